"""Local rings that compute with torch on the bundled pair, and transformers' own answers."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import torch
from support.local_ring import LocalRing
from support.packed_forms import MixedSource
from support.pair_dspark import weights_of
from transformers import AutoModelForCausalLM

from edgespec.backends.compute import CoordinatorCompute, StageCompute
from edgespec.backends.torch_backend import TorchBlock, TorchHead
from edgespec.config import NAMED
from edgespec.daemon.bundled_models import bundled
from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.stage import StageMachine
from edgespec.drafting.choice import parse_draft
from edgespec.drafting.registry import BaseParts, build_draft
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.families import bound_last, folds
from edgespec.model.loader import Checkpoint
from edgespec.model.quantised.linear import dequantised, pack
from edgespec.model.sources import open_source
from edgespec.model.tokenizer import Tokenizer
from edgespec.planning.partition import blocks_of
from edgespec.wire.client_messages import Submit

BASE, DRAFT = bundled("base"), bundled("draft")
CONTEXT = 1024

torch.set_num_threads(1)


@lru_cache
def prompts() -> dict[str, str]:
    """The twenty prompts that exactness is shown on, by id; none is in the training data."""
    file = Path(__file__).parent.parent / "data" / "prompts.jsonl"
    entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {entry["id"]: entry["prompt"] for entry in entries}


@lru_cache
def tokenizer() -> Tokenizer:
    """The pair's tokenizer."""
    return Tokenizer(BASE)


@lru_cache
def torch_ring(
    stages: int,
    dtype: str = "float64",
    quant: str = "none",
    kept_rows: int = 0,
    draft_name: str = "independent",
    base: str | Path = BASE,
    head_last: bool = False,
    head_quant: str = "none",
    chunk: int = 64,
) -> LocalRing:
    """A ring of the bundled base and one of its draft sources; without `kept_rows` it is empty
    again after every answer, so that it may be shared. `base`: another form of the same model.
    `head_last`: the output head is on the last stage. `head_quant`: of the output heads, the base's
    and the draft's. `chunk`: rows of a prompt that travel together. `dtype` may name that of caches
    behind a "+"."""
    mixed = quant == "file" and base == BASE
    source = MixedSource(Checkpoint(BASE)) if mixed else open_source(base, NAMED[quant])
    cuts = blocks_of(source.layers, stages, bound=bound_last(source.config))
    dtype, _, held = dtype.partition("+")
    blocks = [Block(source, first, end, dtype, cache_dtype=held) for first, end in cuts]
    few = NAMED[head_quant]
    head = OutputHead(open_source(base, few), dtype)
    parts = BaseParts(BASE, source, head, dtype, "cpu", head_quantisation=few)
    draft = build_draft(parse_draft(draft_name, weights_of), parts)
    assert draft is not None
    ring = CoordinatorSettings(
        stages,
        CONTEXT,
        draft.name,
        prefill_chunk=chunk,
        kept_rows=kept_rows,
        needs=draft.needs,
        sources=draft.sources,
        head_last=head_last,
        folds=folds(source.config),
    )
    return LocalRing(
        CoordinatorMachine(ring, tokenizer()),
        CoordinatorCompute(None if head_last else TorchHead(head), draft),
        [
            (
                StageMachine(
                    is_first=number == 1,
                    is_last=number == stages,
                    row_limit=4 * CONTEXT,
                    keeps_tokens=block.token_rows is not None,
                ),
                StageCompute(
                    TorchBlock(block), TorchHead(head) if head_last and number == stages else None
                ),
            )
            for number, block in enumerate(blocks, start=1)
        ],
    )


@lru_cache
def transformers_model(
    dtype: str = "float64", quant: str = "none", base: str | Path = BASE, head_quant: str = "none"
) -> torch.nn.Module:
    """The whole base model as transformers runs it, its matrices rounded as `quant` does, that of
    its head as `head_quant` does."""
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=getattr(torch, dtype), experts_implementation="eager"
    ).eval()
    if head_quant != "none":
        weight, few = model.lm_head.weight.detach(), NAMED[head_quant]
        held = dequantised(pack(weight, few), weight.shape, few, weight.dtype)
        model.lm_head.weight = torch.nn.Parameter(held)  # no longer the embedding, if it was
    if quant == "none":
        return model
    mixed, kind = MixedSource(Checkpoint(BASE)), NAMED[quant]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            if quant == "file":
                module.weight.data = mixed.weight(f"{name}.weight").to(module.weight.dtype)
                continue
            shape = module.weight.shape
            packed = pack(module.weight.detach(), kind)
            module.weight.data = dequantised(packed, shape, kind, module.weight.dtype)
    return model


@lru_cache
def generated(
    prompt: str,
    new_tokens: int,
    quant: str = "none",
    base: str | Path = BASE,
    head_quant: str = "none",
) -> tuple[int, ...]:
    """What transformers' own greedy generate gives in float64, without the prompt."""
    ids = torch.tensor([tokenizer().encode(prompt)])
    model = transformers_model(quant=quant, base=base, head_quant=head_quant)
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)  # type: ignore[operator]
    return tuple(out[0, ids.shape[1] :].tolist())


def request(
    prompt: str,
    policy: str,
    new_tokens: int,
    *,
    tag: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    stop: tuple[str, ...] = (),
) -> Submit:
    """A request of a test."""
    return Submit(tag, prompt, new_tokens, temperature, 0, 1.0, 0.0, seed, stop, policy)
