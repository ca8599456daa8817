"""Wire tensors to torch and back, for every dtype, empty ones included."""

import numpy as np
import pytest
import torch

from edgespec.model.tensors import TORCH_DTYPES, from_torch, to_torch
from edgespec.types.tensor import Tensor


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (1,), (2, 0), ()])
def test_round_trip(name: str, shape: tuple[int, ...]) -> None:
    original = (torch.randn(shape) * 100).to(TORCH_DTYPES[name])
    wire = from_torch(original)
    assert (wire.dtype, wire.shape) == (name, shape)
    back = to_torch(wire)
    assert back.dtype == original.dtype
    assert torch.equal(back, original)


def test_bytes_are_little_endian_rows() -> None:
    wire = from_torch(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16).T)
    assert bytes(wire.data) == b"\x80\x3f\x00\x40"


def test_a_contiguous_tensor_is_not_copied() -> None:
    source = torch.zeros(4, 8)
    wire = from_torch(source)
    source[0, 0] = 1
    assert bytes(wire.data[:4]) == np.float32(1).tobytes()


def test_received_bytes_are_copied_even_when_unaligned() -> None:
    raw = bytearray(b"\0" + np.arange(4.0).tobytes())
    tensor = to_torch(Tensor("float64", (4,), memoryview(raw)[1:]))
    raw[:] = bytes(len(raw))
    assert tensor.tolist() == [0, 1, 2, 3]


def test_rows_taken_from_the_wire_form_are_the_rows() -> None:
    source = torch.randn(5, 3, dtype=torch.bfloat16)
    taken = from_torch(source).take(np.array([4, 1]))
    assert torch.equal(to_torch(taken), source[[4, 1]])


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="uint64"):
        to_torch(Tensor("uint64", (1,), bytes(8)))
    with pytest.raises(ValueError, match="bool"):
        from_torch(torch.zeros(1, dtype=torch.bool))
