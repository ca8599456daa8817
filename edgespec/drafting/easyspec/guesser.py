"""EasySpec guesser: the first level of a tree precise, those below it fuzzy; no fuzzy row stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from edgespec.drafting.base import TokenPath
from edgespec.drafting.easyspec.model import GroupedModel
from edgespec.drafting.whole_model import WholeModelGuesser
from edgespec.model.ends import OutputHead

_CHUNK = 256  # rows of a prefill that run together: bounds the mask and the activations


class FuzzyRows:
    """One request's rows: committed ones, run precisely, and after them guesses, run fuzzily.

    After every verification all fuzzy keys and values are thrown away, right guesses' too, and the
    new committed tokens run precisely, in one pass: errors do not add up, and the first level below
    them is precise (EasySpec §3.2, bonus calibration).
    """

    def __init__(
        self, model: GroupedModel, ran: Callable[[int], None], between_layers: Callable[[], object]
    ) -> None:
        """No rows yet. `ran` is told the rows of every forward pass."""
        self.context: list[int] = []
        self._model = model
        self._ran = ran
        self._between_layers = between_layers
        self._cache = model.new_cache()
        self._slot_of: dict[tuple[int, ...], int] = {}  # of guesses, by their paths
        self._hidden = torch.empty(0)  # [1 + guesses, H]: of the last committed row, of the guesses

    def catch_up(self, news: Sequence[int]) -> None:
        if not news:
            return
        self._cache.length = len(self.context)
        self._slot_of.clear()
        for begin in range(0, len(news), _CHUNK):
            part = news[begin : begin + _CHUNK]
            before, rows = len(self.context), len(part)
            positions = torch.arange(before, before + rows)
            mask = torch.ones((rows, before + rows), dtype=torch.bool).tril(before)
            self._hidden = self._run(part, positions, mask, fuzzy=False)[-1:]
            self.context += part

    def rewind(self, rows: int) -> None:
        self.context = self.context[:rows]
        self._slot_of.clear()

    def hidden_behind(self, paths: Sequence[TokenPath]) -> torch.Tensor:
        """One fuzzy pass runs the rows that are missing, ancestors included."""
        fresh: list[tuple[int, ...]] = []
        for path in paths:
            for end in range(1, len(path) + 1):
                start = tuple(path[:end])
                if start not in self._slot_of:
                    self._slot_of[start] = len(self._slot_of)
                    fresh.append(start)
        if fresh:
            self._run_guesses(fresh)
        index = [self._slot_of[tuple(path)] + 1 if path else 0 for path in paths]
        return self._hidden[torch.tensor(index, device=self._hidden.device)]

    def _run_guesses(self, fresh: Sequence[tuple[int, ...]]) -> None:
        before = len(self.context)
        mask = torch.zeros((len(fresh), before + len(self._slot_of)), dtype=torch.bool)
        mask[:, :before] = True
        for row, path in enumerate(fresh):
            mask[row, [before + self._slot_of[path[:end]] for end in range(1, len(path) + 1)]] = (
                True
            )
        positions = torch.tensor([before + len(path) - 1 for path in fresh])
        hidden = self._run([path[-1] for path in fresh], positions, mask, fuzzy=True)
        self._hidden = torch.cat([self._hidden, hidden])

    def _run(
        self, tokens: Sequence[int], positions: torch.Tensor, mask: torch.Tensor, fuzzy: bool
    ) -> torch.Tensor:
        model = self._model
        self._ran(len(tokens))
        device = model.device
        return model.forward(
            torch.tensor(tokens, device=device),
            positions.to(device),
            mask.to(device),
            self._cache,
            fuzzy,
            self._between_layers,
        )


class EasySpecGuesser(WholeModelGuesser[FuzzyRows]):
    """A Guesser (see drafting.base) that runs a whole small model, in groups of layers."""

    def __init__(
        self, model: GroupedModel, head: OutputHead, most_rows: int, vocab_size: int
    ) -> None:
        super().__init__(
            "easyspec",
            lambda: FuzzyRows(model, self.ran, self.between_layers),
            head,
            known=model.vocab_size,
            most_rows=most_rows,
            vocab_size=vocab_size,
        )


@dataclass(frozen=True, slots=True)
class LevelTimes:
    """Seconds of one level of a tree, its layers one after the other and in groups."""

    sequential: float
    fuzzy: float

    @property
    def pays(self) -> bool:
        """Whether groups are faster by enough to make up for the guesses that they get wrong: an
        acceptance of up to 7 % less (EasySpec §4.2)."""
        return self.fuzzy < 0.93 * self.sequential


def level_times(model: GroupedModel, rows: int = 10, context: int = 128) -> LevelTimes:
    """Measure a level of `rows` guesses after `context` tokens, both ways in turn."""
    cache = model.new_cache()
    device = model.device
    every = torch.arange(context, device=device) % model.vocab_size
    seen = torch.ones((context, context), dtype=torch.bool, device=device).tril()
    model.forward(every, torch.arange(context, device=device), seen, cache, fuzzy=False)
    places = torch.full((rows,), context, device=device)
    mask = torch.cat(
        [torch.ones((rows, context), dtype=torch.bool), torch.eye(rows, dtype=torch.bool)], 1
    ).to(device)
    tries: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(12):
        for fuzzy in (False, True):
            cache.length = context
            began = time.perf_counter()
            hidden = model.forward(every[:rows], places, mask, cache, fuzzy)
            hidden[0, 0].item()  # waits for a GPU
            tries[fuzzy].append(time.perf_counter() - began)
    return LevelTimes(*(median(tries[fuzzy][2:]) for fuzzy in (False, True)))
