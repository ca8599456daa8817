"""Looks at this device's torch: does it speak with numpy, see the GPU, and compute rightly."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch

from edgespec.config import QUANTISATIONS
from edgespec.daemon.device import ROOT, is_jetson, system_text
from edgespec.model.quantised.linear import linear_from, pack
from edgespec.model.tensors import compute_dtype

_CUDA_OF_L4T = {35: 11, 36: 12, 38: 13, 39: 13}
"""Release of L4T → the CUDA that comes with it: JetPack 5, 6, 7.0 and 7.1, 7.2."""
_FIRST_USABLE = (36, 4)  # JetPack 6.1
_GPU_FILES = ("dev/nvhost-gpu", "dev/nvhost-ctrl-gpu", "dev/nvidiactl", "dev/nvidia0", "dev/nvmap")
_SHAPE = torch.Size((1024, 1024))
_SIDE = 64


def numpy_problem() -> str:
    """Why torch cannot give arrays to numpy or take them; "" if it can. All rows go that way."""
    try:
        back = torch.from_numpy(np.arange(3)).numpy() + torch.arange(3).numpy()
    except Exception as problem:  # what it raises depends on how the two differ
        return (
            f"torch {torch.__version__} and numpy {np.__version__} cannot exchange arrays "
            f"({_first_line(problem)}): this torch was probably built for NumPy 1; pip install "
            "'numpy<2'"
        )
    return (
        "" if list(back) == [0, 2, 4] else "arrays change between torch and numpy; reinstall both"
    )


# --- the GPU ------------------------------------------------------------------------------------


def jetpack_problem(root: Path = ROOT) -> str:
    """Why this Jetson's system is too old; "" if it is not, or is no Jetson."""
    release = l4t_release(root)
    if release is None or release >= _FIRST_USABLE:
        return ""
    return (
        f"L4T R{release[0]}.{release[1]} is older than JetPack 6.1 (R36.4), the first that a torch "
        "of 2.6 or newer is built for; upgrade JetPack first (docs/jetson.md)"
    )


