"""Independent draft: any causal language model with the base's tokenizer guesses by itself."""

from __future__ import annotations

import torch

from edgespec.drafting.guess_cache import GuessCache
from edgespec.drafting.whole_model import WholeModelGuesser
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.source import TensorSource


class IndependentGuesser(WholeModelGuesser[GuessCache]):
    """A Guesser (see drafting.base) that runs a whole small model beside the ring.

    Its caches hold the context and the guesses that were run; of these, the ones that turn out
    right are committed, and what lies after them stays, instead of being computed again.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        vocab_size: int | None = None,
    ) -> None:
        """Load the draft model. `vocab_size`: tokens that the base model knows; no others are
        guessed (embeddings may be padded to different sizes). Raises ModelError."""
        block = Block(source, 0, source.layers, dtype, device)
        super().__init__(
            "independent",
            lambda: GuessCache(block, self.ran),
            OutputHead(source, dtype, device, share=block),
            known=block.vocab_size,
            most_rows=int(source.config.max_position_embeddings),
            vocab_size=vocab_size,
        )
