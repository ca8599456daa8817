"""The frozen base of a training run: its features, its tokens' vectors, its own texts, a batch
of them side by side; and what it computed for these, in a file, so that none is read twice."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import embedding
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache, DynamicLayer

from edgespec.errors import ModelError
from edgespec.model.families import FAMILIES, embedding_scale, has_windows, logits_from
from edgespec.model.loader import TEXT_PART, Checkpoint
from edgespec.model.source import TensorSource
from edgespec.model.sources import open_source

_TEXTS, _MOST_TEXTS = 64, 2048
_SHARE = 0.25
"""Texts that are continued side by side: on a CPU, and on a GPU as many at most as their keys and
values fill this share of its free memory."""


class Lesson(NamedTuple):
    """What the base computes for rows of tokens: hidden rows after the final norm [B, T, H], and
    those that enter the auxiliary layers side by side [B, T, layers · H], or None."""

    hidden: torch.Tensor
    aux_hidden: torch.Tensor | None


class Teacher:
    """The base model as transformers runs it, without gradients."""

    def __init__(self, base: str | Path, device: torch.device, dtype: torch.dtype) -> None:
        """Load it. Raises ModelError for a model that edgespec does not run."""
        source = open_source(base)
        self.config = source.config
        self._family = FAMILIES[self.config.model_type]
        self.device = device
        self._model = _whole(source, dtype).to(device).eval().requires_grad_(False)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The base's own tensors, by their names in its checkpoint."""
        tensors: dict[str, torch.Tensor] = self._model.state_dict()
        return tensors

    @property
    def head_matrix(self) -> torch.Tensor:
        """The head's matrix [V, H], with the model's scale of logits in it, not their cap."""
        matrix = self.weights["lm_head.weight"]
        return matrix / self.config.logits_scaling if self._family.multipliers else matrix

    @torch.no_grad()
    def read(self, tokens: torch.Tensor, aux_hidden: tuple[int, ...]) -> Lesson:
        """Run rows of tokens int64 [B, T]."""
        out = self._model.model(tokens, use_cache=False, output_hidden_states=bool(aux_hidden))
        side = (
            torch.cat([out.hidden_states[layer] for layer in aux_hidden], -1)
            if aux_hidden
            else None
        )
        return Lesson(out.last_hidden_state, side)

    def require_vectors(self) -> None:
        """Raise ModelError for a base that transformers cannot run as `read_with` asks for."""
        # It takes no mask of trees for windows, nor one of truth values in the form with sinks.
        if has_windows(self.config) or self.config.model_type == "gpt_oss":
            raise ModelError(
                f"prompt tokens cannot be trained for a model of type {self.config.model_type!r} "
                "with sliding windows or attention sinks; train an EAGLE head"
            )

    def read_with(
        self, tokens: torch.Tensor, extra: torch.Tensor, places: torch.Tensor, sees: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows of tokens int64 [B, T], and after them vectors [B, Q, H] that the tokens do not
        see, at positions `places` int64 [B, Q]; `sees` bool [B, Q, T + Q].

        Returns hidden rows after the final norm, [B, T, H] and [B, Q, H]; gradients go through to
        `extra` alone.
        """
        if self._family.multipliers:  # transformers multiplies what enters in place of tokens too
            extra = extra / self.config.embedding_multiplier
        with torch.no_grad():
            first = self._model.model(tokens, use_cache=True)
        after = self._model.model(
            inputs_embeds=extra,
            position_ids=places,
            attention_mask=sees[:, None],
            past_key_values=first.past_key_values,
            use_cache=True,
        )
        return first.last_hidden_state, after.last_hidden_state

    @torch.no_grad()
    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens' vectors [.., H], scaled where the model scales them."""
        vectors = embedding(tokens, self._model.get_input_embeddings().weight)
        scale = embedding_scale(self.config, vectors.dtype)
        return vectors if scale is None else vectors * scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [.., V] of hidden rows; gradients go through to `hidden`."""
        return logits_from(self.config, self._model.lm_head(hidden))

    def texts_at_once(self, length: int) -> int:
        """How many texts of `length` tokens it continues side by side: a GPU is as quick with many
        as with few."""
        if self.device.type != "cuda":
            return _TEXTS
        config, free = self.config, torch.cuda.mem_get_info(self.device)[0]
        numbers = 2 * length * config.num_hidden_layers * config.num_key_value_heads
        numbers *= config.head_dim
        return max(1, min(_MOST_TEXTS, int(_SHARE * free / numbers / self._model.dtype.itemsize)))

    @torch.no_grad()
    def continued(
        self,
        prompts: Sequence[Sequence[int]],
        length: int,
        end: int,
        temperatures: Sequence[float],
        tell: Callable[[int], None],
        taps: tuple[int, ...] | None = None,
    ) -> list[Grown]:
        """The base's own continuations of prompts, with them, up to the token `end` or `length`
        tokens; each of its own temperature, 0 for a greedy one. `tell` hears how long the longest
        is now; `taps`: see grown."""
        heat = torch.tensor(temperatures, device=self.device)

        def choose(hidden: torch.Tensor, texts: list[int]) -> torch.Tensor:
            logits = self.logits(hidden).float()
            best = logits.argmax(-1)
            its = heat[texts]
            drawn = its > 0
            if drawn.any():
                likely = torch.softmax(logits[drawn] / its[drawn, None], -1)
                best[drawn] = likely.multinomial(1)[:, 0]
            return best

        return grown(self._model, prompts, length, end, choose, tell, taps)


def _whole(source: TensorSource, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own model. What is packed is loaded by its values."""
    config = copy.deepcopy(source.config.library)
    model: PreTrainedModel
    if isinstance(source, Checkpoint):
        model = AutoModelForCausalLM.from_pretrained(
            source.path, config=config, key_mapping=TEXT_PART, dtype=dtype, local_files_only=True
        )
        return model
    config.quantization_config = None  # else transformers looks for the program that packed it
    values = {name: source.tensor(name) for name in source.names}
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, loaded = kind.from_pretrained(
        None, config=config, state_dict=values, dtype=dtype, output_loading_info=True
    )
    if loaded["missing_keys"]:  # it has names of its own for what has one name in all our layers
        raise ModelError(
            f"{source.path} is packed, and transformers cannot take models of type "
            f"{source.config.model_type!r} so: train on the original 16-bit release"
        )
    return model


_MOST_BYTES = 12_000_000_000  # as the file's size is said; holes in it take nothing


class KeptRows:
    """Lessons of answers, by the answers' numbers, in float16. Of a file that is full, the answers
    with higher numbers are not kept."""

    def __init__(self, folder: Path, length: int, taps: tuple[int, ...], hidden: int) -> None:
        """Rows of at most `length` tokens; `taps`: the auxiliary layers. The file's name says both:
        rows of other ones do not fit."""
        self.taps, self._hidden = taps, hidden
        self._shape = (length, (len(taps) + 1) * hidden)
        self._bytes = 2 * self._shape[0] * self._shape[1]
        self._most = _MOST_BYTES // self._bytes
        name = "-".join(map(str, (*taps, length)))
        self._file = folder / f"rows-{name}.f16"
        self._file.touch()

    def keep(self, number: int, rows: torch.Tensor) -> None:
        """Keep what the base computed, [T, (1 + taps) · H]: hidden rows, and those of the taps."""
        if not 0 <= number < self._most:
            return
        stored = torch.zeros(self._shape[1] * len(rows), dtype=torch.float16)
        stored.copy_(rows.flatten().clamp(-LARGEST, LARGEST))
        data = stored.numpy().tobytes()
        # The first row last, once the others are on the disk: it tells that they are there.
        first = self._shape[1] * 2
        with self._file.open("r+b", buffering=0) as file:
            for begin, part in ((first, data[first:]), (0, data[:first])):
                file.seek(number * self._bytes + begin)
                file.write(part)
                os.fsync(file.fileno())

    def lesson(self, numbers: Sequence[int], length: int, dtype: torch.dtype) -> Lesson | None:
        """The first `length` rows of these answers; None if one is not there."""
        found = torch.zeros((len(numbers), length, self._shape[1]), dtype=torch.float16)
        with self._file.open("rb", buffering=0) as file:
            for number, rows in zip(numbers, found, strict=True):
                if number < 0:
                    return None
                file.seek(number * self._bytes)
                file.readinto(memoryview(rows.numpy()).cast("B"))
                if not rows[0].any():
                    return None
        wide = found.to(dtype)
        return Lesson(wide[..., : self._hidden], wide[..., self._hidden :] if self.taps else None)


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
