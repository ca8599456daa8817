"""Rows over a state for GPUs, interpreted: against float64, and each row alone, in other chunks and
after others were pruned, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from support.block_texts import TREE
from support.cases import case
from support.tiers import tiered

from edgespec.config import Quantisation
from edgespec.kernels.gpu.launch import Launcher
from edgespec.model.block import row_math
from edgespec.model.kv_cache import RowForm, TwoRegionCache
from edgespec.model.model_config import ModelConfig
from edgespec.model.quantised.kernels import relative_error
from edgespec.model.row_codes import CODED
from edgespec.model.row_math import BATCHED, RowMath, SingleRows, Taps
from edgespec.model.state_form import StateForm
from edgespec.model.state_mixer import StateMixer
from edgespec.model.tree_attention import JointVisibility, Visibility, tree_mask
from edgespec.model.triton_rows import TritonRows
from edgespec.model.triton_states import usable_states
from edgespec.types.boundaries import AHEAD, STRIDE

CPU, HIDDEN, PROMPT = torch.device("cpu"), 16, AHEAD + STRIDE - 3
ROUNDING = {torch.float32: 5e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}

MAMBA = StateForm(
    delta=False, name="mamba", entering=(("in", 2 * 40 + 2 * 24 + 2),), hidden=HIDDEN, heads=2,
    groups=1, key=24, value=20, kernel=4, eps=1e-5, normed=40, conv_bias=True,
)  # fmt: skip
DELTA = StateForm(
    delta=True, name="delta", entering=(("in", 2 * 48 + 2 * 32 + 8),), hidden=HIDDEN, heads=4,
    groups=2, key=16, value=12, kernel=4, eps=1e-5, normed=12, gate_last=True, tiled=True,
)  # fmt: skip
FORMS = {
    "Mamba2": MAMBA,
    "Mamba2 with groups, multipliers, and bounds of steps": replace(
        MAMBA, entering=(("in", 2 * 40 + 2 * 48 + 2),), groups=2, normed=20, gate_last=True,
        scale=(0.7, 0.8, 1.3, 0.9, 0.6), steps=(0.1, 0.5),
    ),
    "Mamba2 without a norm": replace(MAMBA, normed=0, conv_bias=False),
    "gated delta": DELTA,
    "gated delta of neighbours": replace(DELTA, tiled=False, value=30, normed=30,
        entering=(("in", 2 * 120 + 2 * 32 + 8),)),
}  # fmt: skip


class Tensors:
    """Those of a mixer, by chance: a source."""

    path, config, quantisation, mapped, layers = (
        *(Path("random"), ModelConfig({"model_type": "llama"}), Quantisation()),
        *(False, 1),
    )

    def __init__(self, form: StateForm) -> None:
        generator = torch.Generator().manual_seed(form.inner)
        self._held = {
            f"model.layers.0.{name}": torch.randn(shape, generator=generator)
            for name, shape in form.shapes().items()
        }
        self.names = frozenset(self._held)

    def form(self, name: str) -> Quantisation:
        return self.quantisation

    def tensor(self, name: str) -> torch.Tensor:
        return self._held[name]


class Layer:
    """One mixer, by this row math, and a request's rows in it."""

    def __init__(self, form: StateForm, dtype: torch.dtype, math: RowMath) -> None:
        self.mixer = StateMixer(0, form, Tensors(form), dtype, CPU, math)  # type: ignore[arg-type]
        rows = torch.randn(128, HIDDEN, generator=torch.Generator().manual_seed(1))
        self.rows = (rows / 4).to(torch.bfloat16).to(dtype)  # a number that all have alike
        forms = [RowForm(1, 0, 1, form.folded(dtype))]
        self.cache = TwoRegionCache(first_layer=0, forms=forms, reserve=8, dtype=dtype)

    @torch.inference_mode()
    def run(self, rows: Sequence[int], sees: np.ndarray, first: int) -> torch.Tensor:
        """Some rows, each after the `first` ones and what `sees` says."""
        places = first + torch.from_numpy(sees.sum(1) - 1)
        seen = Visibility(tree_mask(first, sees), places, self.cache.place(places))
        out = self.mixer(self.rows[list(rows)], (), self.cache, seen)
        self.cache.advance(len(rows))
        return out

    def text(self, *chunks: int) -> torch.Tensor:
        """Rows after those that are there."""
        found = []
        for count in chunks:
            first = self.cache.length
            found.append(self.run(range(first, first + count), np.tri(count, dtype=bool), first))
        return torch.cat(found)

    def after(self, begun: Layer) -> Layer:
        """Go on from another's rows."""
        self.cache = begun.cache.fork(0, begun.cache.length)
        return self


def tree_rows(*nodes: int) -> list[int]:
    return [120 + node for node in nodes]


