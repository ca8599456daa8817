"""Layers with a state: what they hold of a request, and what can no longer be had.

What transformers makes of the same layers is for test_families; that rows follow from their paths
alone for test_row_invariance.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.checkpoints import write_family
from support.pipelines import Stage, difference, random_tokens

from edgespec.errors import LocalProtocolError
from edgespec.model import block as block_module
from edgespec.model.block import Block
from edgespec.model.folded_rows import FoldedRows
from edgespec.model.row_math import SingleRows
from edgespec.model.sources import open_source
from edgespec.planning.architecture import architecture_of
from edgespec.tree.ledger import RetainSet, Rows
from edgespec.types.boundaries import AHEAD, HELD_ROWS, HELD_STATES

CHUNK = 64
NAME = "granitemoehybrid-mamba"


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Block:
    torch.set_num_threads(1)
    folder = write_family(tmp_path_factory.mktemp("folded") / NAME, NAME)
    return Block(open_source(folder), 0, 4, "float32")


def chain(first: int, count: int) -> Rows:
    places = np.arange(first, first + count)
    tokens = np.array(random_tokens(7, first + count)[first:])
    return Rows(places, places - 1, tokens, places)


def run(stage: Stage, rows: Rows, *, certain: bool) -> torch.Tensor:
    committed = stage.ledger.committed
    if certain:
        stage.ledger.commit(rows)
        sees = np.tri(len(rows), dtype=np.bool_)
    else:
        sees = stage.ledger.append(rows)
    return stage.run(torch.from_numpy(rows.tokens), rows, committed, sees)


def held(stage: Stage) -> FoldedRows:
    assert stage.cache.folded is not None
    return stage.cache.folded


def test_what_is_held_does_not_grow_with_the_text(block: Block) -> None:
    stage, rows, states = Stage(block), [], []
    for first in range(0, 6 * CHUNK, CHUNK):
        run(stage, chain(first, CHUNK), certain=True)
        folded = held(stage)
        rows.append(max(len(own) for own in folded._own.values()))
        states.append(max(len(mine) for mine in folded.states.values()))
    assert max(rows) <= HELD_ROWS < 6 * CHUNK
    assert max(states) == HELD_STATES
    taken = sum(one.nbytes for one in stage.cache._own)
    assert stage.cache.own_bytes == taken + held(stage).nbytes
    # Of states that no row to come reads, one is left where guesses are accepted.
    for place in range(6 * CHUNK, 6 * CHUNK + AHEAD):
        run(stage, chain(place, 1), certain=False)
        order = stage.ledger.retain(RetainSet(place, place, (place,), frozenset()))
        assert order is not None
        stage.cache.gather(place, order)
    assert all(len(mine) <= 2 for mine in held(stage).states.values())


@pytest.mark.parametrize("name", ["granitemoehybrid-mamba", "qwen3_5_text"])
def test_what_is_planned_of_a_request_is_what_layers_hold_in_32_bit(
    tmp_path: Path, name: str
) -> None:
    """With sizes whose rows end with a line of memory, as those of published models."""
    settings: dict[str, dict[str, int]] = {
        "granitemoehybrid-mamba": {"mamba_d_state": 16, "mamba_n_heads": 16, "mamba_n_groups": 1},
        "qwen3_5_text": {"linear_num_value_heads": 16, "linear_value_head_dim": 16},
    }
    folder = write_family(tmp_path / name, name, **settings[name])
    of = architecture_of(json.loads((folder / "config.json").read_text()), name)
    stage = Stage(Block(open_source(folder), 0, 4, "float32"))
    rows = held(stage)
    rows.place(0, HELD_ROWS)
    for mine in rows.states.values():
        for boundary in range(HELD_STATES):
            mine[boundary] = torch.zeros(of.state_heads, of.state_key, of.state_value)
    assert rows.nbytes == of.request_bytes * of.layers == of.states * (rows.nbytes // 3)


def test_guesses_farther_ahead_fold_their_own_path(block: Block) -> None:
    """None are sent so; if they were, they would be slow, but right."""
    stage, plain = Stage(block), Stage(block)
    run(stage, chain(0, CHUNK), certain=True)
    dead = chain(CHUNK, 3)
    run(stage, Rows(dead.ids, dead.parents, dead.tokens ^ 1, dead.positions), certain=False)
    deep = chain(CHUNK, 2 * AHEAD + 5)
    ids = deep.ids + 3
    parents = np.concatenate(([CHUNK - 1], ids[:-1]))
    guessed = run(stage, Rows(ids, parents, deep.tokens, deep.positions), certain=False)
    exact = run(plain, chain(0, CHUNK + len(deep)), certain=True)[CHUNK:]
    assert torch.equal(guessed, exact)


def test_a_request_cannot_begin_where_rows_are_gone(block: Block) -> None:
    stage = Stage(block)
    for first in range(0, 4 * CHUNK, CHUNK):
        run(stage, chain(first, CHUNK), certain=True)
    whole = stage.cache.fork(0, stage.cache.length)
    again = Stage(block)
    again.cache, again.ledger = whole, stage.ledger
    more = chain(4 * CHUNK, 5)
    other = Stage(block)
    exact = run(other, chain(0, 4 * CHUNK + 5), certain=True)[-5:]
    assert torch.equal(run(again, more, certain=True), exact), "behind all of them it can"
    with pytest.raises(LocalProtocolError, match="begins too early in another's rows"):
        stage.cache.fork(0, 20)


def test_a_folder_of_an_older_release_is_the_same(tmp_path: Path) -> None:
    """Whose layer_types say "mamba" and "attention", as published ones do."""
    folder = write_family(tmp_path / "new", NAME)
    file = folder / "config.json"
    new = file.read_text()
    block = Block(open_source(folder), 0, 4, "float32")
    old = new.replace("linear_attention", "mamba").replace("full_attention", "attention")
    assert old != new
    file.write_text(old)
    rows = run(Stage(Block(open_source(folder), 0, 4, "float32")), chain(0, 9), certain=True)
    assert torch.equal(rows, run(Stage(block), chain(0, 9), certain=True))


def test_compiled_code_does_what_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(write_family(tmp_path / NAME, NAME))
    for dtype, bound in (("float64", 1e-6), ("float32", 1e-4)):
        compiled = run(Stage(Block(source, 0, 4, dtype)), chain(0, 2 * CHUNK), certain=True)
        with monkeypatch.context() as changed, case(dtype):
            changed.setattr(block_module, "row_math", lambda *_: SingleRows())
            plain = run(Stage(Block(source, 0, 4, dtype)), chain(0, 2 * CHUNK), certain=True)
            assert difference(compiled, plain) < bound
