"""Grammar child: a small process that tries whether a grammar can be compiled.

A schema or regex comes from whoever asks; to compile one may take hours, all memory, or the whole
process. Here it may (model/bounded_child.py). It yields to all that answers.

It is first told "tokenizer" and "ends", then grammars, each a JSON text; it answers each with {} or
{"problem"}.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from edgespec.errors import ConfigError
from edgespec.model.bounded_child import serve
from edgespec.model.grammar import GrammarCompiler, Vocabulary

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
