"""Workloads: lists of prompts, from files of several formats or bundled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError

DEFAULT_WORKLOAD = "gsm8k-test-40"
"""The bundled prompts (see prompts/README.md)."""

_FORMATS = (
    'a line holds {"question_id", "category", "turns"} (Spec-Bench), {"question", "answer"} '
    '(GSM8K) or {"prompt"}'
)


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


def default_prompts(limit: int = 0) -> list[Prompt]:
    """The bundled workload, or its first `limit` prompts."""
    file = resources.files("edgespec") / "bench" / "prompts" / f"{DEFAULT_WORKLOAD}.jsonl"
    return read_prompts(str(file), limit)


def read_prompts(path: str | Path, limit: int = 0) -> list[Prompt]:
    """The prompts in a file, or its first `limit` ones; lines behind them are not looked at.

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
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise ConfigError(f"{where}: this is not JSON ({problem}); {_FORMATS}") from None
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: this is no JSON object; {_FORMATS}")
        yield _prompt(entry, where, number)


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


def _prompt(entry: Mapping[str, Any], where: str, number: int) -> Prompt:
    """The prompt of one JSON object."""
    if "turns" in entry:
        turns = entry["turns"]
        if not isinstance(turns, list) or not turns:
            raise ConfigError(f"{where}: turns must be a list of at least one text")
        return Prompt(
            _id(entry.get("question_id", number), where, "question_id"),
            _text(entry.get("category", ""), where, "category", empty=True),
            tuple(_text(turn, where, f"turns[{at}]") for at, turn in enumerate(turns)),
        )
    if "prompt" in entry:
        return Prompt(
            _id(entry.get("id", number), where, "id"),
            _text(entry.get("category", ""), where, "category", empty=True),
            (_text(entry["prompt"], where, "prompt"),),
        )
    if "question" in entry:
        question = _text(entry["question"], where, "question")
        return Prompt(str(number), "gsm8k", (f"Question: {question}\nAnswer:",))
    raise ConfigError(f"{where}: there is no prompt in this object; {_FORMATS}")


def _id(value: object, where: str, key: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _text(value, where, key, kind="a number or a text")


def _text(value: object, where: str, key: str, kind: str = "a text", *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        kind += "" if empty else " that is not empty"
        raise ConfigError(f"{where}: {key} is {_shown(value)}; it must be {kind}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            f"{where}: {key} holds half a surrogate pair, which is no text; replace it"
        ) from None
    return value


def _shown(value: object) -> str:
    """A value in a message: not longer than a message should be."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
