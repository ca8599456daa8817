"""State form: what a family's layers that keep a state compute between their two products."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from edgespec.model.model_config import BOTH, RECURRENT, ModelConfig
from edgespec.planning.text_part import DELTA, FOLDING

_LINE = 64
"""Bytes: a row takes a multiple of them, as kernels/states_of.h has it."""


@dataclass(frozen=True, slots=True)
class StateForm:
    """One such mixer: a projection, a short convolution of queries, keys and values, the state, a
    gated norm and a last product.

    `delta`: by the gated delta rule, else Mamba2's. `name`: of the module in its layer. `entering`:
    names and rows of the matrices that make, in this order, the gate [heads * value], what is
    convolved, and one number a head, or two; `by_group`: they make all but the numbers of heads
    first, then these, each group's together, the former too if they are one (see `order`). `heads`
    share the keys of `groups`, which have `key` numbers, values have `value`. `kernel`: taps of the
    convolution. `normed`: numbers that are normed together, 0: none; `gate_last`: before they are
    gated. `steps`: bounds of a step. `scale`: what the gate, values, keys, queries and steps that
    are projected are multiplied by, if not by 1. `share`: what comes out counts so much in the
    layer. `tiled`: heads of a group are as many places apart as there are groups, as GGUF files
    have them; else neighbours.
    """

    delta: bool
    name: str
    entering: tuple[tuple[str, int], ...]
    hidden: int
    heads: int
    groups: int
    key: int
    value: int
    kernel: int
    eps: float
    normed: int
    bias: bool = False
    conv_bias: bool = False
    steps: tuple[float, float] = (0.0, math.inf)
    gate_last: bool = False
    scale: tuple[float, ...] = ()
    share: float = 1.0
    tiled: bool = False
    by_group: bool = False

    @property
    def order(self) -> torch.Tensor | None:
        """Where among what the matrices make the numbers are in their order; None: they are so."""
        if not self.by_group:
            return None
        share = self.heads // self.groups
        of_heads = torch.arange(2 * self.heads).view(self.groups, -1) + self.conv + self.inner
        last = [one.flatten() for one in of_heads.split(share, 1)]
        if len(self.entering) > 2:
            return torch.cat((torch.arange(self.conv + self.inner), *last))
        parts = [self.key, self.key, share * self.value, share * self.value]
        whole = torch.arange(self.conv + self.inner).view(self.groups, -1)
        query, key, value, gate = whole.split(parts, 1)
        first = [one.flatten() for one in (gate, query, key, value)]
        return torch.cat((*first, *last))

    @property
    def numbers(self) -> dict[str, float]:
        """What a compiled mixer takes of it as it is."""
        names = ("eps", "delta", "heads", "groups", "key", "value", "kernel", "normed", "tiled")
        low, high = self.steps
        found = {name: getattr(self, name) for name in (*names, "gate_last")}
        return found | {"step_low": low, "step_high": high}

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of a state."""
        return self.heads, self.key, self.value

    @property
    def keys(self) -> int:
        """Numbers in the keys of a row."""
        return self.groups * self.key

    @property
    def inner(self) -> int:
        """Numbers in its values."""
        return self.heads * self.value

    @property
    def conv(self) -> int:
        """Numbers of a row that are convolved."""
        return 2 * self.keys + self.inner

    @property
    def terms(self) -> int:
        """Numbers that it adds to the state."""
        return self.keys + self.inner + self.heads

    def by_head(self, of_groups: torch.Tensor, dim: int) -> torch.Tensor:
        """What groups have, for each of their heads."""
        heads = torch.arange(self.heads, device=of_groups.device)
        each = heads % self.groups if self.tiled else heads // (self.heads // self.groups)
        return of_groups.index_select(dim, each)

    def scales(self) -> torch.Tensor:
        """`scale` of each number that is projected."""
        counts = torch.tensor([self.inner, self.inner, self.keys, self.keys, self.heads])
        return torch.tensor(self.scale).repeat_interleave(counts)

    def folded(self, held_as: torch.dtype) -> int:
        """How much is held of a row, in `held_as` numbers: its terms, of another type, and behind
        them the inputs of its convolution."""
        bytes_each = held_as.itemsize
        used = self.terms * wide(held_as).itemsize + self.conv * bytes_each
        return -(-used // _LINE) * _LINE // bytes_each

    def shapes(self) -> dict[str, torch.Size]:
        """The tensors of the module, by their names in the layer."""
        found: dict[str, tuple[int, ...]]
        found = {f"{name}.weight": (rows, self.hidden) for name, rows in self.entering}
        if self.bias:
            found |= {f"{name}.bias": (rows,) for name, rows in self.entering}
            found["out_proj.bias"] = (self.hidden,)
        found |= {"out_proj.weight": (self.hidden, self.inner)}
        found |= {"conv1d.weight": (self.conv, 1, self.kernel)}
        if self.conv_bias:
            found["conv1d.bias"] = (self.conv,)
        found |= {"dt_bias": (self.heads,), "A_log": (self.heads,)}
        if not self.delta:
            found["D"] = (self.heads,)
        if self.normed:
            found["norm.weight"] = (self.value if self.delta else self.inner,)
        return {f"{self.name}.{name}": torch.Size(shape) for name, shape in found.items()}


def state_form(config: ModelConfig, index: int) -> StateForm | None:
    """The form of layer `index`, if it keeps a state."""
    if config.model_type not in FOLDING or config.layer_types[index] not in (RECURRENT, BOTH):
        return None
    return _delta(config) if config.model_type in DELTA else _mamba2(config)


def _mamba2(config: ModelConfig) -> StateForm:
    """As Granite 4, Nemotron-H and Falcon-H1 have it."""
    heads, groups = int(config.mamba_n_heads), int(config.mamba_n_groups)
    value, key = int(config.mamba_d_head), int(config.mamba_d_state)
    inner = heads * value
    low, high = config.time_step_limit
    scale: tuple[float, ...] = ()
    gate_last, normed, share = False, inner // groups, 1.0
    if config.model_type == "falcon_h1":
        scale = tuple(float(config.ssm_in_multiplier * one) for one in config.ssm_multipliers)
        gate_last = bool(config.mamba_norm_before_gate)
        normed = normed if config.mamba_rms_norm else 0
        share = float(config.ssm_out_multiplier)
    elif config.model_type == "granitemoehybrid":
        share = float(config.residual_multiplier)
    return StateForm(
        delta=False,
        name="mamba",
        entering=(("in_proj", 2 * inner + 2 * groups * key + heads),),
        hidden=int(config.hidden_size),
        heads=heads,
        groups=groups,
        key=key,
        value=value,
        kernel=int(config.mamba_d_conv),
        eps=float(config.rms_norm_eps),
        normed=normed,
        bias=bool(config.mamba_proj_bias),
        conv_bias=bool(config.mamba_conv_bias),
        steps=(float(low), float(high)),
        gate_last=gate_last,
        scale=scale if any(one != 1 for one in scale) else (),
        share=share,
    )


def _delta(config: ModelConfig) -> StateForm:
    """As Qwen 3.5 has it, and Qwen3-Next, whose matrices are two, or three in a GGUF file."""
    heads, groups = int(config.linear_num_value_heads), int(config.linear_num_key_heads)
    value, key = int(config.linear_value_head_dim), int(config.linear_key_head_dim)
    inner, by_group = heads * value, config.model_type == "qwen3_next"
    gate, mixed = ("in_proj_z", inner), ("in_proj_qkv", 2 * groups * key + inner)
    entering: tuple[tuple[str, int], ...] = (
        gate,
        mixed,
        ("in_proj_b", heads),
        ("in_proj_a", heads),
    )
    if by_group:
        entering = (("in_proj_qkvz", 2 * groups * key + 2 * inner), ("in_proj_ba", 2 * heads))
    if by_group and config.linear_qkvz_in_order:
        entering = (gate, mixed, entering[-1])
    return StateForm(
        delta=True,
        name="linear_attn",
        entering=entering,
        hidden=int(config.hidden_size),
        heads=heads,
        groups=groups,
        key=key,
        value=value,
        kernel=int(config.linear_conv_kernel_dim),
        eps=float(config.rms_norm_eps),
        normed=value,
        gate_last=True,
        tiled=bool(config.linear_value_heads_tiled),
        by_group=by_group,
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """What states are of, and what rows add to them."""
    return torch.float64 if dtype == torch.float64 else torch.float32
