"""Training an EAGLE head: what it begins as, its losses, and what learns by which rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention, smooth_l1_loss

from edgespec.drafting.eagle.format import usual_taps, write_head
from edgespec.drafting.eagle.head import EagleHead, rope_at
from edgespec.drafting.eagle.shape import HeadShape, Kind, Rope
from edgespec.model.model_config import ModelConfig
from edgespec.training.loop import DECAY, Trainer, TrainingSettings, muon
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows, counted_tokens

FEATURE_SHARE = 0.1
"""Of the loss on features against that on tokens, for EAGLE-1 and EAGLE-2."""

LEVELS: dict[Kind, int] = {"eagle": 4, "eagle3": 7}
"""Levels to train. A ring guesses up to a dozen tokens ahead. An EAGLE-2 head's features are held
to the base's: four levels teach it all twelve. An EAGLE-3 head's are its own: having learnt three
levels, the demo's named the right token first in 0.81 of the places at level 1 and 0.33 at 12."""

_FIRST_ROWS = 128  # from which a head begins
_AT_ONCE = 256  # rows whose logits are there at one time


class Student(nn.Module):
    """A head in training, with the output matrix if it has one of its own."""

    def __init__(self, shape: HeadShape, kept: torch.Tensor | None) -> None:
        """`kept` int64 [vocab]: the base's tokens that the head scores, None for all of them."""
        super().__init__()
        self.head = EagleHead(shape)
        self.kept = kept
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False) if shape.own_head else None

    def logits(self, features: torch.Tensor, teacher: Teacher) -> torch.Tensor:
        """Logits [.., vocab] of features that came out of the layer."""
        rows = self.head.outgoing(features)
        return teacher.logits(rows) if self.lm_head is None else self.lm_head(rows)


class EagleTrainer(Trainer):
    """The loop for an EAGLE head."""

    def __init__(
        self, teacher: Teacher, student: Student, settings: TrainingSettings, out: Path
    ) -> None:
        self.student, self._out = student, out
        super().__init__(teacher, student, optimizers(student, settings.rate), settings, out)

    def begin(self, rows: TextRows) -> None:
        first = rows.take(torch.arange(min(len(rows), _FIRST_ROWS)))
        begin(self.student.head, self.teacher, first, self.settings.batch)
        if self.student.lm_head is not None:
            matrix, kept = self.teacher.head_matrix, self.student.kept
            with torch.no_grad():
                self.student.lm_head.weight.copy_(matrix if kept is None else matrix[kept])

    def learn(self, batch: TextRows) -> tuple[float, float]:
        return learn(self.student, self.teacher, batch, self.settings.unroll)

    def write(self) -> None:
        student, config = self.student, self.teacher.config
        tensors = {name: weight.detach() for name, weight in student.head.state_dict().items()}
        if student.lm_head is not None:
            tensors["lm_head.weight"] = student.lm_head.weight.detach()
        vocab, positions = int(config.vocab_size), int(config.max_position_embeddings)
        write_head(self._out, student.head.shape, tensors, student.kept, vocab, positions)


def optimizers(student: Student, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layer's matrices, AdamW for all else."""
    named = list(student.named_parameters())
    inner = [w for name, w in named if w.dim() == 2 and not name.startswith("lm_head")]
    outer = [w for name, w in named if w.dim() != 2 or name.startswith("lm_head")]
    return [muon(inner, rate), torch.optim.AdamW(outer, rate, betas=(0.9, 0.95), weight_decay=0.0)]


def learn(student: Student, teacher: Teacher, rows: TextRows, unroll: int) -> tuple[float, float]:
    """Add the gradients over all levels; the loss, and the share of the first level's best guesses
    that are right.

    Logits of a few rows are there at a time, those of all levels one after the other: all of them
    would be most of the memory.
    """
    device, shape = teacher.device, student.head.shape
    tokens = rows.tokens.to(device, torch.int64)
    lesson = teacher.read(tokens, shape.aux_hidden)
    given = lesson.hidden if lesson.aux_hidden is None else lesson.aux_hidden
    wanted = lesson.hidden[:, 1:].flatten(0, 1)
    embedded = teacher.embedded(tokens[:, 1:])
    steps = list(unrolled(student.head, given[:, :-1], embedded, unroll))
    levels = [features.detach().requires_grad_() for features in steps]
    counts = [counted(rows, level).to(device).flatten() for level in range(unroll)]
    total, hits = 0.0, 0
    for part in torch.arange(len(wanted), device=device).split(_AT_ONCE):
        with torch.no_grad():
            truth = teacher.logits(wanted[part]).float()
            truth = truth if student.kept is None else truth[..., student.kept]
            likely = torch.softmax(truth, -1)
        for level, features in enumerate(levels):
            here, counts_here = features.flatten(0, 1)[part], counts[level][part]
            logits = student.logits(here, teacher).float()
            loss = -(likely * torch.log_softmax(logits, -1)).sum(-1)
            if shape.kind == "eagle":
                apart = smooth_l1_loss(here.float(), wanted[part].float(), reduction="none")
                loss = loss + FEATURE_SHARE * apart.mean(-1)
            loss = DECAY**level * (loss * counts_here).sum() / counts[level].sum()
            loss.backward()
            total += float(loss.detach())
            if level == 0:
                hits += int(((logits.argmax(-1) == truth.argmax(-1)) & counts_here).sum())
    torch.autograd.backward(steps, [features.grad for features in levels])
    return total, hits / max(1, int(counts[0].sum()))


def counted(rows: TextRows, level: int) -> torch.Tensor:
    """Which pairs [B, T - 1] of a level count: those whose guesses are of a row's text.

    Pair p of level i hangs below the root p + 1 - i, and guesses token p + 2; there is no guess
    of what follows the last token.
    """
    pairs = torch.arange(rows.tokens.shape[1] - 1)
    begins = torch.clamp(rows.starts, min=0)[:, None] + level - 1
    return (pairs >= torch.clamp(begins, min=level)) & (pairs + 2 < rows.ends[:, None])


def chosen_vocabulary(rows: TextRows, size: int, vocab: int) -> torch.Tensor | None:
    """The `size` most frequent tokens of the text, ascending, int64; None if that is all."""
    if size >= vocab:
        return None
    frequent = torch.bincount(counted_tokens(rows), minlength=vocab)
    return frequent.argsort(descending=True, stable=True)[:size].sort().values


def shape_for(kind: Kind, config: ModelConfig, vocab: int) -> HeadShape:
    """A head of the width of one of the base's layers. `vocab`: tokens that it scores."""
    third = kind == "eagle3"
    return HeadShape(
        kind=kind,
        hidden=int(config.hidden_size),
        base_hidden=int(config.hidden_size),
        heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads),
        head_dim=config.head_dim,
        intermediate=int(config.intermediate_size),
        vocab=vocab,
        eps=float(config.rms_norm_eps),
        ropes=(Rope(theta=theta_of(config)),),
        own_head=third,
        aux_hidden=usual_taps(int(config.num_hidden_layers)) if third else (),
    )


