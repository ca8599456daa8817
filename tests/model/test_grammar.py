"""Grammars and control tokens: what spells one is text, and none but an end is ever allowed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from support.schemas import schema_of
from support.smollm2 import tokenizer as smollm2_tokenizer
from support.tiers import examples, thorough
from support.torch_rings import tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgespec.errors import ConfigError
from edgespec.model.grammar import CompiledGrammar, GrammarCompiler, Vocabulary
from edgespec.types.grammar_spec import FORMATS, LAYOUT, json_spec, leaves_out, spec
from edgespec.types.tool_forms import HERMES, Tool
from edgespec.verify.rules import Rules


class Told:
    """A vocabulary, and what is to be known of it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.compiler = GrammarCompiler(vocabulary)
        self.backend = Tokenizer.from_str(vocabulary.tokenizer)
        self.ends = set(vocabulary.ends)
        added = self.backend.get_added_tokens_decoder().items()
        self.control = {index for index, token in added if token.special} | self.ends
        self.names = [str(self.backend.id_to_token(index)) for index in sorted(self.control)]

    def text(self, answer: list[int]) -> str:
        return str(self.backend.decode(answer, skip_special_tokens=True))

    def plain(self, text: str) -> list[int]:
        """Its tokens, control tokens being text."""
        self.backend.encode_special_tokens = True
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def answered(self, grammar: str, chance: random.Random) -> list[int]:
        """An answer by chance, every mask on the way looked at."""
        held, answer = self.compiler.compile(grammar), list[int]()
        while True:
            may = {*np.flatnonzero(held.allowed(tuple(answer))).tolist()}
            assert may, (grammar, self.text(answer))
            assert may & self.control <= self.ends, (grammar, self.text(answer))
            if may & self.ends:
                assert not held.allowed((*answer, min(self.ends))).any()
                return answer
            answer.append(chance.choice(sorted(may)))


CONTROL = ("<s>", "<|end|>", "<file>")


def merged(kind: str) -> Vocabulary:
    """One in which merges make a control token, and an end is an ordinary token, or pieces with
    scores are both."""
    letters = sorted(set("".join(CONTROL) + 'abc{}": ,x_-'))
    if kind == "merges":
        parts = ["<|", "end", "|>", "en", "<|end", *CONTROL, "ab"]
        pairs = [("<", "|"), ("|", ">"), ("e", "n"), ("en", "d"), ("<|", "end"), ("<|end", "|>")]
        pairs += [("a", "b")]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {name: n for n, name in enumerate(dict.fromkeys([*alphabet, *parts]))}
        made = Tokenizer(models.BPE(vocab, pairs, unk_token="<s>"))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<file>")])
    else:
        octets = [f"<0x{n:02X}>" for n in range(256)]
        names = dict.fromkeys([*CONTROL, *octets, *letters, "ab", "end"])
        pieces = [(name, -float(n)) for n, name in enumerate(names)]
        made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        made.add_special_tokens([AddedToken(name, special=True) for name in CONTROL])
    return Vocabulary(made.to_str(), (made.token_to_id("<|end|>"),))


@lru_cache
def told(name: str) -> Told:
    if name == "toy":
        return Told(tokenizer().vocabulary)
    return Told(smollm2_tokenizer().vocabulary if name == "smollm2" else merged(name))


def grammars(text: str) -> Iterator[tuple[str, Any]]:
    """Kinds of grammar by which the answer is that text, or JSON of that value."""
    yield spec("regex", re.sub(r"[][\\.+*?()|{}^$/]", r"\\\g<0>", text)), None
    yield spec("lark", f"start: {json.dumps(text, ensure_ascii=False)}"), None
    named = {"type": "object", "required": [text], "additionalProperties": False}
    yield json_spec({"const": text}), text
    yield json_spec({"enum": [text]}), text
    yield json_spec({**named, "properties": {text: {"const": text}}}), {text: text}
    arguments = {**named, "properties": {text: {"enum": [text]}}}
    yield HERMES.grammar([Tool("f", "", arguments)], must=True, several=False), {text: text}


@pytest.mark.parametrize("name", ["toy", "merges", "pieces", thorough("smollm2")])
@given(data=st.data())
@examples(60)
def test_what_spells_a_control_token_is_answered_as_text(name: str, data: st.DataObject) -> None:
    one = told(name)
    parts = st.sampled_from(one.names) | st.text("ab c<|>_x", max_size=3)
    text = "".join(data.draw(st.lists(parts, min_size=1, max_size=4), "text")) + "x"
    chance = random.Random(data.draw(st.integers(0, 99), "seed"))
    for grammar, value in grammars(text):
        found = one.text(one.answered(grammar, chance))
        if value is None:
            assert found == text
        elif "lark" in grammar:
            assert found == HERMES.calls([("f", json.dumps(value))])
        else:
            assert json.loads(found) == value


