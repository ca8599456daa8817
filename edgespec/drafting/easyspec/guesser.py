"""EasySpec guesser: the first level of a tree precise, those below it fuzzy; no fuzzy row stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from edgespec.drafting.base import PASS_ROWS, TokenPath
from edgespec.drafting.easyspec.model import GroupedModel, GroupedPart
from edgespec.drafting.independent import WholeModelGuesser
from edgespec.drafting.steps import Steps, call
from edgespec.model.ends import OutputHead
from edgespec.model.kv_cache import TwoRegionCache


class GroupedRows(NamedTuple):
    """Rows that a request needs of the next pass; `mask` bool [R, T]: which slots each of them sees
    (see GroupedModel.forward)."""

    request: int
    tokens: Sequence[int]
    positions: torch.Tensor
    mask: torch.Tensor
    cache: TwoRegionCache


class GroupedPasses:
    """Passes of a grouped model over the rows of one or several requests."""

    def __init__(
        self, model: GroupedModel, ran: Callable[..., None], between_layers: Callable[[], object]
    ) -> None:
        """`ran` is told the rows of every pass, and whose they were."""
        self.model = model
        self._ran = ran
        self._between_layers = between_layers

    def run_fuzzily(self, every: Sequence[GroupedRows]) -> Sequence[torch.Tensor]:
        """The hidden rows [R, H] of each request, by groups of layers; their slots are taken."""
        return self._run(every, fuzzy=True)

    def run_precisely(self, every: Sequence[GroupedRows]) -> Sequence[torch.Tensor]:
        """The same, layer by layer."""
        return self._run(every, fuzzy=False)

    def _run(self, every: Sequence[GroupedRows], *, fuzzy: bool) -> Sequence[torch.Tensor]:
        model = self.model
        device, tokens = model.device, [token for one in every for token in one.tokens]
        hidden = model.forward(
            torch.tensor(tokens, device=device),
            torch.cat([one.positions for one in every]).to(device),
            [GroupedPart(one.cache, one.mask.to(device)) for one in every],
            fuzzy,
            self._between_layers,
        )
        self._ran(len(tokens), *(one.request for one in every))
        return list(hidden.split([len(one.tokens) for one in every]))


class FuzzyRows:
    """One request's rows: committed ones, run precisely, and after them guesses, run fuzzily.

    After every verification all fuzzy keys and values are thrown away, right guesses' too, and the
    new committed tokens run precisely, in one pass: errors do not add up, and the first level below
    them is precise (EasySpec §3.2, bonus calibration).
    """

    def __init__(self, request: int, passes: GroupedPasses) -> None:
        """No rows yet."""
        self.request = request
        self.context: list[int] = []
        self._passes = passes
        self._cache = passes.model.new_cache()
        self._slot_of: dict[tuple[int, ...], int] = {}  # of guesses, by their paths
        self._hidden = torch.empty(0)  # [1 + guesses, H]: of the last committed row, of the guesses

    def catch_up(self, news: Sequence[int]) -> Steps[None]:
        if not news:
            return
        self._cache.length = len(self.context)
        self._slot_of.clear()
        for begin in range(0, len(news), PASS_ROWS):
            part = news[begin : begin + PASS_ROWS]
            before, rows = len(self.context), len(part)
            positions = torch.arange(before, before + rows)
            mask = torch.ones((rows, before + rows), dtype=torch.bool).tril(before)
            given = GroupedRows(self.request, part, positions, mask, self._cache)
            hidden = yield from call(self._passes.run_precisely, given)
            self._hidden = hidden[-1:].clone()
            self.context += part

    def rewind(self, rows: int) -> None:
        self.context = self.context[:rows]
        self._slot_of.clear()

    def copy(self, other: FuzzyRows, rows: int) -> None:
        self.context = other.context[:rows]
        self._cache = other._cache.fork(0, len(self.context))

    def hidden_behind(self, paths: Sequence[TokenPath]) -> Steps[torch.Tensor]:
        """One fuzzy pass runs the rows that are missing, ancestors included."""
        fresh: list[tuple[int, ...]] = []
        for path in paths:
            for end in range(1, len(path) + 1):
                start = tuple(path[:end])
                if start not in self._slot_of:
                    self._slot_of[start] = len(self._slot_of)
                    fresh.append(start)
        if fresh:
            yield from self._run_guesses(fresh)
        index = [self._slot_of[tuple(path)] + 1 if path else 0 for path in paths]
        return self._hidden[torch.tensor(index, device=self._hidden.device)]

    def _run_guesses(self, fresh: Sequence[tuple[int, ...]]) -> Steps[None]:
        before = len(self.context)
        mask = torch.zeros((len(fresh), before + len(self._slot_of)), dtype=torch.bool)
        mask[:, :before] = True
        for row, path in enumerate(fresh):
            mask[row, [before + self._slot_of[path[:end]] for end in range(1, len(path) + 1)]] = (
                True
            )
        positions = torch.tensor([before + len(path) - 1 for path in fresh])
        tokens = [path[-1] for path in fresh]
        given = GroupedRows(self.request, tokens, positions, mask, self._cache)
        hidden = yield from call(self._passes.run_fuzzily, given)
        self._hidden = torch.cat([self._hidden, hidden])


class EasySpecGuesser(WholeModelGuesser[FuzzyRows]):
    """A Guesser (see drafting.base) that runs a whole small model, in groups of layers."""

    def __init__(
        self, model: GroupedModel, head: OutputHead, most_rows: int, vocab_size: int
    ) -> None:
        passes = GroupedPasses(model, self.ran, self.between_layers)
        super().__init__(
            "easyspec",
            lambda request: FuzzyRows(request, passes),
            head,
            known=model.vocab_size,
            most_rows=most_rows,
            vocab_size=vocab_size,
        )
