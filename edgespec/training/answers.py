"""Answers of the base to prompts, half of them greedy, half sampled, kept in a file at once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec.errors import ConfigError
from edgespec.files import write_whole
from edgespec.training.loop import Remaining
from edgespec.training.teacher import KeptRows, Teacher
from edgespec.training.texts import TextRows


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
        texts = self._teacher.continued(prompts, self._length, self._end, drawn, tell, taps)
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
