"""What learning the weight of a draft's word brings at temperature 1; run by name.

    python tests/benchmarks/draft_weights.py [--depth 6] [--new-tokens 64] [--sources A,B]

Each source reads the base's own answers to the bundled prompts, as horizon.py has them, and guesses
along every one, in one request each: so it learns from answer to answer as it does in a ring. Once
it learns the draft temperature alone, with the weight kept at 1, once both. The shares are of first
guesses that are the token that came; the last half of the answers counts, the first is to learn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
from horizon import Text, features, guesser_of, texts

from edgespec.drafting import ranking

COMPARED = ("independent", "eagle", "eagle3")


def first_guesses(
    source: str, whole: Sequence[Text], depth: int, weights: np.ndarray
) -> list[np.ndarray]:
    """For each text, whether first guesses were right, [places, up to `depth`] in one row."""
    with patch.object(ranking, "WEIGHTS", weights):
        guesser, right = guesser_of(source), []
        for number, text in enumerate(whole):
            guesser.open(number, text.sampling)
            read, found = 0, []
            for end in range(text.prompt + 1, len(text.tokens), depth):
                given = features(guesser, text, max(read - 1, 0), end - 1)
                behind = text.tokens[end : end + depth]
                if guesser.read(number, text.tokens[:end], given):
                    paths = [behind[:level] for level in range(len(behind))]
                    guesses = guesser.guess(number, paths, 8)
                    first = [int(np.argmax(guesses.parents == at)) for at in range(len(behind))]
                    found.append(guesses.tokens[first] == behind)
                read = end
            guesser.close(number)
            right.append(np.concatenate([np.zeros(0, bool), *found]))
    return right


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--sources", default=",".join(COMPARED))
    chosen = parser.parse_args()
    whole = list(texts(1.0, chosen.new_tokens))
    # All kinds of prompts in both halves.
    whole = [text for half in (0, 1) for text in whole[half::2]]
    print("| source | places | weight 1 | weight learnt | standard error of the difference |")
    print("| --- | --- | --- | --- | --- |")
    for source in chosen.sources.split(","):
        without, learnt = (
            np.concatenate(first_guesses(source, whole, chosen.depth, weights)[len(whole) // 2 :])
            for weights in (np.ones(1), ranking.WEIGHTS)
        )
        gain = learnt.astype(float) - without
        cells = len(gain), f"{without.mean():.3f}", f"{learnt.mean():.3f}"
        error = gain.std() / np.sqrt(len(gain))
        print(f"| `{source}` | " + " | ".join(map(str, cells)) + f" | {error:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
