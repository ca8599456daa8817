"""Prompt tokens: their files, and what they say, against transformers on the vectors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.growers import SoloGrower
from support.local_ring import LocalRing
from support.tiers import thorough, tiered
from support.torch_rings import BASE, CONTEXT, prompts, request, tokenizer, transformers_model

from edgespec.backends.compute import CoordinatorCompute, StageCompute
from edgespec.backends.torch_backend import TorchBlock, TorchHead
from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.stage import StageMachine
from edgespec.drafting.ppd import PPDGuesser, PPDTokens, read_ppd_tokens, write_ppd_tokens
from edgespec.drafting.steps import Steps
from edgespec.errors import ModelError
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.tensors import from_torch
from edgespec.planning.partition import split_layers
from edgespec.tree.drafted import Children
from edgespec.types.features import Features
from edgespec.verify.sampling import Sampling

HIDDEN = 256
PLAIN = {
    "peft_type": "PROMPT_TUNING",
    "num_special_tokens": 3,
    "virtual_tokens_per_special_token": 2,
    "vt_attention_type": "VTAttentionType.ENSEMBLE",
    "aggregation_type": "mean",
}


def written(
    folder: Path, settings: dict[str, Any], table: torch.Tensor, kind: str = "safe"
) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tensors = {"prompt_embeddings": table}
    if kind == "safe":
        save_file(tensors, folder / "adapter_model.safetensors")
    else:
        torch.save(tensors, folder / "adapter_model.bin")
    return folder


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safe", "bin"])
def test_published_folders_are_read(tmp_path: Path, kind: str) -> None:
    table = torch.randn(6, HIDDEN)
    found = read_ppd_tokens(written(tmp_path / "p", PLAIN, table, kind), HIDDEN)
    assert (found.depth, found.copies) == (3, 2)
    assert torch.equal(found.table, table)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    table = torch.randn(4, HIDDEN)
    write_ppd_tokens(tmp_path, PPDTokens(2, 2, table), "base")
    found = read_ppd_tokens(tmp_path, HIDDEN)
    assert (found.depth, found.copies) == (2, 2)
    assert torch.equal(found.table, table)


@pytest.mark.parametrize(
    ("changes", "rows", "said"),
    [
        ({"peft_type": "LORA"}, 6, "no PROMPT_TUNING adapter"),
        ({"num_special_tokens": None}, 6, "num_special_tokens"),
        ({"num_special_tokens": True}, 6, "num_special_tokens"),
        ({"vt_attention_type": "decoder"}, 6, "vt_attention_type 'decoder'"),
        ({"aggregation_type": "weighted"}, 6, "aggregation_type 'weighted'"),
        ({"use_prefix_tuning": True}, 6, "use_prefix_tuning"),
        ({"use_custom_lm_head": True}, 6, "use_custom_lm_head"),
        ({"num_exits": 2}, 6, "num_exits"),
        ({}, 5, "trained for this base"),
    ],
)
def test_others_are_refused(tmp_path: Path, changes: dict[str, Any], rows: int, said: str) -> None:
    folder = written(tmp_path / "p", PLAIN | changes, torch.zeros(rows, HIDDEN))
    with pytest.raises(ModelError, match=said):
        read_ppd_tokens(folder, HIDDEN)


def test_one_copy_needs_no_kind_of_attention(tmp_path: Path) -> None:
    settings = PLAIN | {"virtual_tokens_per_special_token": 1, "vt_attention_type": "decoder"}
    assert (
        read_ppd_tokens(written(tmp_path / "p", settings, torch.zeros(3, HIDDEN)), HIDDEN).copies
        == 1
    )


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "p", PLAIN, torch.full((6, HIDDEN), float("nan")))
    with pytest.raises(ModelError, match="no numbers"):
        read_ppd_tokens(folder, HIDDEN)
    (folder / "adapter_model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ModelError, match="cannot read"):
        read_ppd_tokens(folder, HIDDEN)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds neither"):
        read_ppd_tokens(folder, HIDDEN)
    (folder / "adapter_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot read"):
        read_ppd_tokens(folder, HIDDEN)


# --- what they say ------------------------------------------------------------------------------


class Spied(PPDGuesser):
    """Writes down each chain's context and logits, and the guesses of the first level."""

    def __init__(self, found: PPDTokens, head: OutputHead) -> None:
        super().__init__(found, head)
        self.chains: list[tuple[tuple[int, ...], np.ndarray, Children]] = []

    def reading(self, request: int, context: Sequence[int], features: Features) -> Steps[bool]:
        """As it does."""
        can = yield from super().reading(request, context, features)
        if features.ppd_rows is not None and can:
            state = self._requests[request]
            anchored = tuple(context[: features.anchor + 1])
            self.chains.append((anchored, state.logits, self.guess(request, [()], 4)))
        return can


