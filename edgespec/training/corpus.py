"""Training corpus: the base, rows of a text file, some of them held out, and the base's own answers
to prompts, half of them greedy, half sampled, kept in a file at once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec.errors import ConfigError
from edgespec.files import write_whole
from edgespec.model.hub import local_folder
from edgespec.model.template_process import render_apart
from edgespec.model.tensors import best_device
from edgespec.model.tokenizer import Tokenizer
from edgespec.training.loop import Remaining, TrainingSettings
from edgespec.training.teacher import KeptRows, Teacher
from edgespec.training.texts import Document, TextRows, documents, encoded, is_held_out, packed

_CHECKED_ROWS = 96
_PROMPT = 32  # tokens of a document that the base continues
_LEAST_ANSWER = 16


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What to train on: the base's folder, the text file, the folder to write, tokens of a row, and
    how many rows at most are of the file, and of the base's own answers."""

    base: Path
    text: Path
    out: Path
    settings: TrainingSettings
    row_length: int
    text_rows: int
    own_rows: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rows to train on; and the base's own answers after held-out documents, to measure on: greedy
    ones, and sampled ones."""

    trained: TextRows
    greedy: TextRows
    sampled: TextRows


def loaded(
    plan: TrainingPlan, say: Callable[[str], None], dtype: torch.dtype
) -> tuple[Teacher, Tokenizer]:
    """The base of a run and its tokenizer; what follows draws by the plan's seed."""
    torch.manual_seed(plan.settings.seed)
    say("loading the base")
    teacher, tokenizer = (
        Teacher(plan.base, best_device(), dtype),
        Tokenizer(local_folder(plan.base)),
    )
    render_apart(tokenizer)
    return teacher, tokenizer


def prepared(
    plan: TrainingPlan,
    tokenizer: Tokenizer,
    teacher: Teacher,
    say: Callable[[str], None],
    kept_rows: KeptRows | None = None,
) -> Corpus:
    """The rows of a run; the base's own are made first, where they are not there yet. `kept_rows`:
    where what the base computes meanwhile is kept.

    The base answers conversations by its chat template, from the whole prompt on, and continues
    the beginnings of other texts; half of that greedily, half sampled. Raises ConfigError for a
    file that is too short, or rows that the base cannot read.
    """
    texts = list(documents(plan.text))
    random.Random(plan.settings.seed).shuffle(texts)
    end = min(tokenizer.eos_ids) if tokenizer.eos_ids else 0
    length = plan.row_length
    limit = int(getattr(teacher.config, "max_position_embeddings", length))
    if not _PROMPT < length <= limit:
        raise ConfigError(f"rows of {length} tokens: give {_PROMPT + 1} to {limit}")
    say(f"reading {plan.text}")
    kept = [document for document in texts if not is_held_out(document.text)]
    plain = [document.text for document in kept if not document.messages]
    rows = packed(encoded(plain, tokenizer, end), length, plan.text_rows)
    prompts = _openings(kept, tokenizer, length, plan.own_rows, say)
    held_out = [document for document in texts if is_held_out(document.text)]
    checks = _openings(held_out, tokenizer, length, _CHECKED_ROWS, say)
    if not len(rows) + len(prompts) or len(checks) < 2:
        raise ConfigError(
            f"{plan.text} is too short: it has {len(rows)} rows of {length} tokens and "
            f"{len(prompts)} prompts to train on, and {len(checks)} documents of {_PROMPT} tokens "
            "held out; give more text"
        )
    file, seed = plan.out / "answers.jsonl", plan.settings.seed
    answers = OwnAnswers(file, teacher, length, end, seed, kept_rows)
    checked = answers.to(checks, say)
    own = answers.to(prompts, say) if prompts else []
    trained = rows.joined(rows_of(own, length, end)) if own else rows
    measured = (rows_of([a for a in checked if a.sampled == one], length, end) for one in (0, 1))
    return Corpus(trained, *measured)


def _openings(
    texts: Sequence[Document],
    tokenizer: Tokenizer,
    length: int,
    most: int,
    say: Callable[[str], None],
) -> list[list[int]]:
    """What the base answers: conversations up to there, and the first tokens of texts that are
    long enough; none twice."""
    found: dict[tuple[int, ...], None] = {}
    left = Remaining(min(most, len(texts)))
    for document in texts:
        if len(found) == most:
            break
        say(f"reading prompts: {left}")
        if document.messages:
            ids = tokenizer.encode_chat(document.messages)
            fits = len(ids) <= length - _LEAST_ANSWER
        else:
            ids = tokenizer.encode(document.text)[:_PROMPT]
            fits = len(ids) == _PROMPT
        if fits and tuple(ids) not in found:
            found[tuple(ids)] = None
            left.done(1)
    return [list(ids) for ids in found]


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """A prompt's tokens and the base's behind them; those from `start` on are the base's own.
    `number`: of its line in the file."""

    tokens: tuple[int, ...]
    start: int
    sampled: bool
    number: int


