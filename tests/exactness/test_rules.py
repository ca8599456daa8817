"""Promise 1 under rules: with a grammar, penalties and biases the text is plain decoding's too."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from msgspec.structs import replace
from support.growers import SoloGrower
from support.local_ring import LocalRing
from support.schemas import schema_of
from support.smollm2 import smollm2_ring
from support.smollm2 import tokenizer as smollm2_tokenizer
from support.tiers import examples, thorough, tiered
from support.torch_rings import request, tokenizer, torch_ring, transformers_model

from edgespec.drafting.ngram import NgramGuesser
from edgespec.errors import RequestFailed
from edgespec.model.tokenizer import Tokenizer
from edgespec.policy.registry import POLICIES
from edgespec.types.grammar_spec import LAYOUT, json_spec, spec
from edgespec.types.tool_forms import HERMES, Tool
from edgespec.verify.rules import Mask, ThoughtLimit
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import Finished, Submit, TokenBias

NEW_TOKENS = 120
PROMPT = "Describe one thing as JSON, in one line. Answer:"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "London", "Rome"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
SPELT = {
    "type": "object",
    "properties": {"<s>": {"const": "a</s>b"}, "x": {"enum": ["</s>", "<s><s>"]}},
    "required": ["<s>", "x"],
    "additionalProperties": False,
}
"""Spells the control tokens of the bundled pair."""
PENALTIES: dict[str, Any] = {
    "presence_penalty": 1.5,
    "frequency_penalty": 0.7,
    "logit_bias": (TokenBias(5, 3.0), TokenBias(17, -100.0)),
    "repetition_penalty": 1.3,
}


def asked(policy: str, seed: int = 0, temperature: float = 0.0, **rules: Any) -> Submit:
    """That prompt under some rules."""
    ask = request(PROMPT, policy, NEW_TOKENS, temperature=temperature, seed=seed)
    return replace(ask, **rules)


def answer(ring: LocalRing, ask: Submit) -> Finished:
    """The ring's, alone on it."""
    ring.replies.clear()
    return ring.ask(ask)


def valid(schema: object, text: str) -> bool:
    """Whether a text is JSON by that schema, as another program sees it."""
    return bool(jsonschema_rs.validator_for(schema).is_valid(json.loads(text)))


# --- against plain decoding that shares no code -----------------------------------------------


def plainly(
    change: Callable[[Sequence[int], np.ndarray], np.ndarray], most: int
) -> tuple[int, ...]:
    """Greedy decoding by transformers' model, the whole text anew for each token."""
    text, found = tokenizer().encode(PROMPT), []
    with torch.inference_mode():
        while len(found) < most:
            logits = transformers_model()(torch.tensor([text + found])).logits[0, -1].numpy()
            found.append(int(change(found, np.array(logits)).argmax()))
            if found[-1] in tokenizer().eos_ids:
                break
    return tuple(found)


