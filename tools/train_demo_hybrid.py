"""Train the bundled hybrid (gated delta beside gated attention) and its MTP head, and export both.

The model has the form of Qwen 3.5's text models. Its embedding, norms and MLPs begin as the bundled
base's, of the MLPs the neurons that count most; its mixers begin as that base's attention, where
matrices have the same part. It then learns the base's distribution at every token of the text that
the base learnt (RADLADS, arXiv 2505.03005, in one step). The head joins later, and learns the
hybrid's distribution two and more tokens ahead, each time from its own row before. The run is
resumable: stop it at any time (SIGTERM included) and start it again with the same folders; a
smaller ``--steps`` brings the decay forward.

Usage::

    python tools/train_demo_hybrid.py --data DATA --out edgespec/models/toy-hybrid --work WORK

``DATA``: see ``train_demo_models.py``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from demo_data import HELD_OUT_RULE, MIX, Mixture, all_documents, encode_documents
from demo_measure import HELD_OUT_DOCUMENTS, RequestStats, count_hits, shares, unigram_log_shares
from demo_model import keep, make_optimizers, parameter_count, rate_share, update
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

BASE = Path(__file__).resolve().parents[1] / "edgespec" / "models" / "base"
OF_BASE = (0, 1, 3, 5, 7)
"""The layers of the base that the hybrid's begin as."""
NEURONS = 288
HEADS, DIM = 2, 64
ROW_LENGTH = 256
LEVELS = (1.0, 0.6)
"""What the head's loss counts that many tokens ahead, by its own rows from the second on."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Mtp(torch.nn.Module):
    """The head, its parts named as Qwen 3.5's files name them behind `mtp.`."""

    def __init__(self, hybrid: Qwen3_5ForCausalLM) -> None:
        super().__init__()
        config = hybrid.config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        attends = config.layer_types.index("full_attention")
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(hidden, eps)
        self.layers = torch.nn.ModuleList([Qwen3_5DecoderLayer(config, attends)])
        self.norm = Qwen3_5RMSNorm(hidden, eps)

    def forward(
        self, hybrid: Qwen3_5ForCausalLM, rows: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Rows [B, T, H] and the tokens that follow them [B, T] -> what stands for the next rows.
        A row of a further level sees those of its own level, not true ones, which is near enough.
        """
        words = self.pre_fc_norm_embedding(hybrid.model.embed_tokens(tokens))
        joined = self.fc(torch.cat([words, self.pre_fc_norm_hidden(rows)], -1))
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        turned = hybrid.model.rotary_emb(joined, places)
        out: torch.Tensor = self.norm(self.layers[0](joined, position_embeddings=turned))
        return out


def build_hybrid(base: LlamaForCausalLM, sample: torch.Tensor) -> Qwen3_5ForCausalLM:
    """The hybrid as it begins. `sample`: tokens [B, T] by which the base's neurons are weighed."""
    settings = base.config
    config = Qwen3_5TextConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=NEURONS,
        num_hidden_layers=len(OF_BASE),
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=DIM,
        linear_key_head_dim=DIM,
        linear_value_head_dim=DIM // 2,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=2 * HEADS,
        full_attention_interval=4,
        max_position_embeddings=settings.max_position_embeddings,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        rms_norm_eps=settings.rms_norm_eps,
        tie_word_embeddings=True,
        bos_token_id=settings.bos_token_id,
        eos_token_id=settings.eos_token_id,
        pad_token_id=settings.pad_token_id,
        mtp_num_hidden_layers=1,
    )
    hybrid = Qwen3_5ForCausalLM(config)
    begin(hybrid, base, sample)
    return hybrid


