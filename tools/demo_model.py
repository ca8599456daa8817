"""The two models of the demo pair: their shapes, losses and optimisers, and how one is saved."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from demo_data import BOS, EOS, MAX_POSITIONS, VOCAB_SIZE, wrap_tokenizer
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

BASE_SHAPE = {"hidden": 256, "layers": 8, "heads": 4, "kv_heads": 2, "intermediate": 704}
DRAFT_SHAPE = {**BASE_SHAPE, "layers": 2}


def build_model(shape: dict[str, int], tokenizer: Tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["intermediate"],
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(EOS),
    )
    return LlamaForCausalLM(config)


def parameter_count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def pair_losses(
    base: LlamaForCausalLM,
    draft: LlamaForCausalLM | None,
    tokens: torch.Tensor,
    truth_share: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Base cross-entropy, draft loss (KL to the base, a little truth), and top-1 agreement.

    Without a draft the last two are zero.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        base_logits = base(input_ids=inputs, use_cache=False).logits
        draft_logits = draft(input_ids=inputs, use_cache=False).logits if draft else None
    base_log = base_logits.float().flatten(0, 1).log_softmax(-1)
    base_loss = functional.nll_loss(base_log, targets)
    if draft_logits is None:
        return base_loss, torch.zeros(()), torch.zeros(())
    draft_log = draft_logits.float().flatten(0, 1).log_softmax(-1)
    taught = base_log.detach()
    divergence = (taught.exp() * (taught - draft_log)).sum(-1).mean()
    draft_loss = divergence + truth_share * functional.nll_loss(draft_log, targets)
    agreement = (taught.argmax(-1) == draft_log.argmax(-1)).float().mean()
    return base_loss, draft_loss, agreement


@torch.no_grad()
def start_draft(base: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    """Begin the draft as the base without its upper layers: embedding, first layers, last norm."""
    state = base.state_dict()
    for name, weight in draft.state_dict().items():
        weight.copy_(state[name])


def make_optimizers(
    models: Iterable[tuple[torch.nn.Module, float]],
) -> list[torch.optim.Optimizer]:
    """Muon for the inner matrices; AdamW for the rest. With each model the peak of its rate."""
    matrices: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for model, peak in models:
        named = list(model.named_parameters())
        inner = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
        outer = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
        matrices.append({"params": inner, "peak": peak})
        others.append({"params": outer, "peak": peak})
    rate = matrices[0]["peak"]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate_share(step: int, steps: int, warmup: int, decay_start: int | None) -> float:
    """Of the peaks: warm-up, then all, then a straight line down to zero at the last step."""
    share = min(1.0, (step + 1) / warmup)
    if decay_start is not None:
        share *= (steps - step) / max(1, steps - decay_start)
    return share


def update(
    models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer], share: float
) -> None:
    """One step at this share of the peaks, each model's gradients clipped."""
    for model in models:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
        optimizer.step()


def keep(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all."""
    partial = checkpoint.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, checkpoint)


def pair_parameters(base: LlamaForCausalLM, draft: LlamaForCausalLM) -> list[torch.nn.Parameter]:
    return [*base.parameters(), *draft.parameters()]


def write_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Save one model in bfloat16, its embedding tied and stored once, with the tokenizer."""
    config = LlamaConfig.from_dict(model.config.to_dict())
    copy = LlamaForCausalLM(config)
    copy.load_state_dict(model.state_dict())
    copy.tie_weights()
    copy.to(torch.bfloat16)
    copy.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    copy.save_pretrained(folder)
    wrap_tokenizer(tokenizer).save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    values = json.loads(settings.read_text())
    values["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name older releases know too
    settings.write_text(json.dumps(values, indent=2) + "\n")
