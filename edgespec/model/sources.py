"""Sources: the one way to open a model for its tensors, whatever form its files have."""

from __future__ import annotations

from pathlib import Path

from edgespec.config import FILE, Quantisation
from edgespec.model.gguf.checkpoint import GgufCheckpoint
from edgespec.model.gguf.files import GgufFiles
from edgespec.model.hub import model_files
from edgespec.model.loader import Checkpoint
from edgespec.model.packed.checkpoint import PackedCheckpoint
from edgespec.model.packed.settings import packing_of
from edgespec.model.quantised.source import quantising
from edgespec.model.source import TensorSource

PLAIN = Quantisation()


def open_source(model: str | Path, quantisation: Quantisation = PLAIN) -> TensorSource:
    """A model's tensors, those of its layers quantised on the way if that is asked for.

    `model`: a folder, a GGUF file, or either of the hub. Raises ModelError for one that cannot be
    used, saying where and what to do.
    """
    files = model_files(model)
    held = FILE if quantisation == FILE else PLAIN
    if isinstance(files, GgufFiles):
        return quantising(GgufCheckpoint(files, held), quantisation)
    checkpoint = Checkpoint(model)
    packing = packing_of(checkpoint.path, checkpoint.config.settings)
    if packing is None:
        return quantising(checkpoint, quantisation)
    return quantising(PackedCheckpoint(checkpoint, packing, held), quantisation)
