"""Training prompt tokens: chains at many random positions of one text, the base as their teacher.

Real rows never see PPD tokens, so that one run of a text gives the base's own distribution at
every position, and what chains that hang from any of them say, at once.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import kl_div

from edgespec.drafting.ppd import PPDTokens, write_ppd_tokens
from edgespec.training.loop import DECAY, Trainer, TrainingSettings
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows


class PPDVectors(nn.Module):
    """Prompt tokens in training: `depth` tokens ahead, `copies` vectors for each."""

    def __init__(self, depth: int, copies: int, first: torch.Tensor) -> None:
        """They begin as the vectors `first` [W, H], again and again."""
        super().__init__()
        self.depth, self.copies = depth, copies
        begin = first.detach().float()[torch.arange(depth * copies) % len(first)]
        self.table = nn.Parameter(begin)

    def logits(
        self, teacher: Teacher, tokens: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the base, and of chains that hang from positions `anchors` int64 [B, C] of
        `tokens` int64 [B, T].

        Returns [B, T, V] and, averaged over the copies, [B, C, depth, V]: of depth i (from 0) those
        of the token at position anchor + i + 2.
        """
        batch, chains, size = len(tokens), anchors.shape[1], len(self.table)
        extra = self.table.repeat(chains, 1).expand(batch, -1, -1)
        ahead = torch.arange(size, device=anchors.device) // self.copies + 1
        places = (anchors[:, :, None] + ahead).flatten(1)
        kind = teacher.weights["lm_head.weight"].dtype
        text, after = teacher.read_with(tokens, extra.to(kind), places, self._sees(tokens, anchors))
        hidden = after.view(batch, chains, self.depth, self.copies, -1)
        return teacher.logits(text).float(), teacher.logits(hidden).float().mean(3)

    def _sees(self, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Which rows of the text and of the chains every PPD token sees, bool [B, Q, T + Q]."""
        size, device, chains = len(self.table), anchors.device, anchors.shape[1]
        place = torch.arange(tokens.shape[1], device=device)
        before = (place <= anchors[:, :, None]).repeat_interleave(size, 1)
        row = torch.arange(size, device=device)
        same = row[:, None] % self.copies == row % self.copies
        own = same & (row[:, None] // self.copies >= row // self.copies)
        inside = torch.block_diag(*[own] * chains).bool()
        return torch.cat([before, inside.expand(len(tokens), -1, -1)], -1)


class PPDTrainer(Trainer):
    """The loop (see training.loop) for prompt tokens; `chains` hang in every row of text."""

    def __init__(
        self,
        teacher: Teacher,
        vectors: PPDVectors,
        settings: TrainingSettings,
        out: Path,
        chains: int,
        base: str,
    ) -> None:
        """`base`: what the base is called in the folder that is written."""
        self.vectors, self._chains, self._out, self._base = vectors, chains, out, base
        # As PPD trains them: without decay of weights.
        rule = torch.optim.AdamW(vectors.parameters(), settings.rate, weight_decay=0.0)
        super().__init__(teacher, vectors, [rule], settings, out)

    def begin(self, rows: TextRows) -> None:
        """They were made as they begin."""

    def write(self) -> None:
        vectors = self.vectors
        tokens = PPDTokens(vectors.depth, vectors.copies, vectors.table.detach())
        write_ppd_tokens(self._out, tokens, self._base)

    def learn(self, batch: TextRows) -> tuple[float, float]:
        loss, right = self.losses(batch)
        loss.backward()
        return float(loss.detach()), right

    def losses(self, batch: TextRows) -> tuple[torch.Tensor, float]:
        """KL divergence from the base's distribution, each token ahead counting 0.8 of the one
        before; and the share of first guesses whose best token is the base's."""
        vectors, device = self.vectors, self.teacher.device
        tokens = batch.tokens.to(device, torch.int64)
        # Of the seed and the step alone, so that a run that goes on draws what it would have drawn.
        dice = torch.Generator().manual_seed(self.settings.seed * 100_003 + self.step)
        anchors = anchors_in(batch, self._chains, vectors.depth, dice).to(device)
        truth, said = vectors.logits(self.teacher, tokens, anchors)
        ahead = torch.arange(1, vectors.depth + 1, device=device)
        here = torch.arange(len(tokens), device=device)[:, None, None]
        wanted = truth.detach()[here, anchors[:, :, None] + ahead]
        apart = kl_div(
            torch.log_softmax(said, -1),
            torch.log_softmax(wanted, -1),
            reduction="none",
            log_target=True,
        ).sum(-1)
        weights = DECAY ** (ahead - 1)
        right = (said.argmax(-1) == wanted.argmax(-1))[..., 0].float().mean()
        return (apart.mean((0, 1)) * weights).sum() / vectors.depth, float(right)


def anchors_in(rows: TextRows, chains: int, depth: int, dice: torch.Generator) -> torch.Tensor:
    """Positions that chains hang from, int64 [B, C], at random where the text goes on for long
    enough that each token ahead is one of it."""
    low = rows.starts.clamp(min=0)[:, None]
    room = (rows.ends[:, None] - 1 - depth - low).clamp(min=1)
    return low + (torch.rand(len(rows), chains, generator=dice) * room).long()