def everything(form: StateForm, dtype: torch.dtype, bound: float) -> None:
    """A text whose first rows are a CPU's, as the layout is the same, and a tree behind it."""
    assert usable_states(CPU)  # which tries them
    begun = Layer(form, dtype, row_math(CPU, dtype))
    begun.text(PROMPT)
    exact = Layer(form, torch.float64, SingleRows())
    exact.text(PROMPT)
    one = Layer(form, dtype, TritonRows()).after(begun)
    with mock.patch.object(Launcher, "launch", autospec=True, side_effect=Launcher.launch) as asked:
        found = [one.text(6)]  # some of the first state, others of the second one
        assert asked.call_count == 5
        found.append(one.run(tree_rows(*range(5)), TREE, PROMPT + 6))
        assert asked.call_count == 5 + 4
    expected = [exact.text(6), exact.run(tree_rows(*range(5)), TREE, PROMPT + 6)]
    off = relative_error(torch.cat(found), torch.cat(expected))
    assert off < bound, off

    # In other chunks, and the path to a leaf row by row.
    other = Layer(form, dtype, TritonRows()).after(begun)
    assert torch.equal(other.text(1, 4, 1), found[0])
    for depth, node in enumerate((0, 1, 3)):
        row = other.run(tree_rows(node), np.ones((1, depth + 1), bool), PROMPT + 6)
        assert torch.equal(row[0], found[1][node]), node

    # Behind rows that are pruned then, of which one is an ancestor of none.
    third = Layer(form, dtype, TritonRows()).after(begun)
    third.text(3, 3)
    sees = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]], bool)
    row = third.run([*tree_rows(4, 2), *tree_rows(0, 1)], sees, PROMPT + 6)
    assert torch.equal(row[2:], found[1][:2])
    third.cache.gather(PROMPT + 6, np.array([2, 3]))
    row = third.run(tree_rows(3), np.ones((1, 3), bool), PROMPT + 6)
    assert torch.equal(row[0], found[1][3])


@pytest.mark.parametrize("name", tiered(list(FORMS), ["Mamba2", "gated delta"]))
def check_rows(name: str) -> None:
    everything(FORMS[name], torch.float32, ROUNDING[torch.float32])


@pytest.mark.thorough
def check_narrow_rows() -> None:
    for form, dtype in ((MAMBA, torch.float16), (DELTA, torch.bfloat16)):
        with case(dtype):
            everything(form, dtype, ROUNDING[dtype])


@pytest.mark.thorough
def check_guesses_farther_ahead_fold_their_own_path() -> None:
    begun = Layer(DELTA, torch.float32, SingleRows())
    begun.text(PROMPT)
    plain, other = (Layer(DELTA, torch.float32, TritonRows()).after(begun) for _ in range(2))
    deep = AHEAD + STRIDE + 2
    text = plain.text(3, deep)
    assert torch.equal(other.text(3), text[:3])
    first = other.cache.length
    other.run(tree_rows(0, 1), np.tri(2, dtype=bool), first)
    sees = np.concatenate((np.zeros((deep, 2), bool), np.tri(deep, dtype=bool)), 1)
    guessed = other.run(range(first, first + deep), sees, first)
    assert torch.equal(guessed, text[3:])


@torch.inference_mode()
def check_convolutions() -> None:
    """Of two requests, one of which begins with a stem, by rows of any form, and alone."""
    width, generator = 20, torch.Generator().manual_seed(0)

    def by_chance(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    taps = Taps(by_chance(width, 1, 3), by_chance(width))
    for held_as, dtype in ((torch.float16, torch.float16), (CODED, torch.float32)):
        parts, held = [], []
        for length in (70, 1):
            cache = TwoRegionCache(
                first_layer=0, forms=[RowForm(1, width, 1)], reserve=80, dtype=held_as
            )
            cache.place(torch.arange(length))
            cache.append(by_chance(1, 1, length, width).to(dtype), 0)
            cache.advance(length)
            if length > 64:
                cache.freeze(64)
            positions = length + torch.tensor([0, 1, 1])
            mask = tree_mask(length, np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool))
            parts.append(Visibility(mask, positions, cache.place(positions)))
            held.append(cache.append(by_chance(1, 1, 3, width).to(dtype), 0)[0])
        mixed, seen = by_chance(6, 3 * width).to(dtype), JointVisibility(parts, [3, 3])
        found = TritonRows().convolved(held, mixed, seen, taps)
        expected = BATCHED.convolved(held, mixed.double(), seen, taps)
        with case(held_as, dtype):
            assert found.dtype == dtype
            assert relative_error(found, expected) < ROUNDING[dtype]
            mask, positions, slots = parts[0].mask()[:, :, 1:2], parts[0].rows[1:2], parts[0].slots
            alone = Visibility(mask, positions, slots)
            assert torch.equal(TritonRows().convolved(held[0], mixed[1:2], alone, taps), found[1:2])
