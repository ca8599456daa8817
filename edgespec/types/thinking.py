"""Thinking: the tag within which a model thinks before it answers, as its template has it."""

from __future__ import annotations

import re

_OPENING = re.compile(r"<((?:\w{1,16}:)?think(?:ing)?|thought)>")


def thinking_in(template: str) -> str:
    """The name of the tag within which a model of that chat template thinks; "": it does not."""
    names = _OPENING.findall(template)
    return next((name for name in names if f"</{name}>" in template), "")


def settings_for(thinks: bool) -> dict[str, bool]:
    """What tells a chat template whether to think: one of these names is what it knows."""
    return {"enable_thinking": thinks, "thinking": thinks}
