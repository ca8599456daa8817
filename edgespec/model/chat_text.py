"""Chat text: keeps what people say apart from the control tokens that a chat template writes.

A message that spells a control token (`</s>`, `<|im_start|>`) must not end its turn or begin
another. So such a spelling is put between two marks before the template sees it, characters that
occur nowhere else; what the template does with the text around (trim, cut, change case, look for
the token) it does as ever. After the template the marks are taken out, and the stretches that had
some are encoded without control tokens.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tokenizers.pre_tokenizers import Metaspace

from edgespec.errors import ConfigError

_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Characters without a meaning, of which a conversation has hardly ever one, and no case or width:
no template changes them by accident."""

_CHOSEN = ("role", "type")
"""Names of values that a template compares with words."""

Marks = tuple[str, str]
Json = TypeVar("Json")


class ChatText:
    """Marks and encodes conversations for one tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._inner = tokenizer
        self._special = {
            token.content: token
            for token in tokenizer.added_tokens_decoder.values()
            if token.special and token.content
        }
        known = {tokenizer.convert_tokens_to_ids(name) for name in self._special}
        self._control = known - {tokenizer.unk_token_id}
        # At each place the longest counts, as in the tokenizer itself.
        names = sorted(self._special, key=len, reverse=True)
        self._spelt = "|".join(self._pattern(name) for name in names) or "(?!)"
        self._find = re.compile(self._spelt)

    def _pattern(self, name: str) -> str:
        spelt = re.escape(name)
        return rf"(?<!\w){spelt}(?!\w)" if self._special[name].single_word else spelt

    def mark(self, said: Json, template: str) -> tuple[Json, Marks | None]:
        """What is said (lists, objects and texts) with the control tokens in its texts marked, and
        the marks; None if there are none.

        What a template looks for stays as it is, even if a strange model has a control token that
        is spelt so: names of values, and roles and types, that are plain words. Raises ConfigError
        if no character is left to be a mark.
        """
        texts = list(_texts(said))
        if not any(map(self._find.search, texts)):
            return said, None
        marks = _unused(set(template).union(*map(set, texts)))
        return self._marked(said, rf"{marks[0]}\g<0>{marks[1]}"), marks

    def _marked(self, said: Any, wrapped: str) -> Any:
        if isinstance(said, str):
            return self._find.sub(wrapped, said)
        if isinstance(said, Mapping):
            return {
                self._word(name, wrapped): (self._word if name in _CHOSEN else self._marked)(
                    value, wrapped
                )
                for name, value in said.items()
            }
        return [self._marked(one, wrapped) for one in said] if isinstance(said, list) else said

    def _word(self, said: Any, wrapped: str) -> Any:
        plain = isinstance(said, str) and said.isidentifier()
        return said if plain else self._marked(said, wrapped)

    def encode(self, text: str, marks: Marks | None) -> list[int]:
        """Token ids of what the template wrote.

        Raises ConfigError if the tokenizer makes a control token even of plain text.
        """
        if marks is None:
            return list(self._inner.encode(text, add_special_tokens=False, verbose=False))
        ids: list[int] = []
        rest, strips = "", False
        for piece, special in self._pieces(text, marks):
            if special is None:
                rest += piece
                continue
            rest = rest.rstrip() if special.lstrip else rest
            ids += self._plain(rest.lstrip() if strips else rest, is_first=not ids)
            ids.append(self._inner.convert_tokens_to_ids(piece))
            rest, strips = "", special.rstrip
        return ids + self._plain(rest.lstrip() if strips else rest, is_first=not ids)

    def _pieces(self, text: str, marks: Marks) -> Iterator[tuple[str, Any]]:
        """The text without marks, in pieces: the template's control tokens, and what is plain.

        A mark that lost the other one, as the template cut the text between them, still keeps what
        is on both sides from being read as one control token.
        """
        start, end = marks
        parts = re.split(f"{start}({self._spelt}){end}|[{start}{end}]", text)
        for number, part in enumerate(parts):
            if number % 2:
                yield part or "", None
                continue
            at = 0
            for found in self._find.finditer(part):
                yield part[at : found.start()], None
                yield found[0], self._special[found[0]]
                at = found.end()
            yield part[at:], None

    def _plain(self, text: str, is_first: bool) -> list[int]:
        """Token ids of a stretch of text that has no control tokens, whatever it spells."""
        ids = self._as_text(text, is_first)
        if not self._has_control(ids):
            return ids
        # Some vocabularies list control tokens among the ordinary ones: not of a spelling in two.
        cuts = [0, *(found.start() + 1 for found in self._find.finditer(text)), len(text)]
        ids = []
        for start, end in itertools.pairwise(cuts):
            ids += self._as_text(text[start:end], is_first and not ids)
        if self._has_control(ids):
            raise ConfigError(
                "a message spells a control token of this model in a way that its tokenizer cannot "
                "read as plain text; write it otherwise"
            )
        return ids

    def _has_control(self, ids: Sequence[int]) -> bool:
        return not self._control.isdisjoint(ids)

    def _as_text(self, text: str, is_first: bool) -> list[int]:
        if not text:
            return []
        backend = getattr(self._inner, "backend_tokenizer", None)
        cutting = getattr(backend, "pre_tokenizer", None)
        if is_first or not isinstance(cutting, Metaspace) or cutting.prepend_scheme != "first":
            return self._ordinary(text)
        # This one puts a blank in front of a text, but not of what follows a control token in it.
        cutting.prepend_scheme = "never"
        try:
            return self._ordinary(text)
        finally:
            cutting.prepend_scheme = "first"

    def _ordinary(self, text: str) -> list[int]:
        return list(
            self._inner.encode(
                text, add_special_tokens=False, split_special_tokens=True, verbose=False
            )
        )


def _texts(said: object) -> Iterator[str]:
    """All texts in it, names of objects' values too."""
    if isinstance(said, str):
        yield said
    elif isinstance(said, Mapping):
        for pair in said.items():
            for one in pair:
                yield from _texts(one)
    elif isinstance(said, list):
        for one in said:
            yield from _texts(one)


def _unused(taken: set[str]) -> Marks:
    free = (chr(code) for span in _PRIVATE for code in span if chr(code) not in taken)
    start, end = next(free, ""), next(free, "")
    if not end:
        raise ConfigError(
            "the messages use every private-use character of Unicode; leave two of them out"
        )
    return start, end
