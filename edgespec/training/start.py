"""How a new head begins: its shape, after one of the base's layers, and its first weights."""

from __future__ import annotations

import torch

from edgespec.drafting.eagle.head import EagleHead
from edgespec.drafting.eagle.settings import usual_taps
from edgespec.drafting.eagle.shape import HeadShape, Kind, Rope
from edgespec.model.model_config import ModelConfig
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows


def shape_for(kind: Kind, config: ModelConfig, vocab: int) -> HeadShape:
    """A head of the width of one of the base's layers. `vocab`: tokens that it scores."""
    heads = int(config.num_attention_heads)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    third = kind == "eagle3"
    return HeadShape(
        kind=kind,
        hidden=int(config.hidden_size),
        base_hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=int(config.num_key_value_heads),
        head_dim=int(dim),
        intermediate=int(config.intermediate_size),
        vocab=vocab,
        eps=float(config.rms_norm_eps),
        ropes=(Rope(theta=theta_of(config)),),
        own_head=third,
        aux_hidden=usual_taps(int(config.num_hidden_layers)) if third else (),
    )


def theta_of(config: ModelConfig) -> float:
    """The base of the model's rotary embedding."""
    settings = getattr(config, "rope_parameters", None) or {}
    theta = settings.get("rope_theta") if isinstance(settings, dict) else None
    return float(theta or 10000.0)


@torch.no_grad()
def begin(head: EagleHead, teacher: Teacher, rows: TextRows, batch: int) -> None:
    """Let the head begin as the best linear map from what it reads to the next features.

    The map is fitted by ridge regression over `rows`; attention and MLP add nothing yet. Without
    it the first tenth of a run only learns what a matrix inversion says.
    """
    shape = head.shape
    wide = shape.fused_width
    squares = torch.zeros((wide, wide), dtype=torch.float64, device=teacher.device)
    products = torch.zeros((wide, shape.hidden), dtype=torch.float64, device=teacher.device)
    gain = teacher.weights["model.norm.weight"].double()
    third = shape.kind == "eagle3"
    for first in range(0, len(rows), batch):
        tokens = rows.tokens[first : first + batch].to(teacher.device, torch.int64)
        lesson = teacher.read(tokens, shape.aux_hidden)
        if lesson.aux_hidden is None:
            given = torch.cat([teacher.embedded(tokens[:, 1:]), lesson.hidden[:, :-1]], -1)
        else:
            given = lesson.aux_hidden[:, :-1]
        known, wanted = given.flatten(0, 1).double(), lesson.hidden[:, 1:].flatten(0, 1).double()
        squares += known.T @ known
        products += known.T @ (wanted / gain if third else wanted)
    ridge = _RIDGE * squares.diagonal().mean()
    squares += ridge * torch.eye(wide, dtype=torch.float64, device=teacher.device)
    head.fc.weight.copy_(torch.linalg.solve(squares, products).T)
    head.layer.self_attn.o_proj.weight.zero_()
    head.layer.mlp.down_proj.weight.zero_()
    if third:
        head.norm.weight.copy_(gain)


_RIDGE = 1e-3  # of the mean square of what is read
