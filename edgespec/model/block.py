"""Block: a run of consecutive decoder layers, with the embedding or final norm at the ends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import embedding
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from edgespec.errors import ModelError
from edgespec.model.cuda_graphs import GraphMaker, graphs_on
from edgespec.model.experts import Experts, separate_experts
from edgespec.model.families import angle_kinds, embedding_scale
from edgespec.model.joint import CachedPart, JointPass, Turns
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.quantised.linear import linear_from
from edgespec.model.source import TensorSource, check_layers, check_names, shaped
from edgespec.model.static_pass import StaticPasses
from edgespec.model.tensors import TORCH_DTYPES
from edgespec.model.tree_attention import ATTENTION
from edgespec.types.stop_check import StopCheck

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = ("float64", "float32", "bfloat16", "float16")


def compute_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """The torch dtype called `name`. Raises ModelError for one that `device` cannot compute in."""
    if name not in _DTYPES or (name == "float16" and torch.device(device).type == "cpu"):
        raise ModelError(
            f"cannot compute in {name!r} on {device}; use float32, float64, bfloat16 or, on CUDA, "
            "float16"
        )
    return TORCH_DTYPES[name]


def load_parameter(
    source: TensorSource,
    name: str,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Parameter:
    """Read one tensor, into memory of its own unless it may be kept mapped.

    Raises ModelError if it has another shape.
    """
    stored = shaped(source, name, shape)
    return nn.Parameter(stored.to(device, dtype, copy=not source.mapped), requires_grad=False)


def skeleton(config: PretrainedConfig, first: int, end: int) -> PreTrainedModel:
    """The whole model on the meta device, layers [first, end) with one module for each matrix.

    It has a configuration of its own, in which edgespec's attention is chosen.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=ATTENTION
        ).model
        for layer in model.layers[first:end]:
            separate_experts(layer, model.config)
    return model


