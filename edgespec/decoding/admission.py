"""Admission: turns a client's Submit into a request, or says why it cannot be served.

What costs no time is said at once; the prompt is encoded beside the I/O loop (EncodePrompt).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from edgespec.config import FREE_SOURCES
from edgespec.decoding.answer import Answer, RequestClient, TextCodec
from edgespec.decoding.effects import EncodePrompt
from edgespec.decoding.events import PromptEncoded
from edgespec.decoding.request import Request
from edgespec.decoding.shared import Shared
from edgespec.decoding.target_walk import choosing_of
from edgespec.errors import CapacityError, ConfigError, EdgespecError, PeerLost, QueueFull
from edgespec.policy.base import Policy
from edgespec.policy.registry import policy_named
from edgespec.types.features import NO_NEEDS, DraftNeeds
from edgespec.types.record import MOST_CHARS
from edgespec.types.usual_sampling import NAMES, NOTHING_SAID, UsualSampling
from edgespec.verify.rules import Rules, ThoughtLimit
from edgespec.verify.sampling import Sampling
from edgespec.verify.top_logprobs import MOST
from edgespec.wire.client_messages import Submit


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """What the coordinator knows of its ring and model.

    `context_length`: tokens that the base model can hold. `prefill_chunk`: prompt rows that travel
    together at most; several chunks follow each other round the ring. `draft`: the draft source's
    name, "" if there is none. `queue_limit`: requests that may wait. `recovery`: seconds that a
    request waits for a ring that was lost; with 0 it fails at once. `kept_rows`: cache rows that
    live requests and answered ones, whose conversations may go on, may take up together; with 0
    nothing is kept, and the live ones have no limit. `shares_prefixes`: rows of one asker may be of
    use to another. `needs`: what the draft source must be given;
    `sources`: the names of its members, in the order of the bits of their guesses. `head_last`: the
    output head is on the last stage, so that neither hidden rows nor PPD rows come back for a draft
    source. `live`: requests that are answered at once, at most.
    `vocabulary`: how many tokens the model has. `own_stage`: the stage on the coordinator's device,
    0: none. `usual`: how it is sampled where a request does not say. `folds`: some layers fold
    rows into states (types.boundaries): guesses are not far ahead, and no request begins with rows
    of another; then a request counts as `state_rows` more, for what these take however long it is.
    """

    stages: int
    context_length: int
    draft: str
    prefill_chunk: int = 64
    queue_limit: int = 64
    recovery: float = 60.0
    kept_rows: int = 0
    shares_prefixes: bool = False
    needs: DraftNeeds = NO_NEEDS
    sources: tuple[str, ...] = ()
    head_last: bool = False
    live: int = 1
    vocabulary: int = 1 << 31
    own_stage: int = 0
    usual: UsualSampling = NOTHING_SAID
    folds: bool = False
    state_rows: int = 0

    def __post_init__(self) -> None:
        assert self.live >= 1
        assert not self.head_last or self.needs == NO_NEEDS, "see DraftChoice.check_head"

    @property
    def has_free_guesses(self) -> bool:
        """Whether some of its draft sources run no model, and others do."""
        free = [name in FREE_SOURCES for name in self.sources]
        return any(free) and not all(free)


MOST_PENALTY, MOST_BIAS = 2.0, 100.0
"""As in OpenAI's API."""
MOST_REPETITION = 10.0


def admit(
    ring: CoordinatorSettings,
    codec: TextCodec,
    shared: Shared,
    number: int,
    peer: bytes,
    submit: Submit,
    now: float,
) -> Request:
    """The request that `submit` asks for, its prompt not encoded yet.

    Raises ConfigError, or CapacityError for a prompt that is surely too long, fit for the user.
    """
    # Of a prompt that is not answered nothing is guessed.
    policy = _checked_policy(ring, submit.policy if submit.max_new_tokens else "autoregressive")
    shape = _shape(ring, submit)
    sampling = Sampling(shape.temperature, shape.top_k, shape.top_p, shape.min_p, submit.seed)
    for name, top in [("top_logprobs", submit.top), ("prompt_logprobs", submit.prompt_top)]:
        if not -1 <= top <= MOST:
            raise ConfigError(f"{name} is {top}; it must be from 0 to {MOST}")
    if submit.max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens is {submit.max_new_tokens}; it must be at least 0")
    for token in submit.prompt_ids:
        if not 0 <= token < ring.vocabulary:
            words = f"this model's go from 0 to {ring.vocabulary - 1}"
            raise ConfigError(f"the prompt has the token {token}; {words}")
    if not (submit.messages or submit.prompt or submit.prompt_ids):
        raise ConfigError("the prompt is empty; give at least one character")
    answer = Answer(codec, submit.stop, submit.max_new_tokens, submit.stop_token_ids)
    rules = _rules_of(submit, answer, shape.repetition_penalty)
    if submit.prompt and not _is_chat(codec, submit):
        codec.check_length(submit.prompt, most_tokens(ring))
    own = shape.own_words([name for name in NAMES if getattr(submit, name) is not None])
    client = RequestClient(peer, submit, now, own)
    needs = ring.needs if policy.drafts else NO_NEEDS
    top = max(submit.top, submit.prompt_top)
    choosing = choosing_of(sampling, top) if ring.head_last else None
    asked = submit, sampling, policy, answer
    free = ring.has_free_guesses
    return Request(number, client, *asked, shared, needs, choosing, rules or None, free)


