"""One training run of prompt tokens: text, the base's own texts, steps, figures, and the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from edgespec.drafting.ppd.format import PPDTokens, write_ppd_tokens
from edgespec.model.device import best_device
from edgespec.model.tokenizer import Tokenizer
from edgespec.training.corpus import Corpus, prepared
from edgespec.training.evaluate import RANKS, Agreement
from edgespec.training.loop import TrainingSettings
from edgespec.training.ppd import PPDTrainer, PPDVectors
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows

_FIRST_TEXT = "Next {} word"  # whose vectors prompt tokens begin as (PPD's code), from 2 on


@dataclass(frozen=True, slots=True)
class PPDPlan:
    """What to train: `depth` tokens ahead, `copies` vectors for each, `chains` of them in every row
    of a step. For the rest see training.corpus."""

    base: Path
    text: Path
    out: Path
    depth: int
    copies: int
    chains: int
    settings: TrainingSettings
    row_length: int = 256
    text_rows: int = 20_000
    own_rows: int = 1024


def train_ppd(plan: PPDPlan, say: Callable[[str], None], dtype: torch.dtype) -> dict[str, Any]:
    """Train, or go on with a run that was stopped; write the folder; return its figures."""
    device = best_device()
    torch.manual_seed(plan.settings.seed)
    say("loading the base")
    teacher, tokenizer = Teacher(plan.base, device, dtype), Tokenizer(plan.base)
    corpus = Corpus(
        plan.text, plan.out, plan.settings.seed, plan.row_length, plan.text_rows, plan.own_rows
    )
    trained, checked = prepared(corpus, tokenizer, teacher, say)
    text = " ".join(_FIRST_TEXT.format(ahead + 2) for ahead in range(plan.depth))
    first = teacher.embedded(torch.tensor(tokenizer.encode(text), device=device))
    vectors = PPDVectors(plan.depth, plan.copies, first).to(device)
    trainer = PPDTrainer(teacher, vectors, plan.settings, plan.out, plan.chains)
    say("beginning" if not trainer.resume(trained) else f"going on behind step {trainer.step}")
    steps = plan.settings.steps
    trainer.run(
        trained,
        lambda step, loss, right: say(
            f"step {step} of {steps}: loss {loss:.3f}, first guess right {right:.3f}"
        ),
    )
    say("measuring on held-out text")
    measured = agreement(vectors, teacher, checked)
    found = ppd_figures(plan, measured)
    write_ppd_tokens(
        plan.out, PPDTokens(plan.depth, plan.copies, vectors.table.detach()), plan.base.name
    )
    (plan.out / "training.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


@torch.no_grad()
def agreement(vectors: PPDVectors, teacher: Teacher, rows: TextRows) -> Agreement:
    """Measure on rows of the base's own greedy text: at every position, how good the guesses are
    that a chain there makes of the tokens after the next one."""
    found = {rank: torch.zeros(vectors.depth) for rank in RANKS}
    runs = {rank: torch.zeros(vectors.depth) for rank in RANKS}
    total = 0
    for index in range(len(rows)):
        tokens = rows.tokens[index].to(teacher.device, torch.int64)
        first = max(int(rows.starts[index]), 0)
        anchors = torch.arange(first, int(rows.ends[index]) - 1 - vectors.depth)
        if not len(anchors):
            continue
        anchors = anchors.to(teacher.device)
        _, said = vectors.logits(teacher, tokens[None], anchors[None])
        ahead = torch.arange(2, vectors.depth + 2, device=teacher.device)
        wanted = tokens[anchors[:, None] + ahead]
        best = said[0].topk(max(RANKS), -1).indices
        total += len(anchors)
        for rank in RANKS:
            hits = (best[..., :rank] == wanted[..., None]).any(-1).cpu()
            found[rank] += hits.sum(0)
            runs[rank] += hits.long().cumprod(1).sum(0)
    share = max(total, 1)
    return Agreement(
        total,
        {rank: tuple((found[rank] / share).tolist()) for rank in RANKS},
        {rank: 1 + float(runs[rank].sum()) / share for rank in RANKS},
    )


def ppd_figures(plan: PPDPlan, measured: Agreement) -> dict[str, Any]:
    """The figures of a run, as training.json and --json have them."""
    return {
        "kind": "ppd",
        "base": plan.base.name,
        "depth": plan.depth,
        "copies": plan.copies,
        "chains": plan.chains,
        "settings": asdict(plan.settings),
        "row_length": plan.row_length,
        "own_rows": plan.own_rows,
        "held_out_tokens": measured.tokens,
        "agreement_by_level": {
            f"top{rank}": [round(share, 4) for share in measured.by_level[rank]] for rank in RANKS
        },
        "tokens_per_trip": {f"top{rank}": round(measured.trip[rank], 3) for rank in RANKS},
    }
