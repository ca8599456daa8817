"""Every kernel compiles for an Orin, and 16-bit rows are multiplied by its tensor cores."""

from __future__ import annotations

from typing import Any

import torch

from edgespec.kernels.gpu import rows as rows_kernels
from edgespec.kernels.gpu.attention import attention
from edgespec.kernels.gpu.places import Places
from edgespec.kernels.gpu.products import Codes, CodesProduct, chunk_of, plain_product

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
PRODUCTS = (
    # rows, group, zero, planes, two levels of scales, levels
    (BRAIN, 64, "middle", 1, False, False),
    (HALF, 32, "low", 1, True, False),
    (BRAIN, 128, "points", 1, False, False),
    (BRAIN, 64, "", 1, False, True),
    (BRAIN, 512, "", 2, False, False),
    (HALF, 16, "low", 2, True, False),
    (FLOAT, 32, "", 1, False, False),
)
HEADS = (
    # query, heads, of keys, their width, pieces, softcap, window
    (BRAIN, 32, 8, 128, 1, None, None),
    (HALF, 9, 3, 64, 2, None, None),
    (BRAIN, 8, 4, 256, 1, 30.0, 4096),
    (FLOAT, 8, 1, 256, 1, None, None),
)


def check_products(compiled: list[Any]) -> None:
    for dtype, group, zero, planes, double, levels in PRODUCTS:
        chunk = chunk_of(group, 512)
        assert chunk is not None
        words = torch.zeros(planes, 3, 512 // (4 * chunk), chunk, 64, dtype=torch.int16)
        fine = torch.int8 if double else HALF
        whole = torch.int8 if zero == "points" else fine
        numbers = [torch.zeros(512 // group, 192, dtype=one) for one in (fine, whole)]
        blocks = torch.zeros(2, 192, dtype=HALF) if double else None
        table = torch.zeros(16, dtype=dtype) if levels else None
        codes = Codes(words, 190, 512, group, *numbers, zero, blocks, blocks, table)
        CodesProduct(codes, torch.zeros(190, dtype=dtype))(torch.zeros(5, 512, dtype=dtype))
    plain_product(torch.zeros(5, 512, dtype=BRAIN), torch.zeros(190, 512, dtype=BRAIN))
    assert len(compiled) == len(PRODUCTS) + 1
    for one in compiled:
        assert ("mma.sync" in one.asm["ptx"]) == (one is not compiled[-2])


def check_attention(compiled: list[Any]) -> None:
    for dtype, heads, kv_heads, dim, pieces, softcap, window in HEADS:
        key = [torch.zeros(kv_heads, 256, dim, dtype=dtype)] * pieces
        slots = torch.zeros(5, 256 * pieces, dtype=torch.int32)
        rows = torch.zeros(5, dtype=torch.int64)
        places = Places(slots, slots[0], slots[0, :1], rows)
        query = torch.zeros(5, heads, dim, dtype=dtype)
        attention(query, key, key, places, 0.1, softcap, window)
    assert len(compiled) == 2 * len(HEADS)


def check_rows(compiled: list[Any]) -> None:
    rows, gain = torch.zeros(5, 4096, dtype=BRAIN), torch.zeros(4096)
    rows_kernels.add(rows, rows, 1.0, gain, gain, 1e-5)
    angles = (torch.zeros(5, 1, 128, dtype=BRAIN),) * 2
    rows_kernels.rotate(rows.view(5, 32, 128), 24, 4, angles, (gain[:128],) * 2, 1e-5)
    for activation in ("silu", "gelu", "gelu_pytorch_tanh"):
        rows_kernels.gated(rows, activation)
    assert len(compiled) == 5
