"""Client messages: what clients and a coordinator say to each other about requests and the ring."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, field

from edgespec.types.record import MOST_CHARS, Finite, Int64, Numbers, Record, Some, Text
from edgespec.types.tool_forms import Tool
from edgespec.types.usual_sampling import NOTHING_SAID, UsualSampling
from edgespec.wire.messages import Message, require

MOST_BIASES = 1024
"""Tokens of a request whose logits are changed, at most."""


MOST_MESSAGES, MOST_TOOLS, MOST_SETTINGS = 4096, 128, 32
"""Of a conversation."""


Setting = Text | Int64 | Finite | bool | None
"""Of a chat template."""


class TokenBias(Record, frozen=True):
    """What is added to a token's logit; a part of Submit."""

    token: int
    bias: Finite


class ToolCall(Record, frozen=True):
    """A call that the model made of a tool, `arguments` as the text that it wrote; a part of
    ChatMessage."""

    name: Text
    arguments: Text
    id: Text = ""


class ChatMessage(Record, frozen=True):
    """A message of a conversation; a part of Submit. `tool_call_id`: of the call whose result it
    is, with the role "tool". `reasoning`: what the model thought before it said that."""

    role: Annotated[Text, Meta(min_length=1)]
    content: Text
    tool_calls: Some[ToolCall] = ()
    tool_call_id: Text = ""
    reasoning: Text = ""

    def as_json(self) -> dict[str, Any]:
        """As OpenAI's chats have it, and chat templates read it."""
        told: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            told["reasoning_content"] = self.reasoning
        if self.tool_calls:
            told["tool_calls"] = [
                {
                    "function": {"name": call.name, "arguments": call.arguments},
                    "id": call.id,
                    "type": "function",
                }
                for call in self.tool_calls
            ]
        if self.role == "tool":
            told["tool_call_id"] = self.tool_call_id
        return told


class Submit(Message, tag=40, frozen=True):
    """A client's prompt. `tag` is the client's own name for it; answers carry it back.

    An empty `policy` leaves the choice to the coordinator. `messages`: a conversation, for the
    model's chat template, and the `tools` that may be called in its next message; a model without a
    template continues `prompt`, and refuses if that is empty. `prompt_ids`: the prompt as tokens,
    in place of both; `bare`: the tokenizer puts nothing of its own around its text. `top`: how many
    of the likeliest tokens are wanted for each token, from 0 to 20, with log-probabilities; -1: not
    even the token's own. `prompt_top`: the same for the tokens of the prompt. `echo`: the prompt is
    told as well (Echoed), which `prompt_top` asks for too. `scope`: the user on whose behalf a
    client with many users asks, by the client's own name; the coordinator's node replaces it by its
    own name for that user of that client. `grammar`: what the answer may be, as types.grammar_spec
    writes it. The penalties, `logit_bias` and `min_tokens`: see verify.rules.Rules.
    `stop_token_ids` end the answer as the model's own ends do. `settings`: for the chat template,
    by the names that it knows. `thinking_budget`: tokens after which a thought ends; -1: it has no
    such limit. With `max_new_tokens` 0 the prompt is counted, told or scored, and not answered. How
    to sample that is None is as the model publishes it (Status.usual). Raises ValueError for a
    conversation that is too long.
    """

    tag: int
    prompt: Text
    max_new_tokens: int
    temperature: Finite | None
    top_k: int | None
    top_p: Finite | None
    min_p: Finite | None
    seed: int
    stop: Some[Text]
    policy: Text
    messages: Annotated[tuple[ChatMessage, ...], Meta(max_length=MOST_MESSAGES)] = ()
    top: int = -1
    scope: Text = ""
    grammar: Text = ""
    presence_penalty: Finite = 0.0
    frequency_penalty: Finite = 0.0
    logit_bias: Annotated[tuple[TokenBias, ...], Meta(max_length=MOST_BIASES)] = ()
    tools: Annotated[tuple[Tool, ...], Meta(max_length=MOST_TOOLS)] = ()
    repetition_penalty: Finite | None = None
    min_tokens: int = 0
    stop_token_ids: Numbers = ()
    settings: Annotated[dict[Text, Setting], Meta(max_length=MOST_SETTINGS)] = field(
        default_factory=dict
    )
    thinking_budget: int = -1
    prompt_ids: Numbers = ()
    prompt_top: int = -1
    echo: bool = False
    bare: bool = False

    def __post_init__(self) -> None:
        calls = [call for one in self.messages for call in one.tool_calls]
        texts = [text for one in self.messages for text in (one.content, one.reasoning)]
        texts += [call.arguments for call in calls]
        require(sum(map(len, texts)) <= MOST_CHARS, "the conversation is too long")


class Cancel(Message, tag=41, frozen=True):
    """The client does not want the rest."""

    tag: int


class Progress(Message, tag=42, frozen=True):
    """What a waiting client should be told (stages missing, place in the queue)."""

    tag: int
    text: Text


class Tokens(Message, tag=43, frozen=True):
    """Newly committed tokens and the text that they finished; never taken back or repeated.

    `log_probs`: if they were asked for, a JSON list with an object a token: "id", "token" (its
    text), "bytes" (a list, or null if it is no whole character and its bytes are not known),
    "logprob", and "top_logprobs", a list of such objects, best first. `prompt_tokens`: of the
    prompt; `thinks`: it ends within a thought, which the answer goes on with.
    """

    tag: int
    token_ids: Numbers
    text: Text
    log_probs: Text = ""
    prompt_tokens: int = 0
    thinks: bool = False