def l4t_release(root: Path = ROOT) -> tuple[int, int] | None:
    """(36, 4) of R36.4.3; None if this is no Jetson, or does not say."""
    text = system_text(root / "etc/nv_tegra_release")
    found = re.search(r"R(\d+) \(release\), REVISION: (\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def why_no_cuda(root: Path = ROOT) -> str:
    """Why torch computes on the CPU although there is an NVIDIA GPU; "" if there is none."""
    if not is_jetson(root) and not any(root.glob("dev/nvidia[0-9]*")):
        return ""
    built = torch.version.cuda
    if built is None:
        return (
            f"torch {torch.__version__} is a build for the CPU, so that the GPU is idle: pip may "
            "have put it in the place of the vendor's. Install that again, then edgespec with "
            "tools/constraints.py, which keeps it (docs/jetson.md)"
        )
    release = l4t_release(root)
    has = _CUDA_OF_L4T.get(release[0]) if release else None
    if release and has and not built.startswith(f"{has}."):
        return (
            f"torch {torch.__version__} is built for CUDA {built}, and L4T R{release[0]} has CUDA "
            f"{has}: install the torch of this JetPack (docs/jetson.md)"
        )
    closed = [file for file in _GPU_FILES if _is_closed(root / file)]
    if closed:
        return (
            f"this user may not open /{closed[0]}: sudo usermod -aG video,render $USER, then log "
            "in again"
        )
    try:
        torch.cuda.init()
    except Exception as problem:  # the driver's words
        return f"torch {torch.__version__} for CUDA {built} cannot start: {_first_line(problem)}"
    return f"torch {torch.__version__} for CUDA {built} finds no GPU; is its driver loaded?"


def allocator_problem(root: Path) -> str:
    """Why torch's allocator cannot work here as the environment says; "" if it can. Jetsons lack
    what expandable segments need (github.com/unslothai/unsloth-zoo/pull/1235)."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if is_jetson(root) and "expandable_segments:True" in os.environ.get(name, ""):
            return (
                f'{name} asks for expandable segments, which on Jetsons end with "CUDA driver '
                'error: out of memory" at the first tensors: unset it'
            )
    return ""


def _is_closed(file: Path) -> bool:
    return file.exists() and not os.access(file, os.R_OK | os.W_OK)


def architecture_problem(capability: tuple[int, int], built_for: list[str]) -> str:
    """Why binaries of this torch may not run on a GPU of that capability; "" if they do.

    `built_for`: torch.cuda.get_arch_list(). Code for 9.0 does not run on 8.7, code for 8.0 may (of
    Orins reports differ: `kernel_problems` tells); compute_80 is compiled for any later one at
    first use."""
    major, minor = capability
    for name in built_for:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
        if found is None:
            continue
        its = int(found[2]), int(found[3])
        if its <= capability and (found[1] == "compute" or its[0] == major):
            return ""
    return (
        f"torch {torch.__version__} has no code for compute capability {major}.{minor}, only "
        f"{', '.join(built_for) or 'none'}: install the torch of this JetPack (docs/jetson.md)"
    )


def kernel_problems(device: torch.device, dtype: str) -> Iterator[str]:
    """One kernel of each kind that models use, run on the device and compared with the CPU.

    Yields what failed. A build without this GPU's code runs some kernels and not others.
    """
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(_SIDE, _SIDE, generator=generator)
    for name, kernel in kernels_by_name(compute_dtype(dtype)).items():
        try:
            found = kernel(values.to(device)).double().cpu()
        except Exception as problem:  # "no kernel image is available", and others
            yield f"{name} fails: {_first_line(problem)}"
            continue
        if not torch.allclose(found, kernel(values).double(), rtol=0.05, atol=0.05):
            yield f"{name} gives wrong results"


def kernels_by_name(narrow: torch.dtype) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    places = torch.arange(_SIDE - 1, -1, -1)
    return {
        "an element-wise kernel": lambda x: torch.nn.functional.silu(x) * x,
        "a reduction": lambda x: x.pow(2).mean(-1),
        "a softmax": lambda x: x.softmax(-1),
        "a product in float32": lambda x: x @ x.T,
        f"a product in {narrow}".replace("torch.", ""): lambda x: x.to(narrow) @ x.to(narrow).T,
        "a gather of rows": lambda x: x.index_select(0, places.to(x.device)),
        "a scatter of rows": lambda x: torch.zeros_like(x).index_copy_(0, places.to(x.device), x),
        "a sort": lambda x: x.sort(-1).values,
        "a choice of the largest": lambda x: x.topk(4, -1).values,
        "a running sum": lambda x: x.cumsum(-1),
        "a change of type": lambda x: x.to(narrow).float(),
        "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None]
        ),
    }


# --- 16 bit on a CPU ----------------------------------------------------------------------------


def sixteen_bit_times() -> dict[str, float]:
    """Seconds of the same products in bfloat16 and in float16 on this CPU, with weights of 4 and of
    8 bits, 1 and 16 rows. Cortex-A76 and A78AE compute in float16, not in bfloat16."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(_SHAPE, generator=generator) / 32
    rows = torch.randn(16, _SHAPE[1], generator=generator)
    times = dict.fromkeys(("bfloat16", "float16"), 0.0)
    for form in (QUANTISATIONS["int4"], QUANTISATIONS["int8"]):
        packed = pack(weight, form)
        for name in times:
            dtype = compute_dtype(name)
            layer = linear_from(packed, None, _SHAPE, form, dtype, "cpu")
            for count in (1, 16):
                times[name] += _seconds(layer, rows[:count].to(dtype))
    return times


def _seconds(layer: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> float:
    """The median of some runs, after one that may compile."""
    with torch.inference_mode():
        layer(rows)
        taken = []
        for _ in range(9):
            began = time.perf_counter()
            layer(rows)
            taken.append(time.perf_counter() - began)
    return median(taken)


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