@torch.no_grad()
def begin(hybrid: Qwen3_5ForCausalLM, base: LlamaForCausalLM, sample: torch.Tensor) -> None:
    """Let a hybrid begin as the base, layer by layer. The last matrices of mixers and MLPs are
    those by which rows [N, H] of the sample come nearest to the base's at the same place."""
    entered, between = rows_of(base, sample)
    hybrid.model.embed_tokens.weight.copy_(base.model.embed_tokens.weight)
    hybrid.model.norm.weight.copy_(base.model.norm.weight - 1)
    rows = hybrid.model.embed_tokens(sample)
    turned = hybrid.model.rotary_emb(rows, torch.arange(sample.shape[1]).expand_as(sample))
    ends = [*OF_BASE[1:], len(base.model.layers)]
    for layer, number, end in zip(hybrid.model.layers, OF_BASE, ends, strict=True):
        old = base.model.layers[number]
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, name).weight.copy_(getattr(old, name).weight - 1)
        normed = layer.input_layernorm(rows)
        if hasattr(layer, "linear_attn"):
            begin_delta(layer.linear_attn, old.self_attn, normed)
            rows = fitted(layer.linear_attn, "out_proj", rows, between[number], normed)
        else:
            begin_attention(layer.self_attn, old.self_attn)
            given = {"position_embeddings": turned, "attention_mask": None}
            rows = fitted(layer.self_attn, "o_proj", rows, between[number], normed, **given)
        normed = layer.post_attention_layernorm(rows)
        gate, up, down = (
            getattr(old.mlp, f"{name}_proj").weight for name in ("gate", "up", "down")
        )
        inner = functional.silu(normed @ gate.T) * (normed @ up.T)
        weighed = inner.square().mean((0, 1)) * down.square().sum(0)
        kept = weighed.topk(NEURONS).indices.sort().values
        layer.mlp.gate_proj.weight.copy_(gate[kept])
        layer.mlp.up_proj.weight.copy_(up[kept])
        rows = fitted(layer.mlp, "down_proj", rows, entered[end], normed)


