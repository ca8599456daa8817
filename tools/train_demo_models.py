"""Train the bundled demo pair (tokenizer, base model, draft model) on a CPU and export it.

The base is a small Llama trained with cross-entropy. The draft is a smaller Llama with the same
tokenizer, begun from the base's first layers and from then on trained in the same loop to copy
the base's distribution at every token of each batch.
The run is resumable: stop it at any time (SIGTERM included) and start it again with the same
folders. Started again with a smaller ``--steps``, it goes straight into the learning-rate decay.

Usage::

    python tools/train_demo_models.py --data DATA --out edgespec/models --work WORK --steps 2200
    python tools/train_demo_models.py --data DATA --out edgespec/models --work WORK --export-only

``DATA`` holds ``gsm8k_train.jsonl`` (openai/grade-school-math) and ``tldr_pages_en.jsonl.gz``
(tldr-pages/tldr); the third source is the running Python's own standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from demo_card import model_card
from demo_data import (
    HELD_OUT_RULE,
    MAX_POSITIONS,
    MIX,
    Mixture,
    all_documents,
    encode_documents,
    load_or_train_tokenizer,
)
from demo_measure import Pair, measure
from demo_model import (
    BASE_SHAPE,
    DRAFT_SHAPE,
    build_model,
    keep,
    make_optimizers,
    pair_parameters,
    parameter_count,
    rate_share,
    start_draft,
    update,
    write_model,
)
from demo_workers import Workers

ROW_LENGTH = 256


# --------------------------------------------------------------------------- training


@dataclass
class Progress:
    """Where a run stands, beyond weights and optimiser: what a checkpoint also holds."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    decay_start: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """The joint loop over both models, with its checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.documents = all_documents(args.data)
        self.tokenizer = load_or_train_tokenizer(args.work, self.documents, args.seed)
        self.base = build_model(BASE_SHAPE, self.tokenizer)
        self.draft = build_model(DRAFT_SHAPE, self.tokenizer)
        self.optimizers = make_optimizers(
            [(self.base, args.learning_rate), (self.draft, args.draft_learning_rate)]
        )
        self.parameters = pair_parameters(self.base, self.draft)
        self.mixture: Mixture | None = None
        self.progress = Progress()
        self.stopping = False
        self.checkpoint = args.work / "checkpoint.pt"

    def save(self) -> None:
        assert self.mixture is not None
        state = {
            "base": self.base.state_dict(),
            "draft": self.draft.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "data": self.mixture.state(),
            "random": torch.get_rng_state(),
            "progress": vars(self.progress),
        }
        keep(self.checkpoint, state)

    def load(self) -> bool:
        """Take up the checkpoint if there is one."""
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint, weights_only=False)
        self.base.load_state_dict(state["base"])
        self.draft.load_state_dict(state["draft"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        torch.set_rng_state(state["random"])
        if self.mixture is not None:
            self.mixture.load_state(state["data"])
        return True

    def train(self) -> None:
        encoded = encode_documents(self.tokenizer, self.documents, held_out=False)
        for name, rows in encoded.items():
            log(f"{name}: {len(rows)} documents, {sum(map(len, rows))} tokens")
        self.mixture = Mixture(encoded, self.args.seed)
        resumed = self.load()
        log(f"{'resumed at' if resumed else 'new run at'} step {self.progress.step}")
        self.progress.settings = settings_of(self.args)
        signal.signal(signal.SIGTERM, self._stop)
        workers = Workers(self.args, self.args.work / "tokenizer.json", self.parameters)
        saved = time.monotonic()
        while self.progress.step < self.args.steps and not self.stopping:
            self._step(workers)
            if time.monotonic() - saved > 60 * self.args.save_minutes:
                self.save()
                saved = time.monotonic()
        workers.stop()
        self.save()
        log(f"stopped at step {self.progress.step} of {self.args.steps}")

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def _step(self, workers: Workers) -> None:
        assert self.mixture is not None
        started = time.monotonic()
        if self.progress.step == self.args.draft_from:
            start_draft(self.base, self.draft)
        micro_batches = [
            self.mixture.batch(self.args.micro_tokens // length, length)
            for length in self._row_lengths()
        ]
        with_draft = self.progress.step >= self.args.draft_from
        totals = workers.gather(micro_batches, with_draft)
        self._update()
        self.progress.step += 1
        self.progress.tokens += self.args.batch_tokens
        self.progress.seconds += time.monotonic() - started
        self._report(totals, time.monotonic() - started)

    def _row_lengths(self) -> list[int]:
        """Short rows are the cheapest; later one part in each step trains every position."""
        count = self.args.batch_tokens // self.args.micro_tokens
        long = self.progress.step >= self.args.long_from * self.args.steps
        return [MAX_POSITIONS if long else ROW_LENGTH, *[ROW_LENGTH] * (count - 1)]

    def _update(self) -> None:
        step, steps = self.progress.step, self.args.steps
        if self.progress.decay_start is None and step >= self.args.decay_from * steps:
            self.progress.decay_start = step
        share = rate_share(step, steps, self.args.warmup, self.progress.decay_start)
        update((self.base, self.draft), self.optimizers, share)

    def _report(self, totals: torch.Tensor, seconds: float) -> None:
        step = self.progress.step
        if step % self.args.log_every and step > 5:
            return
        base_loss, draft_loss, agreement = totals.tolist()
        log(
            f"step {step} base {base_loss:.3f} draft {draft_loss:.3f} top1 {agreement:.3f} "
            f"rate {self.optimizers[0].param_groups[0]['lr']:.2e} "
            f"{self.args.batch_tokens / seconds:.0f} tokens/s"
        )


def log(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)


# --------------------------------------------------------------------------- export


def export(trainer: Trainer) -> None:
    """Write the pair beside the output folder, measure it, and move its files in."""
    out = trainer.args.out
    fresh = out.with_name(f"{out.name}.partial")
    shutil.rmtree(fresh, ignore_errors=True)
    write_model(trainer.base, trainer.tokenizer, fresh / "base")
    write_model(trainer.draft, trainer.tokenizer, fresh / "draft")
    encoded = {
        held_out: encode_documents(trainer.tokenizer, trainer.documents, held_out)
        for held_out in (False, True)
    }
    metrics = {
        "training": training_facts(trainer, encoded[False]),
        **measure(Pair(fresh), encoded),
    }
    (fresh / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (fresh / "MODEL_CARD.md").write_text(model_card(metrics))
    for path in sorted(fresh.rglob("*")):
        if path.is_file():
            path.chmod(0o644)
            target = out / path.relative_to(fresh)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    shutil.rmtree(fresh)
    log(f"exported step {trainer.progress.step} to {out}")
    log(json.dumps({"held_out": metrics["held_out"]["all"], "own": own_line(metrics)}))


def own_line(metrics: dict[str, Any]) -> dict[str, float]:
    shares: dict[str, float] = metrics["own_greedy_agreement"]["all"]
    return shares


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings a checkpoint keeps for the card."""
    names = ("steps", "seed", "threads", "batch_tokens", "learning_rate", "draft_learning_rate")
    more = ("truth_share", "draft_from", "decay_from", "long_from")
    return {name: getattr(args, name) for name in (*names, *more)}


def training_facts(trainer: Trainer, encoded: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    progress = trainer.progress
    seen = {name: round(share * progress.tokens) for name, share in MIX.items()}
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds),
        **settings_of(trainer.args),
        **progress.settings,
        "note": trainer.args.note,
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "base_parameters": parameter_count(trainer.base),
        "draft_parameters": parameter_count(trainer.draft),
        "training_tokens": {name: sum(map(len, rows)) for name, rows in encoded.items()},
        "epochs": {
            name: round(seen[name] / sum(map(len, rows)), 2) for name, rows in encoded.items()
        },
        "held_out_rule": HELD_OUT_RULE,
    }


# --------------------------------------------------------------------------- command line


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the data files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported pair")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="worker processes")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--micro-tokens", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--draft-learning-rate", type=float, default=2e-3)
    parser.add_argument("--truth-share", type=float, default=0.1, help="of the draft's loss")
    parser.add_argument("--warmup", type=int, default=100, help="steps of rising rate")
    parser.add_argument("--decay-from", type=float, default=0.6, help="share of the steps")
    parser.add_argument("--long-from", type=float, default=0.7, help="share of the steps")
    parser.add_argument("--draft-from", type=int, default=700, help="step at which it joins")
    parser.add_argument("--note", default="", help="a sentence for the card's training part")
    parser.add_argument("--save-minutes", type=float, default=4.0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--export-only", action="store_true", help="export the checkpoint")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(args.threads if args.export_only else 1)
    args.work.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    if not args.export_only:
        trainer.train()
    elif not trainer.load():
        log(f"no checkpoint in {args.work}")
        return 1
    if args.export_only or trainer.progress.step >= args.steps:
        export(trainer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
