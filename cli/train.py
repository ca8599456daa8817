"""edgespec train: trains draft weights for a base model on a text file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.drafting.eagle.shape import Kind
from edgespec.errors import ConfigError

train = typer.Typer(help="Train draft weights for a base model.", no_args_is_help=True)


@dataclass(frozen=True)
class TrainingRun:
    """What every run is told."""

    base: str = typer.Argument(
        ...,
        help="The base model: a name of `edgespec models`, a hub id (ORG/NAME) or a folder.",
        callback=options.check_model,
    )
    text: Path = typer.Argument(
        ..., help='Text: one document a line, or .jsonl objects with a "text" or "messages".'
    )
    out: Path = typer.Option(..., metavar="DIR", help="Folder to write the draft weights to.")
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 2000
    batch: Annotated[int, typer.Option(min=1, help="Rows of text a step.")] = 8
    rate: Annotated[float, typer.Option(help="Peak of the learning rate.")] = 1e-3
    row_length: Annotated[int, typer.Option(min=64, help="Tokens of a row at most.")] = 256
    text_rows: int = typer.Option(
        20_000, min=1, help="Rows of the file at most. The others are left out."
    )
    own_rows: int = typer.Option(
        1024, min=0, help="Answers that the base writes itself, half greedy, half at temperature 1."
    )
    dtype: str = typer.Option("float32", help="What the base is held in.")
    low: bool = typer.Option(True, "--low/--no-low", help="Compute in bfloat16 where it may be.")
    seed: int = typer.Option(0, help="Of the order of the rows.")

    def make_out(self) -> None:
        """Make the folder before hours of training. Raises ConfigError."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ConfigError(
                f"the folder {self.out} cannot be made ({problem.strerror}); give another one with "
                "--out"
            ) from None

    def begun(self, unroll: int, say: Callable[[str], None]) -> dict[str, Any]:
        """The fields of a TrainingPlan of so many levels; a base of the hub is downloaded. Imports
        torch."""
        from edgespec.model.hub_cache import local_weights
        from edgespec.training.loop import TrainingSettings

        return {
            "base": local_weights(self.base, say),
            "text": self.text,
            "out": self.out,
            "settings": TrainingSettings(
                self.steps, self.batch, unroll, self.rate, self.low, self.seed
            ),
            "row_length": self.row_length,
            "text_rows": self.text_rows,
            "own_rows": self.own_rows,
        }


@train.command()
@options.grouped
def eagle(
    run: TrainingRun = TrainingRun(rate=2e-3),
    kind: str = typer.Option("eagle", help="eagle (the form of EAGLE-2) or eagle3."),
    levels: int | None = typer.Option(
        None, min=1, max=8, help="Levels of the tree to train. Default: 4, for eagle3 7."
    ),
    draft_vocab: int = typer.Option(0, min=0, help="Tokens that an eagle3 head scores. 0: all."),
    as_json: bool = options.JSON,
) -> None:
    """Train an EAGLE head for a base model. Stopped, the same command goes on where it was.

    At the end it is measured on the base's own answers to text that was held out.
    """
    if kind not in ("eagle", "eagle3"):
        raise ConfigError(f"--kind {kind}: give eagle or eagle3")
    run.make_out()
    with Notes().waiting("loading") as say:
        # Imported late, as torch takes seconds: a wrong option is refused at once.
        from edgespec.model.tensors import compute_dtype
        from edgespec.training.eagle import LEVELS
        from edgespec.training.run import EaglePlan, train_eagle

        known: Kind = "eagle3" if kind == "eagle3" else "eagle"
        plan = EaglePlan(**run.begun(levels or LEVELS[known], say), kind=known, vocab=draft_vocab)
        figures = train_eagle(plan, say, compute_dtype(run.dtype))
    _show(figures, run.out, as_json)


@train.command()
@options.grouped
def dspark(
    run: TrainingRun = TrainingRun(row_length=512),
    start: Path | None = typer.Option(
        None,
        metavar="DIR",
        help="A head that this command wrote, to go on with. Its shape counts.",
    ),
    layers: int = typer.Option(2, min=1, max=8, help="Layers of the head."),
    block: int = typer.Option(16, min=2, max=64, help="Tokens that a pass guesses."),
    rank: int = typer.Option(64, min=0, help="Rank of the Markov head. 0: none."),
    intermediate: int = typer.Option(
        0,
        min=0,
        help="Width of the MLPs. 0: as the base's.",
    ),
    draft_vocab: int = typer.Option(
        8192, min=0, help="Tokens that the head scores, the commonest of the text. 0: all."
    ),
    anchors: int = typer.Option(24, min=1, help="Blocks in every row of a step."),
    as_json: bool = options.JSON,
) -> None:
    """Train a one-pass head for a base model. Stopped, the same command goes on where it was.

    At the end it is measured on the base's own answers to text that was held out.
    """
    run.make_out()
    with Notes().waiting("loading") as say:
        from edgespec.model.tensors import compute_dtype
        from edgespec.training.run import DSparkPlan, train_dspark

        plan = DSparkPlan(
            **run.begun(block, say),
            layers=layers,
            block=block,
            rank=rank,
            intermediate=intermediate,
            vocab=draft_vocab,
            anchors=anchors,
            start=start,
        )
        figures = train_dspark(plan, say, compute_dtype(run.dtype))
    _show(figures, run.out, as_json)


@train.command()
@options.grouped
def ppd(
    run: TrainingRun = TrainingRun(steps=1000, batch=4, rate=1e-2),
    depth: int = typer.Option(3, min=1, max=8, help="Tokens to guess ahead."),
    copies: int = typer.Option(1, min=1, max=8, help="Vectors of each (EPTs)."),
    chains: int = typer.Option(64, min=1, help="Chains of prompt tokens in a row."),
    as_json: bool = options.JSON,
) -> None:
    """Train PPD prompt tokens for a base model. Stopped, the same command goes on where it was.

    At the end they are measured on the base's own answers to text that was held out.
    """
    run.make_out()
    with Notes().waiting("loading") as say:
        from edgespec.model.tensors import compute_dtype
        from edgespec.training.run import PPDPlan, train_ppd

        plan = PPDPlan(**run.begun(depth, say), depth=depth, copies=copies, chains=chains)
        figures = train_ppd(plan, say, compute_dtype(run.dtype))
    _show(figures, run.out, as_json)


def _show(figures: dict[str, Any], out: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    print(f"draft weights in {out}, measured on the base's own answers to held-out text")
    for temperature, found in (("0", figures), ("1", figures["at_temperature_1"])):
        print(f"temperature {temperature}, {found['held_out_tokens']} places:")
        _show_levels(found)
        if "shown" in found:
            print("  shown the guesses above:")
            _show_levels(found["shown"])


def _show_levels(found: dict[str, Any]) -> None:
    for rank, shares in found["agreement_by_level"].items():
        levels = "  ".join(f"{share:.3f}" for share in shares)
        print(f"  {rank}: by level {levels}; {found['tokens_per_trip'][rank]:.2f} tokens a trip")
