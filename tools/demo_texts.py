"""Write the demo base's training documents as one JSONL file, for `edgespec train`.

Usage::

    python tools/demo_texts.py --data DATA --out texts.jsonl

The documents, and which are held out, are those of ``train_demo_models.py`` (see there for DATA);
sources come in about the shares that the base was trained on, in an order that the seed decides.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from demo_data import MIX, all_documents


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--characters", type=int, default=8_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    documents = [document for document in all_documents(args.data) if not document.held_out]
    random.Random(args.seed).shuffle(documents)
    left = {source: share * args.characters for source, share in MIX.items()}
    with args.out.open("w", encoding="utf-8") as file:
        for document in documents:
            if left[document.source] > 0:
                left[document.source] -= len(document.text)
                file.write(json.dumps({"text": document.text}) + "\n")


if __name__ == "__main__":
    main()