def theta_of(config: ModelConfig) -> float:
    """The base of the model's rotary embedding."""
    settings = getattr(config, "rope_parameters", None) or {}
    theta = settings.get("rope_theta") if isinstance(settings, dict) else None
    return float(theta or 10000.0)


@torch.no_grad()
def begin(head: EagleHead, teacher: Teacher, rows: TextRows, batch: int) -> None:
    """Let the head begin as the best linear map from what it reads to the next features.

    The map is fitted by ridge regression over `rows`; attention and MLP add nothing yet. Without
    it the first tenth of a run only learns what a matrix inversion says.
    """
    shape = head.shape
    wide = shape.fused_width
    squares = torch.zeros((wide, wide), dtype=torch.float64, device=teacher.device)
    products = torch.zeros((wide, shape.hidden), dtype=torch.float64, device=teacher.device)
    gain = teacher.weights["model.norm.weight"].double()
    third = shape.kind == "eagle3"
    for first in range(0, len(rows), batch):
        tokens = rows.tokens[first : first + batch].to(teacher.device, torch.int64)
        lesson = teacher.read(tokens, shape.aux_hidden)
        if lesson.aux_hidden is None:
            given = torch.cat([teacher.embedded(tokens[:, 1:]), lesson.hidden[:, :-1]], -1)
        else:
            given = lesson.aux_hidden[:, :-1]
        known, wanted = given.flatten(0, 1).double(), lesson.hidden[:, 1:].flatten(0, 1).double()
        squares += known.T @ known
        products += known.T @ (wanted / gain if third else wanted)
    ridge = _RIDGE * squares.diagonal().mean()
    squares += ridge * torch.eye(wide, dtype=torch.float64, device=teacher.device)
    head.fc.weight.copy_(torch.linalg.solve(squares, products).T)
    head.layer.self_attn.o_proj.weight.zero_()
    head.layer.mlp.down_proj.weight.zero_()
    if third:
        head.norm.weight.copy_(gain)


_RIDGE = 1e-3  # of the mean square of what is read


class _Paths:
    """Attention (see head.Attend) of one step after the other over rows [B, heads, R, head_dim]."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(group, 1))
        self._values.append(value.repeat_interleave(group, 1))
        step, rows = len(self._keys) - 1, query.shape[2]
        if step == 0:
            return scaled_dot_product_attention(
                query, self._keys[0], self._values[0], is_causal=True
            )
        query = query * query.shape[-1] ** -0.5
        far = torch.ones((rows, rows), dtype=torch.bool, device=query.device).tril(-step)
        scores = (query @ self._keys[0].transpose(2, 3)).masked_fill(~far, float("-inf"))
        near = [
            (query * _later(key, step - made)).sum(-1, keepdim=True)
            for made, key in enumerate(self._keys[1:], start=1)
        ]
        weights = torch.softmax(torch.cat([scores, *near], -1).float(), -1).to(query.dtype)
        seen = weights[..., :rows] @ self._values[0]
        for made, value_rows in enumerate(self._values[1:], start=1):
            column = weights[..., rows + made - 1 : rows + made]
            seen = seen + column * _later(value_rows, step - made)
        return seen


def unrolled(
    head: EagleHead, given: torch.Tensor, embedded: torch.Tensor, steps: int
) -> Iterator[torch.Tensor]:
    """The features [B, R, hidden] that come out of each of `steps` steps.

    `given` (see EagleHead.features) and `embedded` [B, R, hidden] are of the pairs at positions
    0 to R - 1. Row p of step i is what a guess i levels below the root p + 1 - i gives; rows below
    i mean nothing.
    """
    rows = given.shape[1]
    positions = torch.arange(rows, device=given.device)
    angles = rope_at(positions, head.shape.ropes[0], head.shape.head_dim, embedded.dtype)
    attend = _Paths()
    features = head.features(given)
    for step in range(steps):
        if step:
            features = _later(features, 1)
        features = head(features, embedded, angles, attend)
        yield features


def _later(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Rows moved `by` positions on; what has no row before it becomes 0."""
    if by == 0:
        return rows
    return pad(rows, (0, 0, by, 0))[..., : rows.shape[-2], :]
