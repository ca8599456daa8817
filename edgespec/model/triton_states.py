"""Triton states: what kernels.states does, on a GPU: all rows of a pass in few launches."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from edgespec.kernels.gpu.places import PATH, Paths
from edgespec.kernels.gpu.states import GpuMixer
from edgespec.kernels.gpu.usable import tried
from edgespec.model.folded_rows import FoldedRows
from edgespec.model.state_form import StateForm, wide
from edgespec.model.state_steps import StatePass, Step
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


class TritonPass(StatePass):
    """One whose rows all enter at once, and leave so."""

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
        folds = torch.cat(parts) if len(parts) > 1 else (*parts, every[:0])[0]
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
    # Only here, as it is what uses them.
    from edgespec.model.state_mixer import read_states

    form = StateForm(
        delta=True, name="", entering=(), hidden=0, heads=2, groups=1, key=32, value=24, kernel=4,
        eps=1e-5, normed=24, gate_last=True,
    )  # fmt: skip
    text = AHEAD + STRIDE - 1
    vectors, before, projected = made_up(form, text, 3)

    def made(dtype: torch.dtype, where: torch.device, together: int) -> torch.Tensor:
        held = {name: one.to(where, wide(dtype)) for name, one in vectors.items()}
        rows, found = before(dtype, where), list[torch.Tensor]()
        exact = dtype == torch.float64
        math = TorchStates(form, held) if exact else TritonStates(form, held, dtype)
        for part in projected.to(where, dtype).split(together):
            first = text + sum(len(one) for one in found)
            sees = tree_mask(first, np.tri(len(part), dtype=np.bool_), where)
            places = torch.arange(first + len(part), device=where)
            seen = Visibility(sees, places[first:], places)
            found.append(read_states(math, 0, rows, part, seen))
        return torch.cat(found).cpu()

    expected = made(torch.float64, torch.device("cpu"), 3)
    whole = made(torch.bfloat16, device, 3)
    off = (whole.double() - expected).square().mean() / expected.square().mean()
    if not float(off.sqrt()) <= _TOLERANCE:
        return "they are wrong in bfloat16"
    if not torch.equal(made(torch.bfloat16, device, 1), whole):
        return "they give a row other bits alone than beside others"
    return ""


def made_up(
    form: StateForm, text: int, count: int
) -> tuple[Vectors, Callable[[torch.dtype, torch.device], FoldedRows], torch.Tensor]:
    """A layer's vectors by chance; what makes, in any dtype, the cache of a text of so many rows,
    whose slots 64 are enough for; and projections of `count` rows."""
    generator = torch.Generator().manual_seed(0)

    def by_chance(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    terms, inputs = by_chance(text, form.terms), by_chance(text, form.conv).bfloat16()
    terms[:, -form.heads :].sigmoid_()
    heads = form.heads
    vectors = {"taps": by_chance(form.kernel, form.conv), "step_bias": by_chance(heads)}
    vectors["decay"] = -by_chance(heads).exp()
    if form.normed:
        vectors["gain"] = by_chance(form.inner)
    if form.scale:
        vectors["scale"] = form.scales()
    if not form.delta:
        vectors |= {"skip": by_chance(heads), "bias": by_chance(form.conv)}

    def before(dtype: torch.dtype, device: torch.device) -> FoldedRows:
        rows = FoldedRows({0: form.folded(dtype)}, dtype, device)
        own, _ = rows.held(0)
        own[:text].view(wide(dtype))[:, : form.terms] = terms.to(device)
        begin = form.terms * wide(dtype).itemsize // dtype.itemsize
        own[:text, begin : begin + form.conv] = inputs.to(device)
        return rows

    projected = by_chance(count, form.inner + form.conv + (1 + form.delta) * heads)
    return vectors, before, projected.bfloat16()
