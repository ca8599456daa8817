"""Grammar: what an answer may be by a JSON schema, a regex or a Lark grammar, through llguidance.

To compile one may take any time and memory; model/grammar_process.py tries it first in a process
that can be stopped. What compiled takes bounded work for each token.

llguidance encodes what a grammar forces as the tokenizer encodes text, and would find a control
token (`<|im_end|>`) where a schema or a tool's argument only spells one: so it is given a tokenizer
in which no text spells one.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from edgespec.errors import ConfigError
from edgespec.types.grammar_spec import LAYOUT, GrammarSpec
from edgespec.types.tool_forms import IS_OF_TOOL
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

_DEAD_END = "NoExtensionBias"
"""How llguidance begins to say that no token may come and the answer may not end."""


def _source(spec: GrammarSpec) -> str:
    """A grammar as llguidance reads it. Raises ConfigError for one that cannot be read."""
    if spec.kind == "regex":
        return str(LLMatcher.grammar_from_regex(spec.text))
    if spec.kind == "lark":
        return str(LLMatcher.grammar_from_lark(_as_lark(spec.text)))
    try:
        return str(LLMatcher.grammar_from_json_schema(spec.text, overrides=LAYOUT))  # type: ignore[arg-type]
    except ValueError as problem:
        raise ConfigError(f"the JSON schema cannot be read: {problem}") from None


def _as_lark(text: str) -> str:
    """A grammar in Lark, as which GBNF is written anew. Raises ConfigError."""
    if "::=" not in text or is_lark_syntax(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as problem:  # whatever its parser raises
        words = " ".join(str(problem).split())[:MOST_CHARS]
        raise ConfigError(f"the GBNF grammar cannot be read: {words}") from None


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
            text, control = control_tokens(vocabulary.tokenizer, vocabulary.ends)
            self._tokenizer = LLTokenizer(text, eos_token=list(vocabulary.ends))
        except Exception as problem:  # whatever its Rust part raises
            words = str(problem)[:MOST_CHARS]
            raise ConfigError(f"no grammar can be used with this tokenizer: {words}") from None
        self._ends, self._control = vocabulary.ends, control
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, text: str) -> CompiledGrammar:
        """The grammar that a GrammarSpec says. Raises ConfigError for one that cannot be used."""
        matcher = self._known.pop(text, None)
        if matcher is None:
            spec = GrammarSpec.read(text)
            matcher = LLMatcher(self._tokenizer, _source(spec), log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise ConfigError(refusal(spec, matcher.get_error(), LIMITS))
        self._known[text] = matcher
        if len(self._known) > KEPT_GRAMMARS:
            self._known.popitem(last=False)
        size = self._tokenizer.vocab_size
        found = CompiledGrammar(matcher, self._ends, self._control, size)
        if not found.allowed(()).any():
            words = "no token of this model can begin such an answer"
            raise ConfigError(f"the grammar cannot be used: {words}")
        return found


class CompiledGrammar:
    """A verify.rules.Grammar: one matcher, which is moved to the answer that it is asked about.

    Control tokens do not come up in an answer, but for an end where it may end: not even those that
    a Lark grammar names.
    """

    def __init__(
        self, matcher: LLMatcher, ends: Sequence[int], control: Iterable[int], vocabulary: int
    ) -> None:
        """`matcher`: at the beginning, where it stays."""
        self._first, self._matcher = matcher, matcher.deep_copy()
        self._ends, self._vocabulary = list(ends), vocabulary
        self._control = sorted(index for index in control if index < vocabulary)
        self._at: Answer = ()
        self._masks: OrderedDict[Answer, Mask] = OrderedDict()

    def allowed(self, answer: Answer) -> Mask:
        mask = self._masks.pop(answer, None)
        if mask is None:
            mask = self._mask() if self._move(answer) else self._none()
            mask.flags.writeable = False
        self._masks[answer] = mask
        if len(self._masks) > KEPT_MASKS:
            self._masks.popitem(last=False)
        return mask

    def has_ended(self, answer: Answer) -> bool:
        return any(end in answer for end in self._ends)

    def _move(self, answer: Answer) -> bool:
        """False if it is no beginning of what the grammar allows, or has ended."""
        same = len(self._at)
        if answer[:same] != self._at:
            pairs = zip(self._at, answer, strict=False)
            same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(same, len(answer)))
            self._matcher.rollback(len(self._at) - same)
            self._at = answer[:same]
        news = list(answer[same:])
        if any(end in news for end in self._ends):
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
        if self._matcher.get_error().startswith(_DEAD_END):
            # It can do no more; but guesses lead there, which the answer need not follow.
            self._matcher, self._at = self._first.deep_copy(), ()
            return self._none()
        check(self._matcher)
        spread = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        mask = spread[: self._vocabulary].astype(np.bool_)
        may_end = mask[self._ends] & self._matcher.is_accepting()
        mask[self._control] = False
        mask[self._ends] = may_end
        return mask

    def _none(self) -> Mask:
        return np.zeros(self._vocabulary, np.bool_)


def check(matcher: LLMatcher) -> None:
    """Raise ConfigError if it has failed."""
    if matcher.is_error():
        raise ConfigError(f"the grammar cannot be used: {words_of(matcher.get_error())}")


def control_tokens(tokenizer: str, ends: Collection[int]) -> tuple[str, frozenset[int]]:
    """That tokenizer.json with other names for its control tokens, and their ids, the ends' too.

    Nobody can guess the names. All other text is encoded as ever, and every token keeps its id.
    """
    told = json.loads(tokenizer)
    model, added = told["model"], told["added_tokens"]
    control = {token["id"] for token in added if token["special"]} | {*ends}
    names = {token["content"]: token["id"] for token in added if token["id"] in control}
    for name, index in _numbered(model["vocab"]):
        if index in control and name not in names:  # an end that is an ordinary token
            names[name] = index
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": index, "content": name, "special": True, **flags})
    secret = secrets.token_hex(8)
    news = {name: f"{secret}.{index}" for name, index in names.items()}
    for token in added:
        if token["id"] in control:
            token["content"], token["special"] = news[token["content"]], True
    _rename(model, news)
    return json.dumps(told), frozenset(control)


def _numbered(vocab: Any) -> Iterable[tuple[str, int]]:
    """Names and ids: some algorithms list names with a score, in the order of their ids."""
    if isinstance(vocab, dict):
        return vocab.items()
    return ((piece[0], index) for index, piece in enumerate(vocab))


def _rename(model: Any, news: dict[str, str]) -> None:
    """Give those tokens other names where the algorithm lists them; no merges make them."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {news.get(name, name): index for name, index in vocab.items()}
    else:
        model["vocab"] = [[news.get(name, name), score] for name, score in vocab]
    if "merges" in model:
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [
            [a, b] for a, b in pairs if a not in news and b not in news and a + b not in news
        ]
    if model.get("unk_token") in news:
        model["unk_token"] = news[model["unk_token"]]


