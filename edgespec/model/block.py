"""Block: a run of consecutive decoder layers, with the embedding or final norm at the ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn
from torch.nn.functional import embedding

from edgespec.config import EIGHT_BITS, cache_complaint
from edgespec.errors import ModelError
from edgespec.kernels.gpu.usable import DTYPES, usable
from edgespec.kernels.rows import compiled_rows
from edgespec.model.families import angle_kinds, embedding_scale, layer_embedding
from edgespec.model.inventory import block_parts, in_blocks
from edgespec.model.joint import CachedPart, JointPass
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.layer_plan import layer_plan
from edgespec.model.matrices import Product
from edgespec.model.row_codes import CODED
from edgespec.model.row_math import BATCHED, CompiledRows, RowMath, SingleRows
from edgespec.model.source import EMBEDDING, TensorSource, shaped
from edgespec.model.tensors import compute_dtype
from edgespec.model.token_rows import TokenRows, embedded_by
from edgespec.types.stop_check import StopCheck

_TOLD = "tokens"
"""Beside the kinds of layers, in what a pass gives them: what they are told of tokens."""


def row_math(device: torch.device, dtype: torch.dtype) -> RowMath:
    """What keeps rows of a dtype apart on a device, as far as something does there."""
    if device.type != "cpu":
        if dtype not in DTYPES or not usable(device):
            return BATCHED
        # Only here, as it needs triton.
        from edgespec.model.triton_rows import TritonRows

        return TritonRows()
    kernels = compiled_rows()
    return SingleRows() if kernels is None else CompiledRows(kernels)


class Block:
    """Layers [first, end) of a model, and nothing else of it in memory.

    Embeds if it owns layer 0, applies the final norm if it owns the last layer, never holds the
    output head. Hidden rows are [R, hidden_size] in `dtype`.
    """

    def __init__(
        self,
        source: TensorSource,
        first: int,
        end: int,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
        cache_dtype: str = "",
        admit: Callable[[int], None] | None = None,
    ) -> None:
        """Tell `admit`, which may raise, the bytes of memory that the block will take; then read
        its tensors, telling `progress` how many layers of all are done.

        `cache_dtype`: of keys and values and what convolutions read, rounded once; "": that of the
        rows. Raises ModelError if source and block do not fit, and for dtypes that do not go
        together: compiled code reads caches by what they are said to be.
        """
        if complaint := cache_complaint(dtype, cache_dtype):
            raise ModelError(complaint)
        self.first, self.end = first, end
        self.device = torch.device(device)
        self.dtype = compute_dtype(dtype)
        coded = cache_dtype == EIGHT_BITS
        self._cache_dtype = CODED if coded else compute_dtype(cache_dtype or dtype)
        self.config = source.config
        self.hidden_size = int(self.config.hidden_size)
        self.vocab_size = int(self.config.vocab_size)
        math = row_math(self.device, self.dtype)
        parts = block_parts(source, first, end, math)
        if admit is not None:
            admit(parts.held_bytes(self.dtype))
        layers = parts.layers
        self._forms = [layers.rows(index, self.dtype) for index in range(first, end)]
        self.embedding: nn.Parameter | None = None
        if first == 0 and not in_blocks(source):
            shape = torch.Size((self.vocab_size, self.hidden_size))
            matrix = shaped(source, EMBEDDING, shape)
            in_file = source.mapped and matrix.untyped_storage().nbytes() > matrix.nbytes
            # A view of a file's bytes is looked up where it lies: memory that the system can have
            # back.
            if not in_file:
                matrix = matrix.to(device, self.dtype, copy=not source.mapped)
            self.embedding = nn.Parameter(matrix, requires_grad=False)
        self._scale = embedding_scale(self.config, self.dtype)
        self._layers = []
        for index in range(first, end):
            self._layers.append(layers.layer(index, source, self.dtype, self.device))
            if progress is not None:
                progress(index + 1 - first, end - first)
        self._norm: Callable[[torch.Tensor], torch.Tensor] | None = None
        if end == source.layers:
            self._norm = layers.norm(source, self.dtype, self.device)
        self._angles = angle_kinds(self.config)[first:end]
        self.has_experts = layers.has_experts
        self._rotary = {kind: layers.rotary(kind, self.dtype, self.device) for kind in self._angles}
        self.token_rows: TokenRows | None = None
        told = bool(layer_embedding(self.config))
        self._look_up: Product | None = None
        if self.embedding is None and (first == 0 or told):
            self._look_up = embedded_by(source, self.dtype, self.device)
        if told:
            every = range(first, end)
            self.token_rows = TokenRows(source, every, self.dtype, self.device, math, self.embedded)
        self._plan = layer_plan(self._layers, self._angles, math, self.dtype)

    def new_cache(self, reserve: int) -> TwoRegionCache:
        """An empty cache for this block's layers with room for `reserve` rows."""
        return TwoRegionCache(
            first_layer=self.first,
            forms=self._forms,
            reserve=reserve,
            dtype=self._cache_dtype,
            device=self.device,
            folded_as=self.dtype,
        )

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        cache: TwoRegionCache,
        mask: torch.Tensor,
        stop: Callable[[], bool] | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Run rows of one request (see CachedPart) as `forward_joint` does."""
        asked: StopCheck | None = None if stop is None else lambda request=None: stop()
        parts = [CachedPart(0, cache, mask)]
        return self.forward_joint(inputs, positions, parts, asked, tokens=tokens)

    @torch.inference_mode()
    def forward_joint(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        parts: Sequence[CachedPart],
        stop: StopCheck | None = None,
        aux_layers: Collection[int] = (),
        enters: Callable[[torch.Tensor], None] | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Run the R >= 1 rows of all parts and append their keys and values to the parts' caches.

        `inputs`: tokens int64 [R] or vectors in their place (see `embedded`) for the block with
        layer 0, else hidden rows; both [R, hidden_size]. `positions` int64 [R], absolute. `tokens`
        int64 [R]: of all rows, where layers are told of them (`token_rows`) and `inputs` are none.
        Returns hidden rows [R, hidden_size], or None if `stop()` was true before one of the
        layers, or of a few that are run together; a part of which `stop(request)` was true is left
        out from there on, and its rows are zeros. The R slots are taken in each case. `enters` is
        told the rows [R, hidden_size] that enter each of `aux_layers` that is here, in order.
        """
        told = None
        if self.token_rows is not None:
            told = self.token_rows(inputs if tokens is None else tokens)
        hidden = inputs if inputs.dim() > 1 else self.embedded(inputs)
        rotary = {kind: made(positions) for kind, made in self._rotary.items()}
        if told is not None:
            rotary[_TOLD] = (told,)
        joint = JointPass(parts, positions, rotary)
        plan, given = self._plan, None
        taps = {layer - self.first for layer in aux_layers}
        alone = ((index, index + 1) for index in range(len(self._layers)))
        for first, end in alone if plan is None else plan.steps(len(hidden), taps):
            if enters is not None and first in taps:
                enters(joint.all_rows(hidden))
            kept = hidden if stop is None else joint.kept(stop, hidden)
            if kept is None:
                joint.advance()
                return None
            if plan is None:
                hidden = self._layer(first, kept, joint)
                continue
            if given is None or kept is not hidden:
                given = plan.given(joint, first)
            if given is not None:
                hidden = plan.run(first, end, kept, given)
                continue
            for index in range(first, end):
                kept = self._layer(index, kept, joint)
            hidden = kept
        joint.advance()
        return joint.all_rows(hidden if self._norm is None else self._norm(hidden))

    def _layer(self, index: int, hidden: torch.Tensor, joint: JointPass) -> torch.Tensor:
        """Rows [R, H] after layer `index` of the block."""
        rotary = joint.rotary[self._angles[index]]
        if self.token_rows is not None:
            rotary = (*rotary, joint.rotary[_TOLD][0][:, index])
        return self._layers[index](hidden, rotary, joint.cache, joint.seen)

    @torch.inference_mode()
    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Vectors [R, hidden_size] of tokens int64 [R], for a block that embeds or whose layers
        are told of tokens."""
        if self._look_up is not None:
            return self._look_up(tokens)
        assert self.embedding is not None
        hidden = embedding(tokens.to(self.embedding.device), self.embedding)
        hidden = hidden.to(self.device, self.dtype)
        return hidden if self._scale is None else hidden * self._scale
