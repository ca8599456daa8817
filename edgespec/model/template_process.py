"""Template process: renders conversations in a process that can be stopped, and starts it again.

A template is a program that came with the model: it may loop, or take memory without bound, and a
thread that does so cannot be stopped. This process can. The rendering is transformers' own, so that
the text is what its apply_chat_template writes. As a program this module is that process: it is
first told "template" and "tokens", then conversations, each with "messages", "tools" and
"settings", and answers each with {"text"} or {"problem"}.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Mapping
from importlib import resources
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from edgespec.errors import ConfigError
from edgespec.model.bounded_process import MEMORY, MOST_WORDS, BoundedProcess, serve

if TYPE_CHECKING:
    from edgespec.model.tokenizer import Tokenizer

RENDER_S = 10.0
"""Seconds that a chat template may take for a conversation; they take milliseconds."""


class TemplateProcess(BoundedProcess):
    """One model's chat template in a process of its own."""

    def __init__(self, template: str, tokens: Mapping[str, str], seconds: float = RENDER_S) -> None:
        """`tokens`: the control tokens that the template knows by name. `seconds`: its limit."""
        first: dict[str, object] = {"template": template, "tokens": dict(tokens)}
        module = "edgespec.model.template_process"
        super().__init__(module, "the model's chat template", lambda: first, seconds)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the template writes it, with these tools, up to where the model
        answers. `settings`: what else it is told.

        Raises ConfigError if the template does not take it, or needs too much time or memory;
        ModelError if its process cannot be started.
        """
        told = {"messages": messages, "tools": tools, "settings": dict(settings or {})}
        answer = self.ask(told)
        if answer is None:
            raise ConfigError(
                "the model's chat template was stopped: it took all the time or memory that it may "
                f"take for one conversation ({self.seconds:g} s)"
            )
        if "problem" in answer:
            raise ConfigError(f"the model's chat template refuses this: {answer['problem']}")
        return answer["text"]


def render_apart(tokenizer: Tokenizer) -> None:
    """Let a tokenizer write conversations in a process of its own, unless the template is that of
    the bundled models. The process starts with the first one, and ends with the tokenizer."""
    if tokenizer.path.is_relative_to(str(resources.files("edgespec") / "models")):
        return
    process = TemplateProcess(tokenizer.chat_template, tokenizer.special_tokens)
    tokenizer.render = process.render
    weakref.finalize(tokenizer, process.close)


MOST_CHARS = 8 << 20
"""Characters that it may write."""


def prepare(asked: Mapping[str, Any]) -> Callable[[bytes], dict[str, str]]:
    """What answers conversations by that template."""
    render = _renderer(asked["template"], asked["tokens"])
    return lambda line: _answer(render, line)


def _renderer(template: str, tokens: dict[str, str]) -> Callable[[Mapping[str, Any]], str]:
    render_jinja_template = _of_transformers()

    def render(asked: Mapping[str, Any]) -> str:
        texts, _ = render_jinja_template(
            conversations=[asked["messages"]],
            tools=asked["tools"],
            chat_template=template,
            add_generation_prompt=True,
            **{**asked["settings"], **tokens},
        )
        return str(texts[0])

    return render


def _of_transformers() -> Callable[..., Any]:
    """Its function for templates, without torch and, if that goes, without what else its packages
    do as they are imported: it looks through the files of all its models."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    found = find_spec("transformers")
    assert found is not None, "edgespec needs it"
    folders = found.submodule_search_locations or []
    for name, below in (("transformers", ""), ("transformers.utils", "/utils")):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [folder + below for folder in folders]
    try:
        return _function()
    except Exception:  # of a version that wants more of its package
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        return _function()


def _function() -> Callable[..., Any]:
    from transformers.utils.chat_template_utils import render_jinja_template

    made: Callable[..., Any] = render_jinja_template
    return made


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
