"""Whether these kernels are used on a device: there they are compiled and tried, once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial

import torch

_log = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Of rows that they take."""

_CAPABILITY = (8, 0)  # what has tensor cores for bfloat16
_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
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
    from edgespec.kernels.gpu.rows import norm

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
    for dtype, limit in _TOLERANCE.items():
        near = held.to(dtype).to(device)
        plain = weight.to(dtype)

        def attend(rows: torch.Tensor, near: torch.Tensor = near) -> torch.Tensor:
            # All see the same here; that places differ is for tests to try.
            count = len(rows)
            mask = torch.ones(count, 70, dtype=torch.bool, device=device)
            last = torch.full((count,), 69, device=device)
            places = places_of(mask, last, torch.arange(70, device=device))
            query = rows[:, :256].reshape(count, 8, 32)
            return attention(query, [near[0]], [near[1]], places, 0.2)

        rows = by_chance(19, 1024).to(dtype)
        exact = rows.double()
        keys, values = near.cpu().double().repeat_interleave(4, 1)
        scores = exact[:, :256].reshape(19, 8, 32).transpose(0, 1) @ keys.transpose(1, 2) * 0.2
        attended = (scores.softmax(-1) @ values).transpose(0, 1).reshape(19, 256)
        normed = exact / (exact.square().mean(1, keepdim=True) + 1e-5).sqrt() * gain.double()
        by_codes = CodesProduct(matrix), exact @ weight.T
        # One dtype is enough for what looks levels up: others differ in two conversions.
        looked_up = CodesProduct(by_levels), exact @ of_levels.T
        for name, work, expected in (
            ("product by codes", *by_codes),
            ("product by levels", *(looked_up if dtype == half else by_codes)),
            (
                "plain product",
                partial(plain_product, weight=plain.to(device)),
                exact @ plain.double().T,
            ),
            ("attention", attend, attended),
            ("norm", lambda x: norm(x, gain.to(device), 1e-5), normed),
        ):
            whole = work(rows.to(device))
            off = (whole.cpu().double() - expected).square().mean() / expected.square().mean()
            if not float(off.sqrt()) <= limit:
                return f"its {name} in {str(dtype).removeprefix('torch.')} is wrong"
            for row in (0, 9, 18):
                if not torch.equal(work(rows[row : row + 1].to(device))[0], whole[row]):
                    return f"its {name} gives a row other bits alone than beside others"
    return ""