class Echoed(Message, tag=50, frozen=True):
    """The prompt as the model reads it, before any Tokens: once its `token_ids` and `text`, then,
    if `log_probs` of it were asked for, in one or several messages those of its tokens in order, as
    in Tokens. The first token has none: its "logprob" is null.
    """

    tag: int
    token_ids: Numbers = ()
    text: Text = ""
    log_probs: Text = ""


class SourceFigures(Record, frozen=True):
    """What one member of the draft source brought to an answer; a part of Finished.

    `accepted`: tokens that it had guessed; `alone`: those of them that no other member had.
    """

    name: Text
    accepted: int
    alone: int


class Finished(Message, tag=44, frozen=True):
    """The one good end of a request: all of it again, with its figures (see docs/figures.md).

    `stop`: the stop string that ended it, if one did. `thinks`: as in Tokens. `sampled`:
    which of the model's own settings counted, in words; `looped`: the same of an end that only
    repeats itself."""

    tag: int
    text: Text
    token_ids: Numbers
    finish_reason: Text
    policy: Text
    draft: Text
    stages: int
    prompt_tokens: int
    new_tokens: int
    seconds: Finite
    first_token_seconds: Finite
    trips: Finite
    accepted_histogram: Numbers
    rows_sent: int
    rows_wasted: int
    misses: int
    smallest_margin: Finite
    recoveries: int = 0
    cached_tokens: int = 0
    sources: Some[SourceFigures] = ()
    prompt_rows: int = 0
    stop: Text = ""
    thinks: bool = False
    sampled: Text = ""
    looped: Text = ""


class Failed(Message, tag=45, frozen=True):
    """The one bad end of a request.

    `kind`: "invalid" (it cannot be served as it is), "context" (it is too long), "queue" (too many
    wait: try again later), "lost" (the ring is) or "" (anything else went wrong).
    """

    tag: int
    reason: Text
    kind: Text = ""


class StatusRequest(Message, tag=46, frozen=True):
    """Asks for a Status."""


class NodeStatus(Record, frozen=True):
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
    name: Text = ""
    address: Text = ""
    state: Text = "missing"
    words: Text = "missing"
    heard: Finite = 0.0
    temperature: Finite = 0.0
    limit: Finite = 0.0
    memory: int = 0
    free: int = 0
    busy: Finite = 0.0
    throttled: bool = False
    warning: Text = ""
    trip: Finite = 0.0
    losses: int = 0
    last_loss: Text = ""
    lost_ago: Finite = 0.0
    with_coordinator: bool = False


class LiveRequest(Record, frozen=True):
    """A request that is being answered; a part of Status.

    `number`: the coordinator's, which a lost ring changes. `tokens`: of the answer so far;
    `tokens_per_second`: of those behind the first one until now, 0 before the second.
    """

    number: int
    policy: Text
    prompt_tokens: int
    tokens: int
    tokens_per_second: Finite


class Status(Message, tag=47, frozen=True):
    """The ring as the coordinator sees it: whether all stages are ready, one line of text each.

    `nodes`: the same in figures, places first. `ring`: its number, one more for each that was
    lost. `up_for`: seconds since it is up, 0 if it is not. `running` and `waiting`: requests.
    `model`: its name, without the folder that it lies in. `context_length`: tokens that a request
    may have, with its answer. `live`: the running requests, the oldest first. Rows of every
    stage's cache: `rows_live`, which running requests may come to hold with their next token's
    guesses; `rows_kept`, which are held for requests that begin like answered ones, those that
    several share counted once; and `rows_room`, which there is room for, 0 if that has no limit.
    `row_bytes`: what one takes at most of each layer; 0: not known.
    `home`: the coordinator's own machine, as far as its name and its health go. `plain`: tokens a
    second that plain decoding would give one request on this ring, from what single rows took so
    far, without the time of messages; 0: not known. `tools`: the form in which the model calls
    tools, by its name in types.tool_forms; "": its template has none of these. `thinking`: the name
    of the tag within which it thinks; "": it does not. `names`: all by which the model may be asked
    for, the one to show first. `usual`: how answers are sampled where a request does not say.
    `draft`: the source of guesses, as `--draft` names it; "": there is none. `size`: bytes of the
    model's layers and head as devices hold them; 0: not known. `leaving`: why the coordinator
    takes no more requests; "": it does.
    """

    ready: bool
    lines: Some[Text]
    nodes: Some[NodeStatus] = ()
    stages: int = 0
    ring: int = 0
    up_for: Finite = 0.0
    running: int = 0
    waiting: int = 0
    model: Text = ""
    context_length: int = 0
    live: Some[LiveRequest] = ()
    rows_live: int = 0
    rows_kept: int = 0
    rows_room: int = 0
    row_bytes: int = 0
    home: NodeStatus = NodeStatus(0, 0, 0)
    plain: Finite = 0.0
    tools: Text = ""
    thinking: Text = ""
    names: Some[Text] = ()
    usual: UsualSampling = NOTHING_SAID
    draft: Text = ""
    size: int = 0
    leaving: Text = ""
