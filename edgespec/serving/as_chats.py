"""As chats: what the other forms than OpenAI's chats share as they become one."""

from __future__ import annotations

from typing import Any

from edgespec.serving.request_bodies import AskedRequest, ChatRequest


def passed(asked: AskedRequest) -> dict[str, Any]:
    """Of a request in another form, what a chat has by the same name."""
    names = {*asked.__struct_fields__}.intersection(ChatRequest.__struct_fields__)
    found = {name: getattr(asked, name) for name in names - _OWN}
    return {name: value for name, value in found.items() if value is not None}


_OWN = {"messages", "tools", "tool_choice", "user", "metadata"}
"""Of these every form has its own kind."""


def text_of(parts: Any) -> str:
    """The text of parts, of other forms than chats', that have some."""
    if isinstance(parts, str):
        return parts
    told = parts if isinstance(parts, list | tuple) else ()
    texts = [one.get("text") for one in told if isinstance(one, dict)]
    return "".join(text for text in texts if isinstance(text, str))
