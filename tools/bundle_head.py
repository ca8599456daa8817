"""Put a head that `edgespec train dspark` made for SmolLM2 into the package, with its card.

Usage::

    python tools/bundle_head.py RUN [RUN ...] [--on DEVICE]

RUN is the folder of a finished run (its ``--out``) on prompts of ``tools/smollm2_prompts.py``: the
card says so. Of several each began with the head of the one before (``--start``). The last head
goes to ``edgespec/models/smollm2-135m-dspark``, with its figures, a plot of how it grew, and that
card.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

FOLDER = Path(__file__).parent.parent / "edgespec" / "models" / "smollm2-135m-dspark"
BASE = "SmolLM2-135M-Instruct"
MOST_BYTES = 12_000_000
CORE = "a shared x86 core"
STARTED = """
It began with the head of an earlier run, whose steps, hours and answers are not counted here."""
SEVERAL = """
Each run but the first went on with the head of the one before; the answers are those of the last.
Of held-out places its first guess was right at level 1, after each run: {shares}."""

CARD = """\
# A one-pass draft head for SmolLM2-135M-Instruct

It guesses {block} tokens in one pass (DSpark, arXiv 2607.05147): {layers} layers that read the
rows entering three of the base's layers{heads}.
It scores the {vocab} tokens that are commonest in the base's answers, by the base's own output
rows, and guesses for nothing but that base: `edgespec serve --model smollm2-135m --draft dspark`.
What it guesses changes the speed of an answer, never its text.

## Training

`edgespec train dspark`: {steps} steps of {batch} answers with {anchors} blocks each, {hours:.2f}
hours of {device}. It learnt from the base's own answers
alone: {rows} of them, {tokens} tokens, greedy or drawn at temperature 1 by turns, to prompts of
`tools/smollm2_prompts.py`.{start}
[docs/training.md](../../../docs/training.md#one-pass-heads) has the commands.

The prompts are made of GSM8K's training split (MIT), pages of tldr-pages (CC BY 4.0, the
tldr-pages project and its contributors), modules and language help of Python's standard library
(PSF licence), and word lists of this project. None of them is among the prompts that this
project's benchmarks report on.

## Accuracy

On {greedy} places of greedy answers, and {sampled} of answers drawn at temperature 1, to prompts
that were held out: how often the base's token is among the head's first 1, 4 and 8 guesses, by
level, the guesses above being right.{shown}

{accuracy}

![loss and right first guesses by hours of training](growth.png)

The plot is of the batches that it learnt from; answers that come again are partly known by then.

## Licence

Apache-2.0, as SmolLM2-135M-Instruct (Hugging Face), of whose answers it was made.
"""


BEHIND = """
Behind "masks" it sees none of those above; "shown" them, it does, as in a ring."""


def steps_of(runs: Sequence[Path]) -> list[dict[str, float]]:
    """The lines of all runs' progress, the seconds of a later run behind those of the earlier."""
    steps: list[dict[str, float]] = []
    for run in runs:
        before = steps[-1]["seconds"] if steps else 0.0
        lines = [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]
        last = {line["step"]: line for line in lines}
        steps += [{**last[at], "seconds": before + last[at]["seconds"]} for at in sorted(last)]
    return steps


def plot(steps: Sequence[dict[str, float]], target: Path) -> None:
    """Loss and first guesses of the steps, each the mean of fifty, by hours."""
    wide = max(1, min(50, len(steps) // 4))
    parts = [steps[at : at + wide] for at in range(0, len(steps) - wide + 1, wide)]
    hours = [part[-1]["seconds"] / 3600 for part in parts]
    figure, axis = plt.subplots(figsize=(6, 3.5))
    other = axis.twinx()
    for panel, key, colour, name in (
        (axis, "loss", "tab:gray", "loss"),
        (other, "first_guess", "tab:blue", "first guess right"),
    ):
        values = [sum(line[key] for line in part) / len(part) for part in parts]
        panel.plot(hours, values, color=colour)
        panel.set_ylabel(name, color=colour)
    axis.set_xlabel("hours of training")
    figure.tight_layout()
    figure.savefig(target, dpi=90)


def accuracy(figures: dict[str, Any]) -> str:
    """The card's table."""
    levels = [*(one for one in (1, 2, 4, 8, 12) if one < figures["block"]), figures["block"]]
    names = ["temperature", *["behind"] * ("shown" in figures), "first"]
    names += [f"level {level}" for level in levels]
    rows = [names, ["---"] * len(names)]
    for temperature, of_it in (("0", figures), ("1", figures["at_temperature_1"])):
        parts = [("masks", of_it), ("shown", of_it["shown"])] if "shown" in of_it else [("", of_it)]
        for behind, found in parts:
            for rank, shares in found["agreement_by_level"].items():
                cells = [f"{shares[level - 1]:.3f}" for level in levels]
                rows.append(
                    [temperature, *[behind] * bool(behind), rank.removeprefix("top"), *cells]
                )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def finished(run: Path) -> dict[str, Any]:
    """The figures of a run. Ends the program if it has none, or is of something else."""
    file = run / "training.json"
    if not file.is_file():
        raise SystemExit(
            f"there is no {file}: the run has not ended. Give its command again, with --steps of "
            "what it did if that is to be all"
        )
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    kind, base = figures.get("kind"), str(figures.get("base"))
    if kind != "dspark" or not base.startswith(BASE):
        raise SystemExit(f"{run} is a run of kind {kind} for {base}; it takes dspark for {BASE}")
    size = (run / "model.safetensors").stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"the head has {size} bytes; at most {MOST_BYTES} are bundled")
    return figures


def grown(runs: Sequence[dict[str, Any]]) -> str:
    """What the card says of several runs, or of one that began with a head."""
    if len(runs) == 1:
        return STARTED if runs[0]["started"] else ""
    firsts = [
        [one["agreement_by_level"]["top1"][0] for one in (run, run["at_temperature_1"])]
        for run in runs
    ]
    shares = ", ".join(f"{greedy:.3f} (at temperature 1 {drawn:.3f})" for greedy, drawn in firsts)
    return SEVERAL.format(shares=shares)


def bundle(runs: Sequence[Path], folder: Path, device: str = CORE) -> str:
    """Copy, plot and write; returns the card, which says what device the hours are of. Ends the
    program as `finished` does."""
    known = [finished(run) for run in runs]
    figures = known[-1]
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors", "training.json"):
        shutil.copyfile(runs[-1] / name, folder / name)
    plot(steps_of(runs), folder / "growth.png")
    rank = figures["rank"]
    names = ("block", "layers", "vocab", "rows", "tokens", "anchors")
    card = CARD.format(
        **{name: figures[name] for name in names},
        steps=" and ".join(str(one["steps"]) for one in known),
        batch=figures["settings"]["batch"],
        hours=sum(one["seconds"] for one in known) / 3600,
        device=device,
        heads=f", and a Markov head of rank {rank}" if rank else "",
        shown=BEHIND if "shown" in figures else "",
        start=grown(known),
        greedy=figures["held_out_tokens"],
        sampled=figures["at_temperature_1"]["held_out_tokens"],
        accuracy=accuracy(figures),
    )
    (folder / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    return card


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--on", default=CORE, metavar="DEVICE", help="what took those hours")
    options = parser.parse_args()
    print(bundle(options.runs, FOLDER, options.on))


if __name__ == "__main__":
    main()
