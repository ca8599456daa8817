"""Leniency: which keys of a body are taken, which are ignored, and which are refused unread.

A top-level key that no field reads is refused where it is nearly the name of one, or asks another
server for what would change the answer; any other is ignored. Within messages, parts and tools
unknown keys are ignored. What is ignored is told, never dropped in silence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from msgspec import Struct, structs

from edgespec.serving.problems import refused
from edgespec.serving.request_bodies import MOST_INT, UNREAD, ChatRequest, TextRequest
from edgespec.serving.request_parts import is_same

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_OTHERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("typical_p", "typical", "tfs_z", "length_penalty", "num_beams"), (1,)),
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier"), (0,)),
    **dict.fromkeys(("top_a", "no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), (0,)),
    "top_n_sigma": (-1, 0),
    "truncate_prompt_tokens": (-1,),
    **dict.fromkeys(("do_sample", "add_generation_prompt", "skip_special_tokens"), (True,)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("structured_outputs", "json_schema", "bad_words", "allowed_token_ids"), ()),
    **dict.fromkeys(("lora", "lora_request", "chat_template", "samplers", "extra_body"), ()),
    **dict.fromkeys(("input", "system", "instructions", "continue_final_message"), ()),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output"), ()),
}
"""Parameters of other servers that would change an answer, with the values that, beside those of
_NOTHING, ask for nothing."""

_TEXT_STAYS = {
    *("chat_template_kwargs", "enable_thinking", "reasoning_effort", "thinking_budget"),
    *("parallel_tool_calls", "stream_options", "logprobs", "top_logprobs"),
    *("prompt_logprobs", "return_token_ids"),
}
"""Of chats; a form that has them not gives the same text without."""

_SAME_AS: dict[str, dict[Any, Any]] = {
    "top_k": {-1: 0},
    "top_p": {0: math.ulp(0)},  # the smallest set that holds any probability: the likeliest token
    "max_tokens": {-1: MOST_INT},
    "max_completion_tokens": {-1: MOST_INT},
    "max_output_tokens": {-1: MOST_INT},
    "stop": {"": None},
}
"""Values that other servers take, and what is the same here."""

_SAME_NAMES = (
    (
        *("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens"),
        *("n_predict", "num_predict"),
    ),
    ("stop", "stop_sequences"),
    ("repetition_penalty", "repeat_penalty"),
    ("enable_thinking", "think"),
    ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens"),
)

_MOST_KEYS = 256
"""Of a body: each that is unknown is compared with all that are known."""
_MOST_TOLD, _LONGEST = 20, 80
_MOST_LOGGED = 1000

log = logging.getLogger(__name__)


def sifted(
    body: Mapping[str, Any], fields: Collection[str]
) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """What of a body is read, which fields there are known by name, what of it is ignored, and what
    it calls the fields that it has other names for.

    Raises ApiProblem for a key that may not be ignored.
    """
    if len(body) > _MOST_KEYS:
        words = f"the body has {len(body)} parameters; it may have {_MOST_KEYS}"
        raise refused(words, code="unknown_parameter")
    given: dict[str, Any] = {}
    ignored: list[str] = []
    said: dict[str, str] = {}
    for told, value in sorted(body.items(), key=lambda one: one[0] not in fields):
        name = told if told in fields else _name_here(told, fields)
        if told != name and name in given:  # said in two words: the one from here counts
            ignored.append(told)
            continue
        if name in fields:
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # to JSON, 5.0 is an integer
            if isinstance(value, int | str) and not isinstance(value, bool):
                value = _SAME_AS.get(name, {}).get(value, value)
            if value is not None:  # null counts as left out
                given[name], said[name] = value, told
        elif value is not None:
            _check_unread(told, value, fields)
            ignored.append(told)
    if isinstance(tools := given.get("tools"), list):
        given["tools"] = [one for one in tools if not _hosted(one)]
        ignored += [f"tools[{kind}]" for kind in map(_hosted, tools) if kind]
    return given, ignored, said


def _name_here(name: str, fields: Collection[str]) -> str:
    same = (one for names in _SAME_NAMES if name in names for one in names)
    return next((one for one in same if one in fields), name)


@cache
def _neutral() -> dict[str, tuple[Any, ...]]:
    """What changes an answer elsewhere, or in another form here, with the values that do not."""
    own = [field for kind in (ChatRequest, TextRequest) for field in structs.fields(kind)]
    changes = {one.name: (one.default,) for one in own if one.name not in _TEXT_STAYS | UNREAD}
    return {**changes, **_OTHERS}


def _check_unread(name: str, value: Any, fields: Collection[str]) -> None:
    if (neutral := _neutral().get(name)) is not None:
        if not any(is_same(value, one) for one in (*neutral, *_NOTHING)):
            words = f"{name} is not supported here, and would change the answer; leave it out"
            raise refused(words, name, "unsupported_parameter")
        return
    near = get_close_matches(name[:64].lower(), fields, 1, 0.8)
    if near:
        words = f"there is no parameter {ascii(name)[:80]}; is {near[0]} meant?"
        raise refused(words, name[:200], "unknown_parameter")


def _hosted(tool: Any) -> str:
    """The kind of a tool that others' servers run themselves, or that has no schema; "" for a
    function of the client's own."""
    kind = tool.get("type") if isinstance(tool, dict) and "input_schema" not in tool else ""
    return kind if isinstance(kind, str) and kind != "function" else ""


def unread(value: Any, part: Any, place: str = "") -> Iterator[str]:
    """Keys within the parts of a body that nothing reads; `part`: what the value was read into."""
    if isinstance(value, dict) and isinstance(part, Struct):
        known = {*part.__struct_fields__, part.__struct_config__.tag_field}
        for name, inner in value.items():
            if name in known:
                yield from unread(inner, getattr(part, name, None), f"{place}.{name}")
            elif inner is not None:
                yield f"{place}.{name}".removeprefix(".")
    elif isinstance(value, list) and isinstance(part, list):
        for one, read in zip(value, part, strict=False):
            yield from unread(one, read, f"{place}[]")


_logged: set[str] = set()


def header_of(ignored: Collection[str]) -> dict[str, str]:
    """The response header that tells what was ignored; it is logged too, once for each name."""
    shown = (ascii(name)[1:-1][:_LONGEST].replace(",", " ").strip() for name in ignored)
    names = [*dict.fromkeys(name or "''" for name in shown)]
    if not names:
        return {}
    for name in names[:_MOST_TOLD]:
        if name not in _logged and len(_logged) < _MOST_LOGGED:
            _logged.add(name)
            log.info("ignored in a request: %s", name)
    return {"x-edgespec-ignored": ", ".join(names[:_MOST_TOLD])}
