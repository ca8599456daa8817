"""Training of lenses (see drafting.lens), which stages read rows with that are still on their way.

The base runs once over rows of text; at every position each lens is to say what the base says at
the end. `up` begins as the best rank-K form of the output matrix, each `down` as what belongs to
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import kl_div

from edgespec.drafting.lens import MOST_RANK, Lens, first_lens, write_lenses
from edgespec.errors import ConfigError
from edgespec.files import write_whole
from edgespec.model.hub_cache import model_of
from edgespec.training.corpus import TrainingPlan, loaded, prepared
from edgespec.training.loop import Trainer, TrainingSettings
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows

_POSITIONS = 512
_LOGITS = 1 << 22
"""Of a step, of each lens: so many positions, or so many logits if that is less."""


@dataclass(frozen=True, slots=True)
class HintPlan(TrainingPlan):
    """A run of lenses of this `rank`."""

    rank: int


class TrainedLenses(nn.Module):
    """All lenses of a base in training."""

    def __init__(self, teacher: Teacher, rank: int) -> None:
        super().__init__()
        layers = int(teacher.config.num_hidden_layers)
        self.layers = tuple(range(first_lens(layers), layers))
        if not self.layers or not 1 <= rank <= MOST_RANK:
            raise ConfigError(
                f"no lens of rank {rank} for a model of {layers} layers: it takes a rank of 1 to "
                f"{MOST_RANK}, and a layer after three fifths of the way"
            )
        matrix = teacher.head_matrix.float() * teacher.weights["model.norm.weight"].float()
        left, size, right = torch.svd_lowrank(matrix, q=rank, niter=4)
        root = size.sqrt()
        self.up = nn.Parameter((left * root).contiguous())
        self.bias = nn.Parameter(torch.zeros(len(matrix), device=matrix.device))
        down = (right * root).T.contiguous()
        self.downs = nn.ParameterList([nn.Parameter(down.clone()) for _ in self.layers])

    def of(self, place: int) -> Lens:
        """The lens of `layers[place]`."""
        return Lens(self.downs[place], self.up, self.bias)


class HintTrainer(Trainer):
    """The loop (see training.loop) for lenses."""

    def __init__(
        self, teacher: Teacher, lenses: TrainedLenses, settings: TrainingSettings, out: Path
    ) -> None:
        self.lenses, self._out = lenses, out
        rule = torch.optim.AdamW(lenses.parameters(), settings.rate, weight_decay=0.0)
        super().__init__(teacher, lenses, [rule], settings, out)

    def begin(self, rows: TextRows) -> None:
        """They were made as they begin."""

    def write(self) -> None:
        downs = dict(zip(self.lenses.layers, self.lenses.downs, strict=True))
        write_lenses(self._out, self.lenses.up, self.lenses.bias, downs)

    def learn(self, batch: TextRows) -> tuple[float, float]:
        loss, right = self.losses(batch)
        loss.backward()
        return float(loss.detach()), right

    def losses(self, batch: TextRows) -> tuple[torch.Tensor, float]:
        """KL divergence from the base's distribution, the mean of all lenses; and the share of the
        last one's best tokens that are the base's."""
        lenses = self.lenses
        dice = torch.Generator().manual_seed(self.settings.seed * 100_003 + self.step)
        hidden, entering = read(self.teacher, lenses, batch)
        most = max(1, min(_POSITIONS, _LOGITS // len(lenses.up)))
        some = torch.randperm(len(hidden), generator=dice)[:most].to(hidden.device)
        wanted = self.teacher.logits(hidden[some]).float()
        truth, losses = wanted.log_softmax(-1), []
        for place in range(len(lenses.layers)):
            said = lenses.of(place).logits(entering[some, place].float())
            apart = kl_div(said.log_softmax(-1), truth, reduction="none", log_target=True)
            losses.append(apart.sum(-1).mean())
        right = (said.argmax(-1) == wanted.argmax(-1)).float().mean()
        return torch.stack(losses).mean(), float(right)


@torch.no_grad()
def read(
    teacher: Teacher, lenses: TrainedLenses, rows: TextRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all positions that count: the rows [P, H] after the final norm, and those that enter each
    of the lenses' layers [P, L, H]."""
    tokens = rows.tokens.to(teacher.device, torch.int64)
    lesson = teacher.read(tokens, lenses.layers)
    assert lesson.aux_hidden is not None
    place = torch.arange(tokens.shape[1])
    counts = ((place >= rows.starts[:, None]) & (place < rows.ends[:, None])).to(teacher.device)
    side = lesson.aux_hidden[counts]
    return lesson.hidden[counts], side.view(len(side), len(lenses.layers), -1)


def train_hints(plan: HintPlan, say: Callable[[str], None], dtype: torch.dtype) -> dict[str, Any]:
    """Train, or go on with a run that was stopped; write the lenses; return their figures."""
    teacher, tokenizer = loaded(plan, say, dtype)
    lenses = TrainedLenses(teacher, plan.rank).to(teacher.device)
    corpus = prepared(plan, tokenizer, teacher, say)
    HintTrainer(teacher, lenses, plan.settings, plan.out).run(corpus.trained, say)
    say("measuring on held-out text")
    figures = {
        "kind": "hints",
        "base": model_of(plan.base),
        "rank": plan.rank,
        "settings": asdict(plan.settings),
        "row_length": plan.row_length,
        "own_rows": plan.own_rows,
        **_agreement(teacher, lenses, corpus.greedy),
    }
    text = json.dumps(figures, indent=2) + "\n"
    write_whole(plan.out / "training.json", text)
    return figures


@torch.no_grad()
def _agreement(teacher: Teacher, lenses: TrainedLenses, rows: TextRows) -> dict[str, Any]:
    """How often the base's own next token is the best, or one of the 4 or 8 best, of each lens, and
    the mean of -ln of what that gives it."""
    hits = torch.zeros(len(lenses.layers), 3)
    nats, total = torch.zeros(len(lenses.layers)), 0
    for part in torch.arange(len(rows)).split(8):
        hidden, entering = read(teacher, lenses, rows.take(part))
        target = teacher.logits(hidden).argmax(-1)
        total += len(target)
        for place in range(len(lenses.layers)):
            said = lenses.of(place).logits(entering[:, place].float()).log_softmax(-1)
            found = said.topk(8).indices == target[:, None]
            for column, rank in enumerate((1, 4, 8)):
                hits[place, column] += found[:, :rank].any(-1).sum().cpu()
            nats[place] -= said.gather(-1, target[:, None]).sum().cpu()
    share = max(total, 1)
    return {
        "held_out_tokens": total,
        "agreement_by_layer": {
            str(layer): [round(float(hit) / share, 4) for hit in hits[place]]
            for place, layer in enumerate(lenses.layers)
        },
        "nats_by_layer": {
            str(layer): round(float(nats[place]) / share, 4)
            for place, layer in enumerate(lenses.layers)
        },
    }
