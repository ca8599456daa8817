"""Grammar process: tries grammars in a process that can be stopped, before they are used.

A schema or regex comes from whoever asks; to compile one may take hours, all memory, or the whole
process. There it may, and it yields to all that answers. As a program this module is that process:
it is first told "tokenizer" and "ends", then grammars, each a JSON text, and answers each with {}
or {"problem"}.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from edgespec.errors import ConfigError
from edgespec.model.bounded_process import BoundedProcess, serve
from edgespec.model.grammar import GrammarCompiler, Vocabulary

COMPILE_S = 3.0
"""Seconds of computing that a grammar may take; most take milliseconds."""

PATIENCE = 5.0
"""Times as long it may take by the clock: it yields to all other work."""

MOST_CHARS = 512 << 10
"""Characters of a grammar."""

KEPT = 64
"""Grammars that are known to compile."""


class GrammarProcess(BoundedProcess):
    """Tries grammars for one vocabulary in a process of its own, which
    starts with the first one. Its calls come from one thread."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], seconds: float = COMPILE_S) -> None:
        """`vocabulary`: see model.grammar; it is asked as the process starts. `seconds`: its
        limit."""

        def first() -> dict[str, object]:
            known = vocabulary()
            return {"tokenizer": known.tokenizer, "ends": known.ends}

        super().__init__("edgespec.model.grammar_process", "grammars", first, seconds, PATIENCE)
        self._good: OrderedDict[str, None] = OrderedDict()

    def check(self, text: str) -> None:
        """Raise ConfigError for a grammar, as the message Submit has it, that cannot be used or
        needs too much time or memory; ModelError if the process cannot be started."""
        if len(text) > MOST_CHARS:
            words = f"the grammar has {len(text)} characters; it may have {MOST_CHARS}"
            raise ConfigError(words)
        if text in self._good:
            return
        answer = self.ask(text)
        if answer is None:
            raise ConfigError(
                "the schema or grammar was given up: it took all the time or memory that it may "
                f"take to be compiled ({self.seconds:g} s); use fewer alternatives, less nesting "
                "or simpler patterns"
            )
        if "problem" in answer:
            raise ConfigError(answer["problem"])
        self._good[text] = None
        if len(self._good) > KEPT:
            self._good.popitem(last=False)


NICENESS = 10
"""A tenth of a core where all cores are busy: enough to get done, and little for others."""


def prepare(asked: Mapping[str, Any]) -> Callable[[bytes], dict[str, str]]:
    """What tries grammars for that vocabulary."""
    os.nice(NICENESS)
    compiler = GrammarCompiler(Vocabulary(asked["tokenizer"], tuple(asked["ends"])))

    def answer(line: bytes) -> dict[str, str]:
        try:
            compiler.compile(json.loads(line)).allowed(())
        except ConfigError as problem:
            return {"problem": str(problem)}
        return {}

    return answer


if __name__ == "__main__":
    serve(prepare)
