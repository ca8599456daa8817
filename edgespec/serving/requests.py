"""Requests: bodies of /v1/chat/completions and /v1/completions, read into what the ring takes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.config import MAX_TEMPERATURE
from edgespec.policy.registry import POLICIES
from edgespec.serving.parameters import (
    Body,
    Flag,
    Number,
    Only,
    Parameter,
    Text,
    Unread,
    refuse_unknown,
    shown,
    text_of,
)
from edgespec.serving.problems import ApiProblem, not_supported, refused
from edgespec.verify.top_logprobs import MOST
from edgespec.wire.client_messages import Submit

MOST_TOKENS = (1 << 31) - 1
MOST_STOPS = 4
MOST_STOP_CHARS = 1024
MOST_MESSAGES = 4096
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Of messages, and what a chat template calls them."""

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; chats may go on to the end of the context."""

SAMPLING: tuple[Parameter, ...] = (
    Number("temperature", 0, MAX_TEMPERATURE, 1.0, "0 takes the most likely token every time."),
    Number(
        "top_p", 0, 1, 1.0, "Sample from the likeliest tokens of this total share.", False, True
    ),
    Number(
        "top_k", 0, MOST_TOKENS, 0, "Sample from so many of the likeliest tokens; 0: all.", True
    ),
    Number("min_p", 0, 1, 0.0, "Leave out tokens below this share of the likeliest one's."),
    Number("seed", -(1 << 63), (1 << 63) - 1, None, "The same seed gives the same text.", True),
)

COMMON: tuple[Parameter, ...] = (
    *SAMPLING,
    Flag("stream", False, "Send the answer piece by piece, as server-sent events."),
    Text("policy", "Extension: what the ring sends when.", tuple(sorted(POLICIES))),
    Flag("wait", True, "Extension: whether to wait for a ring that is not up, or be told 503."),
    Only("n", (1,), "one answer a request"),
    Only("presence_penalty", (0,), "it would change the model's distribution"),
    Only("frequency_penalty", (0,), "it would change the model's distribution"),
    Only("logit_bias", ({},), "it would change the model's distribution"),
    Unread("user", "Not looked at."),
    Unread("metadata", "Not looked at."),
)
"""Of both kinds of request."""

_NO_TOOLS = "the model calls no tools"
CHAT: tuple[Parameter, ...] = (
    Number("max_completion_tokens", 1, MOST_TOKENS, None, "Tokens of the answer at most.", True),
    Number("max_tokens", 1, MOST_TOKENS, None, "The same, by its older name.", True),
    Flag("logprobs", False, "Tell how likely each token of the answer was."),
    Number("top_logprobs", 0, MOST, None, "So many of the likeliest tokens beside it.", True),
    *COMMON,
    Only("response_format", ({"type": "text"},), "answers are plain text"),
    Only("tools", ([],), _NO_TOOLS),
    Only("tool_choice", ("none", "auto"), _NO_TOOLS),
    Only("parallel_tool_calls", (True, False), _NO_TOOLS),
    Only("functions", ([],), _NO_TOOLS),
    Only("function_call", ("none", "auto"), _NO_TOOLS),
    Only("modalities", (["text"],), "answers are text"),
    Only("audio", (), "answers are text"),
    Only("prediction", (), "the ring guesses by itself"),
    Only("reasoning_effort", ("none",), "the model does not reason on the side"),
    Only("verbosity", ("medium",), "the model has no such setting"),
    Only("web_search_options", (), "the model has no way into the web"),
    Only("store", (False,), "nothing is stored"),
    Only("service_tier", ("auto", "default"), "there is one tier"),
    Unread("safety_identifier", "Not looked at."),
    Unread("prompt_cache_key", "Not looked at."),
    Unread("prompt_cache_retention", "Not looked at."),
)
"""Of chats, beside `model`, `messages`, `stop` and `stream_options`."""

COMPLETION: tuple[Parameter, ...] = (
    Number("max_tokens", 1, MOST_TOKENS, COMPLETION_TOKENS, "Tokens of the answer at most.", True),
    Number("logprobs", 0, MOST, None, "So many of the likeliest tokens for each one.", True),
    *COMMON,
    Only("best_of", (1,), "one answer a request"),
    Only("echo", (False,), "the prompt is not repeated"),
    Only("suffix", ("",), "the model writes at the end of a text"),
)
"""Of completions, beside `model`, `prompt`, `stop` and `stream_options`."""

_READ_APART = ("model", "stop", "stream_options")
_EMPTY_OF_ASSISTANT = ("refusal", "audio", "tool_calls", "function_call", "annotations")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it was read. `submit.max_new_tokens` 0: as many as there is room for.

    `model` "": whichever is served. `waits`: for a ring that is not up.
    """

    submit: Submit
    model: str
    is_chat: bool
    streams: bool
    with_usage: bool
    waits: bool

    def within(self, context_length: int) -> Submit:
        """What the ring is asked. Raises ApiProblem for more tokens than its context holds."""
        limit = self.submit.max_new_tokens
        if limit > context_length:
            raise refused(
                f"the answer may have {limit} tokens, and the model's context holds "
                f"{context_length}, with the prompt",
                "max_tokens",
                "context_length_exceeded",
            )
        return replace(self.submit, max_new_tokens=limit or context_length)


