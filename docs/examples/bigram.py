"""A draft source of one's own: what followed the last token most often in this text."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from edgespec import DraftSource, Sampling


class Bigram(DraftSource):
    def __init__(self) -> None:
        self.after: dict[int, defaultdict[int, Counter[int]]] = {}
        self.last: dict[int, int] = {}

    def open(self, request: int, sampling: Sampling) -> None:
        self.after[request] = defaultdict(Counter)

    def read(self, request: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            if request in self.last:
                self.after[request][self.last[request]][token] += 1
            self.last[request] = token

    def guess(
        self, request: int, paths: Sequence[Sequence[int]], width: int
    ) -> list[list[tuple[int, float]]]:
        found = []
        for path in paths:
            counts = self.after[request][path[-1] if path else self.last[request]]
            best = counts.most_common(width)
            found.append([(token, math.log(n / (counts.total() + 1))) for token, n in best])
        return found

    def close(self, request: int) -> None:
        del self.after[request], self.last[request]

    def seconds(self, tokens: int, paths: int) -> float:
        return 1e-6 * tokens + 1e-5 * paths
