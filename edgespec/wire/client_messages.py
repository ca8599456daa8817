"""Client messages: what clients and a coordinator say to each other about requests and the ring."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.wire.messages import Message


@dataclass(frozen=True, slots=True)
class TokenBias:
    """What is added to a token's logit; a part of Submit."""

    token: int
    bias: float


@dataclass(frozen=True, slots=True)
class Submit(Message):
    """A client's prompt. `tag` is the client's own name for it; answers carry it back.

    An empty `policy` leaves the choice to the coordinator. `messages`: a conversation as a JSON
    list of objects with "role" and "content", for the model's chat template, or, where tools are
    told or were called, an object with "messages" and "tools", both as OpenAI's chats have them; a
    model without a template continues `prompt`, and refuses if that is empty. `top`: how many of
    the likeliest tokens are wanted for each token, from 0 to 20, with log-probabilities; -1: not
    even the token's own. `scope`: the user on whose behalf a client with many users asks, by the
    client's own name; the coordinator's node replaces it by its own name for that user of that
    client. `grammar`: what the answer may be, as types.grammar_spec writes it. The penalties and
    `logit_bias`: see verify.rules.Rules.
    """

    tag: int
    prompt: str
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: tuple[str, ...]
    policy: str
    messages: str = ""
    top: int = -1
    scope: str = ""
    grammar: str = ""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[TokenBias, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """The client does not want the rest."""

    tag: int


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """What a waiting client should be told (stages missing, place in the queue)."""

    tag: int
    text: str


@dataclass(frozen=True, slots=True)
class Tokens(Message):
    """Newly committed tokens and the text that they finished; never taken back or repeated.

    `log_probs`: if they were asked for, a JSON list with an object a token: "id", "token" (its
    text), "bytes" (a list, or null if it is no whole character and its bytes are not known),
    "logprob", and "top_logprobs", a list of such objects, best first.
    """

    tag: int
    token_ids: tuple[int, ...]
    text: str
    log_probs: str = ""


@dataclass(frozen=True, slots=True)
class SourceFigures:
    """What one member of the draft source brought to an answer; a part of Finished.

    `accepted`: tokens that it had guessed; `alone`: those of them that no other member had.
    """

    name: str
    accepted: int
    alone: int


@dataclass(frozen=True, slots=True)
class Finished(Message):
    """The one good end of a request: all of it again, with its figures (see docs/commands.md)."""

    tag: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    policy: str
    draft: str
    stages: int
    prompt_tokens: int
    new_tokens: int
    seconds: float
    first_token_seconds: float
    trips: float
    accepted_histogram: tuple[int, ...]
    rows_sent: int
    rows_wasted: int
    misses: int
    smallest_margin: float
    recoveries: int = 0
    cached_tokens: int = 0
    sources: tuple[SourceFigures, ...] = ()
    prompt_rows: int = 0


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """The one bad end of a request.

    `kind`: "invalid" (it cannot be served as it is), "context" (it is too long), "queue" (too many
    wait: try again later), "lost" (the ring is) or "" (anything else went wrong).
    """

    tag: int
    reason: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class StatusRequest(Message):
    """Asks for a Status."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A stage's place, or a spare (`stage` 0), as the coordinator sees it; a part of Status.

    `state`: missing, loading, waiting, ready or standing by; `words`: the same in more words.
    `heard`: seconds since its last message. What is 0 or "" is not known: the place is free, or
    its stage has not said. `temperature` to `throttled`: see Health. `warning`: what is wrong with
    it, in words. `trip`: seconds of a control message there and back. `losses` of stages in that
    place: how many, the last one's cause, and how many seconds ago. `with_coordinator`: whether it
    is on the coordinator's machine.
    """

    stage: int
    first: int
    end: int
    name: str = ""
    address: str = ""
    state: str = "missing"
    words: str = "missing"
    heard: float = 0.0
    temperature: float = 0.0
    limit: float = 0.0
    memory: int = 0
    free: int = 0
    busy: float = 0.0
    throttled: bool = False
    warning: str = ""
    trip: float = 0.0
    losses: int = 0
    last_loss: str = ""
    lost_ago: float = 0.0
    with_coordinator: bool = False


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request that is being answered; a part of Status.

    `number`: the coordinator's, which a lost ring changes. `tokens`: of the answer so far;
    `tokens_per_second`: of those behind the first one until now, 0 before the second.
    """

    number: int
    policy: str
    prompt_tokens: int
    tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Status(Message):
    """The ring as the coordinator sees it: whether all stages are ready, one line of text each.

    `nodes`: the same in figures, places first. `ring`: its number, one more for each that was
    lost. `up_for`: seconds since it is up, 0 if it is not. `running` and `waiting`: requests.
    `model`: its name, without the folder that it lies in. `context_length`: tokens that a request
    may have, with its answer. `live`: the running requests, the oldest first. Rows of every
    stage's cache: `rows_live`, which running requests may come to hold with their next token's
    guesses; `rows_kept`, which are held for requests that begin like answered ones, those that
    several share counted once; and `rows_room`, which there is room for, 0 if that has no limit.
    `home`: the coordinator's own machine, as far as its name and its health go. `plain`: tokens a
    second that plain decoding would give one request on this ring, from what single rows took so
    far, without the time of messages; 0: not known. `tools`: the form in which the model calls
    tools, by its name in types.tool_forms; "": its template has none of these.
    """

    ready: bool
    lines: tuple[str, ...]
    nodes: tuple[NodeStatus, ...] = ()
    stages: int = 0
    ring: int = 0
    up_for: float = 0.0
    running: int = 0
    waiting: int = 0
    model: str = ""
    context_length: int = 0
    live: tuple[LiveRequest, ...] = ()
    rows_live: int = 0
    rows_kept: int = 0
    rows_room: int = 0
    home: NodeStatus = NodeStatus(0, 0, 0)
    plain: float = 0.0
    tools: str = ""
