"""Toy model: exact arithmetic in place of a model's layers and head.

Every stage mixes a row's number with those of all rows that it sees; the head hashes the result to
a token. Any wrong visibility, order or position changes the tokens, and a run costs microseconds.
`toy_next` is the plain autoregressive definition that every ring must reproduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgespec.backends.base import Walk
from edgespec.errors import LocalProtocolError, RemoteProtocolError
from edgespec.machines.effects import RunBlock
from edgespec.tree.ledger import IntArray, Rows
from edgespec.tree.stems import Fork
from edgespec.types.stop_check import StopCheck
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Choice, Sampling, path_of
from edgespec.verify.top_logprobs import TopLogprobs

UintArray = npt.NDArray[np.uint64]

_GARBAGE = np.uint64(0xDEADBEEFDEADBEEF)
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))


def _mix(value: UintArray) -> UintArray:
    """A 64-bit finaliser (splitmix64's): every bit of the input reaches every bit of the output."""
    value = value * _MULTIPLIERS[0]
    value = (value ^ (value >> np.uint64(30))) * _MULTIPLIERS[1]
    value ^= value >> np.uint64(27)
    return value


def _embed(tokens: IntArray | UintArray, positions: IntArray) -> UintArray:
    return _mix(tokens.astype(np.uint64) + np.uint64(1) + _mix(positions.astype(np.uint64)))


def _layer(stage: int, own: UintArray, seen_sum: UintArray) -> UintArray:
    return _mix(own + np.uint64(stage + 1) * seen_sum)


class FakeBlock:
    """A BlockBackend (see backends.base) of one toy layer."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._cache: dict[int, UintArray] = {}  # rows behind the stems
        self._stems: dict[int, list[UintArray]] = {}
        self._taps: Tensor | None = None

    def open(self, request: int, reserve: int) -> None:
        self._cache[request], self._stems[request] = np.zeros(0, np.uint64), []

    def move(self, request: int, base: int) -> None:
        self._cache[request], self._stems[request] = self._own(base), self._stems[base]
        del self._cache[base], self._stems[base]

    def fork(self, request: int, base: int, how: Fork) -> None:
        own, stems = self._own(base), self._stems[base]
        if how.split:
            whole = stems[how.stems - 1]
            two = whole[: how.split].copy(), whole[how.split :].copy()
            self._stems = {
                number: [part for one in held for part in (two if one is whole else (one,))]
                for number, held in self._stems.items()
            }
            stems = self._stems[base]
        if how.frozen:
            stems.append(own[: how.frozen].copy())
            self._cache[base] = own[how.frozen :]
        self._stems[request] = stems[: how.stems]
        before = sum(map(len, self._stems[request]))
        self._cache[request] = self._slots_of(base)[before : before + how.copied].copy()

    def run(self, job: RunBlock, stop: StopCheck) -> Tensor | None:
        """One toy layer over the job's rows: Tensor uint64 [R, 1].

        Raises RemoteProtocolError for rows that this stage cannot take, LocalProtocolError for a
        job that does not fit the cache.
        """
        for part in job.parts:
            old = len(self._slots_of(part.request))
            if part.slots != old + len(part.rows):
                raise LocalProtocolError(f"job {job.job} does not fit a cache of {old} rows")
        own = self._inputs(job)
        # The layers count as the stages do; what enters the first is its tokens' numbers.
        aux_layer = Tensor("uint8", (len(own), 8), own.tobytes())
        self._taps = aux_layer if self._stage in job.aux_layers else None
        stopped, several = stop(), len(job.parts) > 1
        new, out, first = _mix(own), np.zeros_like(own), 0
        for part in job.parts:
            rows = slice(first, first + len(part.rows))
            first, left_out = rows.stop, stopped or (several and stop(part.request))
            if left_out:  # the slots hold garbage that no row may see
                new[rows] = _GARBAGE
            self._cache[part.request] = np.concatenate([self._own(part.request), new[rows]])
            cache = self._slots_of(part.request)
            if not left_out:
                before, after = cache[: part.committed], cache[part.committed :]
                seen = np.where(part.sees, after[None, :], np.uint64(0)).sum(1) + before.sum()
                out[rows] = _layer(self._stage, own[rows], seen)
        return None if stopped else Tensor("uint64", (len(out), 1), out.tobytes())

    def take_aux_hidden(self) -> Tensor | None:
        """The 8 bytes of each row's number as it came in."""
        return self._taps

    def _inputs(self, job: RunBlock) -> UintArray:
        rows = job.rows
        if self._stage == 0:
            tokens = rows.tokens.astype(np.uint64)
            if job.ppd_tokens is not None:
                vectors = np.frombuffer(job.ppd_tokens.data, np.uint64)
                own = vectors[np.maximum(-1 - rows.tokens, 0)]
                tokens = np.where(rows.tokens < 0, own, tokens)
            return _embed(tokens, rows.positions)
        if job.hidden is None or job.hidden.shape != (len(rows), 1):
            raise RemoteProtocolError(f"job {job.job} lacks the hidden rows of stage {self._stage}")
        return np.frombuffer(job.hidden.data, np.uint64)

    def _own(self, request: int) -> UintArray:
        if request not in self._cache:
            raise LocalProtocolError(f"request {request} is not open on this block")
        return self._cache[request]

    def _slots_of(self, request: int) -> UintArray:
        own = self._own(request)
        stems = self._stems[request]
        return np.concatenate([*stems, own]) if stems else own

    def gather(self, request: int, start: int, order: IntArray) -> None:
        own, before = self._own(request), sum(map(len, self._stems[request]))
        if start < before:
            raise LocalProtocolError(f"gather behind slot {start} moves some of {before} stems")
        cut = start - before
        self._cache[request] = np.concatenate([own[:cut], own[cut:][order]])

    def close(self, request: int) -> None:
        self._cache.pop(request, None)
        self._stems.pop(request, None)

    def slots(self, request: int) -> int:
        """How many slots a request holds (0: none)."""
        return len(self._slots_of(request)) if request in self._cache else 0

    def shares(self, request: int) -> list[tuple[int, int]]:
        """The rows of each stem of a request, and how many requests hold it."""
        holders = Counter(id(stem) for stems in self._stems.values() for stem in stems)
        return [(len(stem), holders[id(stem)]) for stem in self._stems[request]]

    @property
    def held_rows(self) -> int:
        """Rows in all caches, shared ones once."""
        every = {id(stem): len(stem) for stems in self._stems.values() for stem in stems}
        return sum(map(len, self._cache.values())) + sum(every.values())

    @property
    def open_requests(self) -> int:
        """How many requests hold a cache."""
        return len(self._cache)


def _token_behind(hidden: UintArray, positions: IntArray, vocabulary: int, seed: int) -> IntArray:
    salted = _mix(hidden + np.uint64(seed) + positions.astype(np.uint64))
    tokens: IntArray = (salted % np.uint64(vocabulary)).astype(np.int64)
    return tokens


class FakeHead:
    """A Head that hashes hidden numbers to tokens of a small vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def choose(self, walks: Sequence[Walk]) -> list[tuple[Choice, TopLogprobs | None]]:
        """The tokens along the paths; a seed changes all of them. Each is certain."""
        return [self._along(walk.hidden, walk.rows, walk.sampling, walk.top) for walk in walks]

    def score(self, hidden: Tensor, tokens: IntArray, top: int) -> TopLogprobs:
        """A number for each token that follows from all that its row has seen."""
        mixed = _mix(np.frombuffer(hidden.data, np.uint64) + tokens.astype(np.uint64))
        log_probs = -((mixed % np.uint64(1 << 20)).astype(np.float64) / (1 << 16))
        best = np.broadcast_to(tokens[:, None], (len(tokens), min(top, 1)))
        return TopLogprobs(log_probs, best, np.broadcast_to(log_probs[:, None], best.shape))

    def _along(
        self, hidden: Tensor, rows: Rows, sampling: Sampling, top: int
    ) -> tuple[Choice, TopLogprobs | None]:
        numbers = np.frombuffer(hidden.data, np.uint64)
        behind = _token_behind(numbers, rows.positions + 1, self._vocabulary, sampling.seed)
        path = path_of(lambda row: int(behind[row]), rows)
        choice = Choice(path, behind[path], np.ones(len(path)))
        if top < 0:
            return choice, None
        best = np.broadcast_to(choice.tokens[:, None], (len(path), min(top, 1)))
        return choice, TopLogprobs(np.zeros(len(path)), best, np.zeros(best.shape))


def toy_hidden(tokens: Sequence[int], stages: int) -> UintArray:
    """What leaves the last stage for each row of a text, by plain causal evaluation."""
    positions = np.arange(len(tokens), dtype=np.int64)
    hidden = _embed(np.asarray(tokens, np.int64), positions)
    for stage in range(stages):
        hidden = _layer(stage, hidden, np.cumsum(_mix(hidden), dtype=np.uint64))
    return hidden


def toy_next(context: Sequence[int], stages: int, vocabulary: int, seed: int) -> int:
    """The token after `context` by plain causal evaluation of the toy model."""
    last = toy_hidden(context, stages)[-1:]
    return int(_token_behind(last, np.array([len(context)]), vocabulary, seed)[0])
