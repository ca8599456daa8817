"""Let a base model write the questions that a draft head for it is trained with.

Usage::

    python tools/own_questions.py BASE --out questions.jsonl [--count 20000] [--check FILE ...]

The method of Magpie (arXiv 2406.08464, §2): the base continues its chat template from where a
user's turn begins, so it writes what a user would. What stands before that turn, a system message
and sometimes the question's first words, says of which kind. Temperatures take turns.

One JSON object a line, with "category" and "messages", for ``edgespec train``. A question that was
cut off, runs in circles, or says what another said is left out, and so is one that shares eight
words in a row with a prompt of a ``--check`` file (``.jsonl``): those that a benchmark reports on.
Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from edgespec.daemon.model_names import resolved
from edgespec.model.hub import local_folder
from edgespec.model.tensors import best_device
from edgespec.model.tokenizer import Tokenizer
from edgespec.training.teacher import Teacher

TEMPERATURES = (0.7, 1.0, 1.2)
LONGEST = 192  # tokens of a question, with what stands before it
LEAST_WORDS, LEAST_NEW_WORDS = 4, 0.45
SHARED = 8  # words in a row
MARK = "\u2042 the question \u2042"

SYSTEM = "You answer a user who {asks}."


class Kind(NamedTuple):
    """What users of this kind do, and words that a question may begin with; "" leaves all to the
    base."""

    asks: str
    begins: tuple[str, ...] = ("",)


KINDS = {
    "everyday": Kind("has questions of everyday life", ("", "", "How do I", "What should I")),
    "facts": Kind("asks for facts", ("Who", "When", "Where", "What is the", "Which", "How many")),
    "writing": Kind("wants texts written", ("Write a", "Compose", "Draft", "Write an email", "")),
    "roleplay": Kind(
        "wants you to play somebody",
        ("Pretend to be", "Imagine you are", "Act as", "You are a", "Picture yourself as"),
    ),
    "reasoning": Kind("sets puzzles of logic", ("", "If", "Imagine", "Suppose", "There are")),
    "mathematics": Kind("has mathematical problems", ("", "What is", "Find", "Calculate", "Solve")),
    "word problems": Kind("tells a story that ends with a question of arithmetic", ("", "A ")),
    "code": Kind("programs", ("", "Write a function", "How can I", "Implement", "Explain")),
    "extraction": Kind(
        "gives a text and wants what it says as a list, a table or JSON",
        ("Extract", "Identify", "List all", "Given the following", "From the text"),
    ),
    "science": Kind("studies science and engineering", ("", "What", "Explain", "Describe", "How")),
    "humanities": Kind(
        "studies history, economics, law and the arts", ("", "Discuss", "Compare", "How did", "Why")
    ),
    "translation": Kind(
        "wants sentences translated",
        ("Translate German to English:", "Translate to French:", "Translate the following"),
    ),
    "summaries": Kind(
        "gives an article and wants a summary of it",
        ("Summarize:", "Summarize the following", "Sum up this article:", "Give the key points"),
    ),
    "documents": Kind(
        "gives a passage of an encyclopedia and then asks about it", ("Passage:", "Context:", "")
    ),
    "advice": Kind(
        "wants ideas and advice", ("", "Give me", "Suggest", "What are some", "Can you")
    ),
    "editing": Kind("gives a text to correct or to change", ("Rewrite", "Correct", "Edit", "Make")),
}


def words_of(text: str) -> list[str]:
    """The words, in lower case."""
    return re.findall(r"\w+", text.lower())


def runs_of(words: list[str]) -> set[tuple[str, ...]]:
    """All SHARED words in a row; fewer words are one run."""
    if len(words) <= SHARED:
        return {tuple(words)}
    return {tuple(words[at : at + SHARED]) for at in range(len(words) - SHARED + 1)}


def prompts_in(file: Path) -> Iterable[str]:
    """Every text of a file of prompts, whatever its fields are called."""
    for line in file.read_text(encoding="utf-8").splitlines():
        left = [json.loads(line)]
        while left:
            found = left.pop()
            if isinstance(found, str):
                yield found
            elif isinstance(found, dict | list):
                left.extend(found.values() if isinstance(found, dict) else found)


class Kept:
    """The questions that are kept: what they say is neither said yet nor reported on."""

    def __init__(self, reported: Iterable[str]) -> None:
        self._reported = {run for text in reported for run in runs_of(words_of(text))}
        self._said: set[tuple[str, ...]] = set()

    def takes(self, question: str) -> bool:
        """Whether this question is kept, and if so, that it is said now."""
        words = words_of(question)
        runs = runs_of(words)
        opening = tuple(words[: 2 * SHARED])
        if (
            len(words) < LEAST_WORDS
            or len(set(words)) < LEAST_NEW_WORDS * len(words)
            or opening in self._said
            or runs & self._reported
        ):
            return False
        self._said.add(opening)
        return True


def opening_of(tokenizer: Tokenizer, kind: Kind, begins: str) -> list[int]:
    """The template's tokens up to where the user's turn begins, and the words it begins with."""
    system = {"role": "system", "content": SYSTEM.format(asks=kind.asks)}
    whole = tokenizer.render([system, {"role": "user", "content": MARK}])
    before, mark, _ = whole.partition(MARK)
    if not mark:
        raise SystemExit("the model's chat template changes what a user says; no question is made")
    return tokenizer.encode(before + begins, bare=True)


def main() -> None:
    """Write the file, a batch at a time; the kind with the fewest questions is next."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("base", metavar="BASE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--check", type=Path, nargs="*", default=[])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    path = Path(resolved(args.base))
    tokenizer = Tokenizer(local_folder(path))
    teacher = Teacher(path, best_device(), getattr(torch, args.dtype))
    kept = Kept(text for file in args.check for text in prompts_in(file))
    counts = Counter(dict.fromkeys(KINDS, 0))
    if args.out.exists():
        for line in args.out.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            kept.takes(row["messages"][0]["content"])
            counts[row["category"]] += 1
    torch.manual_seed(counts.total())
    size, batch = teacher.texts_at_once(LONGEST), 0
    end = min(tokenizer.eos_ids)
    with args.out.open("a", encoding="utf-8") as file:
        while counts.total() < args.count:
            name, _ = min(counts.items(), key=lambda one: one[1])
            kind, temperature = KINDS[name], TEMPERATURES[batch % len(TEMPERATURES)]
            beginnings = [kind.begins[at % len(kind.begins)] for at in range(size)]
            openings = [opening_of(tokenizer, kind, begins) for begins in beginnings]
            heat = [temperature] * size
            for begins, opening, text in zip(
                beginnings,
                openings,
                teacher.continued(openings, LONGEST, end, heat, lambda _longest: None),
                strict=True,
            ):
                said = text.tokens[len(opening) :]
                question = (begins + tokenizer.decode(said[:-1])).strip()
                if said[-1] == end and kept.takes(question):
                    message = {"role": "user", "content": question}
                    row = {"category": name, "messages": [message]}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    counts[name] += 1
            file.flush()
            batch += 1
            print(f"{counts.total()} of {args.count} questions, {batch} batches", flush=True)


if __name__ == "__main__":
    main()
