"""int4 kernels: tiles of 4-bit codes, and the form in which torch's CUDA kernel wants them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from edgespec.kernels.products import TILE
from edgespec.model.quantised.kernels import agrees

MIDDLE, MOST = 8, 15
"""The code that stands for a group's zero, and the greatest one."""

_KERNEL_GROUPS = (256, 128, 64, 32)
_CUDA_CAPABILITY = (8, 0)  # torch compiles the kernel for nothing older


def store(codes: torch.Tensor, tiles: torch.Tensor) -> None:
    """Write codes, uint8 [rows, columns], into `tiles`, zeros [tiles, columns, half a tile].

    Of a tile, row j is in the low nibbles of byte j of each column, row j + half in the high ones.
    """
    half = tiles.shape[2]
    # In numpy, which turns bytes around in half the time: a stage waits for this as it starts.
    source, out = codes.numpy(), tiles.numpy()
    for tile in range(-(-len(source) // (2 * half))):
        rows = source[tile * 2 * half : (tile + 1) * 2 * half]
        pairs, high = rows[:half].copy(), rows[half:]
        pairs[: len(high)] |= high << 4
        out[tile, :, : len(pairs)] = pairs.T


def codes_of(tiles: torch.Tensor) -> torch.Tensor:
    """The codes, uint8 [rows, columns], that `store` wrote."""
    both = torch.cat((tiles & MOST, tiles >> 4), dim=2)
    return both.transpose(1, 2).reshape(-1, tiles.shape[1])


def paired(scale: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Scales and zeros [out, groups] as kernels want them, [groups, rows of whole tiles, 2]."""
    out, groups = scale.shape
    pairs = torch.zeros(groups, -(-out // TILE) * TILE, 2, dtype=dtype)
    pairs[:, :out, 0] = scale.T
    if zero is not None:
        pairs[:, :out, 1] = zero.T
    return pairs


@dataclass(frozen=True)
class Form:
    """A form of the codes and the kernel that multiplies by it.

    `convert` makes it from stored tiles, on the kernel's device. `multiply` takes rows [R, in], the
    form, the group, scales and zeros.
    """

    name: str
    convert: Callable[[torch.Tensor, torch.device], torch.Tensor]
    multiply: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], torch.Tensor]


def _keep(tiles: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tiles.to(device)


def _for_cuda(tiles: torch.Tensor, device: torch.device) -> torch.Tensor:
    """torch's CUDA form, int32 [rows / 8, columns / (16 k), 32, k / 2], tile by tile."""
    count, columns, _ = tiles.shape
    inner = next(k for k in (8, 4, 2) if columns % (16 * k) == 0)
    form = torch.empty(
        count, TILE // 8, columns // (16 * inner), 32, inner // 2, dtype=torch.int32, device=device
    )
    for tile in range(count):
        codes = codes_of(tiles[tile : tile + 1].to(device))
        pairs = (codes[:, ::2] << 4) | codes[:, 1::2]  # the even column in the high nibble
        form[tile] = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), inner)
    return form.flatten(0, 1)


def _cuda_multiply(
    rows: torch.Tensor, form: torch.Tensor, group: int, scales: torch.Tensor
) -> torch.Tensor:
    brain = rows.to(torch.bfloat16).contiguous()
    result: torch.Tensor = torch.ops.aten._weight_int4pack_mm(brain, form, group, scales)
    return result.to(rows.dtype)


def _no_kernel(
    rows: torch.Tensor, tiles: torch.Tensor, group: int, scales: torch.Tensor
) -> torch.Tensor:
    raise NotImplementedError


PLAIN = Form("plain", _keep, _no_kernel)
"""Tiles as they are stored, for slices alone."""

_CUDA = Form("cuda", _for_cuda, _cuda_multiply)


def kernel_group(group: int) -> int:
    """The widest groups that kernels take and that divide these; else the group itself."""
    return next((wide for wide in _KERNEL_GROUPS if group % wide == 0), group)


@functools.cache
def best_form(dtype: torch.dtype, device: torch.device, group: int) -> Form:
    """The form whose kernel is there, gave the right result, and is worth using; else PLAIN."""
    candidate = _candidate(dtype, device) if group in _KERNEL_GROUPS else PLAIN
    if candidate is PLAIN:
        return PLAIN
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(MOST + 1, (TILE, 256), generator=generator).to(torch.uint8)
    tiles = torch.zeros(1, 256, TILE // 2, dtype=torch.uint8)
    store(codes, tiles)
    scales = torch.rand(256 // group, TILE, 2, generator=generator).to(torch.bfloat16)
    wide = scales.double().repeat_interleave(group, 0)
    weight = ((codes.double() - MIDDLE).T * wide[..., 0] + wide[..., 1]).T
    try:
        form = candidate.convert(tiles, device)
    except (RuntimeError, NotImplementedError):
        return PLAIN
    works = agrees(
        lambda rows: candidate.multiply(rows, form, group, scales.to(device)),
        weight,
        dtype,
        device,
    )
    return candidate if works else PLAIN


def _candidate(dtype: torch.dtype, device: torch.device) -> Form:
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        recent = torch.cuda.get_device_capability(device) >= _CUDA_CAPABILITY
        return _CUDA if recent else PLAIN
    return PLAIN
