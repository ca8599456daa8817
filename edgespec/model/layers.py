"""Layers: how a block makes those of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

from edgespec.kernels.layers import CompiledLayer
from edgespec.kernels.rows import PAIRED
from edgespec.kernels.states import CompiledMixer
from edgespec.model.gemma4 import Gemma4Layers
from edgespec.model.joint import JointCache, RowCache
from edgespec.model.kv_cache import RowForm
from edgespec.model.latent import LatentMixer
from edgespec.model.layer_form import MLP_GATE, LayerForm, layer_form
from edgespec.model.matrices import MatrixReader, Product, plain_product, row_products
from edgespec.model.mixture import Mixture, SharedMlp
from edgespec.model.model_config import ModelConfig
from edgespec.model.rope import Angles, Rotary
from edgespec.model.row_math import BATCHED, HeadNorm, Norm, RowMath, Taps
from edgespec.model.source import TensorSource, load_parameter
from edgespec.model.state_mixer import StateMixer
from edgespec.model.tree_attention import AttentionForm, Seen

_NUMBERS = (
    *("eps", "share", "mlp_share", "scaling", "hidden", "inner", "heads", "kv_heads", "head_dim"),
    *("taps", "gated", "centred"),
)
"""Of a LayerForm what a compiled layer takes as it is."""


class Layer(Protocol):
    """One decoder layer."""

    def __call__(
        self, hidden: torch.Tensor, rotary: Rotary, cache: RowCache | JointCache, seen: Seen
    ) -> torch.Tensor:
        """Hidden rows [R, H] behind the layer, in new memory; what it holds of them goes into
        `cache`.

        `rotary`: what `ModelLayers.rotary` made of the rows' positions.
        """


class ModelLayers(Protocol):
    """Layers [first, end) of a model, by their numbers in it, and what goes with them."""

    has_experts: bool
    """Whether some layer is a mixture, whose rows choose the matrices that they go through."""

    def rows(self, index: int, held_as: torch.dtype) -> RowForm:
        """What a layer holds of each row, in numbers of that type."""

    def shapes(self, index: int) -> Mapping[str, torch.Size]:
        """The tensors of a layer, by their names within it."""

    def matrices(self, index: int) -> frozenset[str]:
        """Of these, the weights [out, in] that rows are multiplied by, which may come packed."""

    def layer(
        self, index: int, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Layer:
        """Read a layer. Raises ModelError as the source does."""

    def norm(
        self, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Read the final norm, of rows [R, H]. Raises ModelError as the source does."""

    def rotary(
        self, kind: str | None, dtype: torch.dtype, device: torch.device
    ) -> Callable[[torch.Tensor], Rotary]:
        """Makes of positions int64 [R] what the layers of a kind are told of them.

        `kind`: the layer type that has rotary embeddings of its own; None: all share one.
        """


def layers_of(config: ModelConfig, first: int, end: int, math: RowMath = BATCHED) -> ModelLayers:
    """The way to make layers [first, end) of a model, which compute by `math`."""
    if config.model_type == "gemma4_text":
        return Gemma4Layers(config, first, end, math)
    return OwnLayers(
        config, {index: layer_form(config, index) for index in range(first, end)}, math
    )


