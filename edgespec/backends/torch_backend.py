"""Compute by torch: a stage's block of layers, and the coordinator's output head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from edgespec.backends.base import Walk
from edgespec.errors import LocalProtocolError, RemoteProtocolError
from edgespec.machines.effects import BlockPart, RunBlock
from edgespec.model.aux_hidden import packed
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.joint import CachedPart
from edgespec.model.kv_cache import SharedCaches
from edgespec.model.tensors import from_torch, to_torch
from edgespec.model.tree_attention import tree_mask
from edgespec.tree.ledger import IntArray, Rows
from edgespec.tree.stems import Fork
from edgespec.types.stop_check import StopCheck
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import (
    Choice,
    Logits,
    Sampling,
    bad_logits,
    choose_along,
    path_of,
)
from edgespec.verify.top_logprobs import TopLogprobs, joined, top_logprobs

SCORED_ROWS = 32
"""Rows of a prompt whose logits are held at once."""


class TorchBlock:
    """A BlockBackend (see backends.base): a Block and a cache for every open request."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._caches = SharedCaches(block.new_cache)
        self._taps: list[torch.Tensor] = []

    def open(self, request: int, reserve: int) -> None:
        self._caches.open(request, reserve)

    def move(self, request: int, base: int) -> None:
        self._caches.move(request, base)

    def fork(self, request: int, base: int, how: Fork) -> None:
        self._caches.fork(request, base, how)

    def run(self, job: RunBlock, stop: StopCheck) -> Tensor | None:
        """Raises RemoteProtocolError, changing nothing, for tokens or hidden rows that this block
        cannot take; LocalProtocolError for a job that does not fit the cache."""
        rows = job.rows
        parts = [self._cached(job.job, part) for part in job.parts if len(part.rows)]
        if not parts:
            return from_torch(torch.empty((0, self._block.hidden_size), dtype=self._block.dtype))
        inputs = self._inputs(job, rows)
        self._taps = []
        positions = torch.from_numpy(rows.positions).to(self._block.device)
        tapped = self._taps.append if job.aux_layers else None
        tokens = None if self._block.token_rows is None else self._tokens(job, rows)
        hidden = self._block.forward_joint(
            inputs, positions, parts, stop, job.aux_layers, tapped, tokens
        )
        return None if hidden is None else from_torch(hidden)

    def _cached(self, job: int, part: BlockPart) -> CachedPart:
        cache, rows = self._caches[part.request], len(part.rows)
        if part.slots != cache.length + rows or rows != len(part.sees):
            raise LocalProtocolError(
                f"job {job} expects {part.slots - rows} rows in the cache of "
                f"request {part.request}, which holds {cache.length}"
            )
        mask = tree_mask(part.committed, part.sees, self._block.device)
        return CachedPart(part.request, cache, mask)

    def take_aux_hidden(self) -> Tensor | None:
        aux_hidden, self._taps = self._taps, []
        return packed(aux_hidden) if aux_hidden else None

    def gather(self, request: int, start: int, order: IntArray) -> None:
        self._caches[request].gather(start, order)

    def close(self, request: int) -> None:
        self._caches.close(request)

    @property
    def held(self) -> tuple[int, int]:
        """Rows in all caches, shared ones once, and the bytes of their keys and values."""
        return self._caches.rows, self._caches.nbytes

    def _inputs(self, job: RunBlock, rows: Rows) -> torch.Tensor:
        """Tokens for the block that embeds, else hidden rows; checked, as peers sent them."""
        block = self._block
        if block.first == 0:
            return self._embedded(job, rows)
        expected, hidden = (len(rows), block.hidden_size), job.hidden
        fits = hidden is not None and hidden.shape == expected
        if hidden is None or not fits or f"torch.{hidden.dtype}" != str(block.dtype):
            found = "none" if hidden is None else f"{hidden.dtype}{list(hidden.shape)}"
            raise RemoteProtocolError(
                f"this stage takes hidden rows of {block.dtype}{list(expected)}, the stage before "
                f"it sent {found}; give both the same model and dtype"
            )
        return to_torch(hidden, block.device)

    def _tokens(self, job: RunBlock, rows: Rows) -> torch.Tensor:
        """Tokens int64 of the rows, -1, -2, … of PPD tokens; checked."""
        block, tokens = self._block, rows.tokens
        if tokens.shape != rows.ids.shape:
            raise RemoteProtocolError(f"job {job.job} lacks the tokens of its rows")
        vectors = 0 if job.ppd_tokens is None else job.ppd_tokens.shape[0]
        # An index outside the embedding would end the process on CUDA.
        if tokens.min() < -vectors or tokens.max() >= block.vocab_size:
            raise RemoteProtocolError(
                f"job {job.job} has a token outside the vocabulary of {block.vocab_size}"
            )
        return torch.from_numpy(tokens).to(block.device)

    def _embedded(self, job: RunBlock, rows: Rows) -> torch.Tensor:
        """Tokens of the rows, or vectors of all if some stand for PPD tokens."""
        block, places, table = self._block, self._tokens(job, rows), job.ppd_tokens
        if rows.tokens.min() >= 0:
            return places
        assert table is not None
        if table.shape[1:] != (block.hidden_size,) or "float" not in table.dtype:
            raise RemoteProtocolError(
                f"prompt rows are {table.dtype}{list(table.shape)}, this model's have "
                f"{block.hidden_size} floats; use prompt tokens that were trained for it"
            )
        embedded = block.embedded(places.clamp(min=0))
        own = to_torch(table, block.device).to(block.dtype)
        return torch.where((places < 0)[:, None], own[(-1 - places).clamp(min=0)], embedded)


