"""bitsandbytes NF4: codes two a byte over the whole matrix, and the state of their quantisation.

As bitsandbytes saves a 4-bit layer: `weight` (bytes, or their bits as another dtype), `.absmax`
(float32, or with double quantisation codes of 8 bits for `.nested_quant_map`, `.nested_absmax` and
an offset), `.quant_map`, and `.quant_state.bitsandbytes__nf4`, JSON as bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from msgspec import Meta, MsgspecError, Struct, json

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.packed.matrix import REMEDY, PackedMatrix, PartReader, Parts
from edgespec.model.quantised import nf4
from edgespec.model.quantised.linear import stored
from edgespec.model.quantised.rounding import Packed

_STATE = "weight.quant_state.bitsandbytes__nf4"
_Count = Annotated[int, Meta(gt=0)]


class _State(Struct):
    """What edgespec needs of a matrix' state; its `dtype` is that of the model before."""

    quant_type: Literal["nf4"]
    shape: tuple[_Count, _Count]
    blocksize: _Count
    nested_blocksize: Literal[256] | None = None
    nested_dtype: Literal["float32"] = "float32"
    nested_offset: float = 0.0


class BitsAndBytes:
    """The dialect of bitsandbytes' NF4."""

    mark = _STATE
    parts = (
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        _STATE,
    )

    def __init__(self, packing: dict[str, Any]) -> None:
        """All that `packing` may say is said by the tensors too."""

    def matrix(self, parts: Parts) -> PackedMatrix:
        read = PartReader(parts)
        state = _state(read)
        shape, group = torch.Size(state.shape), state.blocksize
        if shape[1] % group:
            raise ModelError(
                f"its {shape[1]} columns are no whole number of blocks of {group}; take its "
                "original 16-bit release with --quant int8"
            )
        form = Quantisation("nf4", group, double=state.nested_blocksize is not None)
        return PackedMatrix(shape, form, lambda: _pack(read, state, form))


def _state(read: PartReader) -> _State:
    content = bytes(read.any(_STATE, 1).tolist())
    try:
        return json.decode(content, type=_State)
    except MsgspecError as error:
        raise ModelError(f"its {_STATE!r} cannot be read ({error}); {REMEDY}") from None


def _pack(read: PartReader, state: _State, form: Quantisation) -> Packed:
    shape = torch.Size(state.shape)
    levels = nf4.library().functional.get_4bit_type("nf4", device="cpu")
    if not torch.equal(read.part("weight.quant_map", (16,), torch.float32), levels):
        raise ModelError(f"its 'weight.quant_map' has not the levels of NF4; {REMEDY}")
    # How bytes are spread over two dimensions, and the dtype whose bits they are, mean nothing.
    codes = read.any("weight", 2).flatten().view(torch.uint8)
    if 2 * codes.numel() != shape.numel():
        raise ModelError(f"its 'weight' holds {2 * codes.numel()} codes of {list(shape)}; {REMEDY}")
    expected = nf4.stored_parts(form, shape)
    size, dtype = expected["scales"]
    scales = {"scales": read.part("weight.absmax", (size.numel(),), dtype).view(size)}
    if form.double:
        for part, name in (("nested_scales", "nested_absmax"), ("nested_map", "nested_quant_map")):
            size, dtype = expected[part]
            scales[part] = read.part(f"weight.{name}", tuple(size), dtype)
        scales["nested_mean"] = torch.tensor([state.nested_offset])
    # Copied, as what was read may be a view of the file.
    return stored(codes.view(shape[0], -1).clone(), form, {n: p.clone() for n, p in scales.items()})
