"""Template process: renders conversations in a process that can be stopped, and starts it again."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from edgespec.errors import ConfigError
from edgespec.model.bounded_process import BoundedProcess

if TYPE_CHECKING:
    from edgespec.model.tokenizer import Tokenizer

RENDER_S = 10.0
"""Seconds that a chat template may take for a conversation; they take milliseconds."""


class TemplateProcess(BoundedProcess):
    """One model's chat template in a process of its own (model/template_child.py)."""

    def __init__(self, template: str, tokens: Mapping[str, str], seconds: float = RENDER_S) -> None:
        """`tokens`: the control tokens that the template knows by name. `seconds`: its limit."""
        first: dict[str, object] = {"template": template, "tokens": dict(tokens)}
        module = "edgespec.model.template_child"
        super().__init__(module, "the model's chat template", lambda: first, seconds)

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> str:
        """The conversation as the template writes it, with these tools, up to where the model
        answers.

        Raises ConfigError if the template does not take it, or needs too much time or memory;
        ModelError if its process cannot be started.
        """
        answer = self.ask({"messages": messages, "tools": tools})
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
