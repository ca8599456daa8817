"""Write the demo base's training documents as one JSONL file, for `edgespec train`.

Usage::

    python tools/demo_texts.py --data DATA --out texts.jsonl
    python tools/demo_texts.py --data DATA --out questions.jsonl --questions --seed 1

The documents, and which are held out, are those of ``train_demo_models.py`` (see there for DATA);
sources come in about the shares that the base was trained on, in an order that the seed decides.
With ``--questions`` all of them come, GSM8K's as questions for the base to answer, with other
numbers: the base knows the answers to those that it was trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

from demo_data import MIX, all_documents


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--characters", type=int, default=8_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", action="store_true")
    args = parser.parse_args()
    documents = [document for document in all_documents(args.data) if not document.held_out]
    dice = random.Random(args.seed)
    dice.shuffle(documents)
    left = {source: share * args.characters for source, share in MIX.items()}
    with args.out.open("w", encoding="utf-8") as file:
        for document in documents:
            if args.questions and document.source == "gsm8k":
                asked = question(document.text, dice)
                line: dict[str, object] = {"messages": [{"role": "user", "content": asked}]}
            elif args.questions or left[document.source] > 0:
                left[document.source] -= len(document.text)
                line = {"text": document.text}
            else:
                continue
            file.write(json.dumps(line) + "\n")


def question(problem: str, dice: random.Random) -> str:
    """A problem's question, with other numbers of as many digits."""

    def other(found: re.Match[str]) -> str:
        digits = found[0]
        if digits[0] == "0":
            return digits
        first = 10 ** (len(digits) - 1) if len(digits) > 1 else 2
        return str(dice.randrange(first, 10 ** len(digits)))

    asked = problem.split("\nAnswer:")[0].removeprefix("Question: ")
    return re.sub(r"\d+", other, asked)


if __name__ == "__main__":
    main()
