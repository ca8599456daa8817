"""Write prompts for benchmarks from documents that no bundled model was trained on.

Usage::

    python tools/demo_prompts.py --data DATA --out edgespec/bench/prompts

The beginnings of held-out documents (see ``demo_data.py``, and ``train_demo_models.py`` for DATA):
``help-20.jsonl``, pages of command help up to their first example, and ``code-20.jsonl``, pieces of
Python modules up to about half of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from demo_data import Document, all_documents

COUNT = 20
CODE_CHARS = 600
LEAST_CHARS = 60


def beginning_of_help(text: str) -> str:
    """Name, description and the first example's first word: what follows is the example."""
    return text[: text.index("\n- ") + 3]


def beginning_of_code(text: str) -> str:
    """Whole lines, about half of the piece."""
    lines = text.splitlines(keepends=True)
    kept = ""
    for line in lines[: len(lines) // 2]:
        if len(kept) + len(line) > CODE_CHARS:
            break
        kept += line
    return kept


def prompts_of(
    documents: list[Document], source: str, category: str, beginning: Callable[[str], str]
) -> list[dict[str, object]]:
    """COUNT beginnings of a source's held-out documents, in the order of their hashes."""
    held_out = [d for d in documents if d.source == source and d.held_out]
    held_out.sort(key=lambda d: hashlib.sha256(d.text.encode()).hexdigest())
    found = ((document.name, beginning(document.text)) for document in held_out)
    chosen = [(name, text) for name, text in found if len(text) >= LEAST_CHARS][:COUNT]
    return [
        {"id": f"{at}:{name}", "category": category, "prompt": text}
        for at, (name, text) in enumerate(chosen, start=1)
    ]


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    documents = all_documents(args.data)
    for file, source, category, beginning in (
        ("help-20.jsonl", "tldr", "command help", beginning_of_help),
        ("code-20.jsonl", "code", "code", beginning_of_code),
    ):
        prompts = prompts_of(documents, source, category, beginning)
        lines = [json.dumps(prompt) for prompt in prompts]
        (args.out / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