class Block:
    """Layers [first, end) of a model, and nothing else of it in memory.

    Embeds if it owns layer 0, applies the final norm if it owns the last layer, never holds the
    output head. The layers are transformers' own. Hidden rows are [R, hidden_size] in `dtype`.
    """

    def __init__(
        self,
        source: TensorSource,
        first: int,
        end: int,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
        graphs: Callable[[torch.device], GraphMaker | None] = graphs_on,
    ) -> None:
        """Read the block's tensors, telling `progress` how many layers of all are done.

        `graphs`: what captures passes over few rows on that device; None: none are. Raises
        ModelError if source and block do not fit.
        """
        check_layers(source, first, end)
        self.first, self.end = first, end
        self.device = torch.device(device)
        self.dtype = compute_dtype(dtype, device)
        model = skeleton(source.config, first, end)
        self.config = model.config
        self.hidden_size = int(self.config.hidden_size)
        self.vocab_size = int(self.config.vocab_size)
        self._kv_heads = int(self.config.num_key_value_heads)
        self._head_dim = int(model.layers[first].self_attn.head_dim)
        self.embedding: nn.Parameter | None = None
        if first == 0:
            self.embedding = load_parameter(
                source, EMBEDDING, model.embed_tokens.weight.shape, self.dtype, device
            )
        self._scale = embedding_scale(self.config, self.dtype)
        self._layers = list(model.layers[first:end])
        for index, layer in enumerate(self._layers, start=first):
            self._load(source, layer, f"model.layers.{index}.")
            if progress is not None:
                progress(index + 1 - first, end - first)
        self._norm: nn.Module | None = None
        if end == source.layers:
            self._norm = model.norm
            self._load(source, model.norm, "model.norm.")
        # Made again, as the one on the meta device has no frequencies; they stay float32.
        # None where no layer turns its keys.
        rotary = model.rotary_emb
        self._rotary = None if rotary is None else type(rotary)(self.config).to(self.device)
        self._angles = angle_kinds(self.config)[first:end]
        self.static: StaticPasses | None = None
        maker = graphs(self.device)
        if maker is not None and not self.has_experts:
            self.static = StaticPasses(self, maker)

    def _load(self, source: TensorSource, module: nn.Module, prefix: str) -> None:
        """Replace a module's meta parameters by the checkpoint's tensors."""
        check_names(source, prefix, {prefix + name for name, _ in module.named_parameters()})
        # One tensor at a time, so that loading never needs more than the finished block and one
        # tensor as stored.
        self._load_packed(source, module, prefix)
        for name, parameter in list(module.named_parameters()):
            owner_path, _, leaf = name.rpartition(".")
            loaded = load_parameter(source, prefix + name, parameter.shape, self.dtype, self.device)
            setattr(module.get_submodule(owner_path), leaf, loaded)
        module.eval()

    def _load_packed(self, source: TensorSource, module: nn.Module, prefix: str) -> None:
        """Replace the linear layers of a module whose weights come packed."""
        for name, linear in list(module.named_modules()):
            if not isinstance(linear, nn.Linear):
                continue
            form = source.form(f"{prefix}{name}.weight")
            if form.kind == "none":
                continue
            bias = None
            if linear.bias is not None:
                bias = load_parameter(
                    source, f"{prefix}{name}.bias", linear.bias.shape, self.dtype, self.device
                )
            shape = linear.weight.shape
            packed = source.packed(f"{prefix}{name}.weight", shape)
            held = linear_from(packed, bias, shape, form, self.dtype, self.device)
            module.set_submodule(name, held)

    @property
    def has_experts(self) -> bool:
        """Whether some layer is a mixture, whose rows choose the matrices that they go through."""
        return any(isinstance(one, Experts) for layer in self._layers for one in layer.modules())

    def new_cache(self, reserve: int) -> TwoRegionCache:
        """An empty cache for this block's layers with room for `reserve` rows."""
        return TwoRegionCache(
            first_layer=self.first,
            layers=len(self._layers),
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            reserve=reserve,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        cache: TwoRegionCache,
        mask: torch.Tensor,
        stop: Callable[[], bool] | None = None,
    ) -> torch.Tensor | None:
        """Run rows of one request (see CachedPart) as `forward_joint` does."""
        asked: StopCheck | None = None if stop is None else lambda request=None: stop()
        return self.forward_joint(inputs, positions, [CachedPart(0, cache, mask)], asked)

    @torch.inference_mode()
    def forward_joint(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        parts: Sequence[CachedPart],
        stop: StopCheck | None = None,
        enters: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None:
        """Run the R >= 1 rows of all parts and append their keys and values to the parts' caches.

        `inputs`: tokens int64 [R] or vectors in their place (see `embedded`) for the block with
        layer 0, else hidden rows; both [R, hidden_size]. `positions` int64 [R], absolute.
        Returns hidden rows [R, hidden_size], or None if `stop()` was true before one of the
        layers; a part of which `stop(request)` was true is left out from there on, and its rows
        are zeros. The R slots are taken in each case. `enters` is told each layer's number in the
        model and the rows [R, hidden_size] that enter it.
        """
        if self.static is not None and enters is None and self.static.take(parts):
            out, done = self.static.forward(inputs, positions, parts[0], stop)
            if done:
                return out
        hidden, joint = self.enter(inputs, positions, parts)
        for index in range(len(self._layers)):
            if enters is not None:
                enters(self.first + index, joint.all_rows(hidden).squeeze(0))
            kept = hidden if stop is None else joint.kept(stop, hidden)
            if kept is None:
                joint.advance()
                return None
            hidden = self.layer(index, kept, joint)
        joint.advance()
        return joint.all_rows(self.leave(hidden)).squeeze(0)

    def enter(
        self, inputs: torch.Tensor, positions: torch.Tensor, parts: Sequence[CachedPart]
    ) -> tuple[torch.Tensor, JointPass]:
        """The rows [1, R, H] that enter the first layer, and what all layers are given."""
        hidden = (inputs if inputs.dim() > 1 else self.embedded(inputs)).unsqueeze(0)
        place = positions.unsqueeze(0)
        return hidden, JointPass(parts, place, self._turns(hidden, place))

    def layer(self, index: int, hidden: torch.Tensor, joint: JointPass) -> torch.Tensor:
        """Rows [1, R, H] after layer `index` of the block."""
        out: torch.Tensor = self._layers[index](
            hidden,
            attention_mask=joint.seen,
            position_ids=joint.place,
            past_key_values=joint.cache,
            position_embeddings=joint.turns[self._angles[index]],
        )
        return out

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [1, R, H] after the last layer as they leave the block."""
        if self._norm is None:
            return hidden
        normed: torch.Tensor = self._norm(hidden)
        return normed

    @torch.inference_mode()
    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Vectors [R, hidden_size] of tokens int64 [R], for the block that embeds."""
        assert self.embedding is not None
        hidden = embedding(tokens, self.embedding)
        return hidden if self._scale is None else hidden * self._scale

    def _turns(self, hidden: torch.Tensor, place: torch.Tensor) -> Turns:
        """Cosines and sines of the positions' angles, for each kind that the layers use."""
        if self._rotary is None:
            return dict.fromkeys(self._angles)
        return {
            kind: self._rotary(hidden, place, *(() if kind is None else (kind,)))
            for kind in dict.fromkeys(self._angles)
        }
