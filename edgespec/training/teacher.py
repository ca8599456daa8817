"""The frozen base of a training run: its features, its tokens' vectors, and its own texts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import embedding
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from edgespec.errors import ModelError
from edgespec.model.families import FAMILIES, embedding_scale, has_windows, logits_from
from edgespec.model.loader import Checkpoint
from edgespec.model.source import TensorSource
from edgespec.model.sources import open_source
from edgespec.model.stored_names import TEXT_PART
from edgespec.training.growing import Grown, grown

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
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        numbers = 2 * length * config.num_hidden_layers * config.num_key_value_heads * dim
        return max(1, min(_MOST_TEXTS, int(_SHARE * free / numbers / self._model.dtype.itemsize)))

    @torch.no_grad()
    def continued(
        self,
        prompts: Sequence[Sequence[int]],
        length: int,
        end: int,
        sampled: Sequence[bool],
        tell: Callable[[int], None],
        taps: tuple[int, ...] | None = None,
    ) -> list[Grown]:
        """The base's own continuations of prompts, with them, up to the token `end` or `length`
        tokens: greedy ones, and of temperature 1 where `sampled` says so. `tell` hears how long
        the longest is now; `taps`: see grown."""

        def choose(hidden: torch.Tensor, texts: list[int]) -> torch.Tensor:
            logits = self.logits(hidden).float()
            best = logits.argmax(-1)
            drawn = torch.tensor([sampled[text] for text in texts], device=best.device)
            if drawn.any():
                best[drawn] = torch.softmax(logits[drawn], -1).multinomial(1)[:, 0]
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
    model = kind.from_pretrained(None, config=config, state_dict=values, dtype=dtype)
    return model