@pytest.mark.parametrize("name", ["toy", thorough("smollm2")])
def test_it_is_encoded_as_the_plain_text_around_it(name: str) -> None:
    one = told(name)
    text = f"a{one.names[0]}b, {one.names[1]}{one.names[1]} c"
    answer = one.answered(spec("regex", re.escape(text)), random.Random(0))
    assert answer == one.plain(text)


@pytest.mark.parametrize(("name", "count"), [("toy", 8), thorough("smollm2", 60)])
def test_where_nothing_spells_one_masks_are_llguidances_own(name: str, count: int) -> None:
    vocabulary = (smollm2_tokenizer() if name == "smollm2" else tokenizer()).vocabulary
    plain = LLTokenizer(vocabulary.tokenizer, eos_token=list(vocabulary.ends))
    for seed in range(count):
        schema, chance = schema_of(seed), random.Random(seed)
        held, answer = told(name).compiler.compile(json_spec(schema)), list[int]()
        matcher = LLMatcher(
            plain, LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=LAYOUT)
        )
        for _ in range(40):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            right = np.unpackbits(bits, bitorder="little")[: plain.vocab_size]
            assert np.array_equal(held.allowed(tuple(answer)), right), (seed, answer)
            answer.append(int(chance.choice(np.flatnonzero(right))))
            if answer[-1] in vocabulary.ends:
                break
            assert matcher.consume_token(answer[-1])


# --- Lark grammars that ask for more ------------------------------------------------------------


def after(grammar: str, *texts: str) -> set[str]:
    """What may come after these tokens of the toy model, by name."""
    held = tokenizer().grammar(spec("lark", grammar))
    answer = tuple(tokenizer().inner.convert_tokens_to_ids(list(texts)))
    may = np.flatnonzero(held.allowed(answer)).tolist()
    return {*tokenizer().inner.convert_ids_to_tokens(may)}


def test_a_lark_grammar_brings_in_no_control_token() -> None:
    assert after('start: "a" <[0]> "b"', "a") == set()
    assert after('start: "a" <[1]> "b"', "a") == set()
    assert after('start: "a" (<[0]> | "c") "b"', "a") == {"c"}
    whatever = after('start: "a" <[*]> "b"', "a")
    assert len(whatever) == 2046
    assert not whatever & {"<s>", "</s>"}
    for control in ("<s>", "</s>"):
        with pytest.raises(ConfigError, match=f"line 1: unknown special token: .{control}"):
            after(f'start: "a" {control}')
    with pytest.raises(ConfigError, match="no token of this model can begin"):
        after("start: <[0]>")


def test_an_end_is_allowed_only_where_the_answer_may_end() -> None:
    assert after('start: t "foo"\nt[stop=""]: /[a-c]+/', "a") >= {"a", "f"}
    assert "</s>" not in after('start: t "foo"\nt[stop=""]: /[a-c]+/', "a")
    assert "</s>" in after('start: t\nt[stop=""]: /[a-c]+/', "a")


# --- where nothing may come ---------------------------------------------------------------------

DEAD_END = 'start: "x" X | "yes"\nX: /ab+/ & ~/ab.*/'


def held_to(grammar: str) -> tuple[CompiledGrammar, dict[str, int]]:
    ids = tokenizer().inner.get_vocab()
    return tokenizer().grammar(spec("lark", grammar)), ids


def test_a_dead_end_is_an_error_of_who_goes_there_and_of_nobody_else() -> None:
    held, ids = held_to(DEAD_END)
    x, y, end = ids["x"], ids["y"], ids["</s>"]
    for _ in range(2):  # looking there changes nothing
        assert not held.allowed((x,)).any()
        assert held.allowed(()).any()
        assert held.allowed((y,)).any()
    rules, logits = Rules(held), np.zeros(len(ids))
    for dead in ((x,), (x, y), (y, y)):
        with pytest.raises(ConfigError, match=rf"grammar leaves no token .* first {len(dead)} tok"):
            rules.applied(logits, dead)
    assert np.isneginf(rules.applied(logits, (y,))).any()
    whole = tuple(tokenizer().encode("yes")[1:])
    assert np.flatnonzero(rules.applied(logits, whole) == 0).tolist() == [end]
    assert np.array_equal(rules.applied(logits, (*whole, end)), logits)  # which nobody reads


# --- formats ------------------------------------------------------------------------------------

UNKNOWN = ("int32", "int64", "uri-reference", "password", "binary", "regex", "json-pointer", "idn")


