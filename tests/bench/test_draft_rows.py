"""Draft rows: on the text and beside it, a row says what it does in a pass of its own, and runs
once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.torch_rings import DRAFT

from edgespec.bench.draft_rows import DraftRows
from edgespec.drafting.independent import GuessCache, JointPasses
from edgespec.drafting.steps import alone
from edgespec.model.block import Block
from edgespec.model.sources import open_source

TEXT = tuple(range(40, 52))
# Contexts go back and forth, as those of several policies do; paths stay on the text or leave it.
ASKED = [
    (4, [(), (44,), (44, 45, 7), (9, 9, 9)]),
    (11, [(), (51, 3), (8,)]),
    (5, [(45, 7, 7), (45, 7), (9, 9, 9), (45, 7, 8, 2)]),
    (4, [(44, 45, 7, 7), (9, 9, 9, 1), (9, 9, 9)]),
]


@pytest.fixture(scope="module")
def block() -> Block:
    source = open_source(DRAFT)
    return Block(source, 0, source.layers, "float64")


def computed(
    block: Block, context: tuple[int, ...], paths: Sequence[tuple[int, ...]]
) -> torch.Tensor:
    """What the model's own cache says of these paths."""
    cache = GuessCache(0, JointPasses(block, lambda *ran: None, lambda: False))
    alone(cache.catch_up(context))
    return alone(cache.hidden_behind(paths))


def test_rows_say_what_they_do_in_a_pass_of_their_own(block: Block) -> None:
    rows = DraftRows(block, TEXT, 100)
    for size, paths in ASKED:
        found = rows.hidden(rows.places(TEXT[:size], paths))
        for path, hidden in zip(paths, found, strict=True):
            expected = computed(block, (*TEXT[:size], *path), [()])[0]
            assert torch.allclose(hidden, expected, rtol=0, atol=1e-12)


def test_a_context_that_is_not_the_texts_is_computed_too(block: Block) -> None:
    rows = DraftRows(block, TEXT, 100)
    asked = rows.places((40, 41, 5), [(), (6,)])
    assert asked == [(2, (5,)), (2, (5, 6))]
    expected = computed(block, (40, 41, 5), [(), (6,)])
    assert torch.allclose(rows.hidden(asked), expected, rtol=0, atol=1e-12)


def test_each_row_runs_once(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    forward = Block.forward

    def counted(self: Block, tokens: torch.Tensor, *rest: object) -> object:
        ran.append(len(tokens))
        return forward(self, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Block, "forward", counted)
    rows = DraftRows(block, TEXT, 100)
    for size, paths in [*ASKED, *ASKED]:
        rows.hidden(rows.places(TEXT[:size], paths))
    beside = {(at, (9,) * size) for at in (4, 5) for size in (1, 2, 3)} | {(4, (9, 9, 9, 1))}
    beside |= {(6, (7,)), (6, (7, 7)), (6, (7, 8)), (6, (7, 8, 2))}
    beside |= {(11, (8,)), (12, (3,))}
    assert ran[0] == len(TEXT)
    assert sum(ran[1:]) == len(beside)


def test_rows_that_the_draft_model_cannot_run_are_not_the_texts(block: Block) -> None:
    """Its context is shorter, or it lacks a token of the base."""
    assert DraftRows(block, TEXT, 6).places(TEXT[:5], [TEXT[5:8]]) == [(6, TEXT[6:8])]
    strange = (*TEXT[:5], block.vocab_size, *TEXT[5:])
    rows = DraftRows(block, strange, 100)
    assert len(rows.hidden(rows.places(strange[:5], [()]))) == 1
