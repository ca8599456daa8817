"""Grammar: what an answer may be by a JSON schema, a regex or a Lark grammar, through llguidance.

To compile one may take any time and memory; model/grammar_process.py tries it first in a process
that can be stopped. What compiled takes bounded work for each token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from edgespec.errors import ConfigError
from edgespec.types.grammar_spec import LAYOUT, GrammarSpec
from edgespec.verify.rules import Answer, Mask

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=20_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""About 5 ms for the mask of a token, and 100 MB of states, at most."""

KEPT_MASKS = 128
"""Masks of the newest answers: the same ones are asked for by the draft and by the head."""

KEPT_GRAMMARS = 8
"""Compiled ones that are there for the next request with the same one."""

_MOST_WORDS = 300


def _source(text: str) -> str:
    """A GrammarSpec as llguidance reads it. Raises ConfigError for one that cannot be read."""
    spec = GrammarSpec.read(text)
    if spec.kind == "regex":
        return str(LLMatcher.grammar_from_regex(spec.text))
    if spec.kind == "lark":
        return str(LLMatcher.grammar_from_lark(spec.text))
    try:
        return str(LLMatcher.grammar_from_json_schema(spec.text, overrides=LAYOUT))  # type: ignore[arg-type]
    except ValueError as problem:
        raise ConfigError(f"the JSON schema cannot be read: {problem}") from None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as llguidance reads it: its tokenizer.json, and the tokens that end an answer."""

    tokenizer: str
    ends: tuple[int, ...]


class GrammarCompiler:
    """Compiles grammars for one vocabulary; calls come from one thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises ConfigError for a tokenizer that llguidance cannot read."""
        if not vocabulary.ends:
            raise ConfigError("this model has no end token, so that no grammar could end an answer")
        try:
            self._tokenizer = LLTokenizer(vocabulary.tokenizer, eos_token=list(vocabulary.ends))
        except Exception as problem:  # whatever its Rust part raises
            words = str(problem)[:_MOST_WORDS]
            raise ConfigError(f"no grammar can be used with this tokenizer: {words}") from None
        self._ends = frozenset(vocabulary.ends)
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, text: str) -> CompiledGrammar:
        """The grammar that a GrammarSpec says. Raises ConfigError for one that cannot be used."""
        matcher = self._known.pop(text, None)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer, _source(text), log_level=0, limits=LIMITS)
            check(matcher)
        self._known[text] = matcher
        if len(self._known) > KEPT_GRAMMARS:
            self._known.popitem(last=False)
        return CompiledGrammar(matcher.deep_copy(), self._ends, self._tokenizer.vocab_size)


class CompiledGrammar:
    """A verify.rules.Grammar: one matcher, which is moved to the answer that it is asked about."""

    def __init__(self, matcher: LLMatcher, ends: Collection[int], vocabulary: int) -> None:
        self._matcher, self._ends, self._vocabulary = matcher, ends, vocabulary
        self._at: Answer = ()
        self._masks: OrderedDict[Answer, Mask] = OrderedDict()

    def allowed(self, answer: Answer) -> Mask:
        mask = self._masks.pop(answer, None)
        if mask is None:
            mask = self._mask() if self._move(answer) else np.zeros(self._vocabulary, np.bool_)
            mask.flags.writeable = False
        self._masks[answer] = mask
        if len(self._masks) > KEPT_MASKS:
            self._masks.popitem(last=False)
        return mask

    def _move(self, answer: Answer) -> bool:
        """False if it is no beginning of what the grammar allows, or has ended."""
        same = len(self._at)
        if answer[:same] != self._at:
            pairs = zip(self._at, answer, strict=False)
            same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(same, len(answer)))
            self._matcher.rollback(len(self._at) - same)
            self._at = answer[:same]
        news = list(answer[same:])
        if any(token in self._ends for token in news):
            return False
        if news and self._matcher.validate_tokens(news) < len(news):
            check(self._matcher)
            return False
        if news:
            self._matcher.try_consume_tokens(news)
            check(self._matcher)
        self._at = answer
        return True

    def _mask(self) -> Mask:
        bits = self._matcher.compute_bitmask()
        check(self._matcher)
        spread = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        return spread[: self._vocabulary].astype(np.bool_)


def check(matcher: LLMatcher) -> None:
    """Raise ConfigError if it has failed."""
    if matcher.is_error():
        words = " ".join(matcher.get_error().split())[:_MOST_WORDS]
        raise ConfigError(f"the grammar cannot be used: {words}")
