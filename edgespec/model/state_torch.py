"""Torch states: what kernels.states does, by torch's operations on one row after the other: slow,
for where nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad, silu, softplus

from edgespec.model.folded_rows import FoldedRows
from edgespec.model.state_form import StateForm, wide
from edgespec.model.state_steps import InTurn
from edgespec.model.tree_attention import Visibility

Vectors = dict[str, torch.Tensor]
"""Those of a layer, by the names of CompiledMixer's, on the rows' device."""


class TorchStates:
    """The same by torch's operations on one row after the other: slow, for where nothing is
    compiled."""

    def __init__(self, form: StateForm, vectors: Vectors) -> None:
        self.form, self.vectors = form, vectors

    def given(
        self, rows: FoldedRows, index: int, seen: Visibility, projected: torch.Tensor
    ) -> TorchPass:
        return TorchPass(self, rows, index, seen, projected)


class TorchPass(InTurn):
    def __init__(
        self,
        states: TorchStates,
        rows: FoldedRows,
        layer: int,
        seen: Visibility,
        projected: torch.Tensor,
    ) -> None:
        super().__init__(projected)
        self._states, (self._held, self._gone) = states, rows.held(layer)
        mask = seen.mask()[0, 0]
        self._paths = [row.nonzero().squeeze(1).tolist() for row in mask]

    def prefixes(self) -> list[int]:
        return [
            next((at for at, slot in enumerate(path) if at != slot), len(path))
            for path in self._paths
        ]

    def path(self, row: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        return ((slot, 1) for slot in self._paths[row][first:end])

    def _kept(self, slot: int) -> torch.Tensor:
        return self._held[slot - self._gone]

    def _terms(self, kept: torch.Tensor) -> torch.Tensor:
        """Of rows [..., width] what they add to the state, [..., terms]."""
        return kept.view(wide(kept.dtype))[..., : self._states.form.terms]

    def _inputs(self, kept: torch.Tensor) -> torch.Tensor:
        form = self._states.form
        begin = form.terms * wide(kept.dtype).itemsize // kept.dtype.itemsize
        return kept[..., begin : begin + form.conv]

    def fold(self, slot: int, count: int, state: torch.Tensor) -> None:
        form = self._states.form
        for at in range(slot, slot + count):
            keys, adds, decays = self._split(self._terms(self._kept(at)))
            state.mul_(decays[:, None, None])
            state.add_(form.by_head(keys, 0)[:, :, None] * adds[:, None])

    def _split(self, terms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys [..., groups, key], what they stand for [..., heads, value], decays [..., heads]."""
        form = self._states.form
        keys, adds, decays = terms.split([form.keys, form.inner, form.heads], -1)
        before = terms.shape[:-1]
        keys = keys.reshape(*before, form.groups, form.key)
        return keys, adds.reshape(*before, form.heads, form.value), decays

    def rows(self, first: int, end: int, boundary: int, state: torch.Tensor) -> torch.Tensor:
        paths = self._paths[first:end]
        each = zip(self.projected[first:end], paths, strict=True)
        return torch.stack([self._row(row, path[boundary:], state) for row, path in each])

    def _row(self, projected: torch.Tensor, path: list[int], state: torch.Tensor) -> torch.Tensor:
        form, by = self._states.form, self._states.vectors
        kept = [self._kept(slot) for slot in path]
        wider = projected.to(state.dtype)
        gate, inputs, steps = (wider * by["scale"] if "scale" in by else wider).split(
            [form.inner, form.conv, (1 + form.delta) * form.heads]
        )
        self._inputs(kept[-1]).copy_(inputs)
        near = torch.stack([self._inputs(one) for one in kept[-form.kernel :]]).to(state.dtype)
        mixed = (near * by["taps"][-len(near) :]).sum(0)
        mixed = silu(mixed + by["bias"] if "bias" in by else mixed)
        step = softplus(steps[-form.heads :] + by["step_bias"])
        every = self._terms(torch.stack(kept))
        keys, adds, decays = (one[:-1] for one in self._split(every))
        left = decays.flip(0).cumprod(0).flip(0)  # of what came before a row
        whole = left[0] if len(left) else torch.ones_like(step)
        left = pad(left[1:], (0, 0, 0, min(1, len(left))), value=1.0)

        def read(vector: torch.Tensor) -> torch.Tensor:
            """What the rows before give for a vector [groups, key]: [heads, value]."""
            dots = form.by_head((keys * vector).sum(-1), -1) * left
            of_state = (state * form.by_head(vector, 0)[:, :, None]).sum(1)
            return whole[:, None] * of_state + (dots[:, :, None] * adds).sum(0)

        if form.delta:
            query, key, value = mixed.split([form.keys, form.keys, form.inner])
            query, key = (one.view(form.groups, form.key) for one in (query, key))
            query, key = (one / (one.square().sum(-1, True) + 1e-6).sqrt() for one in (query, key))
            query = query / form.key**0.5
        else:
            step = step.clamp(*form.steps)
            value, key, query = mixed.split([form.inner, form.keys, form.keys])
            query, key = (one.view(form.groups, form.key) for one in (query, key))
        value = value.view(form.heads, form.value)
        decay = torch.exp(by["decay"] * step)[:, None]
        if form.delta:
            share = torch.sigmoid(steps[: form.heads])[:, None]
            new = share * (value - decay * read(key))
        else:
            new = step[:, None] * value
        self._terms(kept[-1]).copy_(torch.cat((key.flatten(), new.flatten(), decay[:, 0])))
        out = decay * read(query) + form.by_head((key * query).sum(-1), 0)[:, None] * new
        if "skip" in by:
            out = out + by["skip"][:, None] * value
        out = out.flatten()
        if not form.gate_last:
            out = out * silu(gate)
        if "gain" in by:
            groups = out.view(-1, form.normed)
            out = (groups / (groups.square().mean(1, True) + form.eps).sqrt()).flatten()
            out = out * by["gain"]
        if form.gate_last:
            out = out * silu(gate)
        rounded: torch.Tensor = out.to(projected.dtype)
        return rounded
