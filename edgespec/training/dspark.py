"""Training a one-pass head: what it begins as, its losses, and what learns by which rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from edgespec.drafting.dspark.format import write_head
from edgespec.drafting.dspark.head import BlockPlaces, DSparkHead, rows_of
from edgespec.drafting.dspark.shape import DSparkShape
from edgespec.drafting.eagle.shape import Rope
from edgespec.model.model_config import ModelConfig
from edgespec.training.blocks import Blocks, beside, drawn
from edgespec.training.eagle import theta_of
from edgespec.training.loop import Trainer, TrainingSettings, muon
from edgespec.training.teacher import KeptRows, Lesson, Teacher
from edgespec.training.texts import TextRows

CROSS_ENTROPY, VARIATION = 0.1, 0.9
"""Shares of the losses (DSpark §3.3): total variation is what costs accepted tokens."""

_FIRST_ROWS = 64  # from which the spread of what is tapped is taken
_AT_ONCE = 256  # slots whose logits are there at one time
_LOGITS = 1 << 26  # that are there on a GPU at one time: few and long steps
_OUTER_SHARE = 0.5  # of the rate, for what AdamW learns


class DSparkStudent(nn.Module):
    """A head in training. It borrows the base's embedding and rows of its output matrix, unless its
    shape has its own."""

    kept: torch.Tensor

    def __init__(self, shape: DSparkShape, kept: torch.Tensor, words: int = 0) -> None:
        """`kept` int64 [vocab], ascending: the base's tokens that it scores; `words`: how many the
        base has, if the head has an embedding of its own."""
        super().__init__()
        self.head = DSparkHead(shape)
        self.register_buffer("kept", kept, persistent=False)
        own = shape.own_embedding
        self.embed_tokens = nn.Embedding(words, shape.hidden) if own else None
        own = shape.own_head
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False) if own else None

    def embedded(self, tokens: torch.Tensor, teacher: Teacher) -> torch.Tensor:
        """The tokens' vectors [.., hidden] as slots hold them."""
        if self.embed_tokens is None:
            return teacher.embedded(tokens)
        vectors: torch.Tensor = self.embed_tokens(tokens)
        return vectors

    def matrix(self, teacher: Teacher) -> torch.Tensor:
        """The output matrix [vocab, hidden]."""
        return teacher.head_matrix[self.kept] if self.lm_head is None else self.lm_head.weight

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of a head's file, by its names there."""
        return {
            name.removeprefix("head."): weight.detach() for name, weight in self.named_parameters()
        }

    def outputs(
        self, teacher: Teacher, tokens: torch.Tensor, given: torch.Tensor, blocks: Blocks
    ) -> torch.Tensor:
        """What the slots of blocks give, [B, K · block, hidden]; `tokens` int64 [B, T], `given`
        [B, T, taps · H]: the base's rows."""
        shape, head = self.head.shape, self.head
        at = blocks.places.clamp(max=tokens.shape[1] - 1)
        words = self.embedded(tokens.gather(1, at), teacher).to(given.dtype)
        if head.mask_embedding is None:
            mask = self.embedded(torch.tensor(shape.mask_token, device=tokens.device), teacher)
        else:
            mask = head.mask_embedding
        block = torch.where(blocks.shown[..., None], words, mask.to(words.dtype))
        context = head.context(given)
        everywhere = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        places = BlockPlaces(everywhere, blocks.places)
        out: torch.Tensor = head(context, block, places, beside(shape, places))
        return out


def shape_for(
    config: ModelConfig,
    vocab: int,
    layers: int,
    block: int,
    rank: int,
    intermediate: int,
) -> DSparkShape:
    """A head with layers as wide as the base's and MLPs of `intermediate` (0: the base's). It is
    causal and learns to be shown up to three quarters of a block: each slot is a lesson then, also
    one that is shown."""
    return DSparkShape(
        layers=layers,
        hidden=int(config.hidden_size),
        base_hidden=int(config.hidden_size),
        heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads),
        head_dim=config.head_dim,
        intermediate=intermediate or int(config.intermediate_size),
        eps=float(config.rms_norm_eps),
        rope=Rope(theta=theta_of(config)),
        vocab=vocab,
        block=block,
        aux_hidden=taps_of(int(config.num_hidden_layers)),
        markov_rank=rank,
        markov_rows=vocab if rank else 0,
        causal=True,
        revealed=block - max(1, block // 4),
    )


