"""Self-test: which quantisations work here, found out by multiplying with each of them."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import time

import torch

from edgespec.config import FILE, NAMED, Quantisation
from edgespec.errors import ConfigError, ModelError
from edgespec.model.bounded_process import STILL_S, speaks
from edgespec.model.quantised.kernels import complaint
from edgespec.model.quantised.linear import dequantised, linear_from, pack, stored_parts
from edgespec.model.quantised.rounding import Packed
from edgespec.model.tensors import compute_dtype
from edgespec.types.own_module import own_command


def made_up(form: Quantisation, shape: torch.Size, seed: int = 0) -> Packed:
    """The stored form of a weight [out, in] that is nobody's.

    Raises ModelError if the shape does not fit the form.
    """
    generator = torch.Generator().manual_seed(seed)
    packed = {}
    for name, (size, dtype) in stored_parts(form, shape).items():
        if dtype.is_floating_point:
            packed[name] = ((torch.rand(size, generator=generator) + 0.1) / 64).to(dtype)
        elif name == "order":
            packed[name] = torch.randperm(shape[1], generator=generator).to(dtype)
        else:
            all_of = torch.iinfo(dtype) if name in ("codes", "tiles") else None
            least, most = (all_of.min, all_of.max + 1) if all_of else (0, 16)
            most = 127 if form.kind == "fp8" else most  # behind it is what is no number
            packed[name] = torch.randint(least, most, size, generator=generator, dtype=dtype)
    return packed


_SHAPE = torch.Size((200, 256))  # not whole tiles of rows; columns that every group divides
_FARTHEST = {"int8": 0.02, "int4": 0.2, "nf4": 0.2}
"""Root mean square of the rounding of normally distributed weights, above which it is wrong:
twice what int4 with groups of 128 was measured to have, and more than that for int8."""

FILE_FORMS = (
    Quantisation("int4", 32, zeros="low", scales="float16"),
    Quantisation("int4", 32, double=True, zeros="low", scales="float16"),
    Quantisation("int4", 128, zeros="points", scales="float16", ordered=True),
    Quantisation("int8", 32, zeros="low", scales="float16"),
    Quantisation("int8", 16, double=True, scales="float16"),
    Quantisation("iq4", 32, double=True, scales="float16"),
)
"""Some of the forms that files come in, with every kind of scale, and every way to multiply but
that of FP8, which a GPU lacks."""

_VERDICT = "verdict:"  # what the line of a process that tried begins with
PATIENCE, _IMPORTS = 180.0, 60.0
"""The first CUDA kernel of a process may be compiled for the device: it has so many seconds, or so
many times what the imports took there, if that is more."""


def usable_quantisations(dtype: str, device: torch.device | str) -> dict[str, str]:
    """`usable` of every quantisation, "file" included, by its name."""
    return {name: usable(one, dtype, device) for name, one in NAMED.items()}


def usable(quantisation: Quantisation, dtype: str, device: torch.device | str) -> str:
    """The empty string if `quantisation` computes rightly in `dtype` on `device`, else why not.

    Quantises a small matrix, and multiplies by it with one, few and many rows. On CUDA another
    library's kernels are tried in a process of their own, as those that were not built for the
    device may end it: that takes seconds. The verdict is kept for this process.
    """
    try:
        compute_dtype(dtype)
    except ConfigError as error:
        return str(error)
    return verdict(quantisation, dtype, str(device))


@functools.cache
def verdict(quantisation: Quantisation, dtype: str, device: str) -> str:
    if quantisation.kind == "nf4" and torch.device(device).type == "cuda":
        return _tried_apart(quantisation, dtype, device)
    return tried(quantisation, dtype, device)


def tried(quantisation: Quantisation, dtype: str, device: str) -> str:
    """What `usable` says, tried in this process."""
    if quantisation.kind == "none":
        return ""
    if quantisation == FILE:
        found = (_complaint(one, made_up(one, _SHAPE), dtype, device) for one in FILE_FORMS)
        return next(filter(None, found), "")
    weight = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(2)) / 16
    try:
        packed = pack(weight, quantisation)
        exact = dequantised(packed, _SHAPE, quantisation, torch.float64)
    except ModelError as error:
        return str(error)
    except Exception as error:  # what a library raises that does not fit this machine
        return f"it failed while it was set up: {error}"
    rounding = float((exact - weight).norm() / weight.norm())
    if not rounding <= _FARTHEST[quantisation.kind]:
        return f"its weights are wrong: they are off by {rounding:.0%}"
    return _complaint(quantisation, packed, dtype, device)


def _complaint(form: Quantisation, packed: Packed, dtype: str, device: str) -> str:
    """What is wrong with products by this packed matrix; the empty string if nothing is."""
    compute, place = compute_dtype(dtype), torch.device(device)
    try:
        exact = dequantised(packed, _SHAPE, form, torch.float64)
        layer = linear_from(packed, None, _SHAPE, form, compute, device)
    except ModelError as error:
        return str(error)
    except Exception as error:  # what a library raises that does not fit this machine
        return f"it failed while it was set up: {error}"
    return complaint(layer, exact, compute, place)


def _tried_apart(quantisation: Quantisation, dtype: str, device: str) -> str:
    """`tried` in a process of its own, whose death is a verdict too."""
    command = [*own_command(__name__), quantisation.name, dtype, device]
    pipe = subprocess.PIPE
    try:
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, bufsize=0) as child:
            try:
                return _told_by(child)
            finally:
                child.kill()
    except OSError as error:
        return f"it could not be tried: {error}"


def _told_by(child: subprocess.Popen[bytes]) -> str:
    """The verdict of a process that has just been started."""
    assert child.stdout is not None
    began = time.monotonic()
    if not speaks(child.stdout, child.pid, STILL_S):
        return f"the process that tries it did nothing for {STILL_S:.0f} s"
    child.stdout.readline()
    patience = max(PATIENCE, _IMPORTS * (time.monotonic() - began))
    try:
        said, errors = child.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        return f"its first kernel did not end within {patience:.0f} s"
    if child.returncode < 0:
        return f"its first kernel ended the process ({_signal_name(-child.returncode)})"
    verdict = said.decode(errors="replace").strip().splitlines()
    if child.returncode or not verdict or not verdict[-1].startswith(_VERDICT):
        lines = errors.decode(errors="replace").strip().splitlines() or ["no message"]
        return f"its first kernel failed: {lines[-1]}"
    return verdict[-1].removeprefix(_VERDICT).strip()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main(arguments: list[str]) -> None:
    """Print the verdict on NAME DTYPE DEVICE, on one line."""
    print("imported", flush=True)
    name, dtype, device = arguments
    reason = tried(Quantisation.parse(name), dtype, device)
    print(_VERDICT, " ".join(reason.split()))


if __name__ == "__main__":
    main(sys.argv[1:])
