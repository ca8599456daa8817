"""Fake compute: exact toy arithmetic in place of a model, for tests and simulation.

Every stage mixes a row's number with those of all rows that it sees; the head hashes the result to
a token. Any wrong visibility, order or position changes the tokens, and a run costs microseconds.
`toy_next` is the plain autoregressive definition that every ring must reproduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from edgespec.errors import LocalProtocolError, RemoteProtocolError
from edgespec.machines.effects import (
    RunBlock,
)
from edgespec.planning.cost_model import DraftPass
from edgespec.tree.drafted import FROM_ROOT, Children, DraftedTree
from edgespec.tree.ledger import IntArray
from edgespec.types.features import NO_FEATURES, Features
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Choice, Sampling
from edgespec.verify.top_logprobs import TopLogprobs

UintArray = npt.NDArray[np.uint64]

_GARBAGE = np.uint64(0xDEADBEEFDEADBEEF)
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))


def _mix(value: UintArray) -> UintArray:
    """A 64-bit finaliser (splitmix64's): every bit of the input reaches every bit of the output."""
    value = value * _MULTIPLIERS[0]
    value = (value ^ (value >> np.uint64(30))) * _MULTIPLIERS[1]
    return value ^ (value >> np.uint64(27))


def _embed(tokens: IntArray | UintArray, positions: IntArray) -> UintArray:
    return _mix(tokens.astype(np.uint64) + np.uint64(1) + _mix(positions.astype(np.uint64)))


def _layer(stage: int, own: UintArray, seen_sum: UintArray) -> UintArray:
    return _mix(own + np.uint64(stage + 1) * seen_sum)


class FakeBlock:
    """A BlockBackend (see backends.base) of one toy layer."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._cache: dict[int, UintArray] = {}
        self._taps: Tensor | None = None

    def open(self, request: int, reserve: int) -> None:
        """Make an empty cache."""
        self._cache[request] = np.zeros(0, np.uint64)

    def move(self, request: int, base: int) -> None:
        """Give the cache of `base` to `request`."""
        self._cache[request] = self._slots_of(base)
        del self._cache[base]

    def run(self, job: RunBlock, stop: Callable[[], bool]) -> Tensor | None:
        """One toy layer over the job's rows: Tensor uint64 [R, 1].

        Raises RemoteProtocolError for rows that this stage cannot take, LocalProtocolError for a
        job that does not fit the cache.
        """
        old = self._slots_of(job.request)
        if job.committed + job.sees.shape[1] != len(old) + len(job.rows):
            raise LocalProtocolError(f"job {job.job} does not fit a cache of {len(old)} rows")
        own = self._inputs(job)
        # The layers count as the stages do; what enters the first is its tokens' numbers.
        aux_layer = Tensor("uint8", (len(own), 8), own.tobytes())
        self._taps = aux_layer if self._stage in job.aux_layers else None
        stopped = stop()
        # The slots of an aborted job hold garbage that nobody may look at.
        new = np.full_like(own, _GARBAGE) if stopped else _mix(own)
        cache = np.concatenate([old, new])
        self._cache[job.request] = cache
        if stopped:
            return None
        before, behind = cache[: job.committed], cache[job.committed :]
        seen = np.where(job.sees, behind[None, :], np.uint64(0)).sum(1) + before.sum()
        out = _layer(self._stage, own, seen)
        return Tensor("uint64", (len(out), 1), out.tobytes())

    def take_taps(self) -> Tensor | None:
        """See BlockBackend: the 8 bytes of each row's number as it came in."""
        return self._taps

    def _inputs(self, job: RunBlock) -> UintArray:
        if self._stage == 0:
            tokens = job.rows.tokens.astype(np.uint64)
            if job.prompts is not None:
                vectors = np.frombuffer(job.prompts.data, np.uint64)
                own = vectors[np.maximum(-1 - job.rows.tokens, 0)]
                tokens = np.where(job.rows.tokens < 0, own, tokens)
            return _embed(tokens, job.rows.positions)
        if job.hidden is None or job.hidden.shape != (len(job.rows), 1):
            raise RemoteProtocolError(f"job {job.job} lacks the hidden rows of stage {self._stage}")
        return np.frombuffer(job.hidden.data, np.uint64)

    def _slots_of(self, request: int) -> UintArray:
        if request not in self._cache:
            raise LocalProtocolError(f"request {request} is not open on this block")
        return self._cache[request]

    def gather(self, request: int, start: int, order: IntArray) -> None:
        """Keep slots `start + order` behind the first `start`."""
        cache = self._slots_of(request)
        self._cache[request] = np.concatenate([cache[:start], cache[start:][order]])

    def close(self, request: int) -> None:
        """Free the request's cache."""
        self._cache.pop(request, None)

    def slots(self, request: int) -> int:
        """How many slots a request holds (0: none)."""
        return len(self._cache.get(request, ()))

    @property
    def open_requests(self) -> int:
        """How many requests hold a cache."""
        return len(self._cache)


def _token_behind(hidden: UintArray, positions: IntArray, vocabulary: int, seed: int) -> IntArray:
    salted = _mix(hidden + np.uint64(seed) + positions.astype(np.uint64))
    return (salted % np.uint64(vocabulary)).astype(np.int64)


class FakeHead:
    """A Head that hashes hidden numbers to tokens of a small vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def choose(
        self, hidden: Tensor, positions: IntArray, sampling: Sampling, top: int = -1
    ) -> tuple[Choice, TopLogprobs | None]:
        """The token behind every row; a seed changes all of them. It is committed of each."""
        rows = np.frombuffer(hidden.data, np.uint64)
        tokens = _token_behind(rows, positions, self._vocabulary, sampling.seed)
        choice = Choice(tokens, np.ones(len(tokens)), np.zeros(len(tokens)))
        if top < 0:
            return choice, None
        best = np.broadcast_to(tokens[:, None], (len(tokens), min(top, 1)))
        return choice, TopLogprobs(np.zeros(len(tokens)), best, np.zeros(best.shape))


def toy_next(context: Sequence[int], stages: int, vocabulary: int, seed: int) -> int:
    """The token behind `context` by plain causal evaluation of the toy model."""
    positions = np.arange(len(context), dtype=np.int64)
    hidden = _embed(np.asarray(context, np.int64), positions)
    for stage in range(stages):
        hidden = _layer(stage, hidden, np.cumsum(_mix(hidden), dtype=np.uint64))
    last = positions[-1:] + 1
    return int(_token_behind(hidden[-1:], last, vocabulary, seed)[0])


class FakeDraft:
    """A DraftSource that knows the toy model and errs on purpose.

    The right token is the best guess in a share of `accuracy` of all contexts, the second best in
    half of the rest; which contexts is a hash of the context, so that runs repeat exactly.
    """

    name = "fake"
    sources = ("fake",)
    needs: frozenset[str] = frozenset()

    def __init__(self, stages: int, vocabulary: int, accuracy: float) -> None:
        self._next = lambda context, seed: toy_next(context, stages, vocabulary, seed)
        self._vocabulary = vocabulary
        self._accuracy = accuracy
        self._requests: dict[int, _FakeTree] = {}
        self._seeds: dict[int, int] = {}
        self._work: list[int] = []

    def open(self, request: int, sampling: Sampling) -> None:
        """Start a request."""
        self._seeds[request] = sampling.seed

    def inherit(self, request: int, base: int, rows: int) -> None:
        """Nothing: it remembers no tokens."""

    def refresh(
        self,
        request: int,
        context: Sequence[int],
        depth: int,
        width: int,
        features: Features = NO_FEATURES,
    ) -> DraftedTree:
        """A fresh tree of `depth` levels below the context's last token."""
        self._requests[request] = _FakeTree(list(context))
        return self.deepen(request, depth, width)

    def deepen(self, request: int, levels: int, width: int) -> DraftedTree:
        """The last tree with `levels` more."""
        tree = self._requests[request]
        for _ in range(levels):
            self._charge(tree.frontier_rows)
            tree.grow(width, lambda path: self._children(path, width, self._seeds[request]))
        return tree.drafted()

    def expand(
        self,
        request: int,
        context: Sequence[int],
        paths: Sequence[Sequence[int]],
        width: int,
        features: Features = NO_FEATURES,
    ) -> Children:
        """The `width` best children of each path behind `context`."""
        self._charge(len(paths))
        guesses = [
            (index, token, score)
            for index, path in enumerate(paths)
            for token, score in self._children([*context, *path], width, self._seeds[request])
        ]
        parents, tokens, scores = zip(*guesses, strict=True) if guesses else ((), (), ())
        return Children(
            np.array(parents, np.int64), np.array(tokens, np.int64), np.array(scores, np.float64)
        )

    def take_work(self) -> tuple[DraftPass, ...]:
        """The passes that a model with a cache of the right context would have run."""
        work, self._work = self._work, []
        return tuple(DraftPass(rows, self.name) for rows in work)

    def _charge(self, rows: int) -> None:
        if rows:
            self._work.append(rows)

    def close(self, request: int) -> None:
        """Free the request."""
        self._requests.pop(request, None)
        self._seeds.pop(request, None)

    @property
    def open_requests(self) -> int:
        """How many requests are held."""
        return len(self._seeds)

    def _children(self, path: list[int], width: int, seed: int) -> list[tuple[int, float]]:
        right = self._next(path, seed)
        luck = float(_mix(np.array([hash(tuple(path)) & (2**63 - 1)], np.uint64))[0]) / 2.0**64
        rank = 0 if luck < self._accuracy else 1 if luck < (1 + self._accuracy) / 2 else width
        wrong = [
            (right + 1 + i) % self._vocabulary for i in range(min(width, self._vocabulary - 1))
        ]
        tokens = [*wrong[:rank], right, *wrong[rank:]] if rank < width else wrong
        # Equal scores for neighbouring ranks: ties are the rule here, not the exception.
        return [(t, -0.5 - (i // 2)) for i, t in enumerate(tokens[:width])]


class _FakeTree:
    """Guesses of one fake draft, grown level by level."""

    def __init__(self, context: list[int]) -> None:
        self._paths: list[list[int]] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._context = context
        self._frontier: list[int] = [FROM_ROOT]

    @property
    def frontier_rows(self) -> int:
        """How many rows have to be run for the next level."""
        return len(self._frontier)

    def grow(self, width: int, children: Callable[[list[int]], list[tuple[int, float]]]) -> None:
        """One level more below the `width` best of the frontier."""
        level: list[int] = []
        for at in self._frontier:
            path = self._context if at == FROM_ROOT else self._paths[at]
            score = 0.0 if at == FROM_ROOT else self._scores[at]
            for token, log_score in children(path):
                level.append(len(self._paths))
                self._paths.append([*path, token])
                self._parents.append(at)
                self._scores.append(score + log_score)
        self._frontier = sorted(level, key=lambda i: (-self._scores[i], i))[:width]

    def drafted(self) -> DraftedTree:
        """All guesses so far."""
        return DraftedTree(
            np.array(self._parents, np.int64),
            np.array([path[-1] for path in self._paths], np.int64),
            np.array(self._scores, np.float64),
        )
