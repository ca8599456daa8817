"""Whether these kernels are used on a device: there they are compiled and tried, once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from functools import partial

import torch

_log = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Of rows that they take."""

Product = Callable[[torch.Tensor], torch.Tensor]
"""Rows to as many results."""

_CAPABILITY = (8, 0)  # what has tensor cores for bfloat16
_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}
"""Root mean square of what a result may be off, against that of the result."""


@functools.cache
def usable(device: torch.device) -> bool:
    """Whether a device's rows are computed by these kernels; where a GPU's are not, the log says
    why, once."""
    if device.type != "cuda":
        return False
    reason = complaint(device)
    if reason:
        _log.warning(
            "Triton's kernels are not used on %s, so layers take longer there, and in 16 bit a "
            "text may depend on how its rows were batched: %s",
            device,
            reason,
        )
    return not reason


def complaint(device: torch.device) -> str:
    """What keeps a GPU from using them; the empty string if nothing does."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < _CAPABILITY:
        return f"it has compute capability {major}.{minor}, and they need 8.0"
    return tried(trial, device)


def tried(trial: Callable[[torch.device], str], device: torch.device) -> str:
    """What a trial of kernels says of a device, or what came of it."""
    try:
        return trial(device)
    except ImportError as error:
        return f"triton cannot be imported ({error}); run `pip install triton`"
    except Exception as error:  # compilers and drivers raise what they like
        lines = str(error).strip().splitlines()
        return f"the first one failed: {lines[0] if lines else type(error).__name__}"


def trial(device: torch.device) -> str:
    """What is wrong with results on a device; the empty string if nothing is.

    Each is compared with float64, and to the bit with that of single rows.
    """
    from edgespec.kernels.gpu.attention import attention
    from edgespec.kernels.gpu.code_words import Codes, numbers_of, pairs_of, words_of
    from edgespec.kernels.gpu.places import places_of
    from edgespec.kernels.gpu.plain_product import plain_product
    from edgespec.kernels.gpu.products import CodesProduct
    from edgespec.kernels.gpu.rows import code, norm

    generator = torch.Generator().manual_seed(0)

    def by_chance(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    codes = torch.randint(16, (70, 1024), generator=generator).to(torch.uint8)
    scales, zeros = by_chance(2, 70, 16).half()
    wide = [one.double().repeat_interleave(64, 1) for one in (scales, zeros)]
    weight = (codes.double() - 8) * wide[0] + wide[1]
    words = words_of(codes.to(device), 32)[None]
    numbers = [numbers_of(one.to(device), 64, 32) for one in (scales, zeros)]
    half = torch.float16
    matrix = Codes(words, 70, 1024, 64, numbers[0], half, numbers[1], half, "middle")
    levels = by_chance(16).to(half)
    paired = words_of(codes.to(device), 32, paired=True)[None]
    by_levels = Codes(paired, 70, 1024, 64, numbers[0], half, levels=pairs_of(levels).to(device))
    of_levels = levels.double()[codes.long()] * wide[0]
    gain = by_chance(1024)
    held = by_chance(2, 2, 70, 32)

    def attend(rows: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        # All see the same here; that places differ is for tests to try.
        count = len(rows)
        mask = torch.ones(count, 70, dtype=torch.bool, device=device)
        last = torch.full((count,), 69, device=device)
        places = places_of(mask, last, torch.arange(70, device=device))
        query = rows[:, :256].reshape(count, 8, 32)
        return attention(query, [near[0]], [near[1]], places, 0.2)

    def attended(exact: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        keys, values = near.cpu().double().repeat_interleave(4, 1)
        scores = exact[:, :256].reshape(19, 8, 32).transpose(0, 1) @ keys.transpose(1, 2) * 0.2
        found: torch.Tensor = scores.softmax(-1) @ values
        return found.transpose(0, 1).reshape(19, 256)

    def wrong(name: str, rows: torch.Tensor, work: Product, expected: torch.Tensor) -> str:
        whole = work(rows.to(device))
        off = (whole.cpu().double() - expected).square().mean() / expected.square().mean()
        if not float(off.sqrt()) <= _TOLERANCE[rows.dtype]:
            return f"its {name} in {str(rows.dtype).removeprefix('torch.')} is wrong"
        for row in (0, 9, 18):
            if not torch.equal(work(rows[row : row + 1].to(device))[0], whole[row]):
                return f"its {name} gives a row other bits alone than beside others"
        return ""

    def tried() -> Iterator[str]:
        for dtype in (torch.float16, torch.bfloat16):
            near = held.to(dtype).to(device)
            plain = weight.to(dtype)
            rows = by_chance(19, 1024).to(dtype)
            exact = rows.double()
            normed = exact / (exact.square().mean(1, keepdim=True) + 1e-5).sqrt() * gain.double()
            yield wrong("product by codes", rows, CodesProduct(matrix), exact @ weight.T)
            if dtype == half:  # enough for what looks levels up: others differ in two conversions
                product = CodesProduct(by_levels)
                yield wrong("product by levels", rows, product, exact @ of_levels.T)
            multiply = partial(plain_product, weight=plain.to(device))
            yield wrong("plain product", rows, multiply, exact @ plain.double().T)
            yield wrong("attention", rows, partial(attend, near=near), attended(exact, near))
            yield wrong("norm", rows, lambda x: norm(x, gain.to(device), 1e-5), normed)
        # Caches may be narrower than rows: in 16 bit, and in 8 with a scale behind a row's codes.
        rows = by_chance(19, 1024)
        coded = torch.empty(2, 2, 70, 36, dtype=torch.int8, device=device)
        code(held.to(device), coded, 32, 1e-30)
        scales = coded.cpu()[..., 32:].contiguous().view(torch.float32)
        for near, numbers in (
            (held.half().to(device), held.half()),
            (coded, coded.cpu()[..., :32] * scales),
        ):
            work, expected = partial(attend, near=near), attended(rows.double(), numbers)
            yield wrong("attention over narrow rows", rows, work, expected)

    return next(filter(None, tried()), "")