def taps_of(layers: int) -> tuple[int, ...]:
    """What enters the second layer, which is hardly more than the token, the middle one and the
    last; of a small base all of these that there are."""
    return tuple(sorted({min(1, layers - 1), layers // 2, layers - 1}))


LessonOf = Callable[[TextRows, torch.Tensor], Lesson]
"""What the base computes for rows of text and their tokens."""


class DSparkTrainer(Trainer):
    """The loop for a one-pass head."""

    def __init__(
        self,
        teacher: Teacher,
        student: DSparkStudent,
        settings: TrainingSettings,
        out: Path,
        anchors: int,
        is_new: bool,
        kept_rows: KeptRows | None = None,
    ) -> None:
        """`anchors` blocks in every row of text; `is_new`: whether the head has no weights yet;
        `kept_rows`: of the answers among the rows."""
        self._kept_rows = kept_rows
        self.student, self._out, self._anchors, self._is_new = student, out, anchors, is_new
        matrix = teacher.head_matrix[student.kept]
        self._matrix = matrix.bfloat16() if settings.low else matrix
        super().__init__(teacher, student, optimizers(student, settings), settings, out)

    def begin(self, rows: TextRows) -> None:
        if self._is_new:
            begin(self.student, self.teacher, rows, self._lesson)

    def write(self) -> None:
        head, config = self.student.head, self.teacher.config
        write_head(
            self._out,
            head.shape,
            self.student.tensors(),
            self.student.kept,
            int(config.vocab_size),
            int(config.num_hidden_layers),
            int(config.max_position_embeddings),
        )

    def learn(self, batch: TextRows) -> tuple[float, float]:
        device, shape = self.teacher.device, self.student.head.shape
        # Of the seed and the step alone, so that a run that goes on draws what it would have drawn.
        dice = torch.Generator().manual_seed(self.settings.seed * 100_003 + self.step)
        fading = shape.block / (4 if shape.shows else 2)
        blocks = drawn(batch, shape, self._anchors, fading, dice)
        blocks = Blocks(*(part.to(device) for part in blocks))
        tokens = batch.tokens.to(device, torch.int64)
        lesson = self._lesson(batch, tokens)
        assert lesson.aux_hidden is not None
        out = self.student.outputs(self.teacher, tokens, lesson.aux_hidden, blocks)
        slots = out.detach().requires_grad_()
        found = slot_losses(self.student, self._matrix, tokens, lesson, blocks, slots)
        assert slots.grad is not None
        out.backward(slots.grad)
        return found

    def _lesson(self, batch: TextRows, tokens: torch.Tensor) -> Lesson:
        """What the base computes for a batch, read once."""
        shape, kept = self.student.head.shape, self._kept_rows
        if kept is None or batch.numbers is None or kept.taps != shape.aux_hidden:
            return self.teacher.read(tokens, shape.aux_hidden)
        numbers, dtype = batch.numbers.tolist(), self._matrix.dtype
        found = kept.lesson(numbers, tokens.shape[1], dtype)
        if found is not None:
            return Lesson(*(part.to(self.teacher.device) for part in found if part is not None))
        lesson = self.teacher.read(tokens, shape.aux_hidden)
        assert lesson.aux_hidden is not None
        for number, *rows in zip(numbers, lesson.hidden, lesson.aux_hidden, strict=True):
            kept.keep(number, torch.cat(rows, -1).cpu())
        return lesson


def slot_losses(
    student: DSparkStudent,
    matrix: torch.Tensor,
    tokens: torch.Tensor,
    lesson: Lesson,
    blocks: Blocks,
    out: torch.Tensor,
) -> tuple[float, float]:
    """Losses of what slots gave, [B, K · block, hidden], a leaf whose gradient is set; and the
    share of the blocks' first guesses that are the base's. `matrix`: the base's output matrix, of
    the tokens that are scored.

    A few slots at a time: logits of all of them would be most of the memory.
    """
    head, shape = student.head, student.head.shape
    counts = blocks.weights > 0
    picked = counts.nonzero()
    weights = blocks.weights[counts] / blocks.weights.sum()
    truth_at = blocks.sources[counts]
    first = blocks.sources == (blocks.anchors + blocks.revealed).repeat_interleave(shape.block, 1)
    is_first = first[counts]
    total, hits = 0.0, 0.0
    most = _AT_ONCE if picked.device.type == "cpu" else max(_AT_ONCE, _LOGITS // shape.vocab)
    for part in torch.arange(len(picked), device=picked.device).split(most):
        rows, slots = picked[part].unbind(1)
        here, weight = out[rows, slots], weights[part]
        with torch.no_grad():
            known = lesson.hidden[rows, truth_at[part]]
            likely = torch.softmax((known @ matrix.T).float(), -1)
        before = rows_of(tokens[rows, truth_at[part]], shape, student.kept)
        own = student.lm_head
        logits = here @ matrix.T.to(here.dtype) if own is None else own(here)
        if shape.markov_rank:
            logits = logits + head.markov(before)
        loss, slope = divergence(likely, logits.detach().float())
        logits.backward((slope * weight[:, None]).to(logits.dtype))
        total += float((loss * weight).sum())
        begins = is_first[part]
        hits += int((logits[begins].argmax(-1) == likely[begins].argmax(-1)).sum())
    return total, hits / max(1, int(is_first.sum()))


def divergence(likely: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """CROSS_ENTROPY of cross-entropy and VARIATION of total variation, from probabilities `likely`
    to those of `logits`, float32 [R, V]: the loss [R], and its slope by the logits [R, V]."""
    said = torch.softmax(logits, -1)
    wrong = said - likely
    apart = wrong.abs().sum(-1) / 2
    # log-sum-exp less the mean logit: no logarithm of every probability.
    surprise = torch.logsumexp(logits, -1) - (likely * logits).sum(-1)
    side = wrong.sign() / 2
    lean = (said * side).sum(-1, keepdim=True)
    slope = CROSS_ENTROPY * wrong + VARIATION * said * (side - lean)
    return CROSS_ENTROPY * surprise + VARIATION * apart, slope


def optimizers(student: DSparkStudent, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers and `fc`, AdamW for all else."""
    named = list(student.tensors())
    every = dict(zip(named, student.parameters(), strict=True))
    words = ("mark", "embed", "lm_head")
    inner = [w for name, w in every.items() if w.dim() == 2 and not name.startswith(words)]
    outer = [w for name, w in every.items() if w.dim() != 2 or name.startswith(words)]
    adam = torch.optim.AdamW(outer, settings.rate, betas=(0.9, 0.95), weight_decay=0.0)
    adam.param_groups[0]["share"] = _OUTER_SHARE
    return [muon(inner, settings.rate), adam]


@torch.no_grad()
def begin(student: DSparkStudent, teacher: Teacher, rows: TextRows, lesson_of: LessonOf) -> None:
    """Let the head begin as one that reads every tapped row alike, whatever its size, and whose
    layers add nothing to what is in its slots yet: their tokens."""
    head, shape = student.head, student.head.shape
    squares = torch.zeros(shape.fused_width, device=teacher.device)
    parts = torch.arange(min(len(rows), _FIRST_ROWS)).split(8)
    for part in parts:
        tokens = rows.take(part).trimmed().tokens.to(teacher.device, torch.int64)
        given = lesson_of(rows.take(part).trimmed(), tokens).aux_hidden
        assert given is not None
        squares += given.float().square().mean((0, 1))
    sizes = (squares / len(parts)).sqrt().clamp(min=1e-6)
    taps = len(shape.aux_hidden)
    for name, weight in head.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif weight.dim() == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        elif name.endswith("bias"):
            weight.zero_()
    each = torch.eye(shape.hidden, shape.base_hidden, device=teacher.device) / taps**0.5
    head.fc.weight.copy_(each.repeat(1, taps) / sizes)
    if shape.markov_rank:
        head.markov_head.markov_w2.weight.zero_()
    if head.mask_embedding is not None:
        common = teacher.embedded(torch.arange(256, device=teacher.device)).float()
        head.mask_embedding.copy_(common.mean(0))
    head.norm.weight.copy_(teacher.weights["model.norm.weight"])
