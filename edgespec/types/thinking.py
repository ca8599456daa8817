"""Thinking: tags within which models think before they answer, and what of an answer that is."""

from __future__ import annotations

TAGS = ("think", "thinking", "thought", "seed:think")
"""Names of tags that chat templates have for it."""


def thinking_in(template: str) -> str:
    """The name of the tag within which a model of that chat template thinks; "": it does not."""
    return next((tag for tag in TAGS if f"<{tag}>" in template and f"</{tag}>" in template), "")


def tags_of(name: str) -> tuple[str, str]:
    """What stands before a thought, and behind it."""
    return f"<{name}>", f"</{name}>"


def settings_for(thinks: bool) -> dict[str, bool]:
    """What tells a chat template whether to think: one of these names is what it knows."""
    return {"enable_thinking": thinks, "thinking": thinks}


class ThoughtReader:
    """Finds the thought that an answer begins with, in pieces as they come.

    Blanks beside the tags are in neither part. A thought that is not closed goes on to the end.
    """

    def __init__(self, *tags: str) -> None:
        """`tags`: those that may be; without any an answer is all text."""
        self._openings = [f"<{tag}>" for tag in tags]
        self._closings = [f"</{tag}>" for tag in tags]
        self._held = ""
        self._thinks: bool | None = None if tags else False  # None: that is not known yet
        self._trims = False  # blanks that come next are in no part

    def push(self, text: str, *, thinks: bool = False) -> list[tuple[str, bool]]:
        """What is certain with this text, and of each piece whether it is of a thought; `thinks`:
        the prompt ended within one."""
        self._held += text
        if self._thinks is None and not self._begin(thinks):
            return []
        self._trim()
        if not self._thinks:
            return self.flush()
        found, is_over = self._thought()
        if not is_over:
            return found
        self._thinks, self._trims = False, True
        self._trim()
        return [*found, *self.flush()]

    def flush(self) -> list[tuple[str, bool]]:
        """The answer has ended: what was held back of it."""
        rest, self._held = self._held, ""
        return [(rest, bool(self._thinks))] if rest else []

    def _begin(self, thinks: bool) -> bool:
        """Whether it is known now how the answer begins."""
        bare = self._held.lstrip()
        opening = next((one for one in self._openings if bare.startswith(one)), "")
        if opening:
            self._closings = [opening.replace("<", "</")]
            self._held = bare[len(opening) :]
        elif not thinks and any(one.startswith(bare) for one in self._openings):
            return False
        self._thinks = self._trims = bool(opening) or thinks
        return True

    def _thought(self) -> tuple[list[tuple[str, bool]], bool]:
        """What is certain of the thought, and whether it is over."""
        held = self._held
        places = [(held.find(one), one) for one in self._closings if one in held]
        if places:
            at, closing = min(places)
            self._held = held[at + len(closing) :]
        else:  # a closing tag may have begun, or blanks before one
            begun = [one[:n] for one in self._closings for n in range(1, len(one))]
            cut = max((len(one) for one in begun if held.endswith(one)), default=0)
            at = len(held[: len(held) - cut].rstrip())
            self._held = held[at:]
        sure = held[:at].rstrip()
        return [(sure, True)] if sure else [], bool(places)

    def _trim(self) -> None:
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held
