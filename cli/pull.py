"""edgespec pull: download a model, and a draft for it, before it is needed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import typer

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.daemon.model_names import spoken
from edgespec.daemon.settings import chosen_draft
from edgespec.errors import EXIT_CANCELLED
from edgespec.model.hub import require_model
from edgespec.model.hub_cache import download

WHOLE_MODELS = ("independent", "easyspec")
"""Draft sources whose weights are those of a model like the base."""


def pull(
    model: str = typer.Argument(
        ...,
        metavar="NAME|HUB_ID|ORG/NAME/FILE.gguf",
        help="A name of `edgespec models`, a hub id (ORG/NAME), or a GGUF file of the hub.",
        callback=options.check_model,
    ),
    draft: str = typer.Option(
        "", help="Download the weights of this draft for it too; as `edgespec init` takes it."
    ),
    as_json: bool = options.JSON,
) -> None:
    """Download a model from the Hugging Face Hub, into the hub's own cache.

    Interrupted, the same command goes on where it stopped.
    """
    require_model(model)
    choice = chosen_draft(draft, model)
    wanted = [(model, False)]
    wanted += [(one.folder, one.name not in WHOLE_MODELS) for one in choice.members if one.weights]
    notes = Notes()
    places = {}
    try:
        for one, is_head in wanted:
            places[one] = _fetched(one, is_head, notes)
    except KeyboardInterrupt:
        notes.say("stopped; the same command goes on where it was")
        raise typer.Exit(EXIT_CANCELLED) from None
    drafting = f" --draft {shlex.quote(draft)}" if draft else ""
    following = f"edgespec init --model {shlex.quote(spoken(model))}{drafting} --stages N"
    if as_json:
        print(json.dumps({"places": places, "next": following}))
        return
    for one, place in places.items():
        print(f"{spoken(one)}: {place}")
    print(f"next: {following}; or, on this machine alone: edgespec demo"
          f"{following.removeprefix('edgespec init').removesuffix(' --stages N')}")  # fmt: skip


def _fetched(model: str, is_head: bool, notes: Notes) -> str:
    """Where the model is, downloaded if it is one of the hub."""
    here = Path(model).exists()
    return model if here else str(download(model, is_head, notes.say))