def by_schema(schema: object) -> Callable[[Sequence[int], np.ndarray], np.ndarray]:
    """The logits by a fresh matcher for every token."""
    backend = tokenizer().inner.backend_tokenizer
    known = LLTokenizer(backend.to_str(), eos_token=sorted(tokenizer().eos_ids))
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=LAYOUT)

    def change(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
        matcher = LLMatcher(known, source)
        assert matcher.try_consume_tokens(list(tokens)) == len(tokens)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        may = np.unpackbits(bits, bitorder="little")[: len(logits)].astype(bool)
        return np.where(may, logits, -np.inf)

    return change


def with_penalties(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
    """The logits by PENALTIES, written down one by one."""
    for token in {*tokenizer().encode(PROMPT), *tokens}:
        logits[token] *= 1 / 1.3 if logits[token] > 0 else 1.3
    for one in PENALTIES["logit_bias"]:
        logits[one.token] += one.bias
    for token in set(tokens):
        logits[token] -= PENALTIES["presence_penalty"]
        logits[token] -= PENALTIES["frequency_penalty"] * list(tokens).count(token)
    return logits


def test_three_stages_give_what_transformers_gives_under_a_schema() -> None:
    found = answer(torch_ring(3), asked("adaptive", grammar=json_spec(PERSON)))
    assert found.token_ids == plainly(by_schema(PERSON), NEW_TOKENS)
    assert found.finish_reason == "stop"
    assert valid(PERSON, found.text)


def test_three_stages_give_what_transformers_gives_with_penalties() -> None:
    ask = replace(asked("flowspec", **PENALTIES), max_new_tokens=24)
    assert answer(torch_ring(3), ask).token_ids == plainly(with_penalties, 24)


@pytest.mark.parametrize("policy", tiered(sorted(POLICIES), ["flowspec"]))
def test_an_answer_has_as_many_tokens_as_it_has_to(policy: str) -> None:
    """Its end is what the model likes best, and comes as soon as it may; a token that ends it for
    this request alone may not come before either."""
    (end,) = tokenizer().eos_ids
    first, *_ = plainly(lambda tokens, logits: logits, 1)
    rules: dict[str, Any] = {"stop_token_ids": (first,), "min_tokens": 4}
    rules["logit_bias"] = (TokenBias(end, 100.0),)

    def forbidden(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
        logits[end] = -np.inf if len(tokens) < 4 else np.inf
        logits[first] = -np.inf
        return logits

    found = answer(torch_ring(3), asked(policy, **rules))
    assert found.token_ids == plainly(forbidden, 5)
    assert (found.token_ids[-1], found.finish_reason) == (end, "stop")
    stopped = answer(torch_ring(3), asked(policy, stop_token_ids=(first,)))
    assert (stopped.token_ids, stopped.text, stopped.finish_reason) == ((first,), "", "stop")


@pytest.mark.parametrize("policy", tiered(sorted(POLICIES), ["flowspec"]))
@pytest.mark.parametrize("temperature", tiered([0.0, 0.8], [0.0]))
def test_a_thought_ends_where_its_budget_does(
    monkeypatch: pytest.MonkeyPatch, policy: str, temperature: float
) -> None:
    """With the tokens of its closing mark, whatever the model would say, and then it goes on."""
    closing = tuple(tokenizer().encode("</think>")[1:])
    assert len(closing) > 1
    monkeypatch.setattr(Tokenizer, "thought_marks", ((3,), closing))
    monkeypatch.setattr(Tokenizer, "opens_thought", lambda *_: True)

    def forced(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if 5 <= len(tokens) < 5 + len(closing):
            logits[closing[len(tokens) - 5]] = np.inf
        return logits

    most = 10 + len(closing)
    ask = asked(policy, 2, temperature, thinking_budget=5, max_new_tokens=most)
    found = answer(torch_ring(3), ask)
    assert found.thinks
    assert found.token_ids[5 : 5 + len(closing)] == closing
    plain = answer(torch_ring(3), replace(ask, policy="autoregressive"))
    assert found.token_ids == plain.token_ids
    if temperature == 0:
        assert found.token_ids == plainly(forced, most)


def test_a_thought_that_is_over_has_no_limit() -> None:
    limit = ThoughtLimit(4, (1,), (7, 8))
    assert limit.forced((1, 5, 5, 5)) is None
    assert limit.forced((1, 5, 5, 5, 5)) == 7
    assert limit.forced((1, 5, 5, 5, 5, 7)) == 8
    assert limit.forced((1, 5, 5, 5, 5, 7, 8)) is None
    for over in ((5, 5, 5, 5, 5), (1, 5, 7, 8, 5), (1, 5, 5, 7, 8), (1, 7, 8, 5, 5, 7)):
        assert limit.forced(over) is None
    assert ThoughtLimit(0, (), (7,)).forced(()) == 7


# --- every policy, draft and timing -----------------------------------------------------------


@pytest.mark.parametrize("temperature", tiered([0.0, 0.8], [0.8]))
@pytest.mark.parametrize("policy", tiered(sorted(POLICIES), ["adaptive"]))
def test_every_policy_gives_the_same_tokens(policy: str, temperature: float) -> None:
    for rules, most in (({"grammar": json_spec(PERSON)}, 40), (PENALTIES, 12)):
        ask = replace(asked(policy, 3, temperature, **rules), max_new_tokens=most)
        plain = answer(torch_ring(3), replace(ask, policy="autoregressive"))
        found = answer(torch_ring(3), ask)
        assert found.token_ids == plain.token_ids
        assert found.text == plain.text


@pytest.mark.parametrize("policy", tiered(sorted(POLICIES), ["pipedec"]))
def test_a_schema_that_spells_control_tokens_is_answered_by_every_policy(policy: str) -> None:
    ask = asked(policy, 1, 0.8, grammar=json_spec(SPELT))
    found = answer(torch_ring(3), ask)
    assert found.finish_reason == "stop"
    assert valid(SPELT, found.text), found.text
    plain = answer(torch_ring(3), replace(ask, policy="autoregressive"))
    assert found.token_ids == plain.token_ids


@pytest.mark.parametrize("policy", tiered(sorted(POLICIES), ["pipedec"]))
def test_guesses_that_lead_nowhere_by_the_grammar_end_no_answer(policy: str) -> None:
    """Only an answer that goes there itself is an error: of one request, by every policy."""
    leads = spec("lark", 'start: "x" X | "yes, sir"\nX: /ab+/ & ~/ab.*/')
    x = tokenizer().encode("x")[-1]
    ask = asked(policy, grammar=leads, logit_bias=(TokenBias(x, -50.0),))
    for ring in (torch_ring(3), torch_ring(2, head_last=True, draft_name="ngram")):
        assert answer(ring, ask).text == "yes, sir"
        words = "leaves no token that may come after the first 1 tok"
        with pytest.raises(RequestFailed, match=words):
            answer(ring, replace(ask, logit_bias=(TokenBias(x, 50.0),)))
        assert answer(ring, ask).text == "yes, sir"


@pytest.mark.parametrize(
    "draft",
    tiered(["ngram", "eagle", "eagle3", "dspark", "ppd", "hybrid:ngram+independent"], ["ngram"]),
)
def test_every_draft_source_gives_the_same_tokens(draft: str) -> None:
    for seed, temperature in enumerate((0.0, 0.8)):
        ask = asked("adaptive", seed, temperature, grammar=json_spec(PERSON))
        plain = answer(torch_ring(3), replace(ask, policy="autoregressive"))
        found = answer(torch_ring(3, draft_name=draft), ask)
        assert found.token_ids == plain.token_ids


@given(data=st.data())
@examples(4)
def test_several_live_requests_and_a_lost_ring_change_no_token(data: st.DataObject) -> None:
    last = data.draw(st.booleans(), "head on the last stage")
    ring = torch_ring(3, kept_rows=4096, draft_name="ngram", head_last=last)
    ring.replies.clear()
    seeds = data.draw(st.lists(st.integers(0, 20), min_size=2, max_size=3), "schemas")
    asks = [
        replace(
            asked("adaptive", seed, data.draw(st.sampled_from([0.0, 0.8]), "temperature")),
            tag=tag,
            grammar=json_spec(schema_of(seed)) if tag % 2 else "",
            presence_penalty=0.5,
            max_new_tokens=30,
        )
        for tag, seed in enumerate(seeds, 1)
    ]
    for ask in asks:
        ring.submit(ask)
    for _ in range(data.draw(st.integers(0, 60), "steps before the loss")):
        steps = list(ring.steps())
        if not steps:
            break
        ring.take(data.draw(st.sampled_from(steps), "step"))
    ring.lose("a stage is lost")
    ring.mend()
    ring.run()
    ends = {m.tag: m for m in ring.replies if isinstance(m, Finished)}
    for ask in asks:
        plain = answer(torch_ring(3), replace(ask, policy="autoregressive"))
        assert ends[ask.tag].token_ids == plain.token_ids


# --- many schemas -----------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "count"), [(0, 4), thorough(4, 96), thorough(100, 100)])
def test_answers_to_generated_schemas_are_valid_and_the_same(first: int, count: int) -> None:
    for seed in range(first, first + count):
        schema = schema_of(seed)
        ask = asked("adaptive", seed, seed % 2 * 0.8, grammar=json_spec(schema))
        found = answer(torch_ring(3), ask)
        assert found.finish_reason == "stop", (seed, schema, found.text)
        assert valid(schema, found.text), (seed, schema, found.text)
        plain = answer(torch_ring(3), replace(ask, policy="autoregressive"))
        assert found.token_ids == plain.token_ids, (seed, schema)
        if seed % 10 == 0:
            flow = answer(torch_ring(3), replace(ask, policy="flowspec"))
            assert flow.token_ids == plain.token_ids, (seed, schema)


@pytest.mark.parametrize("count", [thorough(4), pytest.param(200, marks=pytest.mark.slow)])
def test_the_real_model_answers_schemas_validly_and_in_fewer_trips(count: int) -> None:
    ring = smollm2_ring(3, draft_name="ngram")
    tokens, trips = {"schema": 0, "free": 0}, {"schema": 0.0, "free": 0.0}
    for seed in range(count):
        schema = schema_of(seed)
        free = replace(asked("adaptive", seed, seed % 2 * 0.8), max_new_tokens=60)
        ask = replace(free, grammar=json_spec(schema), max_new_tokens=200)
        found = answer(ring, ask)
        assert found.finish_reason == "stop", (seed, schema, found.text)
        assert valid(schema, found.text), (seed, schema, found.text)
        plain = answer(ring, replace(ask, policy="autoregressive"))
        assert found.token_ids == plain.token_ids, (seed, schema)
        for name, end in (("schema", found), ("free", answer(ring, free))):
            tokens[name] += end.new_tokens
            trips[name] += end.trips
    ratio = tokens["schema"] / trips["schema"] / (tokens["free"] / trips["free"])
    print(f"tokens a trip under schemas are {ratio:.2f} times those of free text")
    assert ratio >= 1.2


@pytest.mark.thorough
def test_the_real_model_answers_what_spells_its_control_tokens() -> None:
    ring = smollm2_ring(3, draft_name="ngram")
    paths = {"path": {"enum": ["<filename>", "<|im_start|>user"]}}
    closed = {"properties": paths, "required": ["path"], "additionalProperties": False}
    tool = Tool("read", "", closed)
    called = HERMES.grammar([tool], must=True, several=False)
    named = {"required": ["<|im_start|>user"], "additionalProperties": False}
    schema = {"type": "object", "properties": {"<|im_start|>user": {"const": "a<|im_end|>b"}}}
    for grammar, pattern in (
        (json_spec(schema | named), r'\{"<\|im_start\|>user": "a<\|im_end\|>b"\}'),
        (spec("regex", r"<\|im_(start|end)\|>[a-c]{3}"), r"<\|im_(start|end)\|>[a-c]{3}"),
        (called, r'<tool_call>\n.*"path": "(<filename>|<\|im_start\|>user)".*\n</tool_call>'),
    ):
        ask = replace(asked("adaptive", 5, 0.8, grammar=grammar), max_new_tokens=80)
        found = answer(ring, ask)
        assert re.fullmatch(pattern, found.text), found.text
        plain = answer(ring, replace(ask, policy="autoregressive"))
        assert found.token_ids == plain.token_ids


def test_heads_are_let_in_between_the_masks_of_a_draft() -> None:
    """A grammar may take milliseconds for each path that is guessed after."""
    source, calls, asked_about = SoloGrower(NgramGuesser()), [], []
    grammar = tokenizer().grammar(json_spec(PERSON))

    class Watched:
        def allowed(self, answer: tuple[int, ...]) -> Mask:
            asked_about.append(len(calls))
            return grammar.allowed(answer)

        def has_ended(self, answer: tuple[int, ...]) -> bool:
            raise AssertionError("a draft does not ask")

    source.let_in(lambda: calls.append(None))
    source.open(1, Sampling(), Watched(), 2)
    first = int(grammar.allowed(()).argmax())
    source.expand(1, (5, 6), [(), (first,), (first, 0)], 2)
    assert asked_about[:3] == [0, 1, 2]


# --- what a grammar is ------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000))
@examples(20)
def test_a_grammar_says_the_same_however_it_came_to_an_answer(seed: int) -> None:
    chance, schema = random.Random(seed), schema_of(seed % 200)
    moved = tokenizer().grammar(json_spec(schema))
    answers: list[tuple[int, ...]] = [()]
    for _ in range(30):
        begin = chance.choice(answers)
        may = np.flatnonzero(moved.allowed(begin))
        if len(may):
            answers.append((*begin, int(chance.choice(may.tolist()))))
    for one in chance.sample(answers, min(6, len(answers))):
        fresh = tokenizer().grammar(json_spec(schema))
        assert np.array_equal(moved.allowed(one), fresh.allowed(one)), one


def test_what_a_grammar_forbids_and_what_ends_an_answer_have_nothing_after_them() -> None:
    grammar = tokenizer().grammar(spec("regex", "[ab]"))
    (end,) = tokenizer().eos_ids
    first = int(np.flatnonzero(grammar.allowed(()))[0])
    assert not grammar.allowed((first, first)).any()
    assert np.flatnonzero(grammar.allowed((first,))).tolist() == [end]
    assert not grammar.allowed((first, end)).any()
    assert grammar.allowed(()).any()


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (spec("json_schema", '{"type": "thing"}'), "thing"),
        (spec("json_schema", "[1, 2"), "cannot be read: EOF"),
        (spec("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (spec("regex", "(a"), "grammar cannot be used"),
        (spec("lark", "begin: x"), "grammar cannot be used"),
        ('{"kind": "poem", "text": ""}', "grammar cannot be read"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(grammar: str, words: str) -> None:
    with pytest.raises(RequestFailed, match=words):
        answer(torch_ring(3), asked("adaptive", grammar=grammar))


RULES: list[dict[str, Any]] = [
    {"grammar": json_spec(PERSON), "max_new_tokens": 40},
    {"grammar": json_spec(SPELT), "presence_penalty": 0.5, "max_new_tokens": 40},
    {**PENALTIES, "min_tokens": 12, "max_new_tokens": 12},
    {"thinking_budget": 5, "max_new_tokens": 12, "top": 2},
]


@pytest.mark.parametrize(
    ("policy", "temperature", "draft"),
    [
        ("adaptive", 0.8, "ngram"),
        *(thorough(policy, t, "independent") for policy in sorted(POLICIES) for t in (0.0, 0.8)),
        *(thorough("adaptive", t, "hybrid:ngram+independent") for t in (0.0, 0.8)),
    ],
)
def test_the_head_on_the_last_stage_keeps_all_rules(
    monkeypatch: pytest.MonkeyPatch, policy: str, temperature: float, draft: str
) -> None:
    """To the token, its margin and the log-probabilities that are told of it."""
    closing = tuple(tokenizer().encode("</think>")[1:])
    monkeypatch.setattr(Tokenizer, "thought_marks", ((3,), closing))
    monkeypatch.setattr(Tokenizer, "opens_thought", lambda *_: True)
    for rules in RULES:
        ask, there = asked(policy, 3, temperature, **rules), torch_ring(3, head_last=True)
        if draft != "independent":
            there = torch_ring(2, head_last=True, draft_name=draft)
        plain = answer(torch_ring(3), replace(ask, policy="autoregressive"))
        found = answer(there, ask)
        assert found.token_ids == plain.token_ids, rules
        assert found.smallest_margin == plain.smallest_margin, rules
        assert not any(stage.ledgers() for stage in there.stages)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"logit_bias": (TokenBias(3, 101.0),)}, "logit_bias of token 3"),
        ({"logit_bias": (TokenBias(-1, 1.0),)}, "negative"),
        ({"logit_bias": (TokenBias(999_999, 1.0),)}, "token 999999"),
    ],
)
def test_penalties_out_of_range_are_refused(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestFailed, match=words):
        answer(torch_ring(3), asked("adaptive", **rules))


def test_the_real_models_vocabulary_is_read() -> None:
    mask = smollm2_tokenizer().grammar(json_spec(PERSON)).allowed(())
    assert len(mask) >= 49152
    assert smollm2_tokenizer().decode(np.flatnonzero(mask)[:1].tolist()).startswith("{")
