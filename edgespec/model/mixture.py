"""Mixture: an MLP in several experts, of which each row goes through a few, in own layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edgespec.model.matrices import MatrixReader, Product, plain_product
from edgespec.model.row_math import RowMath
from edgespec.model.source import TensorSource, load_parameter


@dataclass(frozen=True, slots=True)
class MixtureForm:
    """Experts of a layer, and how a row's are chosen: the `active` ones with the largest weights,
    to which a bias is added if there is one (`biased`). Weights are the softmax of what the router
    gives (`softmax`), or its sigmoid.

    `inner`: width of an expert. `wide`: the router multiplies in float32, whatever the rows are of,
    as softmax is always taken. If there are several `groups` of experts, `kept_groups` are chosen
    from: those with the largest sums of their `best` weights. A row's shares are its weights
    without the bias, over their sum and `least` if they are `normed`, times `scaling`. `gated`:
    an expert is a gated MLP.
    """

    hidden: int
    inner: int
    experts: int
    active: int
    biased: bool
    normed: bool
    scaling: float = 1.0
    least: float = 0.0
    softmax: bool = False
    wide: bool = False
    groups: int = 1
    kept_groups: int = 1
    best: int = 2
    gated: bool = True

    def shapes(self) -> dict[str, torch.Size]:
        """All tensors, by their names in the MLP; matrices [out, in], the bias flat."""
        found = {ROUTER: torch.Size((self.experts, self.hidden))}
        if self.biased:
            found[BIAS] = torch.Size((self.experts,))
        up, down = torch.Size((self.inner, self.hidden)), torch.Size((self.hidden, self.inner))
        for expert in range(self.experts):
            for name in self.entering:
                found[f"experts.{expert}.{name}.weight"] = up
            found[f"experts.{expert}.down_proj.weight"] = down
        return found

    @property
    def entering(self) -> tuple[str, ...]:
        """An expert's matrices of gate and up; the latter alone where nothing gates."""
        return ("gate_proj", "up_proj") if self.gated else ("up_proj",)


ROUTER, BIAS = "gate.weight", "expert_bias"


class Mixture:
    """The experts of one layer."""

    def __init__(
        self,
        form: MixtureForm,
        activation: str,
        prefix: str,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        math: RowMath,
    ) -> None:
        """Read those whose names begin with `prefix`. Raises ModelError as the source does."""
        self._form, self._activation, self._math = form, activation, math
        reader, shapes = MatrixReader(source, dtype, device), form.shapes()
        self._routed_as = torch.float32 if form.wide else dtype
        # Never packed (see LayerForm.matrices).
        router = load_parameter(source, prefix + ROUTER, shapes[ROUTER], self._routed_as, device)
        self._router = plain_product(router)
        # As wide as transformers keeps it: what is rounded chooses another expert.
        wide = torch.promote_types(dtype, torch.float32)
        self._bias = (
            load_parameter(source, prefix + BIAS, shapes[BIAS], wide, device).data
            if form.biased
            else None
        )
        up, down = shapes["experts.0.up_proj.weight"], shapes["experts.0.down_proj.weight"]
        places = [f"{prefix}experts.{expert}." for expert in range(form.experts)]
        self.experts = [
            (
                reader.product([place + name for name in form.entering], [up] * len(form.entering)),
                reader.product([f"{place}down_proj"], [down]),
            )
            for place in places
        ]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of what the experts of each row [R, hidden] make of it, by their shares. One that
        no row chose is not touched."""
        scores = self._router(rows.to(self._routed_as))
        chosen, shares = self._math.by_row(self._route, scores)
        how = rows, self._activation, self._math
        return sum_of_experts(self.experts, chosen, shares, *how)

    def _route(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts [R, active] of rows whose scores are [R, experts], and their shares."""
        form = self._form
        weights = scores.softmax(-1, torch.float32) if form.softmax else scores.sigmoid()
        by = weights if self._bias is None else weights + self._bias
        if form.groups > 1:
            each = by.unflatten(-1, (form.groups, -1))
            worth = each.topk(form.best, -1).values.sum(-1)
            left_out = torch.ones_like(worth, dtype=torch.bool)
            left_out.scatter_(1, worth.topk(form.kept_groups, -1).indices, False)
            by = each.masked_fill(left_out[..., None], -torch.inf).flatten(1)
        chosen = torch.topk(by, form.active, -1).indices
        shares = weights.gather(1, chosen)
        if form.normed:
            shares = shares / (shares.sum(-1, keepdim=True) + form.least)
        return chosen, shares * form.scaling


def sum_of_experts(
    experts: Sequence[tuple[Product, Product]],
    chosen: torch.Tensor,
    shares: torch.Tensor,
    rows: torch.Tensor,
    activation: str,
    math: RowMath,
) -> torch.Tensor:
    """What the `chosen` experts [R, active] of `rows` [R, hidden] make of them, by their `shares`.

    `experts`: of each the products of gate and up, and down. One that no row chose is not touched.
    """
    out = torch.zeros_like(rows)
    # In the order of the experts, so that sums are rounded as transformers rounds them.
    for number in torch.unique(chosen).tolist():
        row, rank = torch.where(chosen == number)
        gate_up, down = experts[number]
        made = down(math.gated(gate_up(rows[row]), activation))
        out.index_add_(0, row, (made * shares[row, rank, None]).to(out.dtype))
    return out
