"""Requests: bodies of the API, checked, and what the ring is asked for a chat or a completion."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from reprlib import Repr
from typing import Any, TypeVar

from msgspec import ValidationError, convert
from msgspec.structs import replace

from edgespec.errors import ConfigError
from edgespec.serving.leniency import sifted, unread
from edgespec.serving.problems import ApiProblem, refused
from edgespec.serving.request_bodies import MOST_INT, ChatRequest, TextRequest
from edgespec.serving.request_parts import FieldError, RequestPart
from edgespec.types.tool_forms import HERMES, ToolForm
from edgespec.wire.client_messages import Submit, TokenBias

Body = Mapping[str, Any]
Kind = TypeVar("Kind", bound=RequestPart)

_PROBLEM = re.compile(r"(.*?)(?: - at `\$\.?([\w.\[\]]*)`)?", re.DOTALL)
_STEP = re.compile(r"(\w+)|\[(\d+)\]")
_CONTENT_PART = re.compile(r"messages\[\d+\]\.content\[\d+\]")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_WORDS = {
    "`str | array`": "a string or a list",
    "`str`": "a string",
    "`int`": "an integer",
    "`float`": "a number",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "an object",
    " of length": " with a length",
    " <=": " of at most",
    " >=": " of at least",
    " >": " above",
}
_SHOWN = Repr()
_SHOWN.maxstring = _SHOWN.maxlong = 80
_SHOWN.maxlevel = 2


DEEPEST_BODY = 200
"""Levels of a body: more than the deepest schema has, and less than Python can write again."""


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
    inner: list[Any] = [body]
    for _ in range(DEEPEST_BODY):
        inner = [part for one in inner for part in _parts(one)]
    if inner:
        raise refused("the body is nested too deep", code="invalid_json")
    return body


def _parts(value: Any) -> Collection[Any]:
    """What stands in a part of a body that has parts."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def checked(kind: type[Kind], body: bytes | Body, ignored: list[str] | None = None) -> Kind:
    """A body as a request of that kind; what of it is ignored is added to `ignored`.

    Raises ApiProblem, naming the parameter, for a bad one.
    """
    body = parsed(body) if isinstance(body, bytes) else body
    try:
        given, left_out, said = sifted(body, kind.__struct_fields__)
        request = convert(given, kind)
    except UnicodeEncodeError as error:  # in a name, or in one of a few words
        text = _SHOWN.repr(error.object)
        raise refused(f"{text} is not valid Unicode text: it has half a character") from None
    except ValidationError as error:
        raise _as_said(_problem_of(error, given), said) from None
    if ignored is not None:
        ignored += [*left_out, *unread(given, request)]
    return request


def submits_of(
    request: ChatRequest | TextRequest, context_length: int, form: ToolForm = HERMES
) -> list[Submit]:
    """What the ring is asked for each choice: those of the first prompt first, each with the next
    seed. `form`: how its model calls tools. A limit of more tokens than the context holds is as
    none. What a request leaves out of its sampling is as the model publishes it (see
    decoding.admission). Raises ApiProblem for what cannot be asked of a ring."""
    limit = request.limit
    submit = Submit(
        tag=0,
        prompt="",
        max_new_tokens=context_length if limit is None else min(limit, context_length),
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        # Negative ones are among OpenAI's; two that differ stay different.
        seed=request.seed % (1 << 64),
        stop=request.stops,
        policy=request.policy or "",
        top=request.top,
        grammar=_spec_of(request, form),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=tuple(TokenBias(int(token), bias) for token, bias in request.logit_bias.items()),
        min_tokens=MOST_INT if request.ignore_eos else request.min_tokens,
        stop_token_ids=tuple(request.stop_token_ids),
        prompt_top=request.prompt_top,
        echo=request.tells_prompt,
    )
    if isinstance(request, ChatRequest):
        budget = request.thinking_budget
        if budget is None or budget >= context_length:
            budget = -1
        more = {"tools": tuple(request.callable_tools), "settings": request.settings}
        submit = replace(submit, thinking_budget=budget, **more)
        try:
            messages = tuple(one.record() for one in request.messages)
            asked = [replace(submit, messages=messages)]
        except ValueError as problem:
            raise refused(str(problem), "messages") from None
    else:
        submit = replace(submit, bare=not request.add_special_tokens)
        asked = [
            replace(submit, prompt=one)
            if isinstance(one, str)
            else replace(submit, prompt_ids=tuple(one))
            for one in request.prompts
        ]
    seeds = [(submit.seed + choice) % (1 << 64) for choice in range(request.n)]
    # Scores have a prompt read anew: one choice's are those of all, but in a stream, whose choices
    # do not wait for each other.
    top = submit.prompt_top if request.stream else -1
    return [
        replace(one, seed=seed, prompt_top=top if place else submit.prompt_top)
        for one in asked
        for place, seed in enumerate(seeds)
    ]


