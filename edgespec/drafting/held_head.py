"""Held heads: a head's matrices as rows are multiplied by them, and what guessers by heads, their
requests and their passes have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from edgespec.config import Quantisation
from edgespec.drafting.base import Guesser, TokenPath
from edgespec.drafting.launches import Launches
from edgespec.drafting.ranking import Ranking
from edgespec.drafting.steps import Steps, call
from edgespec.drafting.weight_file import HeadFiles
from edgespec.errors import ModelError, RemoteProtocolError
from edgespec.model.aux_hidden import unpacked
from edgespec.model.ends import InputEmbedding, OutputHead, output_product
from edgespec.model.kv_cache import RowForm, TwoRegionCache
from edgespec.model.matrices import Product
from edgespec.model.quantised.exact import ExactLinear, row_product
from edgespec.model.quantised.linear import linear_from, pack
from edgespec.model.source import TensorSource
from edgespec.model.tensors import compute_dtype, to_torch
from edgespec.types.features import DraftNeeds, Features
from edgespec.types.tensor import Layers
from edgespec.verify.sampling import Sampling

Head = TypeVar("Head", bound=nn.Module)
Embed = Callable[[torch.Tensor], torch.Tensor]
"""The vectors [R, hidden] of tokens int64 [R]."""


class GuesserParts(NamedTuple):
    """What the passes of a head take of its guesser. `ran` is told the rows of every pass, whose
    they were, and how many of them are of the base (see Guesser.ran)."""

    embed: Embed
    dtype: torch.dtype
    device: torch.device
    ran: Callable[..., None]
    between_layers: Callable[[], object]


class HeadPasses:
    """Passes of a head over the rows [R, hidden] of one or several requests."""

    def __init__(
        self, parts: GuesserParts, hidden: int, forms: Sequence[RowForm], first_layer: int = 0
    ) -> None:
        """`forms`: of what is kept of rows in the head's layers, of which the first has that
        number."""
        self.hidden, self.dtype, self.device = hidden, parts.dtype, parts.device
        self._embed, self._ran = parts.embed, parts.ran
        self._between_layers = parts.between_layers
        self._forms, self._first_layer = forms, first_layer

    def new_cache(self) -> TwoRegionCache:
        return TwoRegionCache(
            first_layer=self._first_layer,
            forms=self._forms,
            reserve=0,
            dtype=self.dtype,
            device=self.device,
        )


@dataclass(slots=True, kw_only=True)
class HeadRequest:
    """One request: its committed tokens. `broken`: some rows of the base will never come."""

    context: tuple[int, ...] = ()
    broken: bool = False


Request = TypeVar("Request", bound=HeadRequest)


class HeadGuesser(Guesser, Generic[Request]):
    """A Guesser: a head beside the base's ends, which it may borrow."""

    def __init__(
        self,
        name: str,
        taps: Sequence[int],
        files: HeadFiles[Any],
        base: OutputHead,
        source: TensorSource,
        dtype: str,
        device: torch.device | str,
        own: Quantisation,
        lent: Quantisation,
    ) -> None:
        """`taps`: the base's layers whose incoming rows it reads, none: it reads those that the
        output head does. `base` and its tensors `source` are lent where `files` has no embedding or
        output matrix. That is held as `own` says if it is the head's, as `lent` does if it is some
        rows of the base's. Raises ModelError for what cannot be lent or held so."""
        super().__init__(name, DraftNeeds(not taps, Layers(tuple(sorted(taps)))))
        self._base, self._taps = base, taps
        self._dtype, self._device = compute_dtype(dtype), torch.device(device)
        embed: Embed
        if files.embedding is None:
            embed = InputEmbedding(source, dtype, device, share=base).rows
        else:
            embed = files.embedding.to(self._device, self._dtype, copy=True).__getitem__
        matrix, tokens = files.matrix, files.tokens
        self._matrix: Product | None = None  # that of an output matrix of its own
        if matrix is not None:
            try:
                self._matrix = output_product(matrix, own, self._dtype, self._device)
            except ModelError as problem:
                what = f"the output matrix of the {name} head"
                raise ModelError(f"cannot hold {what} as {own.name}: {problem}") from problem
        elif tokens is not None:
            base = OutputHead(source, dtype, device, tokens=tokens, few_as=lent)
        self._lent = base
        self._parts = GuesserParts(embed, self._dtype, self._device, self.ran, self.between_layers)
        self._tokens = None if tokens is None else tokens.numpy()
        self._launches = Launches(device)
        self._ranking = Ranking(self.ranked, self.allowed)
        self._requests: dict[int, Request] = {}

    @abstractmethod
    def _begun(self, request: int) -> Request:
        """A request that nothing is known of."""

    @abstractmethod
    def _read(self, given: torch.Tensor) -> torch.Tensor:
        """What the base gave of rows [n, ...], as the head takes it: [n, hidden]."""

    def open(self, request: int, sampling: Sampling) -> None:
        self._requests[request] = self._begun(request)
        self._ranking.open(request, sampling)

    def close(self, request: int) -> None:
        super().close(request)
        self._requests.pop(request, None)
        self._ranking.close(request)

    def _news(
        self, request: int, context: Sequence[int], features: Features
    ) -> Steps[torch.Tensor | None]:
        """Take committed tokens; the rows [n, hidden] that came, if any did, as the head takes
        them."""
        state = self._requests[request]
        self._ranking.read(request, context[len(state.context) :])
        state.context = tuple(context)
        given = self._given(features)
        if given is None or state.broken:
            return None
        return (yield from call(self._taken, given.to(self._device, self._dtype)))

    @torch.inference_mode()
    def _taken(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What the base gave of each request's rows, as the head takes it."""
        rows = self._read(torch.cat(list(given)) if len(given) > 1 else given[0])
        # Rows that are kept have memory of their own: one request may stay long after another.
        return [own.clone() for own in rows.split([len(own) for own in given])]

    def _given(self, features: Features) -> torch.Tensor | None:
        """What the base gave of some rows, [n, hidden] or those of several layers side by side;
        None for none. Raises RemoteProtocolError for rows of another base."""
        hidden, layers = self._base.hidden_size, features.aux_layers
        if self._taps:
            if features.aux_hidden is None:
                return None
            by_layer = unpacked(features.aux_hidden, len(layers), hidden)
            return by_layer[:, [layers.index(layer) for layer in self._taps]].flatten(1)
        rows = None if features.final is None else to_torch(features.final)
        if rows is not None and rows.shape[1] != hidden:
            raise RemoteProtocolError(
                f"the ring's rows have {rows.shape[1]} columns, the base's {hidden}; give all "
                "stages the same model"
            )
        return rows

    def _known(self, paths: Sequence[TokenPath]) -> list[int]:
        """Which of the paths have no tokens but the base's."""
        vocab = self._base.vocab_size
        return [index for index, path in enumerate(paths) if max(path, default=0) < vocab]

    def between_layers(self) -> bool:
        self._launches.keep_near()
        return super().between_layers()

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] of rows [R, hidden] as the output matrix takes them, in float32 at
        least."""
        if self._matrix is None:
            return self._lent.logits(rows)
        logits = self._matrix(rows)
        return logits if self._dtype == torch.float64 else logits.float()


def filled(
    head: Head,
    weights: Mapping[str, torch.Tensor],
    quantisation: Quantisation,
    dtype: torch.dtype,
    device: torch.device,
    kind: str,
    spared: Collection[str] = (),
) -> Head:
    """The head, which has no weights yet, with these by its names, in `dtype` on `device`; `kind`:
    what messages call it.

    Its matrices are held in that quantisation, but for those of one row and those that are
    `spared`. Raises ModelError for one that cannot be.
    """

    def own(name: str) -> torch.Tensor:
        return weights[name].to(device, dtype, copy=True)

    for name, matrix in list(head.named_modules()):
        if not isinstance(matrix, nn.Linear):
            continue
        plain = quantisation.kind == "none" or matrix.out_features == 1 or name in spared
        bias = None if matrix.bias is None else own(f"{name}.bias")
        if plain and device.type == "cpu":
            head.set_submodule(name, ExactLinear(row_product(own(f"{name}.weight"), bias)))
        elif not plain:
            try:
                packed = pack(weights[f"{name}.weight"], quantisation)
            except ModelError as problem:
                raise ModelError(
                    f"cannot hold {name} of the {kind} head as {quantisation.name}: {problem}"
                ) from problem
            held = linear_from(packed, bias, matrix.weight.shape, quantisation, dtype, device)
            head.set_submodule(name, held)
    for name, _ in list(head.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(head.get_submodule(owner), leaf, nn.Parameter(own(name), requires_grad=False))
    return head.eval()