def test_a_format_that_is_not_known_is_an_annotation() -> None:
    for name in UNKNOWN:
        one = {"type": "string", "format": name, "maxLength": 3}
        nested = {
            "type": "object",
            "properties": {
                "format": one,
                "const": {"anyOf": [one, {"type": "array", "items": one, "prefixItems": [one]}]},
                "properties": {"properties": {"default": one}, "patternProperties": {"^a": one}},
                "kept": {"const": {"format": name}, "default": {"format": name}},
                "listed": {"enum": [{"format": name}], "examples": [{"format": name}]},
            },
            "required": ["format"],
            "additionalProperties": one,
            "$defs": {"format": one},
        }
        tokenizer().grammar(json_spec(nested))
        tokenizer().grammar(HERMES.grammar([Tool("f", "", nested)], must=True, several=True))
        cut = json.loads(json.loads(json_spec(nested))["text"])
        assert json.dumps(cut).count(f'"format": "{name}"') == 4, "those of values"
        assert cut["properties"]["format"] == {"type": "string", "maxLength": 3}
        assert cut["required"] == ["format"]


def test_a_format_that_is_known_is_held_to() -> None:
    for name in FORMATS:
        schema = {"type": "string", "format": name}
        assert json.loads(json.loads(json_spec(schema))["text"]) == schema
        held = tokenizer().grammar(json_spec(schema))
        quote = int(np.flatnonzero(held.allowed(()))[0])
        text = tokenizer().encode('" "')[-2]
        assert not held.allowed((quote,))[text], name


# --- what is refused, and how -------------------------------------------------------------------

UNHELD = {"type": "array", "contains": {}}


@pytest.mark.parametrize(
    ("schema", "pointer", "words"),
    [
        (UNHELD, "#/contains", "contains"),
        (
            {"properties": {"a": {"items": UNHELD}}},
            "#/properties/a/items/contains",
            "contains",
        ),
        ({"$ref": "#/$defs/b", "$defs": {"b": UNHELD}}, "#/$defs/b/contains", "contains"),
        ({"anyOf": [{"type": "null"}, {"type": "thing"}]}, "#/anyOf/1/type", "thing"),
        ({"properties": {"a\n": {"pattern": "(a"}}}, "#/properties/a\n/pattern", "unclosed"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_by_the_place_in_it(
    schema: dict[str, Any], pointer: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        tokenizer().grammar(json_spec(schema))
    assert f"at {pointer!a}: " in str(caught.value)
    assert words in str(caught.value)
    tools = [Tool("good", "", {}), Tool("bad-one", "", {"properties": {"f": schema}})]
    if "$ref" in schema:
        return
    for must in (True, False):
        with pytest.raises(ConfigError) as caught:
            tokenizer().grammar(HERMES.grammar(tools, must=must, several=True))
        said = str(caught.value)
        assert f'tool "bad-one", at {"#/properties/f" + pointer[1:]!a}: ' in said
        assert words in said
        assert "%json" not in said
        assert "\n" not in said


def test_a_long_name_does_not_hide_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="contains") as caught:
        tokenizer().grammar(json_spec({"properties": {"a" * 10_000: UNHELD}}))
    assert len(str(caught.value)) < 500


def test_gbnf_is_read_as_what_it_says_in_lark() -> None:
    gbnf = 'root ::= "a" digits?\ndigits ::= [0-9]+ # some\n'
    held = tokenizer().grammar(spec("lark", gbnf))
    plain = tokenizer().grammar(spec("lark", 'start: "a" DIGITS?\nDIGITS: /[0-9]+/\n'))
    for text in ("a", "a12", "b", "ab"):
        tokens = tuple(tokenizer().encode(text)[1:])
        assert (held.allowed(tokens) == plain.allowed(tokens)).all(), text
    for wrong in ("root ::= nowhere", "root ::= (", "leaf ::= [a-"):
        with pytest.raises(ConfigError, match=r"the GBNF grammar cannot|the grammar cannot"):
            tokenizer().grammar(spec("lark", wrong))


def test_what_no_grammar_can_hold_a_text_to_is_left_out() -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
    named = {"properties": {"uniqueItems": {"const": "uniqueItems"}}}
    assert leaves_out({"anyOf": [schema]})
    assert not leaves_out(named)
    tokens = tuple(tokenizer().encode("[1, 1]")[1:])
    held = tokenizer().grammar(json_spec(schema))
    assert all(t in np.flatnonzero(held.allowed(tokens[:n])) for n, t in enumerate(tokens))


def test_a_lark_grammar_that_cannot_be_used_is_refused_by_its_line() -> None:
    with pytest.raises(ConfigError, match=r"used: line 3: .*nowhere") as caught:
        tokenizer().grammar(spec("lark", "start: a\n\na: nowhere\n"))
    assert "start:" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"used: line 1: .*nowhere"):
        tokenizer().grammar(spec("lark", 'start: %json {"type": "null"} nowhere'))
