"""Mixture: an MLP in several experts, of which each row goes through a few, in own layers, and the
MLP that may be beside them for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from edgespec.kernels.layers import CompiledMixture, compiles
from edgespec.kernels.rows import Clamp
from edgespec.model.matrices import MatrixReader, Product, plain_product, row_products
from edgespec.model.row_math import CompiledRows, RowMath
from edgespec.model.source import TensorSource, load_parameter


@dataclass(frozen=True, slots=True)
class MixtureForm:
    """Experts of a layer, and how a row's are chosen: the `active` ones with the largest weights,
    to which a bias is added if there is one (`biased`). Weights are the softmax of what the router
    gives (`softmax`), or its sigmoid.

    `inner`: width of an expert. `wide`: the router multiplies in float32, whatever the rows are of,
    as softmax is always taken. If there are several `groups` of experts, `kept_groups` are chosen
    from: those with the largest sums of their `best` weights. A row's shares are its weights
    without the bias, over their sum and `least`, or over their sum or `floor`, if they are
    `normed`, times `scaling`. `gated`: an expert is a gated MLP; `clamp`: what its activation may
    need. `affine`: router and experts have biases.
    """

    hidden: int
    inner: int
    experts: int
    active: int
    biased: bool
    normed: bool
    scaling: float = 1.0
    least: float = 0.0
    floor: float = 0.0
    softmax: bool = False
    wide: bool = False
    groups: int = 1
    kept_groups: int = 1
    best: int = 2
    gated: bool = True
    clamp: Clamp = (0.0, 0.0)
    affine: bool = False

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
        if self.affine:
            outs = {n.replace("weight", "bias"): shape[:1] for n, shape in found.items()}
            found |= {name: shape for name, shape in outs.items() if name not in found}
        return found

    @property
    def entering(self) -> tuple[str, ...]:
        """An expert's matrices of gate and up; the latter alone where nothing gates."""
        return ("gate_proj", "up_proj") if self.gated else ("up_proj",)


_NUMBERS = (
    *("hidden", "inner", "experts", "active", "scaling", "least", "floor", "softmax", "normed"),
    *("wide", "groups", "kept_groups", "best"),
)
"""Of a MixtureForm what a compiled one takes as it is."""
ROUTER, BIAS = "gate.weight", "expert_bias"


class SharedMlp(NamedTuple):
    """An MLP beside experts, `inner` wide: products of gate and up, and down, and of what makes of
    a row the number whose sigmoid is its share; None: all of it counts."""

    inner: int
    gate_up: Product
    down: Product
    share: Product | None


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
        beside: SharedMlp | None = None,
    ) -> None:
        """Read those whose names begin with `prefix`. Raises ModelError as the source does."""
        self._form, self._activation, self._math, self._beside = form, activation, math, beside
        reader, shapes = MatrixReader(source, dtype, device), form.shapes()
        self._routed_as = torch.float32 if form.wide else dtype
        # Never packed (see LayerForm.matrices).

        def plain(name: str, kept: torch.dtype) -> torch.Tensor:
            return load_parameter(source, prefix + name, shapes[name], kept, device).data

        more = plain("gate.bias", self._routed_as) if form.affine else None
        self._router = plain_product(plain(ROUTER, self._routed_as), more)
        # As wide as transformers keeps it: what is rounded chooses another expert.
        wide = torch.promote_types(self._routed_as, torch.float32)
        self._bias = plain(BIAS, wide) if form.biased else None
        # gpt-oss alone takes the softmax in the type of its scores.
        self._softmax_as = wide if form.affine else torch.float32
        up, down = shapes["experts.0.up_proj.weight"], shapes["experts.0.down_proj.weight"]
        places = [f"{prefix}experts.{expert}." for expert in range(form.experts)]
        ups = [up] * len(form.entering)
        self.experts = [
            (
                reader.product([place + n for n in form.entering], ups, form.affine),
                reader.product([f"{place}down_proj"], [down], form.affine),
            )
            for place in places
        ]
        self.compiled: CompiledMixture | None = None
        # float64 is there to be compared with transformers, which takes the softmax in float32.
        if isinstance(math, CompiledRows) and compiles() and dtype != torch.float64:
            self.compiled = self._compiled()

    def _compiled(self) -> CompiledMixture | None:
        """All of it as one function; None where some product is of another kind."""
        form, beside = self._form, self._beside
        pairs = [*self.experts, *([] if beside is None else [(beside.gate_up, beside.down)])]
        each = [(row_products(one), row_products(other)) for one, other in pairs]
        gate = None if beside is None else beside.share
        router, share = row_products(self._router), [] if gate is None else row_products(gate)
        known = [(one, other) for one, other in each if one is not None and other is not None]
        if router is None or share is None or len(known) < len(each):
            return None
        slope, limit = form.clamp
        return CompiledMixture(
            *(router, share, known, self._bias, self._activation),
            slope=slope,
            limit=limit,
            beside=0 if beside is None else beside.inner,
            **{name: getattr(form, name) for name in _NUMBERS},
        )

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of what the experts of each row [R, hidden], and the MLP beside them, make of it,
        by their shares. One that no row chose is not touched."""
        if self.compiled is not None:
            return self.compiled(rows)
        math, beside, kind = self._math, self._beside, self._activation
        scores = self._router(rows.to(self._routed_as))
        chosen, shares = math.by_row(self._route, scores)
        made = sum_of_experts(self.experts, chosen, shares, rows, kind, math, self._form.clamp)
        if beside is None:
            return made
        more = beside.down(math.gated(beside.gate_up(rows), kind))
        if beside.share is not None:
            more *= math.by_row(torch.sigmoid, beside.share(rows))
        return made.add_(more)

    def _route(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts [R, active] of rows whose scores are [R, experts], and their shares."""
        form = self._form
        weights = scores.softmax(-1, self._softmax_as) if form.softmax else scores.sigmoid()
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
            whole = shares.sum(-1, keepdim=True)
            whole = whole.clamp(min=form.floor) if form.floor else whole + form.least
            shares = shares / whole
        return chosen, shares * form.scaling


def sum_of_experts(
    experts: Sequence[tuple[Product, Product]],
    chosen: torch.Tensor,
    shares: torch.Tensor,
    rows: torch.Tensor,
    activation: str,
    math: RowMath,
    clamp: Clamp = (0.0, 0.0),
) -> torch.Tensor:
    """What the `chosen` experts [R, active] of `rows` [R, hidden] make of them, by their `shares`.

    `experts`: of each the products of gate and up, and down. One that no row chose is not touched.
    """
    out = torch.zeros_like(rows)
    # In the order of the experts, so that sums are rounded as transformers rounds them.
    for number in torch.unique(chosen).tolist():
        row, rank = torch.where(chosen == number)
        gate_up, down = experts[number]
        made = down(math.gated(gate_up(rows[row]), activation, clamp))
        out.index_add_(0, row, (made * shares[row, rank, None]).to(out.dtype))
    return out
