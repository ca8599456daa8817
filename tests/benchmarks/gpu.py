"""All that is to be known of a CUDA device, in one prepared run of at most so many minutes.

    python tests/benchmarks/gpu.py --out FOLDER [--minutes 8] [--parts right,products,…] [--tiny]
        [--model smollm2-135m]

In order of worth (support.gpu_parts): whether every kernel and form is right and no row's bits
depend on the rows beside it, whole blocks too; products and attention by rows, beside torch's,
cuBLAS' and bitsandbytes'; layers of a 7B model of random weights, with graphs and without; what D0
computes; `edgespec profile`; whole answers of SmolLM2 by rings of processes, compared with plain
decoding's. Every part has its share of the time, and what one leaves the next ones have. FOLDER has
what was found so far at any time, as gpu.json and gpu.md; a part that ends the process or its
CUDA context is named there, and the others are done in a new process. Ends with 1 if anything is
wrong, and with 2 without a CUDA device.

`--tiny` goes through the same on this processor, in Triton's interpreter, with tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # an import of triton decides

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.gpu_parts import PARTS, TINY, Line, Place, Sizes, table

from edgespec.daemon.bandwidths import memory_rate
from edgespec.daemon.device import gpu_facts, last_level_cache
from edgespec.daemon.memory import available_memory
from edgespec.kernels.gpu.usable import complaint, usable

NO_DEVICE = "no CUDA device here, so nothing is measured"


class Findings:
    """What was found so far, in files."""

    def __init__(self, folder: Path) -> None:
        """Goes on with what is there."""
        folder.mkdir(parents=True, exist_ok=True)
        self._json, self._page = folder / "gpu.json", folder / "gpu.md"
        self.about: dict[str, object] = {}
        self.parts: dict[str, dict[str, Any]] = {}
        if self._json.exists():
            kept = json.loads(self._json.read_text(encoding="utf-8"))
            self.about, self.parts = kept["about"], kept["parts"]

    def begin(self, name: str) -> dict[str, Any]:
        """A part, written down before anything of it is done, so that what it breaks is known."""
        self.parts[name] = {"lines": [], "state": "it ended the process"}
        self.write()
        return self.parts[name]

    @property
    def wrong(self) -> list[str]:
        """Everything that is, in words."""
        found = []
        for name, part in self.parts.items():
            for line in part["lines"]:
                if "wrong" in line:
                    found.append(f"{name}: " + ", ".join(f"{k} {v}" for k, v in line.items()))
            if part["state"] not in ("done", "cut by time"):
                found.append(f"{name}: {part['state']}")
        return found

    def write(self) -> None:
        """Both files, whole."""
        text = json.dumps({"about": self.about, "parts": self.parts}, indent=1)
        for path, what in ((self._json, text), (self._page, "\n".join(self._markdown()) + "\n")):
            new = path.with_suffix(".new")
            new.write_text(what, encoding="utf-8")
            new.replace(path)

    def _markdown(self) -> Iterator[str]:
        yield "# One run on a GPU"
        yield ""
        yield from (f"**{one}**\n" for one in self.wrong)
        yield from (f"- {name}: {fact}" for name, fact in self.about.items())
        for name, part in self.parts.items():
            yield from ("", f"## {name} ({part['state']}, {part.get('seconds', 0):.0f} s)", "")
            if part["lines"]:
                yield from table(part["lines"])


def run_part(
    work: Callable[[Place], Iterator[Line]],
    place: Place,
    found: Findings,
    name: str,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Whether it came to its end, or to that of its time."""
    part, start = found.begin(name), clock()
    try:
        for line in work(replace(place, until=time.monotonic() + seconds)):
            part["lines"].append(dict(line))
            part["seconds"] = clock() - start
            found.write()
            if part["seconds"] >= seconds:
                part["state"] = "cut by time"
                return True
        part["state"] = "done"
    except Exception as problem:  # whatever it is, the other parts are worth their time
        part["state"] = f"failed: {type(problem).__name__}: {str(problem).strip()[:500]}"
    finally:
        part["seconds"] = clock() - start
        found.write()
        print(f"{name}: {part['state']}, {part['seconds']:.0f} s", file=sys.stderr)
    return part["state"] == "done"


def here(tiny: bool, model: str) -> Place:
    """The device that is measured."""
    if tiny:
        return Place(torch.device("cpu"), replace(TINY, model=model), 1e9, lambda _: None)
    device, room = torch.device("cuda"), available_memory("cuda").bytes
    beyond = 2 * last_level_cache()
    memory = memory_rate(device, room=room, beyond_cache=beyond, seconds=1.0).per_second
    return Place(device, Sizes(model=model), memory)


def about(place: Place) -> dict[str, object]:
    """Device, driver and versions."""
    import triton

    facts: dict[str, object] = {"torch": torch.__version__, "triton": triton.__version__}
    facts["CUDA of torch"] = torch.version.cuda
    if place.device.type == "cuda":
        own = "in use" if usable(place.device) else complaint(place.device)
        facts |= gpu_facts() | {"edgespec's kernels": own}
    return facts | {"memory": f"{place.memory / 1e9:.4g} GB/s"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--parts", default=",".join(PARTS), help="do these only")
    parser.add_argument("--model", default=Sizes.model, help="a name or a file: who answers")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"unknown parts: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not options.tiny and not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        return 2
    found = Findings(options.out)
    with ExitStack() as stack:
        if options.tiny:
            from support.interpreted_gpu import as_on_a_gpu, complete

            complete()
            stack.enter_context(as_on_a_gpu())
        place = here(options.tiny, options.model)
        found.about = about(place)
        for number, name in enumerate(names):
            work, share = PARTS[name]
            left = deadline - time.monotonic()
            rest = sum(PARTS[one][1] for one in names[number:])
            if not run_part(work, place, found, name, max(0.0, left) * share / rest):
                # A CUDA context that is lost stays lost in this process.
                later = names[number + 1 :]
                if later and place.device.type == "cuda" and "CUDA" in found.parts[name]["state"]:
                    minutes = (deadline - time.monotonic()) / 60
                    command = [sys.executable, __file__, "--out", str(options.out)]
                    command += ["--model", options.model]
                    command += ["--minutes", f"{minutes:.2f}", "--parts", ",".join(later)]
                    os.execv(sys.executable, command)
    for one in found.wrong:
        print(one, file=sys.stderr)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
