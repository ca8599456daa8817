"""Training text: documents of a file, those that are held out, and rows of tokens made of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec.errors import ConfigError
from edgespec.model.tokenizer import Tokenizer

HELD_OUT_ONE_IN = 50


@dataclass(frozen=True, slots=True)
class TextRows:
    """Rows of tokens, int32 [N, T]; of each, those from `starts` [N] to `ends` [N] - 1 count.
    `numbers` int64 [N]: of the base's own answers, -1 for other rows; None: there are none."""

    tokens: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    numbers: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, index: torch.Tensor) -> TextRows:
        numbers = None if self.numbers is None else self.numbers[index]
        return TextRows(self.tokens[index], self.starts[index], self.ends[index], numbers)

    def trimmed(self) -> TextRows:
        """Without the columns behind the last token that counts."""
        wide = int(self.ends.max())
        return TextRows(self.tokens[:, :wide], self.starts, self.ends, self.numbers)

    def joined(self, *others: TextRows) -> TextRows:
        """These and others, of one length."""
        every = (self, *others)
        tokens = torch.cat([rows.tokens for rows in every])
        starts, ends = (torch.cat([getattr(r, name) for r in every]) for name in ("starts", "ends"))
        numbers = [
            torch.full((len(rows),), -1) if rows.numbers is None else rows.numbers for rows in every
        ]
        return TextRows(tokens, starts, ends, torch.cat(numbers))


@dataclass(frozen=True, slots=True)
class Document:
    """What one line of a file says: a text, or the messages of a conversation up to where the base
    answers, of which `text` is the JSON."""

    text: str
    messages: tuple[dict[str, str], ...] = ()


def documents(file: Path) -> Iterator[Document]:
    """The documents of a text file: one a line, or of a .jsonl file the "text" or the "messages" of
    each object.

    Raises ConfigError for a file that cannot be read as that.
    """
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                document = _document_of(line, file, number)
                if document.text.strip():
                    yield document
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {file} ({error}); give a UTF-8 file with one document a line, or JSONL "
            'with objects that have a "text" or "messages"'
        ) from error


def _document_of(line: str, file: Path, number: int) -> Document:
    if file.suffix != ".jsonl" or not line.strip():
        return Document(line)
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if isinstance(found, dict):
        text, messages = found.get("text"), found.get("messages")
        if isinstance(text, str):
            return Document(text)
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            said = tuple({"role": one["role"], "content": one["content"]} for one in messages)
            return Document(json.dumps(said, ensure_ascii=False), said)
    raise ConfigError(
        f'line {number} of {file} is no JSON object with a "text" or with "messages" that have '
        "a role and content; correct it"
    )


def _is_message(found: object) -> bool:
    return isinstance(found, dict) and all(
        isinstance(found.get(key), str) for key in ("role", "content")
    )


def is_held_out(text: str) -> bool:
    """Whether a document is never trained on: one in fifty, by its SHA-256."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def encoded(texts: Iterable[str], tokenizer: Tokenizer, end: int) -> Iterator[torch.Tensor]:
    """Tokens of each document as the model reads it, int32, with the token `end` after them."""
    for text in texts:
        yield torch.tensor([*tokenizer.encode(text), end], dtype=torch.int32)


def packed(encodings: Iterable[torch.Tensor], length: int, most: int) -> TextRows:
    """At most `most` rows of `length` tokens: documents one after the other.

    A document starts a row again, whole, if the row before has cut it.
    """
    rows: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []
    space = length
    for document in encodings:
        left = document
        while len(left) >= space:
            rows.append(torch.cat([*parts, left[:space]]))
            parts, rest, space = [], left[space:], length
            if len(rows) == most:
                return whole(rows, length)
            left = document if len(rest) > 0 and len(document) < length else rest
        if len(left):
            parts.append(left)
            space -= len(left)
    return whole(rows, length)


def whole(rows: list[torch.Tensor], length: int) -> TextRows:
    """Rows of which every token counts."""
    count = len(rows)
    tokens = torch.stack(rows) if rows else torch.zeros((0, length), dtype=torch.int32)
    return TextRows(tokens, torch.zeros(count, dtype=torch.int64), torch.full((count,), length))


def counted_tokens(rows: TextRows) -> torch.Tensor:
    """The tokens of all rows that count, int64, one after the other."""
    place = torch.arange(rows.tokens.shape[1])
    counts = (place >= rows.starts.clamp(min=0)[:, None]) & (place < rows.ends[:, None])
    return rows.tokens[counts].long()
