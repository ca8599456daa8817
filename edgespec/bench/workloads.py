"""Workloads: lists of prompts, from files of several formats or bundled, and their requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from edgespec.errors import ConfigError
from edgespec.schema import as_type, parse_json
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import Submit

DEFAULT_WORKLOAD = "gsm8k-test-40"
"""The bundled prompts (see prompts/README.md)."""

_FORMATS = (
    'a line holds {"question_id", "category", "turns"} (Spec-Bench), {"question", "answer"} '
    '(GSM8K) or {"prompt"}'
)

_Text = Annotated[str, Meta(min_length=1)]


class _TurnsLine(Struct):
    turns: Annotated[tuple[_Text, ...], Meta(min_length=1)]
    question_id: int | _Text | None = None
    category: str = ""


class _PromptLine(Struct):
    prompt: _Text
    id: int | _Text | None = None
    category: str = ""


class _QuestionLine(Struct):
    question: _Text


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `turns` are what a user says one after the other, at least one."""

    id: str
    category: str
    turns: tuple[str, ...]

    @property
    def text(self) -> str:
        """The first turn."""
        return self.turns[0]


def submit_of(tag: int, text: str, limit: int, sampling: Sampling, policy: str) -> Submit:
    """The request for an answer of at most `limit` tokens."""
    s = sampling
    shape = (float(s.temperature), s.top_k, float(s.top_p), float(s.min_p), s.seed)
    return Submit(tag, text, limit, *shape, (), policy, repetition_penalty=1.0)


def default_prompts(limit: int = 0) -> list[Prompt]:
    """The bundled workload, or its first `limit` prompts."""
    file = resources.files("edgespec") / "bench" / "prompts" / f"{DEFAULT_WORKLOAD}.jsonl"
    return read_prompts(str(file), limit)


def read_prompts(path: str | Path, limit: int = 0) -> list[Prompt]:
    """The prompts in a file, or its first `limit` ones; later lines are not read.

    A file whose name ends in .jsonl, or whose first line opens an object, has one JSON object a
    line (see _FORMATS); any other has one prompt a line. Blank lines are skipped. Raises
    ConfigError, naming the file and the line, for anything else.
    """
    if limit < 0:
        raise ConfigError(f"limit is {limit}; it must be at least 1, or 0 for all prompts")
    prompts: list[Prompt] = []
    for prompt in _prompts(Path(path)):
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise ConfigError(f"{path} holds no prompt; give one a line, or JSON: {_FORMATS}")
    return prompts


def _prompts(path: Path) -> Iterator[Prompt]:
    # Not splitlines: JSON may hold other line separators as they are.
    lines = _read(path).split("\n")
    filled = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    as_json = path.suffix == ".jsonl" or (bool(filled) and filled[0][1].startswith("{"))
    for number, line in filled:
        if not as_json:
            yield Prompt(str(number), "", (line,))
            continue
        where = f"{path}, line {number}"
        prompt = _prompt(parse_json(line, where, _FORMATS), where, number)
        try:
            " ".join((prompt.id, prompt.category, *prompt.turns)).encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{where}: the prompt holds half a surrogate pair, which is no text; replace it"
            ) from None
        yield prompt


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as problem:
        if isinstance(problem, UnicodeDecodeError):
            line = problem.object.count(b"\n", 0, problem.start) + 1
            raise ConfigError(
                f"{path}, line {line}: byte {problem.start} is not valid UTF-8; convert the file, "
                "for instance with iconv"
            ) from None
        reason = getattr(problem, "strerror", None) or problem
        raise ConfigError(
            f"cannot read the prompts in {path}: {reason}; give the path of a readable file"
        ) from None


def _prompt(entry: object, where: str, number: int) -> Prompt:
    """The prompt of one JSON value."""
    if isinstance(entry, dict):
        if "turns" in entry:
            turns = as_type(_TurnsLine, entry, where, _FORMATS)
            name = number if turns.question_id is None else turns.question_id
            return Prompt(str(name), turns.category, turns.turns)
        if "prompt" in entry:
            one = as_type(_PromptLine, entry, where, _FORMATS)
            return Prompt(str(number if one.id is None else one.id), one.category, (one.prompt,))
        if "question" in entry:
            question = as_type(_QuestionLine, entry, where, _FORMATS).question
            return Prompt(str(number), "gsm8k", (f"Question: {question}\nAnswer:",))
    raise ConfigError(f"{where}: there is no prompt in this; {_FORMATS}")
