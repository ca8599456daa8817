"""Template child: a small process that renders conversations by a model's chat template.

A template is a program that came with the model: it may loop, or take memory without bound, and a
thread that does so cannot be stopped. This process can (model/bounded_child.py). The rendering is
transformers' own, so that the text is what its apply_chat_template writes.

It is first told "template" and "tokens", then conversations, each with "messages" and "tools"; it
answers each with {"text"} or {"problem"}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from edgespec.model.bounded_child import MEMORY, MOST_WORDS, serve

MOST_CHARS = 8 << 20
"""Characters that it may write."""


def prepare(asked: Mapping[str, Any]) -> Callable[[bytes], dict[str, str]]:
    """What answers conversations by that template."""
    render = _renderer(asked["template"], asked["tokens"])
    return lambda line: _answer(render, line)


def _renderer(template: str, tokens: dict[str, str]) -> Callable[[Mapping[str, Any]], str]:
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then does without it
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(asked: Mapping[str, Any]) -> str:
        texts, _ = render_jinja_template(
            conversations=[asked["messages"]],
            tools=asked["tools"],
            chat_template=template,
            add_generation_prompt=True,
            **tokens,
        )
        return str(texts[0])

    return render


def _answer(render: Callable[[Mapping[str, Any]], str], line: bytes) -> dict[str, str]:
    try:
        text = render(json.loads(line))
    except MemoryError:
        return {"problem": f"it needs more than {MEMORY >> 20} MiB of memory for it"}
    except Exception as problem:  # templates raise what they like for what they do not take
        return {"problem": str(problem)[:MOST_WORDS]}
    if len(text) > MOST_CHARS:
        return {"problem": f"it writes more than {MOST_CHARS} characters for it"}
    return {"text": text}


if __name__ == "__main__":
    serve(prepare)
