"""edgespec shard: a model as block files, quantised once, for stages to start from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import typer

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.config import MOST_STAGES
from edgespec.daemon.precision import AUTO, head_quantisation_for, quantisation_for
from edgespec.errors import ConfigError
from edgespec.model.hub import require_model
from edgespec.model.manifest import Manifest, size_text
from edgespec.planning.partition import blocks_of, parse_split


def shard(
    model: str = typer.Argument(
        ...,
        help="The model: a name of `edgespec models`, a hub id (ORG/NAME) or a folder.",
        callback=options.check_model,
    ),
    stages: int = typer.Option(
        0, help="Number of stages. Default: as many as --layers says.", show_default=False
    ),
    layers: str = options.LAYERS,
    quant: options.Quant = AUTO,
    head_quant: options.HeadQuant = AUTO,
    out: str = typer.Option(
        "", metavar="DIR", help="Folder to write. Default: ./NAME-QUANT-Nstages."
    ),
    as_json_object: bool = options.JSON,
) -> None:
    """Write a model as one file for each stage, quantised, and one for the head.

    One tensor at a time is in memory, however large the model. A run that was interrupted goes on
    where it stopped.
    """
    split = parse_split(layers)
    stages = stages or len(split)
    if not 1 <= stages <= MOST_STAGES:
        raise ConfigError(
            f"{stages} stages; a ring has 1 to {MOST_STAGES}: give --stages N, or --layers N,N,..."
        )
    require_model(model)
    quantisation = quantisation_for(model, quant)
    head = head_quantisation_for(model, quantisation, head_quant)
    notes = Notes()
    with notes.waiting("opening the model") as waiting:
        # Imported late, as torch takes seconds: a wrong option is refused at once.
        from edgespec.model.sharding import Sharding

        sharding = Sharding(model, quantisation, head)
        blocks = blocks_of(sharding.layers, stages, split, sharding.bound)
        name = f"{Path(model).resolve().name}-{quantisation.name}-{stages}stages"
        folder = Path(out or name)
        manifest = sharding.into(folder, blocks, progress_line(waiting))
    if as_json_object:
        print(json.dumps(summary(folder, manifest)))
    else:
        _show(folder, manifest)


def progress_line(
    say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[str, int, int], None]:
    """A progress callback for `Sharding` that adds the seconds a layer takes."""
    task, layers_before, start = "", 0, 0.0

    def news(what: str, done: int, layers: int) -> None:
        nonlocal task, layers_before, start
        if what != task:
            task, layers_before, start = what, done, clock()
        rate = ""
        if done > layers_before:
            rate = f", {(clock() - start) / (done - layers_before):.2g} s a layer"
        say(f"{what}: {done} of {layers} layers{rate}")

    return news


def summary(folder: Path, manifest: Manifest) -> dict[str, object]:
    """The object of --json."""
    return {
        "folder": str(folder.resolve()),
        "model": manifest.model,
        "fingerprint": manifest.fingerprint,
        "quantisation": manifest.quantisation.name,
        "head_quantisation": manifest.head_quantisation.name,
        "dtype": manifest.dtype,
        "layers": manifest.layers,
        "split": [[first, end] for first, end in manifest.split],
        "bytes": sum(entry.bytes for entry in manifest.entries),
        "blocks": [
            {"name": block.name, "bytes": block.bytes, "sha256": block.sha256}
            for block in manifest.blocks
        ],
    }


def _show(folder: Path, manifest: Manifest) -> None:
    for stage, block in enumerate(manifest.blocks, start=1):
        print(
            f"stage {stage}: layers {block.first} to {block.end - 1}, {size_text(block.bytes)}, "
            f"{block.name}"
        )
    total = sum(entry.bytes for entry in manifest.entries)
    print(f"{manifest.model} as {manifest.quantisation.name}: {size_text(total)} in {folder}")