class DecoderLayer:
    """One layer of any family but Gemma 4, as `layer_form` tells what it is: a function of the
    rows, their angles, the cache and what they see. It attends, or convolves: then a row reads the
    few rows before it on its path, as through a window, and nothing is kept that pruning could not
    take away. Or it keeps a state, or does two of these, or none (see LayerForm).

    On a GPU the host launches an operation at a time, on a CPU each has a price of its own, so what
    counts beside the products is how many there are: matrices with one input are one, queries and
    keys are rotated together where the product left them, and keys and values are stored by one
    copy. What is neither a product nor the cache's is the row math (see model.row_math).
    """

    def __init__(
        self,
        index: int,
        form: LayerForm,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        math: RowMath,
    ) -> None:
        """Read layer `index`. Raises ModelError for tensors that the source does not have so."""
        self._index, self.form, self._math = index, form, math
        prefix = f"model.layers.{index}."
        shapes = form.shapes()
        reader = MatrixReader(source, dtype, device)

        def product(*names: str) -> Callable[[torch.Tensor], torch.Tensor]:
            biased = f"{names[0]}.bias" in shapes
            of = [shapes[f"{name}.weight"] for name in names]
            return reader.product([prefix + name for name in names], of, biased)

        def vector(name: str, leaf: str = "weight") -> torch.Tensor:
            key = f"{name}.{leaf}"
            return load_parameter(source, prefix + key, shapes[key], dtype, device).data

        def norm(name: str, times: float = 1.0) -> Norm | None:
            how = form.eps, form.above_one, times, form.centred
            return Norm(vector(name), *how) if name else None

        self._mixer: StateMixer | LatentMixer | None = None
        if form.state is not None:
            self._mixer = StateMixer(index, form.state, source, dtype, device, math)
        elif form.latent is not None:
            self._mixer = LatentMixer(index, form.latent, source, dtype, device, math)
        if form.projects:
            self._qkv = product(*form.qkv_names)
            self._out = product(form.out_name)
        beside: SharedMlp | None = None
        if form.inner:
            self._gate_up = product(*form.gate_up_names)
            self._down = product("mlp.down_proj")
            share: Product | None = None
            if form.mlp_gate:
                weight = load_parameter(source, prefix + MLP_GATE, shapes[MLP_GATE], dtype, device)
                share = plain_product(weight)
            beside = SharedMlp(form.inner, self._gate_up, self._down, share)
        self.mixture: Mixture | None = None
        if form.mixture is not None:
            how = form.mixture, form.activation, f"{prefix}mlp.", source, dtype, device, math
            self.mixture = Mixture(*how, beside)
        enter, attended, middle, left = form.norm_names
        self._enter, self._attended = norm(enter), norm(attended)
        self._middle, self._left = norm(middle, form.mlp_gain), norm(left)
        self._head_norm: HeadNorm | None = None
        self._taps: Taps | None = None
        if form.taps:
            bias = vector("conv.conv", "bias") if form.taps_bias else None
            self._taps = Taps(vector("conv.conv"), bias)
        elif form.head_norms and form.attends:
            gains = vector("self_attn.q_norm"), vector("self_attn.k_norm")
            counts, ways = (form.heads, form.kv_heads), (form.normed_last, form.normed_whole)
            self._head_norm = HeadNorm(*gains, *counts, form.eps, form.above_one, *ways)
        sinks = vector("self_attn", "sinks") if form.sinks else None
        self._attention = AttentionForm(form.scaling, form.softcap, form.window, sinks)

    @property
    def _ways(self) -> int:
        return PAIRED if self.form.paired else 0

    @property
    def mixer(self) -> CompiledMixer | None:
        """What is compiled of a layer that keeps a state."""
        return self._mixer.compiled if isinstance(self._mixer, StateMixer) else None

    def compiled(self, angles: int, runs: int, folded: int, every: int) -> CompiledLayer | None:
        """The layer for `kernels.layers`, by the numbers of the angles and of the runs that it is
        given in each pass, and as number `folded` of those with states, by those of all slots; None
        where that cannot run it."""
        form, mixer = self.form, self._mixer
        mixture = None if self.mixture is None else self.mixture.compiled
        if (mixer is not None and self.mixer is None) or (self.mixture is not None) > bool(mixture):
            return None
        assert not isinstance(mixer, LatentMixer)
        ways: list[Product | None] = [None] * 6
        if form.projects:
            ways[:2] = self._qkv, self._out
        if form.inner and mixture is None:
            ways[2:4] = self._gate_up, self._down
        if mixer is not None:
            ways[4:] = mixer.products
        products = []
        for way in ways:
            found = [] if way is None else row_products(way)
            if found is None:
                return None
            products.append(found)
        norms = (self._enter, self._attended, self._middle, self._left)
        of_heads = self._head_norm and self._head_norm.gains
        sinks = self._attention.sinks
        taps = None if self._taps is None else (self._taps.weights, self._taps.bias)
        return CompiledLayer(
            products,
            [
                *(None if one is None else one.gain for one in norms),
                *(of_heads or (None, None)),
                *(taps or (None, None)),
                None if sinks is None else sinks.float().contiguous(),
            ],
            form.activation,
            self.mixer,
            mixture,
            ways=self._ways | (0 if self._head_norm is None else self._head_norm.ways),
            angles=angles if form.turned else -1,
            runs=runs,
            folded=folded,
            every=every,
            state_share=1.0 if form.state is None else form.state.share,
            softcap=form.softcap or 0.0,
            **{name: getattr(form, name) for name in _NUMBERS},
        )

    def __call__(
        self, hidden: torch.Tensor, rotary: Rotary, cache: RowCache | JointCache, seen: Seen
    ) -> torch.Tensor:
        """Hidden rows [R, H] to such rows, in new memory; keys and values go into the cache.

        `rotary`: cosines and signed sines of the rows' positions (see Angles).
        """
        form, math, before, middle = self.form, self._math, self._attended, self._middle
        entering, share = hidden, form.share
        if self._enter is not None:
            entering = math.norm(hidden, self._enter)
        if form.projects:
            added = self._out(self._mixed(self._qkv(entering), rotary, cache, seen))
        if self._mixer is not None:
            if form.projects:
                hidden = math.add(hidden, added, share, before)
            added = self._mixer(entering, rotary, cache, seen)
            share = share if form.state is None else form.state.share
        if not form.projects and self._mixer is None:
            assert middle is not None
            entering = math.norm(hidden, middle)
        elif middle is not None:
            hidden, entering = math.add_and_norm(hidden, added, share, before, middle)
        else:
            hidden = math.add(hidden, added, share, before)
            # Of a layer that norms what enters it alone, the MLP is given that, too.
            entering = hidden if self._enter is None else entering
        if self.mixture is not None:
            made = self.mixture(entering)
        elif form.inner:
            made = self._down(math.gated(self._gate_up(entering), form.activation))
        else:
            return hidden
        return math.add(hidden, made, form.mlp_share, self._left)

    def _mixed(
        self, qkv: torch.Tensor, rotary: Rotary, cache: RowCache | JointCache, seen: Seen
    ) -> torch.Tensor:
        """Attention [R, heads * head_dim] of queries, whose keys and values are beside them, or the
        convolution."""
        form, math, heads = self.form, self._math, self.form.heads
        if self._taps is not None:
            enters, _, inputs = qkv.chunk(3, 1)
            (held,) = cache.append((enters * inputs)[None, None], self._index)
            return math.convolved(held, qkv, seen, self._taps)
        gate: torch.Tensor | None = None
        if form.gated:
            both, kv = qkv.split([2 * heads * form.head_dim, 2 * form.kv_heads * form.head_dim], 1)
            both = both.view(-1, heads, 2 * form.head_dim)
            gate = both[..., form.head_dim :].flatten(1)
            qkv = torch.cat((both[..., : form.head_dim].flatten(1), kv), 1)
        qkv = qkv.view(qkv.shape[0], -1, form.head_dim)
        turns = rotary if form.turned else None
        math.rotate(qkv, heads, form.kv_heads, turns, self._head_norm, self._ways)
        kv = qkv.narrow(1, heads, 2 * form.kv_heads)
        kv = kv.view(-1, 2, form.kv_heads, form.head_dim).permute(1, 2, 0, 3)
        keys, values = cache.append(kv, self._index)
        out = math.attention(qkv.narrow(1, 0, heads), keys, values, seen, self._attention)
        return out if gate is None else math.gated(torch.cat((gate, out), 1), "sigmoid")