def _spec_of(request: ChatRequest | TextRequest, form: ToolForm) -> str:
    try:
        return request.spec(form)
    except ConfigError as problem:
        raise refused(str(problem), "response_format") from None
    except RecursionError:
        raise refused("tools are nested too deep", "tools") from None


# --- problems -----------------------------------------------------------------------------------


def _problem_of(error: ValidationError, body: Body) -> ApiProblem:
    """What msgspec says, with the place as `param`, the wrong value, and in JSON's words."""
    text = str(error)
    if len(text) > 600:  # it has a long name or value in its middle
        text = f"{text[:300]}...{text[-300:]}"
    parts = _PROBLEM.fullmatch(text)
    assert parts is not None
    problem, path = parts[1], parts[2] or ""
    if isinstance(cause := error.__cause__, FieldError):
        path = f"{path}.{cause.name}".strip(".")
        return refused(f"{path} {cause}", path, cause.code)
    part = _at(body, place[0]) if (place := _CONTENT_PART.match(path)) else None
    if place and isinstance(part, dict) and part.get("type") != "text":
        words = f"{place[0]}.type must be text: the model reads nothing else"
        return refused(words, place[0], "unsupported_parameter")
    if problem.startswith("Object missing"):
        code = "invalid_type" if path else "missing_required_parameter"
        path = f"{path}.{_named(problem)}".removeprefix(".")
        if not path.endswith(".role"):
            return refused(f"{path} is missing", path, code)
    value = _at(body, path)
    if path.endswith(".role"):
        words = f"{path} is {_SHOWN.repr(value)}; choose one of: {', '.join(_ROLES)}"
        return refused(words, path)
    expected = problem.partition(", got ")[0].replace(" | null", "")
    for word, plain in _WORDS.items():
        expected = expected.replace(word, plain)
    expected = expected.replace("Expected ", "it must be ")
    # Of a parameter that is a list of texts, `param` names the whole.
    param = path if path.startswith(("messages", "tools")) else path.partition("[")[0]
    code = "invalid_type" if ", got " in problem else "invalid_value"
    is_length = " of length " in problem
    found = f"has a length of {len(value)}" if is_length else f"is {_SHOWN.repr(value)}"
    return refused(f"{path} {found}; {expected}", param, code)


def _as_said(problem: ApiProblem, said: Mapping[str, str]) -> ApiProblem:
    """The same of a body that has another name for the parameter."""
    name = re.split(r"\W", problem.param, maxsplit=1)[0]
    told = said.get(name, name)
    words, param = (one.replace(name, told, 1) for one in (str(problem), problem.param))
    return problem if told == name else refused(words, param, problem.code)


def _named(problem: str) -> str:
    return problem.partition("`")[2].removesuffix("`")


def _at(body: Any, path: str) -> Any:
    """The value at a path; None if there is none: an unknown name may look like a path."""
    try:
        for name, index in _STEP.findall(path):
            body = body[name or int(index)]
    except (LookupError, TypeError):
        return None
    return body
