"""Growing texts: the base's own continuations of prompts, a batch of them side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

_LEAST_LIVE = 0.8  # of a batch: with fewer, those that have ended leave it

Choose = Callable[[torch.Tensor, list[int]], torch.Tensor]
"""Final rows [R, H] of the texts with these numbers → their next tokens, int64 [R]."""


class Grown(NamedTuple):
    """A prompt's tokens with the base's behind them; and of all but the last what leaves the final
    norm and what enters the auxiliary layers, float16 [T - 1, (1 + taps) · H], if asked for."""

    tokens: tuple[int, ...]
    rows: torch.Tensor | None


@torch.no_grad()
def grown(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    length: int,
    end: int,
    choose: Choose,
    tell: Callable[[int], None],
    taps: tuple[int, ...] | None = None,
) -> list[Grown]:
    """The prompts as they go on, up to the token `end` or `length` tokens.

    `tell` hears how long the longest is now; `taps`: the auxiliary layers of the rows that are
    kept, None for no rows.
    """
    texts = [list(prompt) for prompt in prompts]
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    cache = DynamicCache(config=model.config)
    cache.layers = [_RoomyLayer() for _ in cache.layers]
    wide = max(map(len, prompts))
    padded = [[end] * (wide - len(prompt)) + [*prompt] for prompt in prompts]
    newest = torch.tensor(padded, device=model.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    seen = (torch.arange(wide) >= wide - lengths[:, None]).long().to(model.device)
    live = list(range(len(prompts)))
    while True:
        places = (seen.cumsum(1) - 1).clamp(min=0)[:, -newest.shape[1] :]
        out = model.model(
            newest,
            attention_mask=seen,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=taps is not None,
        )
        if taps is not None:
            _note(rows, texts, live, out, taps)
        tell(max(map(len, texts)) + 1)
        newest = choose(out.last_hidden_state[:, -1], live)[:, None]
        for text, token in zip(live, newest[:, 0].tolist(), strict=True):
            if not _has_ended(texts[text], len(prompts[text]), end, length):
                texts[text].append(token)
        goes_on = [not _has_ended(texts[t], len(prompts[t]), end, length) for t in live]
        if not any(goes_on):
            break
        seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
        if sum(goes_on) < _LEAST_LIVE * len(live):
            kept = torch.tensor(goes_on, device=model.device)
            cache.batch_select_indices(kept)
            newest, seen = newest[kept], seen[kept]
            live = [text for text, goes in zip(live, goes_on, strict=True) if goes]
    return [
        Grown(tuple(text), torch.cat(parts)[: len(text) - 1] if parts else None)
        for text, parts in zip(texts, rows, strict=True)
    ]


def _has_ended(text: list[int], start: int, end: int, length: int) -> bool:
    return len(text) >= length or (len(text) > start and text[-1] == end)


def _note(
    rows: list[list[torch.Tensor]],
    texts: list[list[int]],
    live: list[int],
    out: Any,
    taps: tuple[int, ...],
) -> None:
    """Add the rows of the newest tokens, without those before a prompt's first."""
    every = torch.cat([out.last_hidden_state, *(out.hidden_states[tap] for tap in taps)], -1)
    for text, new in zip(live, every.clamp(-LARGEST, LARGEST).half(), strict=True):
        rows[text].append(new[-len(texts[text]) :].clone())


LARGEST = 65504.0
"""Of float16; residual streams may be larger in a few places."""


class _RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values in tensors with room for more: transformers' own are copied for every
    token."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._length = 0
        self._room = [key_states[:, :, :0], value_states[:, :, :0]]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self._length + key_states.shape[2]
        if length > self._room[0].shape[2]:
            self._room = [
                torch.cat([old[:, :, : self._length], _room_for(new)], 2)
                for old, new in zip(self._room, (key_states, value_states), strict=True)
            ]
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, self._length : length] = new
        self._length = length
        self.keys, self.values = (room[:, :, :length] for room in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._room = [room[indices] for room in self._room]
        self.keys, self.values = (room[:, :, : self._length] for room in self._room)


def _room_for(new: torch.Tensor) -> torch.Tensor:
    """For these rows and some more."""
    return new.new_empty((*new.shape[:2], new.shape[2] + 64, new.shape[3]))