class TorchHead:
    """A Head (see backends.base): the base model's output matrix and the sampling rule."""

    def __init__(self, head: OutputHead) -> None:
        self._head = head

    def choose(self, walks: Sequence[Walk]) -> list[tuple[Choice, TopLogprobs | None]]:
        every = [self._checked(walk.hidden, len(walk.rows)) for walk in walks]
        logits = self._head.logits(torch.cat(every) if len(every) > 1 else every[0])
        own = logits.split([len(rows) for rows in every])
        return [_along(walk, rows) for walk, rows in zip(walks, own, strict=True)]

    def score(self, hidden: Tensor, tokens: IntArray, top: int) -> TopLogprobs:
        found, every = [], self._checked(hidden, len(tokens))
        for first in range(0, len(tokens), SCORED_ROWS):
            some = slice(first, first + SCORED_ROWS)
            logits = self._head.logits(every[some])
            for row, token in zip(logits, tokens[some], strict=True):
                told: Logits = row.cpu().numpy()
                if not np.isfinite(told.max()):
                    raise bad_logits(told.max()[None])
                found.append(top_logprobs(told[None], token[None], top))
        return joined(found)

    def _checked(self, hidden: Tensor, count: int) -> torch.Tensor:
        """So many hidden rows where the head is."""
        head = self._head
        fits = hidden.shape == (count, head.hidden_size)
        if not fits or f"torch.{hidden.dtype}" != str(head.dtype):
            raise RemoteProtocolError(
                f"the head takes hidden rows of {head.dtype}{[count, head.hidden_size]}, "
                f"the last stage sent {hidden.dtype}{list(hidden.shape)}; give all stages the same "
                "model and dtype"
            )
        return to_torch(hidden, head.device)


def _along(walk: Walk, logits: torch.Tensor) -> tuple[Choice, TopLogprobs | None]:
    """What is chosen of a walk's logits [R, V]."""

    def row(number: int) -> Logits:  # no other row leaves the head's device
        array: Logits = logits[number].cpu().numpy()
        return array

    wanted = row if walk.rules is None else walk.rules.along(row, walk.rows)
    if walk.rules is None and walk.sampling.greedy and logits.device.type != "cpu":
        choice = best_along(logits, walk.rows)
    elif walk.rules is None and walk.top < 0 and _few(walk.sampling, logits):
        choice = few_along(logits, walk.rows, walk.sampling)
    else:
        choice = choose_along(wanted, walk.rows, walk.sampling)
    if walk.top < 0:
        return choice, None
    some = np.stack([wanted(number) for number in choice.rows.tolist()])
    return choice, top_logprobs(some, choice.tokens, walk.top)


def _few(sampling: Sampling, logits: torch.Tensor) -> bool:
    """Whether a token is one of so few that these are found where the logits are."""
    few = not sampling.greedy and 0 < 4 * sampling.top_k <= logits.shape[1]
    return few and logits.device.type != "cpu" and logits.dtype == torch.float32


def few_along(logits: torch.Tensor, rows: Rows, sampling: Sampling) -> Choice:
    """What `choose_along` takes with a temperature and top-k < V, found where the logits are: of
    float32 [R, V] so many a row leave that device, with their tokens. Raises BadLogits."""
    count, width = sampling.top_k, logits.shape[1]
    least = logits.topk(count).values[:, -1:]
    # Of equal ones `topk` takes any, so it is asked again for numbers of which no two are: whether
    # a logit is above the last one (or none, to be told of) or that one, and then the token.
    order = torch.arange(width, 0, -1, dtype=torch.int32, device=logits.device)
    above = ((logits > least) | logits.isnan()).int() * 2 + (logits == least).int()
    tokens = (above * width + order).topk(count).indices.sort(1).values
    found = torch.cat((tokens.double(), logits.gather(1, tokens).double()), 1).cpu().numpy()
    places = found[:, :count].astype(np.int64)
    return choose_along(lambda row: found[row, count:], rows, sampling, places.__getitem__)


def best_along(logits: torch.Tensor, rows: Rows) -> Choice:
    """What `choose_along` takes greedily, found where the logits [R, V] are: three numbers a row
    leave that device. Raises BadLogits."""
    tops = torch.full((len(logits), 2), -torch.inf, dtype=torch.float64, device=logits.device)
    tops[:, : logits.shape[1]] = logits.topk(min(2, logits.shape[1])).values
    # Of equal ones torch's `argmax` takes the first, where `topk` takes any.
    found = torch.cat((logits.argmax(1, keepdim=True).double(), tops), 1).cpu().numpy()
    tokens, best, second = found.T

    def target(row: int) -> int:
        if not np.isfinite(best[row]):
            raise bad_logits(best[row : row + 1])
        return int(tokens[row])

    path = path_of(target, rows)
    return Choice(path, tokens[path].astype(np.int64), best[path] - second[path])