def _shape(ring: CoordinatorSettings, submit: Submit) -> UsualSampling:
    """How the request is sampled: what it does not say is as the model publishes it."""
    given = {name: value for name in NAMES if (value := getattr(submit, name)) is not None}
    return structs.replace(ring.usual, **given)


def _rules_of(submit: Submit, answer: Answer, repetition: float) -> Rules:
    """What the request's logits are changed by, but for the grammar."""
    presence, frequency = submit.presence_penalty, submit.frequency_penalty
    for name, value, most in [
        ("presence_penalty", presence, MOST_PENALTY),
        ("frequency_penalty", frequency, MOST_PENALTY),
        *((f"logit_bias of token {one.token}", one.bias, MOST_BIAS) for one in submit.logit_bias),
    ]:
        if not -most <= value <= most:
            raise ConfigError(f"{name} is {value}; it must be from {-most:g} to {most:g}")
    if any(one.token < 0 for one in submit.logit_bias):
        raise ConfigError("logit_bias names a negative token")
    if not 0 < repetition <= MOST_REPETITION:
        words = f"repetition_penalty is {repetition}; it must be above 0, at most "
        raise ConfigError(f"{words}{MOST_REPETITION:g}")
    bias = tuple((one.token, one.bias) for one in submit.logit_bias)
    rules = Rules(None, presence, frequency, bias, repetition)
    if submit.min_tokens:
        rules = replace(rules, least=submit.min_tokens, ends=tuple(sorted(answer.ends)))
    if submit.thinking_budget >= 0 and (marks := answer.codec.thought_marks):
        rules = replace(rules, thought=ThoughtLimit(submit.thinking_budget, *marks))
    return rules


def most_tokens(ring: CoordinatorSettings) -> int:
    """Tokens of the longest prompt that can be answered."""
    return ring.context_length - 1


def encode(codec: TextCodec, effect: EncodePrompt) -> PromptEncoded:
    """Carry out that effect; it touches nothing but the tokenizer, in whatever thread."""
    asked = effect.asked
    try:
        tokens = asked.prompt_ids or tuple(_encoded(codec, asked, effect.most))
        grammar = codec.grammar(asked.grammar) if asked.grammar else None
    except EdgespecError as problem:
        return PromptEncoded(effect.request, (), str(problem), kind_of(problem))
    except RecursionError:
        words = "tools, or the arguments of a call, are nested too deep"
        return PromptEncoded(effect.request, (), words, "invalid")
    thinks = codec.opens_thought(tokens)
    tells = asked.echo or asked.prompt_top >= 0
    text = codec.spelt(tokens) if tells else ""
    if len(text) > MOST_CHARS:
        words = f"the prompt's text has {len(text)} characters; at most {MOST_CHARS} can be told"
        return PromptEncoded(effect.request, (), words, "invalid")
    return PromptEncoded(effect.request, tokens, grammar=grammar, thinks=thinks, text=text)


def _encoded(codec: TextCodec, asked: Submit, most: int) -> Sequence[int]:
    if not _is_chat(codec, asked):
        return codec.encode(asked.prompt, bare=asked.bare)
    told = [one.as_json() for one in asked.messages]
    return codec.encode_chat(told, most, asked.tools, asked.settings)


def _is_chat(codec: TextCodec, asked: Submit) -> bool:
    """Whether the chat template writes the prompt. Where the model has none, a conversation that
    comes with a prompt gives way to it."""
    return bool(asked.messages and (codec.chat_template or not asked.prompt))


_KINDS = {  # of one type and a type of it, the narrower one first
    QueueFull: "queue",
    CapacityError: "context",
    PeerLost: "lost",
    ConfigError: "invalid",
}


def kind_of(problem: EdgespecError) -> str:
    """What a request that is not admitted fails with (see the message Failed)."""
    return next((kind for of, kind in _KINDS.items() if isinstance(problem, of)), "")


def _checked_policy(ring: CoordinatorSettings, name: str) -> Policy:
    """The policy of that name; the best one that this ring can run if the name is empty."""
    policy = policy_named(name or ("adaptive" if ring.draft else "autoregressive"))
    if policy.drafts and not ring.draft:
        raise ConfigError(
            f"policy {policy.name} needs a draft model and this coordinator has none; start it "
            "with --draft, or use --policy autoregressive"
        )
    return policy


def take_prompt(
    ring: CoordinatorSettings, request: Request, event: PromptEncoded
) -> tuple[str, str]:
    """The request's prompt is encoded: it can be started. Comes with why not, fit for the user, and
    that problem's kind (see kind_of); "" if it can."""
    if event.problem or request.asked is None:
        return event.problem, event.kind
    try:
        fits = _fitting(ring, len(event.tokens), request.asked.max_new_tokens)
    except EdgespecError as problem:
        return str(problem), kind_of(problem)
    request.encoded(event, fits)
    return "", ""


def _fitting(ring: CoordinatorSettings, prompt_tokens: int, max_new_tokens: int) -> int:
    """How many new tokens fit after the prompt, at most those asked for.

    Raises ConfigError, or CapacityError if none does.
    """
    if prompt_tokens == 0:
        raise ConfigError("the prompt has no tokens; give at least one character")
    room = ring.context_length - prompt_tokens
    if room < 1:
        raise CapacityError(
            f"the prompt has {prompt_tokens} tokens and the model's context is "
            f"{ring.context_length}, of which one must be left for the answer; shorten the prompt"
        )
    return min(max_new_tokens, room)
