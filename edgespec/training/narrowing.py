"""How a one-pass head begins as a wider one: with the neurons of its MLPs that say most."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn

from edgespec.training.blocks import Blocks, drawn
from edgespec.training.dspark import DSparkStudent
from edgespec.training.regression import LessonOf
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows

_ROWS, _AT_ONCE, _BLOCKS = 32, 8, 16  # of text in all, at a time, and blocks in each


@torch.no_grad()
def begin_narrower(
    wide: DSparkStudent,
    student: DSparkStudent,
    teacher: Teacher,
    rows: TextRows,
    lesson_of: LessonOf,
) -> None:
    """Let a head begin as `wide`, of the same shape but for wider MLPs.

    Of each MLP those neurons stay that say most: by the root mean square of what a neuron holds in
    slots of `rows`, times the size of its column in the down projection.
    """
    width, layers = student.head.shape.intermediate, wide.to(teacher.device).head.layers
    squares = [torch.zeros(()) for _ in layers]

    def note(number: int, module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        held = given[0].detach().flatten(0, -2)
        squares[number] = squares[number].to(held.device) + held.square().sum(0)

    downs = [layer.mlp.down_proj for layer in layers]  # type: ignore[union-attr]
    hooks = [
        down.register_forward_pre_hook(partial(note, number))  # type: ignore[union-attr]
        for number, down in enumerate(downs)
    ]
    for part in torch.arange(min(len(rows), _ROWS)).split(_AT_ONCE):
        text = rows.take(part).trimmed()
        tokens = text.tokens.to(teacher.device, torch.int64)
        dice = torch.Generator().manual_seed(int(part[0]))
        blocks = drawn(text, wide.head.shape, _BLOCKS, math.inf, dice)
        given = lesson_of(text, tokens).aux_hidden
        assert given is not None
        wide.outputs(teacher, tokens, given, Blocks(*(one.to(teacher.device) for one in blocks)))
    for hook in hooks:
        hook.remove()
    weights = wide.state_dict()
    for number, (down, seen) in enumerate(zip(downs, squares, strict=True)):
        sizes = seen.sqrt() * down.weight.norm(dim=0)  # type: ignore[union-attr, operator]
        kept = sizes.topk(width).indices.sort().values
        for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            path = f"head.layers.{number}.mlp.{name}.weight"
            weights[path] = weights[path].index_select(axis, kept)
    student.load_state_dict(weights)