def ring_of(found: PPDTokens, stages: int) -> tuple[LocalRing, Spied]:
    """The bundled base with those prompt tokens."""
    checkpoint = Checkpoint(BASE)
    head = OutputHead(checkpoint, "float64")
    guesser = Spied(found, head)
    draft = SoloGrower(guesser)
    ring = CoordinatorSettings(stages, CONTEXT, "ppd", needs=draft.needs)
    parts = []
    for number, (first, end) in enumerate(split_layers(checkpoint.layers, stages), start=1):
        machine = StageMachine(
            is_first=number == 1, is_last=number == stages, row_limit=4 * CONTEXT
        )
        block = TorchBlock(Block(checkpoint, first, end, "float64"))
        parts.append((machine, StageCompute(block)))
    machine = CoordinatorMachine(ring, tokenizer())
    return LocalRing(machine, CoordinatorCompute(TorchHead(head), draft), parts), guesser


@torch.inference_mode()
def plain_logits(context: Sequence[int], found: PPDTokens, links: int) -> np.ndarray:
    """Each copy's chain as a continuation of its own, by transformers; logits averaged."""
    model: Any = transformers_model()
    words = model.get_input_embeddings()(torch.tensor([context]))
    total = 0
    for copy in range(found.copies):
        chain = found.table[copy :: found.copies][:links].double()
        hidden = model.model(inputs_embeds=torch.cat([words, chain[None]], 1)).last_hidden_state
        total = total + model.lm_head(hidden[0, len(context) :])
    return (total / found.copies).numpy()


@pytest.mark.parametrize(("depth", "copies"), [thorough(3, 1), (2, 3)])
@pytest.mark.parametrize("policy", tiered(["flowspec", "adaptive"], ["adaptive"]))
def test_chains_say_what_transformers_says(depth: int, copies: int, policy: str) -> None:
    torch.manual_seed(depth)
    found = PPDTokens(depth, copies, 0.3 * torch.randn(depth * copies, HIDDEN))
    ring, guesser = ring_of(found, 3)
    prompt = prompts()["gsm8k-test-3"]
    answer = ring.ask(request(prompt, policy, 12))
    plain = transformers_model().generate(  # type: ignore[operator]
        torch.tensor([tokenizer().encode(prompt)]), max_new_tokens=12, do_sample=False
    )
    whole = tuple(plain[0].tolist())
    assert whole[-12:] == answer.token_ids
    assert len(guesser.chains) >= 3
    for anchored, logits, guesses in guesser.chains:
        assert anchored == whole[: len(anchored)]
        wanted = plain_logits(anchored, found, len(logits))
        assert np.abs(logits.numpy() - wanted).max() < 1e-9
        assert guesses.tokens.tolist()[:1] != [] or len(anchored) + 2 > len(whole)
    assert max(len(logits) for _, logits, _ in guesser.chains) == depth


def test_guesses_are_a_product_of_levels_and_end_with_the_chain() -> None:
    checkpoint = Checkpoint(BASE)
    head = OutputHead(checkpoint, "float64")
    guesser = PPDGuesser(PPDTokens(2, 1, torch.zeros(2, HIDDEN)), head)
    guesser.open(1, Sampling(temperature=0.7, seed=3))
    assert not guesser.read(1, [1, 2, 3], Features())
    rows = torch.randn(2, HIDDEN, dtype=torch.float64)
    assert guesser.read(1, [1, 2, 3], Features(ppd_rows=from_torch(rows), anchor=1))
    found = guesser.guess(1, [(7,), (), (8,), (7, 9)], 5)
    assert found.parents.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    first, second, third = (found.tokens[i : i + 5].tolist() for i in (0, 5, 10))
    assert first == third != second
    # One token later, the second row of the chain is the one for the first level.
    assert guesser.read(1, [1, 2, 3, 4], Features())
    assert guesser.guess(1, [()], 5).tokens.tolist() == first
    assert not len(guesser.guess(1, [(5,)], 5))
    assert not guesser.read(1, [1, 2, 3, 4, 5], Features())