class OwnAnswers:
    """The base's answers to prompts, of at most `length` tokens with their prompts.

    Every other prompt is answered greedily, the others at temperature 1. What was answered before
    is read from `file`, a line of JSON each, so that a run that is stopped loses a batch at most.
    """

    def __init__(
        self,
        file: Path,
        teacher: Teacher,
        length: int,
        end: int,
        seed: int,
        rows: KeptRows | None = None,
    ) -> None:
        """`end`: the token that ends an answer; `rows`: where what the base computes is kept.
        Raises ConfigError for a file of something else."""
        self._file, self._teacher = file, teacher
        self._length, self._end, self._seed = length, end, seed
        self._rows = rows
        self._known = _read(file) if file.exists() else {}

    def to(self, prompts: Sequence[Sequence[int]], say: Callable[[str], None]) -> list[OwnAnswer]:
        """The answers, in the order of the prompts; those that are missing are made, with progress
        and the time that is left."""
        wanted = [tuple(prompt) for prompt in prompts]
        missing = [
            (prompt, bool(at % 2)) for at, prompt in enumerate(wanted) if prompt not in self._known
        ]
        # Those of one length side by side: a batch is as long as its longest. The batches in any
        # order: a run that is stopped has answers to prompts of all lengths.
        missing.sort(key=lambda one: len(one[0]))
        size = self._teacher.texts_at_once(self._length)
        batches = [missing[at : at + size] for at in range(0, len(missing), size)]
        random.Random(self._seed).shuffle(batches)
        # In tokens, as if no answer ended early.
        left = Remaining(sum(self._length - len(prompt) for prompt, _ in missing))
        with self._file.open("a", encoding="utf-8") as file:
            for batch in batches:
                self._answer(batch, say, left)
                for prompt, _ in batch:
                    file.write(json.dumps(_line(self._known[prompt])) + "\n")
                file.flush()
        return [self._known[prompt] for prompt in wanted]

    def _answer(
        self,
        batch: list[tuple[tuple[int, ...], bool]],
        say: Callable[[str], None],
        left: Remaining,
    ) -> None:
        prompts, drawn = zip(*batch, strict=True)
        room, first = sum(self._length - len(prompt) for prompt in prompts), left.made

        def tell(tokens: int) -> None:
            say(f"own texts: {left} (tokens; batch of {len(prompts)}, longest {tokens})")
            left.done(min(len(prompts), room - (left.made - first)))

        torch.manual_seed(self._seed * 100_003 + len(self._known))
        taps = None if self._rows is None else self._rows.taps
        heat = [float(sampled) for sampled in drawn]
        texts = self._teacher.continued(prompts, self._length, self._end, heat, tell, taps)
        for prompt, sampled, text in zip(prompts, drawn, texts, strict=True):
            number = len(self._known)
            self._known[prompt] = OwnAnswer(text.tokens, len(prompt), sampled, number)
            if self._rows is not None and text.rows is not None:
                self._rows.keep(number, text.rows)
        left.done(room - (left.made - first))


def rows_of(answers: Sequence[OwnAnswer], length: int, end: int) -> TextRows:
    """Rows of `length` tokens, one an answer; what counts begins with the prompt's last token."""
    tokens = torch.full((len(answers), length), end, dtype=torch.int32)
    for row, answer in zip(tokens, answers, strict=True):
        row[: len(answer.tokens)] = torch.tensor(answer.tokens[:length], dtype=torch.int32)
    starts = torch.tensor([answer.start - 1 for answer in answers], dtype=torch.int64)
    ends = torch.tensor([min(len(answer.tokens), length) for answer in answers], dtype=torch.int64)
    numbers = torch.tensor([answer.number for answer in answers], dtype=torch.int64)
    return TextRows(tokens, starts, ends, numbers)


def _line(answer: OwnAnswer) -> dict[str, object]:
    return {"start": answer.start, "sampled": answer.sampled, "tokens": answer.tokens}


def _read(file: Path) -> dict[tuple[int, ...], OwnAnswer]:
    """Answers by their prompts; a last line that was cut off is left out."""
    known: dict[tuple[int, ...], OwnAnswer] = {}
    lines = file.read_text("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
            tokens = tuple(map(int, found["tokens"]))
            answer = OwnAnswer(tokens, found["start"], found["sampled"], len(known))
            known[answer.tokens[: answer.start]] = answer
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise ConfigError(
                    f"line {number} of {file} is no answer ({error}); delete the file, and the "
                    "answers are made again"
                ) from error
    if lines and len(known) < len(lines):
        kept = [json.dumps(_line(answer)) + "\n" for answer in known.values()]
        write_whole(file, "".join(kept))
    return known
