"""What `edgespec bench --kit` collects about a board, for one file that can be published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec import __version__
from edgespec.cli.answering import tokens_per_second
from edgespec.cli.demo import ring_here
from edgespec.cli.notes import Notes
from edgespec.config import LOOPBACK, Address
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.cluster import ClusterFolder, folder_of
from edgespec.daemon.device import ROOT, board_facts, gpu_facts
from edgespec.daemon.doctor import Finding, examine
from edgespec.daemon.kit import Watch, own_names, versions, without_names
from edgespec.daemon.settings import RingOptions, coordinator_config
from edgespec.door.asking import SamplingParams
from edgespec.errors import EdgespecError
from edgespec.net.control import takes_connections
from edgespec.net.keys import Identity
from edgespec.wire.client_messages import Finished

FORMAT = 1
SECONDS = 120.0
"""About how long the profile is measured."""
LIBRARIES = ("torch", "numpy", "transformers", "triton", "bitsandbytes", "pyzmq")
PROMPT = "Question: Anna has 4 bags with 6 apples each. How many apples does she have?\nAnswer:"
TOKENS = (1155, 79, 66, 453, 222, 21, 289, 1009, 439, 222, 23, 1309, 533, 13, 649, 509)
"""What the bundled pair says to PROMPT in float64: seen on x86-64 by plain decoding."""


def kit(file: Path, notes: Notes) -> None:
    """Measure this board, which should do nothing else, and write the report to `file`.

    Raises EdgespecError where nothing can be measured; what fails by itself is in the report."""
    from edgespec.daemon.blocks import default_folder

    with notes.waiting("looking at this board") as waiting, Watch() as watch:
        waiting("looking at this board")
        findings = list(examine(default_folder(), folder_of("")))
        content: dict[str, Any] = {
            "format": FORMAT,
            "edgespec": __version__,
            "versions": versions(LIBRARIES),
            "board": board_facts(ROOT) | gpu_facts(),
            "findings": [_told(finding) for finding in findings],
            "measured": _tried(lambda: _measured(waiting)),
        }
        waiting("comparing tokens with those of another machine")
        content["exactness"] = _tried(lambda: _exactness(notes))
    content["meanwhile"] = watch.as_json()
    text = json.dumps(without_names(content, own_names()), indent=1, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")


def _told(finding: Finding) -> dict[str, str]:
    return {"name": finding.name, "state": finding.state, "text": finding.text}


def _tried(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A part of the report, or why there is none."""
    try:
        return part()
    except EdgespecError as problem:
        return {"failed": str(problem)}


def _measured(waiting: Callable[[str], None]) -> dict[str, Any]:
    """The profile, the seconds of a layer by rows for each kernel, and the bytes of the layer."""
    from edgespec.daemon.blocks import default_folder
    from edgespec.daemon.kernels import tried_kernels
    from edgespec.daemon.measure import MeasureRequest, measure

    kernels = tried_kernels()
    if not kernels.has_four_bit:
        return {"failed": "no 4-bit quantisation runs here", "unusable": dict(kernels.unusable)}
    address, identity = _coordinator()
    request = MeasureRequest(
        "measured", default_folder(), coordinator=address, identity=identity, seconds=SECONDS
    )
    found = measure(request, kernels.usable, kernels.unusable, waiting)
    return {
        "profile": found.profile.to_dict(),
        "layer_of": found.shape,
        "layer_seconds": {name: dict(times) for name, times in found.layer.items()},
        "layer_bytes": dict(found.stored),
        "notes": list(found.notes),
    }


def _coordinator() -> tuple[Address | None, Identity | None]:
    """The coordinator of this device's cluster, if it has joined one that answers: the way to it
    is measured too."""
    try:
        folder = ClusterFolder.open(folder_of(""))
        if folder.address and takes_connections(
            address := Address.parse(folder.address), folder.identity
        ):
            return address, folder.identity
    except EdgespecError:
        pass
    return None, None


def _exactness(notes: Notes) -> dict[str, Any]:
    """The tokens of the bundled pair in float64, on a ring of two stages of this machine."""
    options = RingOptions(bundled("base"), bundled("draft"), 2, "float64", "none", "none", "none")
    config = coordinator_config(options, Address(LOOPBACK, 0))
    submit = SamplingParams(max_new_tokens=len(TOKENS)).complete(PROMPT)
    with ring_here(config, notes) as client:
        *_, done = client.ask(submit)
    assert isinstance(done, Finished)
    return {
        "same_tokens": tuple(done.token_ids) == TOKENS,
        "token_ids": list(done.token_ids),
        "smallest_margin": done.smallest_margin,
        "tokens_per_second": tokens_per_second(done),
    }