SEARCH_S = 0.5
"""Seconds of computing that the search for the place of a fault may take."""

MOST_CHARS = 300

_PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_QUOTED = re.compile(r"\n *\d+ \| .*|; following special tokens are .*|<non-verbose/>", re.DOTALL)


def refusal(spec: GrammarSpec, problem: str, limits: LLParserLimits) -> str:
    """What whoever asks is told of a fault that llguidance has these words for."""
    where, schema, place = [], "", _PLACE.match(problem)
    if spec.kind == "json_schema":
        schema = spec.text
    elif spec.kind == "lark" and place:
        number = int(place[1])
        line = "".join(spec.text.split("\n")[number - 1 : number])
        schema = line.partition(" %json ")[2]
        tool = line.rpartition(IS_OF_TOOL)
        where.append(f"tool {tool[2]}" if tool[1] else f"line {number}")
    with suppress(ValueError, RecursionError):  # there may be no schema
        pointer = _pointer(json.JSONDecoder().raw_decode(schema)[0], limits)
        where += [f"at {pointer!a:.150}"] if pointer else []
    told = words_of(problem[place.end() :] if place else problem)
    return ": ".join(["the grammar cannot be used", *filter(None, [", ".join(where)]), told])


def words_of(problem: str) -> str:
    """llguidance's words in one line, without the grammar that it quotes."""
    return " ".join(_QUOTED.sub("", problem).split())[:MOST_CHARS]


def _pointer(schema: Any, limits: LLParserLimits) -> str:
    """The JSON pointer of a schema's fault: of the innermost part without which it is none, or
    another one; "" if the schema has none."""

    def fault(tried: Any) -> str:
        source = LLMatcher.grammar_from_json_schema(json.dumps(tried), overrides=LAYOUT)  # type: ignore[arg-type]
        return str(LLMatcher.validate_grammar(source, limits=limits))

    until, first = time.process_time() + SEARCH_S, fault(schema)
    if not first:
        return ""

    def inner(path: list[Any], part: Any) -> list[Any]:
        for key in _keys(part):
            if time.process_time() > until:
                break
            if fault(_without(schema, [*path, key])) != first:
                return inner([*path, key], part[key])
        return path

    return "/".join(["#", *map(str, inner([], schema))])


def _keys(part: Any) -> list[Any]:
    """Where to look in it: what has parts itself first."""
    if isinstance(part, list):
        return [n for n, one in enumerate(part) if isinstance(one, dict | list)]
    if not isinstance(part, dict):
        return []
    return sorted(part, key=lambda key: not isinstance(part[key], dict | list))


def _without(whole: Any, path: Sequence[Any]) -> Any:
    """A copy that lacks what is there."""
    found = whole.copy()
    if len(path) > 1:
        found[path[0]] = _without(found[path[0]], path[1:])
    else:
        del found[path[0]]
    return found
