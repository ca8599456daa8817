"""Text bound: how many characters a token can stand for at most, by a tokenizer's stages.

A prompt that is longer cannot fit, and is refused without the seconds that it takes to encode it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Stage = Mapping[str, Any]

_COMPOSED = 4
"""Characters that Unicode's normal forms C and KC may make one of: a letter and three accents."""

_LENGTHEN = {"Prepend", "NFD", "NFKD", "Lowercase", "ByteLevel"}
_CUT = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "Punctuation", "Split"}
_DROP_BLANKS = {"WhitespaceSplit", "Whitespace"}
BYTES = {chr(byte): byte for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
"""Byte by the letter that byte-level tokenizers (GPT-2's and most since) write for it: the letter
of that number, or one from U+0100 on."""
_UNSPELT = [byte for byte in range(256) if chr(byte) not in BYTES]
BYTES |= {chr(256 + number): byte for number, byte in enumerate(_UNSPELT)}
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


@dataclass(frozen=True, slots=True)
class TextBound:
    """`chars`: characters of one token at most. `blanks`: whether blanks count among them, or may
    be dropped: those beside a control token that swallows them, or between words."""

    chars: int
    blanks: bool

    def counted(self, text: str) -> int:
        """The characters of a text of which each takes its share of a token."""
        return len(text) if self.blanks else sum(map(len, text.split()))


def bound_of(tokenizer: Stage) -> TextBound | None:
    """That of a tokenizer, by what its tokenizer.json says.

    None if it may drop characters that are not blank, or make one token of any number of them (of
    an unknown word), or has a stage that is not known here: then nothing can be said beforehand.
    """
    model = tokenizer.get("model") or {}
    normal, cuts = _flat(tokenizer.get("normalizer")), _flat(tokenizer.get("pre_tokenizer"))
    vocabulary = _vocabulary(model)
    by_bytes = any(stage.get("type") == "ByteLevel" for stage in (*normal, *cuts))
    if not _spells_all(model, vocabulary, by_bytes):
        return None
    factor, blanks = 1, True
    for stage in normal:
        if stage.get("type") == "Strip":
            blanks = False
            continue
        more = _shortened(stage)
        if more is None:
            return None
        factor *= more
    for stage in cuts:
        if stage.get("type") in _DROP_BLANKS:
            blanks = False
        elif stage.get("type") not in _CUT or stage.get("behavior") == "Removed":
            return None
    added = tokenizer.get("added_tokens") or ()
    blanks = blanks and not any(token.get("lstrip") or token.get("rstrip") for token in added)
    longest = max(map(len, (*vocabulary, *(token["content"] for token in added))), default=0)
    return TextBound(longest * factor, blanks) if longest else None


def _flat(stage: Stage | None) -> list[Stage]:
    if stage is None:
        return []
    if stage.get("type") != "Sequence":
        return [stage]
    inner = stage.get("normalizers") or stage.get("pretokenizers") or ()
    return [one for each in inner for one in _flat(each)]


def _vocabulary(model: Stage) -> set[str]:
    listed = model.get("vocab") or ()
    return set(listed) if isinstance(listed, Mapping) else {entry[0] for entry in listed}


def _spells_all(model: Stage, vocabulary: set[str], by_bytes: bool) -> bool:
    """Whether every character gets a token, or a share of one, whatever it is."""
    if model.get("byte_fallback"):
        return model.get("type") in ("BPE", "Unigram") and vocabulary >= _BYTE_TOKENS
    if model.get("type") != "BPE":
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if by_bytes and vocabulary >= BYTES.keys():
        return True
    return bool(model.get("unk_token")) and not model.get("fuse_unk")


def _shortened(stage: Stage) -> int | None:
    """Characters that a normaliser may make one of; None if it is not known, or drops any."""
    kind = stage.get("type")
    if kind in _LENGTHEN:
        return 1
    if kind in ("NFC", "NFKC"):
        return _COMPOSED
    if kind == "Replace":
        what = (stage.get("pattern") or {}).get("String")
        by = stage.get("content")
        return len(what) if what and by else None
    return None