def parsed(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiProblem if there is none."""
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise refused("the body is not UTF-8 text", code="invalid_json") from None
    except (ValueError, RecursionError) as problem:
        words = str(problem)[:200] or "it is nested too deep"
        raise refused(f"the body is not valid JSON: {words}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise refused("the body is no JSON object", code="invalid_json")
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def chat_request(body: Body) -> Asked:
    """A chat. Raises ApiProblem, naming the parameter, for what cannot be served."""
    values = _values(body, CHAT, "messages")
    if values["top_logprobs"] is not None and not values["logprobs"]:
        raise refused("top_logprobs needs logprobs to be true", "top_logprobs")
    top = (values["top_logprobs"] or 0) if values["logprobs"] else -1
    limit = values["max_completion_tokens"] or values["max_tokens"] or 0
    messages = json.dumps(_messages(body.get("messages")), ensure_ascii=False)
    return _asked(body, values, limit, top, messages=messages)


def completion_request(body: Body) -> Asked:
    """A completion. Raises ApiProblem, naming the parameter, for what cannot be served."""
    values = _values(body, COMPLETION, "prompt")
    top = -1 if values["logprobs"] is None else values["logprobs"]
    return _asked(body, values, values["max_tokens"], top, prompt=_prompt(body.get("prompt")))


def _values(body: Body, parameters: Sequence[Parameter], own: str) -> dict[str, Any]:
    refuse_unknown(body, (*(one.name for one in parameters), *_READ_APART, own))
    return {one.name: one.read(body) for one in parameters}


def _asked(
    body: Body,
    values: Mapping[str, Any],
    limit: int,
    top: int,
    *,
    prompt: str = "",
    messages: str = "",
) -> Asked:
    seed = values["seed"]
    submit = Submit(
        tag=0,
        prompt=prompt,
        max_new_tokens=limit,
        temperature=values["temperature"],
        top_k=values["top_k"],
        top_p=values["top_p"],
        min_p=values["min_p"],
        # Negative ones are among OpenAI's; two that differ stay different.
        seed=secrets.randbits(63) if seed is None else seed % (1 << 64),
        stop=_stops(body.get("stop")),
        policy=values["policy"],
        messages=messages,
        top=top,
    )
    streams = values["stream"]
    model = body.get("model")
    return Asked(
        submit,
        "" if model is None else text_of(model, "model"),
        bool(messages),
        streams,
        _with_usage(body.get("stream_options"), streams),
        values["wait"],
    )


def _prompt(value: object) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, list):
        raise not_supported(
            "prompt is a list; give one string (several prompts are several requests, and token "
            "ids are not taken)",
            "prompt",
        )
    if value is None:
        raise refused("prompt is missing", "prompt", "missing_required_parameter")
    text = text_of(value, "prompt")
    if not text:
        raise refused("prompt is empty; give at least one character", "prompt")
    return text


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    if len(listed) > MOST_STOPS:
        raise refused(f"stop has {len(listed)} entries; at most {MOST_STOPS} are taken", "stop")
    stops = tuple(text_of(one, "stop") for one in listed)
    if not all(0 < len(stop) <= MOST_STOP_CHARS for stop in stops):
        raise refused(
            f"a stop string is empty, or longer than {MOST_STOP_CHARS} characters", "stop"
        )
    return stops


def _with_usage(value: object, streams: bool) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict):
        raise refused("stream_options must be an object", "stream_options", "invalid_type")
    if not streams:
        raise refused("stream_options needs stream to be true", "stream_options")
    flag = Flag("include_usage", False, "")
    refuse_unknown(value, (flag.name, "include_obfuscation"), "stream_options.")
    return flag.read(value)


# --- messages -----------------------------------------------------------------------------------


def _messages(value: object) -> list[dict[str, str]]:
    if value is None:
        raise refused("messages is missing", "messages", "missing_required_parameter")
    if not isinstance(value, list):
        raise refused("messages must be a list", "messages", "invalid_type")
    if not 0 < len(value) <= MOST_MESSAGES:
        raise refused(
            f"messages has {len(value)} entries; 1 to {MOST_MESSAGES} are taken", "messages"
        )
    return [_message(one, f"messages[{number}]") for number, one in enumerate(value)]


def _message(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise refused(f"{where} must be an object", where, "invalid_type")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _unknown_role(role, f"{where}.role")
    taken = ("role", "content", "name", *(_EMPTY_OF_ASSISTANT if role == "assistant" else ()))
    refuse_unknown(value, taken, f"{where}.")
    for name in _EMPTY_OF_ASSISTANT:
        if value.get(name):
            raise not_supported(f"{where}.{name} is not supported here", f"{where}.{name}")
    content = value.get("content")
    if content is None and role == "assistant" and "content" in value:
        content = ""  # it called a tool or refused; templates can add an empty text to another
    return {"role": ROLES[role], "content": _content(content, f"{where}.content")}


def _unknown_role(role: object, where: str) -> ApiProblem:
    if role in ("tool", "function"):
        return not_supported(f"{where} is {shown(role)}, and {_NO_TOOLS}", where)
    return refused(f"{where} is {shown(role)}; choose one of: {', '.join(ROLES)}", where)


def _content(value: object, where: str) -> str:
    """A string, or a list of texts, which are put one behind the other."""
    if not isinstance(value, list):
        return text_of(value, where)
    texts = []
    for number, part in enumerate(value):
        at = f"{where}[{number}]"
        if not isinstance(part, dict):
            raise refused(f"{at} must be an object", at, "invalid_type")
        if part.get("type") != "text":
            raise not_supported(f"{at}.type must be text: the model reads nothing else", at)
        refuse_unknown(part, ("type", "text"), f"{at}.")
        texts.append(text_of(part.get("text"), f"{at}.text"))
    return "".join(texts)