class OwnLayers:
    """Layers of a model whose form `layer_form` knows (see model.layers)."""

    def __init__(self, config: ModelConfig, forms: dict[int, LayerForm], math: RowMath) -> None:
        self._config, self._forms, self._math = config, forms, math
        self.has_experts = any(form.mixture is not None for form in forms.values())

    def rows(self, index: int, held_as: torch.dtype) -> RowForm:
        return self._forms[index].rows(held_as)

    def shapes(self, index: int) -> dict[str, torch.Size]:
        return self._forms[index].shapes()

    def matrices(self, index: int) -> frozenset[str]:
        return self._forms[index].matrices

    def layer(
        self, index: int, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> DecoderLayer:
        return DecoderLayer(index, self._forms[index], source, dtype, device, self._math)

    def norm(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        name: str = "model.norm.weight",
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The final norm, or another one of that name."""
        form = next(iter(self._forms.values()))
        shape = torch.Size((form.hidden,))
        weight = load_parameter(source, name, shape, dtype, device)
        norm = Norm(weight.data, form.eps, form.above_one, centred=form.centred)
        return partial(self._math.norm, norm=norm)

    def rotary(
        self, kind: str | None, dtype: torch.dtype, device: torch.device
    ) -> Callable[[torch.Tensor], Rotary]:
        return partial(self._math.angles, Angles(self._config, kind, dtype, device))
