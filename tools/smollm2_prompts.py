"""Write the chat prompts that the bundled head for SmolLM2-135M-Instruct was trained with.

Usage::

    python tools/smollm2_prompts.py --data DATA --out prompts.jsonl

One JSON object a line, with "category" and "messages", for ``edgespec train``. The prompts are made
of GSM8K's training questions (MIT), pages of tldr-pages (CC BY 4.0), modules and language help of
Python's standard library (PSF), and ``smollm2_words.json``. Documents that are held out from the
demo models (see ``demo_data.py``) are left out: `edgespec bench` ships their beginnings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from demo_data import Document, all_documents

COUNTS = {
    "math": 5000,
    "help": 3000,
    "code": 4500,
    "chat": 6500,
    "translation": 2000,
    "summary": 1500,
    "qa": 3500,
    "rag": 1500,
}
PASSAGE_CHARS = 900

WORDS = json.loads(Path(__file__).with_name("smollm2_words.json").read_text(encoding="utf-8"))


def filled(template: str, dice: random.Random) -> str:
    """The template with words of the lists in place of its names."""
    person, other, third = dice.sample(WORDS["names"], 3)
    topic, second = dice.sample(WORDS["topics"], 2)
    thing, thing2 = dice.sample(WORDS["things"], 2)
    return template.format(
        name=person,
        name2=other,
        name3=third,
        topic=topic,
        topic2=second,
        thing=thing,
        thing2=thing2,
        place=dice.choice(WORDS["places"]),
        role=dice.choice(WORDS["roles"]),
        person=dice.choice(WORDS["people"]),
        work=dice.choice(WORDS["works"]),
        country=dice.choice(WORDS["countries"]),
        language=dice.choice(WORDS["languages"]),
        program=dice.choice(WORDS["programs"]),
    )


def german(dice: random.Random) -> str:
    """A sentence of the word lists."""
    who, when, what, why = (dice.choice(words) for words in WORDS["german"].values())
    subject = who[0].lower() + who[1:]
    return f"{when[0].upper()}{when[1:]} {what.format(w=subject)}, {why}."


def french(dice: random.Random) -> str:
    """A sentence of the word lists."""
    return " ".join(dice.choice(words) for words in WORDS["french"].values()) + "."


def passages(dice: random.Random) -> Iterator[str]:
    """Paragraphs of Python's language help, again and again."""
    found = []
    for text in topics.values():
        parts = re.split(r"\n\s*\n", text)
        for first in range(1, len(parts), 2):
            passage = " ".join(" ".join(parts[first : first + 4]).split())[:PASSAGE_CHARS]
            if len(passage) > 200:
                found.append(passage)
    while True:
        dice.shuffle(found)
        yield from found


def math_prompts(documents: list[Document], dice: random.Random) -> Iterator[str]:
    forms = ("{q}",) * 5 + (
        "{q} Think step by step.",
        "Solve this problem: {q}",
        "Question: {q}\nAnswer:",
    )
    for document in documents:
        question = document.text.split("\nAnswer:")[0].removeprefix("Question: ")
        yield dice.choice(forms).format(q=question)


def help_prompts(documents: list[Document], dice: random.Random) -> Iterator[str]:
    for document in documents:
        name = Path(document.name).stem
        begins = document.text.split("\n- ")[0] + "\n\n- "
        yield dice.choice(
            (
                begins,
                begins,
                f"What does the command {name} do?",
                f"Show me examples of the command {name}.",
                f"Explain this page of help:\n\n{document.text[:PASSAGE_CHARS]}",
                f"How do I use {name}?",
            )
        )


def code_prompts(documents: list[Document], dice: random.Random) -> Iterator[str]:
    asks = (
        "Explain what this Python code does:\n\n{c}",
        "Write a docstring for this code:\n\n{c}",
        "Find a mistake in this code, or say that there is none:\n\n{c}",
        "Complete this Python code:\n\n{c}",
        "{c}",
        "Summarize this module:\n\n{c}",
    )
    for document in documents:
        if dice.random() < 0.45:
            yield filled(dice.choice(WORDS["code"]), dice)
        lines = document.text.splitlines(keepends=True)
        piece = "".join(lines[: dice.randint(8, 22)])[:700]
        yield dice.choice(asks).format(c=piece)


def endless(make: Callable[[], str]) -> Iterator[str]:
    while True:
        yield make()


def rag(text: str, other: str, dice: random.Random) -> str:
    subject = dice.choice(text.split()[:20]).strip('"().,')
    question = dice.choice(
        (
            f"What does the text say about {subject}?",
            "What is described here?",
            "When is this used?",
            f"Why is {subject} mentioned?",
            "What are the exceptions to the rule?",
        )
    )
    return dice.choice(
        (
            f"{text[:600]}\n\n{other[:300]}\n\n{question}",
            f"Answer the question by the documents.\n\nDocument 1: {text[:500]}\n\nDocument 2: "
            f"{other[:400]}\n\nQuestion: {question}",
            f"Context: {text}\n\nQuestion: {question}\n\nAnswer:",
        )
    )


def all_prompts(data: Path, seed: int) -> list[dict[str, object]]:
    """The prompts, shuffled; none twice."""
    dice = random.Random(seed)
    documents = [document for document in all_documents(data) if not document.held_out]
    dice.shuffle(documents)
    by_source = {
        source: [document for document in documents if document.source == source]
        for source in ("gsm8k", "tldr", "code")
    }
    texts = passages(dice)
    sources: dict[str, Iterator[str]] = {
        "math": math_prompts(by_source["gsm8k"], dice),
        "help": help_prompts(by_source["tldr"], dice),
        "code": code_prompts(by_source["code"], dice),
        "chat": endless(lambda: filled(dice.choice(WORDS["chat"]), dice)),
        "translation": endless(
            lambda: (
                f"Translate German to English: {german(dice)}"
                if dice.random() < 0.75
                else f"Translate to English: {french(dice)}"
            )
        ),
        "summary": endless(
            lambda: (
                dice.choice(("Summarize: ", "Give a short summary: ", "Sum up the key points: "))
                + next(texts)
            )
        ),
        "qa": endless(lambda: filled(dice.choice(WORDS["qa"]), dice)),
        "rag": endless(lambda: rag(next(texts), next(texts), dice)),
    }
    prompts: list[dict[str, object]] = []
    for category, source in sources.items():
        seen: set[str] = set()
        for text in itertools.islice(source, 4 * COUNTS[category]):
            if text not in seen and len(seen) < COUNTS[category]:
                seen.add(text)
                message = {"role": "user", "content": text}
                prompts.append({"category": category, "messages": [message]})
    dice.shuffle(prompts)
    return prompts


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts = all_prompts(args.data, args.seed)
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in prompts]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(prompts)} prompts")


if __name__ == "__main__":
    main()
