"""Weights for the bundled base that are made at once, of sources that none are bundled for: a
one-pass head that knows which token follows which."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from edgespec.daemon.bundled_models import bundled
from edgespec.drafting.dspark.format import write_head
from edgespec.drafting.dspark.head import DSparkHead
from edgespec.drafting.dspark.shape import DSparkShape
from edgespec.drafting.eagle.shape import Rope

RANK, BLOCK = 64, 12
_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def weights_of(part: str) -> str:
    """The folder of bundled weights, or of such ones."""
    folder = bundled(part)
    return followers() if part == "dspark" and not Path(folder).exists() else folder


@lru_cache
def followers() -> str:
    """Its folder: what the base says after each token alone, as a Markov head of low rank; all else
    of the head adds nothing."""
    base = AutoModelForCausalLM.from_pretrained(bundled("base"), dtype=torch.float32).eval()
    config = base.config
    with torch.inference_mode():
        said = base(torch.arange(config.vocab_size)[:, None]).logits[:, 0]
        left, sizes, right = torch.linalg.svd(said.log_softmax(-1), full_matrices=False)
    shape = DSparkShape(
        layers=1,
        hidden=config.hidden_size,
        base_hidden=config.hidden_size,
        heads=4,
        kv_heads=4,
        head_dim=16,
        intermediate=64,
        vocab=config.vocab_size,
        block=BLOCK,
        eps=1e-5,
        aux_hidden=(0, config.num_hidden_layers - 1),
        rope=Rope(),
        markov_rank=RANK,
        markov_rows=config.vocab_size,
    )
    head = DSparkHead(shape)
    torch.nn.init.zeros_(head.norm.weight)
    weights = head.state_dict() | {
        "markov_head.markov_w1.weight": left[:, :RANK] * sizes[:RANK],
        "markov_head.markov_w2.weight": right[:RANK].T.contiguous(),
    }
    folder = tempfile.TemporaryDirectory(prefix="edgespec-dspark-")
    _KEPT.append(folder)
    write_head(
        Path(folder.name),
        shape,
        weights,
        None,
        config.vocab_size,
        config.num_hidden_layers,
        1024,
        torch.float32,
    )
    return folder.name
