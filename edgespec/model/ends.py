"""The ends of a model on the coordinator and in drafts: from tokens to rows, and to logits."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from edgespec.config import QUANTISATIONS, Quantisation
from edgespec.errors import ModelError
from edgespec.model.block import Block
from edgespec.model.families import embedding_scale, logits_from
from edgespec.model.matrices import Product, plain_product
from edgespec.model.quantised.linear import linear_from, pack
from edgespec.model.source import EMBEDDING, LM_HEAD, TensorSource, load_parameter
from edgespec.model.tensors import compute_dtype
from edgespec.model.token_rows import Table, embedded_by


def output_product(
    matrix: torch.Tensor,
    quantisation: Quantisation,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Product:
    """The product with a draft's output matrix [vocab, hidden], held so; in 8 bits where others
    have the codes of their file, of which this matrix has none."""
    if quantisation.kind == "none":
        return plain_product(matrix.to(device, dtype, copy=True))
    form = quantisation if quantisation in QUANTISATIONS.values() else QUANTISATIONS["int8"]
    return linear_from(pack(matrix, form), None, matrix.shape, form, dtype, device)


class OutputHead:
    """The model's output matrix alone, [vocab_size, hidden_size]: lm_head, or the embedding where
    the two are tied. `weight`: the whole matrix if it is held plain, else None."""

    def __init__(
        self,
        source: TensorSource,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        *,
        share: Block | None = None,
        tokens: torch.Tensor | None = None,
        few_as: Quantisation = QUANTISATIONS["none"],
    ) -> None:
        """Read the matrix in the form that `source` has for it.

        A plain one that is tied is that of the block `share`, which embeds. With `tokens` int64
        [vocab_size], its rows of these alone, held as `few_as` says. Raises ModelError if the
        source does not have it, or cannot hold it in that form.
        """
        config = source.config
        self.device = torch.device(device)
        self.dtype = compute_dtype(dtype)
        self.vocab_size, self.hidden_size = int(config.vocab_size), int(config.hidden_size)
        self.layers = int(config.num_hidden_layers)  # of the whole model
        self._config = config
        tied = bool(config.tie_word_embeddings)
        name = EMBEDDING if tied else LM_HEAD
        shape = torch.Size((self.vocab_size, self.hidden_size))
        self.form = source.form(name)
        self.weight: torch.nn.Parameter | None = None
        self._product: Product
        if tokens is not None:
            self.vocab_size = len(tokens)
            few = Table(source, name, shape)(tokens)
            self._product = output_product(few, few_as, self.dtype, device)
            return
        if self.form.kind != "none":
            packed = source.packed(name, shape)
            self._product = linear_from(packed, None, shape, self.form, self.dtype, device)
            return
        lent = share.embedding if tied and share is not None else None
        if lent is not None and (lent.device, lent.dtype) == (self.device, self.dtype):
            self.weight = lent
        else:
            self.weight = load_parameter(source, name, shape, self.dtype, device)
        self._product = plain_product(self.weight)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab_size] of hidden rows [R, hidden_size] that went through the final norm.

        On its device; float64 if the head computes in it, else float32.
        """
        logits = logits_from(self._config, self._product(hidden))
        return logits if self.dtype == torch.float64 else logits.float()


class InputEmbedding:
    """The model's embedding alone, scaled where the model scales it. Its rows are looked up where
    they lie, on the host, in the file if they can: few are read, of a matrix of gigabytes."""

    def __init__(
        self,
        source: TensorSource,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        *,
        share: OutputHead | None = None,
    ) -> None:
        """Rows come in `dtype` on `device`. Where the matrix is tied and `share` holds it plain,
        they are its.

        Raises ModelError if the source does not have it.
        """
        kind = compute_dtype(dtype)
        tied = bool(source.config.tie_word_embeddings)
        self._weight = share.weight if tied and share is not None else None
        self._scale = embedding_scale(source.config, kind)
        if self._weight is not None:
            return
        if EMBEDDING not in source.names:
            raise ModelError(
                f"{source.path} has no embedding for a draft head to borrow, as its blocks are cut "
                "already; give --model the model itself"
            )
        self._look_up = embedded_by(source, kind, torch.device(device))

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows [R, hidden_size] of tokens int64 [R]."""
        if self._weight is None:
            return self._look_up(tokens)
        rows = embedding(tokens, self._weight)
        return rows if self._scale is None else rows * self._scale
