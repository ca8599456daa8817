"""Triton states: what kernels.states does, on a GPU: all rows of a pass in few launches."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator

import torch

from edgespec.kernels.gpu.places import PATH, Paths
from edgespec.kernels.gpu.states import GpuMixer
from edgespec.kernels.gpu.usable import tried
from edgespec.model.folded_rows import FoldedRows
from edgespec.model.state_form import StateForm, wide
from edgespec.model.state_steps import Step
from edgespec.model.state_torch import TorchStates, Vectors
from edgespec.model.tree_attention import Visibility, tree_mask
from edgespec.types.boundaries import AHEAD, STRIDE

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-2
"""Root mean square of what bfloat16 results may be off, against that of the results."""


class TritonStates:
    """The states of a layer whose rows are of this dtype."""

    def __init__(self, form: StateForm, vectors: Vectors, dtype: torch.dtype) -> None:
        self.form, self.mixer = form, GpuMixer(vectors, dtype, form.folded(dtype), **form.numbers)

    def given(
        self, rows: FoldedRows, index: int, seen: Visibility, projected: torch.Tensor
    ) -> TritonPass:
        return TritonPass(self, rows, index, seen, projected)


class TritonPass:
    """See state_mixer: all rows enter at once, and leave so."""

    def __init__(
        self,
        states: TritonStates,
        rows: FoldedRows,
        layer: int,
        seen: Visibility,
        projected: torch.Tensor,
    ) -> None:
        self._mixer, self._seen = states.mixer, seen
        self._projected, (self._kept, self._gone) = projected.contiguous(), rows.held(layer)
        if seen.paths is None:
            seen.paths = _paths(seen, self._gone)
        self._paths = seen.paths
        self._entered = self._mixer.enter(self._projected, self._kept, self._paths)
        size = len(projected), states.form.inner
        self._read = projected.new_empty(size, dtype=torch.float32)

    def prefixes(self) -> list[int]:
        alike = self._seen.mask()[0, 0].to(torch.int32).cumprod(1, dtype=torch.int32)
        found: list[int] = alike.sum(1).tolist()
        return found

    def path(self, row: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        slots = self._seen.mask()[0, 0, row].nonzero().squeeze(1)
        return ((slot, 1) for slot in slots[first:end].tolist())

    def read(
        self,
        step: Step,
        source: torch.Tensor | None,
        runs: Iterable[tuple[int, int]],
        state: torch.Tensor,
    ) -> None:
        every = self._paths.every
        parts = [every[slot - self._gone :][:count] for slot, count in runs]
        folds = parts[0] if len(parts) == 1 else torch.cat([every[:0], *parts])
        rows = step.first, step.end
        self._mixer.read(
            self._kept, self._paths, self._entered, source, folds, state, rows, self._read
        )

    def out(self) -> torch.Tensor:
        return self._mixer.leave(self._projected, self._read)


def _paths(seen: Visibility, gone: int) -> Paths:
    """Once a pass, for all its layers; nothing waits for the device."""
    slots, absent = seen.behind(PATH)
    depth = seen.rows - ((seen.rows - AHEAD) // STRIDE * STRIDE).clamp(min=0)
    apart = torch.arange(PATH - 1, -1, -1, device=slots.device)
    beyond = absent[..., 0] | (apart > depth[:, None])
    every = torch.arange(len(seen.slots) - gone, dtype=torch.int32, device=slots.device)
    table = (slots - gone).masked_fill_(beyond, -1).to(torch.int32)
    return Paths(table, every, len(every) - len(seen.rows))


@functools.cache
def usable_states(device: torch.device) -> bool:
    """Whether these kernels are used on a device that the others are used on; where they are not,
    the log says why, once."""
    if reason := tried(trial, device):
        _log.warning(
            "Triton's kernels for states are not used on %s, so that such layers take far longer "
            "there, and in 16 bit a text may depend on how its rows were batched: %s",
            device,
            reason,
        )
    return not reason


def trial(device: torch.device) -> str:
    """What is wrong with results on a device; the empty string if nothing is.

    Rows that begin to read a second state are compared with float64, and to the bit with themselves
    one by one.
    """
    form = StateForm(
        delta=True, name="", entering=(), hidden=0, heads=4, groups=2, key=32, value=24, kernel=4,
        eps=1e-5, normed=24, gate_last=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def by_chance(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    before, count = AHEAD + STRIDE - 1, 3
    terms, inputs = by_chance(before, form.terms), by_chance(before, form.conv).bfloat16()
    terms[:, -form.heads :].sigmoid_()
    vectors = {
        "taps": by_chance(form.kernel, form.conv),
        "step_bias": by_chance(form.heads),
        "decay": -by_chance(form.heads).exp(),
        "gain": by_chance(form.inner),
    }
    projected = by_chance(count, form.inner + form.conv + 2 * form.heads).bfloat16()

    def made(dtype: torch.dtype, where: torch.device, together: int) -> torch.Tensor:
        held = {name: one.to(where, wide(dtype)) for name, one in vectors.items()}
        rows = FoldedRows({0: form.folded(dtype)}, dtype, where)
        own, _ = rows.held(0)
        own[:before].view(wide(dtype))[:, : form.terms] = terms.to(where)
        begin = form.terms * wide(dtype).itemsize // dtype.itemsize
        own[:before, begin : begin + form.conv] = inputs.to(where)
        math = TorchStates(form, held)
        states = math if dtype == torch.float64 else TritonStates(form, held, dtype)
        found, state = [], torch.zeros(form.state, dtype=wide(dtype), device=where)
        for first in range(0, count, together):
            part = projected[first : first + together].to(where, dtype)
            sees = tree_mask(before + first, torch.ones(len(part), len(part)).tril().bool().numpy())
            places = torch.arange(before + first + len(part), device=where)
            seen = Visibility(sees.to(where), places[before + first :], places)
            given = states.given(rows, 0, seen, part)
            for row, place in enumerate(range(before + first, before + first + len(part))):
                folds = [(0, STRIDE)] if place == AHEAD + STRIDE else []
                given.read(Step(row, row + 1, 0, 0, 0, 0), state, folds, state)
            found.append(given.out())
        return torch.cat(found).cpu()

    expected = made(torch.float64, torch.device("cpu"), count)
    whole = made(torch.bfloat16, device, count)
    off = (whole.double() - expected).square().mean() / expected.square().mean()
    if not float(off.sqrt()) <= _TOLERANCE:
        return "they are wrong in bfloat16"
    if not torch.equal(made(torch.bfloat16, device, 1), whole):
        return "they give a row other bits alone than beside others"
    return ""
