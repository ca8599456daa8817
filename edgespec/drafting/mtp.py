"""MTP: guesses by the head that some bases ship in their own files, to foresee one token more.

Qwen 3.5's (`mtp.*`, in GGUF files `nextn.*`): a row of the base behind its final norm, and the
vector of the token that follows, are normed each, joined by a matrix, the token's first, and go
through one attending layer of the base's family. What a last norm makes of that, the base's output
matrix reads, and it stands for the next row. As vLLM has it (model_executor/models/
qwen3_next_mtp.py); that rows behind the norm are meant, ggml-org/llama.cpp#24025 measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgespec.config import Quantisation
from edgespec.drafting.eagle.guesser import PLAIN, PairGuesser
from edgespec.drafting.eagle.rows import NextPairs, PairPasses
from edgespec.drafting.held_head import GuesserParts
from edgespec.drafting.weight_file import HeadFiles
from edgespec.errors import ModelError
from edgespec.model.block import row_math
from edgespec.model.ends import OutputHead
from edgespec.model.joint import CachedPart, JointPass
from edgespec.model.layer_form import LayerForm, layer_form
from edgespec.model.layers import OwnLayers
from edgespec.model.matrices import MatrixReader
from edgespec.model.model_config import FULL, ModelConfig
from edgespec.model.source import TensorSource, check_names
from edgespec.planning.text_part import DELTA

NAME = "mtp"

_JOIN, _NORMS = "eh_proj", ("enorm", "hnorm", "shared_head.norm")
"""Beside the layer's own tensors, as DeepSeek's and GGUF files call them: what joins a token and a
row; the norms of the token, of the row, and of what comes out."""


class MtpPasses(PairPasses):
    """Passes of such a head."""

    def __init__(self, source: TensorSource, parts: GuesserParts) -> None:
        """Read the head of a base. Raises ModelError if there is none, or one of another form."""
        number, form = int(source.config.num_hidden_layers), mtp_form(source)
        super().__init__(parts, form.hidden, [form.rows(parts.dtype)], number)
        prefix, held = f"model.layers.{number}.", (source, parts.dtype, parts.device)
        own = {f"{name}.weight" for name in (_JOIN, *_NORMS)}
        check_names(source, prefix, {prefix + name for name in own | form.shapes().keys()})
        self._math = row_math(parts.device, parts.dtype)
        layers = OwnLayers(source.config, {number: form}, self._math)
        joined = torch.Size((form.hidden, 2 * form.hidden))
        self._join = MatrixReader(*held).product([prefix + _JOIN], [joined])
        self._norms = [layers.norm(*held, name=f"{prefix}{name}.weight") for name in _NORMS]
        self._layer = layers.layer(number, *held)
        self._rotary = layers.rotary(None, parts.dtype, parts.device)

    @torch.inference_mode()
    def run(self, every: Sequence[NextPairs]) -> Sequence[torch.Tensor]:
        self._between_layers()  # there is one
        device, counts = self.device, [len(one.tokens) for one in every]
        tokens = torch.tensor([token for one in every for token in one.tokens], device=device)
        places = torch.tensor([place for one in every for place in one.positions], device=device)
        of_token, of_row, leave = self._norms
        rows = torch.cat([one.features for one in every])
        hidden = self._join(torch.cat([of_token(self._embed(tokens)), of_row(rows)], 1))
        cached = [CachedPart(one.request, one.kv, one.sees[None, None].to(device)) for one in every]
        joint = JointPass(cached, places, {})
        out = leave(self._layer(hidden, self._rotary(places), joint.cache, joint.seen))
        joint.advance()
        self._ran(len(tokens), *(one.request for one in every))
        return list(out.split(counts))


class MtpGuesser(PairGuesser):
    """A Guesser: the MTP head of a base beside the base's ends."""

    def __init__(
        self,
        ends: TensorSource,
        layer: TensorSource,
        base: OutputHead,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        head_quantisation: Quantisation = PLAIN,
        guessed: torch.Tensor | None = None,
    ) -> None:
        """`ends` and `layer`: the base's tensors, its embedding's and as the head's layer is to be
        held; `guessed` int64, ascending: the tokens that it guesses, None: all;
        `head_quantisation`: of their rows of its output matrix. Raises ModelError if it has no such
        head."""
        files = HeadFiles(None, {}, tokens=guessed)
        held = dtype, device, head_quantisation, head_quantisation
        super().__init__(NAME, (), files, base, ends, *held)
        self._passes = MtpPasses(layer, self._parts)


def has_mtp(source: TensorSource) -> bool:
    """Whether a base ships such a head."""
    layers = int(source.config.num_hidden_layers)
    return f"model.layers.{layers}.{_JOIN}.weight" in source.names


def mtp_form(source: TensorSource) -> LayerForm:
    """The form of the head's layer: that of the base's which attend. Raises ModelError if the base
    ships no head, or one of another form."""
    config: ModelConfig = source.config
    if not has_mtp(source):
        raise ModelError(
            f"{source.path} has no MTP head (no tensors 'mtp.*' or 'nextn.*'), or its blocks are "
            "cut already; give --model a base that ships one, or has its mtp-*.gguf beside it, or "
            "another --draft"
        )
    form = None
    if config.model_type in DELTA and FULL in config.layer_types:
        form = layer_form(config, config.layer_types.index(FULL))
    more = min((name for name in source.names if name.startswith("mtp.")), default="")
    if form is None or more:
        raise ModelError(
            f"{source.path} has an MTP head of a form that edgespec does not compute (type "
            f"{config.model_type!r}{more and f', with {more!r}'}); choose another --draft"
        )
    return form