def rows_of(
    base: LlamaForCausalLM, sample: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The rows that enter each layer of the base, and those that leave the last one; and the rows
    between its attention and its MLP."""
    entered, between = [], []
    hooks = [
        hook
        for layer in base.model.layers
        for hook in (
            layer.register_forward_pre_hook(lambda _, given: entered.append(given[0])),
            layer.post_attention_layernorm.register_forward_pre_hook(
                lambda _, given: between.append(given[0])
            ),
        )
    ]
    hooks.append(base.model.norm.register_forward_pre_hook(lambda _, g: entered.append(g[0])))
    base(input_ids=sample, use_cache=False)
    for hook in hooks:
        hook.remove()
    return entered, between


def fitted(
    part: torch.nn.Module,
    last: str,
    rows: torch.Tensor,
    wanted: torch.Tensor,
    *given: Any,
    **more: Any,
) -> torch.Tensor:
    """The rows behind a part of a layer, whose last matrix is made so that they are near `wanted`
    (ridge regression)."""
    matrix, seen = getattr(part, last), []
    hook = matrix.register_forward_pre_hook(lambda _, entered: seen.append(entered[0]))
    part(*given, **more)
    hook.remove()
    features, missing = seen[0].flatten(0, 1).double(), (wanted - rows).flatten(0, 1).double()
    square = features.T @ features
    square.diagonal().add_(1e-3 * square.diagonal().mean())
    matrix.weight.copy_(torch.linalg.solve(square, features.T @ missing).T)
    behind: torch.Tensor = rows + matrix(seen[0])
    return behind


def begin_delta(mixer: Any, old: Any, normed: torch.Tensor) -> None:
    """What of the base's attention has a place here: keys, values, and of the queries the heads
    that read different keys. Gates begin about even, decays from slow to fast."""
    query = old.q_proj.weight.view(-1, DIM, normed.shape[-1])[::2].flatten(0, 1)
    mixer.in_proj_qkv.weight.copy_(torch.cat([query, old.k_proj.weight, old.v_proj.weight]))
    mixer.conv1d.weight.mul_(0.1)[:, 0, -1] = 1.0  # almost the row itself
    mean = normed.mean((0, 1))
    mixer.in_proj_z.weight.mul_(0.5).add_(1.5 * mean / mean.square().sum())
    mixer.A_log.copy_(torch.linspace(0.05, 2.0, len(mixer.A_log)).log())
    mixer.dt_bias.fill_(-3.0)


def begin_attention(mixer: Any, old: Any) -> None:
    """The base's first two heads, which share keys; the gates half open."""
    query = old.q_proj.weight.view(-1, DIM, old.q_proj.weight.shape[1])[:HEADS]
    mixer.q_proj.weight.copy_(torch.cat([query, torch.zeros_like(query)], 1).flatten(0, 1))
    mixer.k_proj.weight.copy_(old.k_proj.weight[:DIM])
    mixer.v_proj.weight.copy_(old.v_proj.weight[:DIM])


@torch.no_grad()
def begin_head(mtp: Mtp, hybrid: Qwen3_5ForCausalLM, tokens: torch.Tensor) -> None:
    """The matrix that maps a token and a row to the next row best, and little of a layer."""
    rows = hybrid.model(tokens, use_cache=False).last_hidden_state.float()
    words = hybrid.model.embed_tokens(tokens[:, 1:])
    norms = mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden
    given = torch.cat([norms[0](words), norms[1](rows[:, :-1])], -1).flatten(0, 1)
    gain = hybrid.model.norm.weight
    wanted = (rows[:, 1:] / (1 + gain)).flatten(0, 1)
    mtp.fc.weight.copy_(torch.linalg.lstsq(given, wanted).solution.T)
    mtp.norm.weight.copy_(gain)
    attends = hybrid.config.layer_types.index("full_attention")
    layer: Any = mtp.layers[0]
    layer.load_state_dict(hybrid.model.layers[attends].state_dict())
    layer.self_attn.o_proj.weight.mul_(0.1)
    layer.mlp.down_proj.weight.mul_(0.1)


def divergence(taught: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Mean KL divergence of logits [..., V] from log probabilities [..., V], in nats."""
    log = logits.float().log_softmax(-1)
    return (taught.exp() * (taught - log)).sum(-1).mean()


class Trainer:
    """The loop over both, with its checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args, self.stopping = args, False
        self.documents = all_documents(args.data)
        self.tokenizer = Tokenizer.from_file(str(BASE / TOKENIZER[0]))
        self.encoded = encode_documents(self.tokenizer, self.documents, held_out=False)
        self.mixture = Mixture(self.encoded, args.seed)
        self.base = LlamaForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
        self.base.requires_grad_(False)
        self.hybrid = build_hybrid(self.base, self.batch())
        self.mtp = Mtp(self.hybrid)
        self.models = {"hybrid": self.hybrid, "mtp": self.mtp}
        peaks = args.learning_rate, args.head_rate
        self.optimizers = make_optimizers(zip(self.models.values(), peaks, strict=True))
        self.progress: dict[str, Any] = {"step": 0, "seconds": 0.0, "head_from": 0, "decay": None}
        self.curve: list[dict[str, float]] = []
        self.checkpoint = args.work / "checkpoint.pt"

    def batch(self) -> torch.Tensor:
        return self.mixture.batch(self.args.batch_tokens // ROW_LENGTH, ROW_LENGTH)[:, :-1]

    def save(self) -> None:
        state = {
            "models": {name: model.state_dict() for name, model in self.models.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "data": self.mixture.state(),
            "progress": self.progress,
            "curve": self.curve,
        }
        keep(self.checkpoint, state)

    def load(self) -> None:
        """Take up the checkpoint if there is one."""
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=True)
        for name, model in self.models.items():
            model.load_state_dict(state["models"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.mixture.load_state(state["data"])
        self.progress, self.curve = state["progress"], state["curve"]

    def train(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))
        saved = time.monotonic()
        while self.progress["step"] < self.args.steps and not self.stopping:
            started = time.monotonic()
            figures = self.step()
            self.progress["step"] += 1
            self.progress["seconds"] += time.monotonic() - started
            if self.progress["step"] % self.args.log_every == 0:
                self.curve.append({"step": self.progress["step"], **figures})
                print(time.strftime("%H:%M:%S"), json.dumps(self.curve[-1]), flush=True)
            if time.monotonic() - saved > 60:
                self.save()
                saved = time.monotonic()
        self.save()

    def step(self) -> dict[str, float]:
        step, tokens = self.progress["step"], self.batch()
        if not self.progress["head_from"] and step >= self.args.head_share * self.args.steps:
            self.progress["head_from"] = max(1, step)
            begin_head(self.mtp, self.hybrid, tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                taught = self.base(input_ids=tokens, use_cache=False).logits.float()
            rows = self.hybrid.model(input_ids=tokens, use_cache=False).last_hidden_state
            logits = self.hybrid.lm_head(rows)
        loss = divergence(taught.log_softmax(-1), logits)
        figures = {"loss": loss.item()}
        if self.progress["head_from"]:
            head = self.head_losses(rows.detach(), logits.detach(), tokens)
            figures |= {f"head_{ahead}": one.item() for ahead, one in enumerate(head, start=1)}
            loss = loss + sum(share * one for share, one in zip(LEVELS, head, strict=True))
        loss.backward()
        self.update()
        return {name: round(value, 4) for name, value in figures.items()}

    def head_losses(
        self, rows: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor
    ) -> list[torch.Tensor]:
        """By level, against the hybrid's distributions. Of the hybrid the embedding alone learns
        from this."""
        taught, losses = logits.float().log_softmax(-1), []
        for level in range(1, len(LEVELS) + 1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                rows = self.mtp(self.hybrid, rows[:, :-1], tokens[:, level:])
                guessed = functional.linear(rows, self.hybrid.lm_head.weight.detach())
            losses.append(divergence(taught[:, level:], guessed))
        return losses

    def update(self) -> None:
        step, steps = self.progress["step"], self.args.steps
        if self.progress["decay"] is None and step >= self.args.decay_from * steps:
            self.progress["decay"] = step
        share = rate_share(step, steps, self.args.warmup, self.progress["decay"])
        update(self.models.values(), self.optimizers, share)
        for optimizer in self.optimizers:
            optimizer.zero_grad()


# --------------------------------------------------------------------------- export


def export(trainer: Trainer) -> None:
    """Write the model's folder, and what it has learnt as `training.json`."""
    out, hybrid = trainer.args.out, trainer.hybrid
    out.mkdir(parents=True, exist_ok=True)
    held = {name: weight for name, weight in hybrid.state_dict().items() if "lm_head" not in name}
    held |= {f"mtp.{name}": weight for name, weight in trainer.mtp.state_dict().items()}
    rounded = {name: weight.to(torch.bfloat16).contiguous() for name, weight in held.items()}
    save_file(rounded, out / "model.safetensors", {"format": "pt"})
    hybrid.config.architectures, hybrid.config.dtype = ["Qwen3_5ForCausalLM"], "bfloat16"
    hybrid.config.save_pretrained(out)
    for name in (*TOKENIZER, "generation_config.json"):
        shutil.copyfile(BASE / name, out / name)
    hybrid.load_state_dict({k: v.float() for k, v in rounded.items() if "mtp" not in k}, False)
    trainer.mtp.load_state_dict(
        {name[4:]: weight.float() for name, weight in rounded.items() if name.startswith("mtp.")}
    )
    figures = {
        "steps": trainer.progress["step"],
        "head_from": trainer.progress["head_from"],
        "decay_from": trainer.progress["decay"],
        "seconds": round(trainer.progress["seconds"]),
        "batch_tokens": trainer.args.batch_tokens,
        "learning_rate": trainer.args.learning_rate,
        "head_rate": trainer.args.head_rate,
        "seed": trainer.args.seed,
        "torch": torch.__version__,
        "parameters": parameter_count(hybrid),
        "head_parameters": parameter_count(trainer.mtp),
        "held_out_rule": HELD_OUT_RULE,
        "held_out": measured(trainer),
        "curve": trainer.curve,
    }
    (out / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures["held_out"], indent=2))


@torch.inference_mode()
def measured(trainer: Trainer) -> dict[str, Any]:
    """Figures on held-out text by source: `base` is the hybrid, `draft` its teacher, and what the
    head guesses two tokens ahead of a row is compared with what the hybrid then says."""
    unigram = unigram_log_shares(trainer.encoded)
    held_out = encode_documents(trainer.tokenizer, trainer.documents, held_out=True)
    decoder, found = AutoTokenizer.from_pretrained(BASE), {}
    for source in MIX:
        stats, hits, guessed = (
            RequestStats(),
            count_hits(torch.zeros(0).long(), torch.zeros(0, 8)),
            0,
        )
        for ids in held_out[source][:HELD_OUT_DOCUMENTS]:
            tokens = ids[: trainer.hybrid.config.max_position_embeddings + 1].long()[None]
            given, targets = tokens[:, :-1], tokens[0, 1:]
            rows = trainer.hybrid.model(given, use_cache=False).last_hidden_state
            logits = trainer.hybrid.lm_head(rows)[0]
            taught = trainer.base(given, use_cache=False).logits[0]
            nats = [
                float(functional.cross_entropy(one, targets, reduction="sum"))
                for one in (logits, taught)
            ]
            stats.add(
                RequestStats(
                    documents=1,
                    tokens=len(targets),
                    bytes=len(decoder.decode(targets, skip_special_tokens=True).encode()),
                    base_nats=nats[0],
                    draft_nats=nats[1],
                    unigram_nats=-float(unigram[source][targets].sum()),
                    draft_hits=count_hits(taught.argmax(-1), logits),
                )
            )
            ahead = trainer.mtp(trainer.hybrid, rows[:, :-1], given[:, 1:])
            hits += count_hits(logits[1:].argmax(-1), trainer.hybrid.lm_head(ahead)[0])
            guessed += ahead.shape[1]
        found[source] = stats.report() | {"head": shares(hits, guessed)}
    return found


def main() -> None:
    """Train up to the last step, then export."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the data files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--head-rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps of rising rate")
    parser.add_argument("--decay-from", type=float, default=0.5, help="share of the steps")
    parser.add_argument("--head-share", type=float, default=0.6, help="of the steps before it")
    parser.add_argument("--log-every", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    trainer.load()
    trainer.train()
    if trainer.progress["step"] >= args.steps:
        export(trainer)


if __name__ == "__main__":
    main()
