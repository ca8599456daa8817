"""How a one-pass head begins as a small model, with its layers, which read what the base gave;
or as a wider head, with the neurons of its MLPs that say most."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from edgespec.drafting.dspark.shape import DSparkShape
from edgespec.drafting.eagle.head import normed
from edgespec.drafting.eagle.shape import rope
from edgespec.errors import ConfigError
from edgespec.model.model_config import ModelConfig
from edgespec.training.blocks import Blocks, drawn
from edgespec.training.dspark import DSparkStudent, LessonOf, block_settings
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows

KINDS = ("llama", "qwen2", "qwen3")
"""Model types whose layers are those of a head."""

_RIDGE = 1e-3  # of the mean square of what is read
_ROWS = 4  # read at a time
_COMMON = 256  # tokens whose mean a mask begins as
_SEEN_ROWS, _AT_ONCE, _BLOCKS = 32, 8, 16  # of text in all, at a time, and blocks in each


def small_shape(
    small: ModelConfig, where: Path, base: ModelConfig, vocab: int, block: int, rank: int
) -> DSparkShape:
    """A causal head of that model's layers, embedding and output matrix, for a base.

    `where`: its folder, for messages; the others as in training.dspark.shape_for. Raises
    ConfigError for a model whose layers are of another form, or that has other tokens than the
    base.
    """
    windows = "sliding_attention" in (getattr(small, "layer_types", None) or ())
    plain = small.hidden_act == "silu" and not getattr(small, "mlp_bias", False)
    if small.model_type not in KINDS or windows or not plain:
        raise ConfigError(
            f"--start {where}: a head has layers as those of {', '.join(KINDS)} without windows or "
            f"biases in their MLPs, this is a model of type {small.model_type!r}; begin without"
        )
    if small.vocab_size != base.vocab_size:
        raise ConfigError(
            f"--start {where}: it has {small.vocab_size} tokens, the base {base.vocab_size}; give "
            "a model with the base's tokenizer"
        )
    biased = small.model_type == "qwen2" or bool(getattr(small, "attention_bias", False))
    return DSparkShape(
        layers=int(small.num_hidden_layers),
        hidden=int(small.hidden_size),
        base_hidden=int(base.hidden_size),
        heads=int(small.num_attention_heads),
        kv_heads=int(small.num_key_value_heads),
        head_dim=small.head_dim,
        intermediate=int(small.intermediate_size),
        eps=float(small.rms_norm_eps),
        rope=rope(dict(small.settings), where),
        qk_norm=small.model_type == "qwen3",
        qkv_bias=biased,
        o_bias=biased and small.model_type != "qwen2",
        own_embedding=True,
        own_head=True,
        **block_settings(base, vocab, block, rank),
    )


@torch.no_grad()
def begin_as_model(
    small: Teacher, student: DSparkStudent, teacher: Teacher, rows: TextRows, lesson_of: LessonOf
) -> None:
    """Let a head of small_shape begin as that model, whose slots are its tokens.

    Its keys and values of committed tokens are taken from the base's rows: `fc` is fitted by ridge
    regression over `rows` to those that the model computes itself, of all layers together, as one
    context serves all of them.
    """
    head, known = student.head, small.weights
    assert student.embed_tokens is not None
    assert student.lm_head is not None
    for name, weight in head.named_parameters():
        if f"model.{name}" in known:
            weight.copy_(known[f"model.{name}"])
    words = known["model.embed_tokens.weight"]
    student.embed_tokens.weight.copy_(words)
    student.lm_head.weight.copy_(small.head_matrix[student.kept])
    if head.mask_embedding is not None:
        head.mask_embedding.copy_(words[:_COMMON].mean(0))
    if head.shape.markov_rank:
        torch.nn.init.normal_(head.markov_head.markov_w1.weight, std=head.shape.markov_rank**-0.5)
        head.markov_head.markov_w2.weight.zero_()
    _fit_context(student, small, teacher, rows, lesson_of)


def _fit_context(
    student: DSparkStudent, small: Teacher, teacher: Teacher, rows: TextRows, lesson_of: LessonOf
) -> None:
    head, shape = student.head, student.head.shape
    layers = [layer.self_attn for layer in head.layers]
    maps = [torch.cat([own.k_proj.weight, own.v_proj.weight]) for own in layers]  # type: ignore[list-item, union-attr]
    stacked = torch.cat(maps)
    spread, count = torch.zeros(len(stacked)), 0
    sizes = torch.zeros(shape.fused_width)
    seen = []
    for part in torch.arange(len(rows)).split(_ROWS):
        text = rows.take(part).trimmed()
        tokens = text.tokens.to(teacher.device, torch.int64)
        inside = torch.arange(tokens.shape[1])[None] < text.ends[:, None]
        given = lesson_of(text, tokens).aux_hidden
        entering = small.read(tokens, tuple(range(shape.layers))).aux_hidden
        assert given is not None
        assert entering is not None
        entered = [
            normed(rows_in, layer.input_layernorm, shape.eps)  # type: ignore[arg-type]
            for rows_in, layer in zip(
                entering[inside].split(shape.hidden, -1), head.layers, strict=True
            )
        ]
        wanted = torch.cat([own @ by.T for own, by in zip(entered, maps, strict=True)], -1)
        seen.append((given[inside].float().cpu(), wanted.float().cpu()))
        sizes += seen[-1][0].square().sum(0)
        spread += seen[-1][1].square().sum(0)
        count += len(wanted)
    sizes, spread = (sizes / count).sqrt().clamp(min=1e-6), (spread / count).sqrt().clamp(min=1e-6)
    nearest = _ridge_regression((given / sizes, wanted / spread) for given, wanted in seen)
    # The one context whose keys and values in all layers are nearest to the wanted ones.
    best = nearest @ torch.linalg.pinv(stacked.cpu() / spread[:, None]).T
    size = sum(float((given / sizes @ best).square().sum()) for given, _ in seen)
    size = (size / count / shape.hidden) ** 0.5
    head.fc.weight.copy_((best / sizes[:, None]).T / size)
    head.hidden_norm.weight.fill_(size)


def _ridge_regression(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The map, float32 [wide, out], from what is read to what is wanted, [N, wide] and [N, out]:
    that of the least squares, a little towards zero."""
    squares = products = torch.zeros((), dtype=torch.float64)
    for read, wanted in pairs:
        squares = squares + (read.T @ read).double()
        products = products + (read.T @ wanted).double()
    squares.diagonal().add_(_RIDGE * squares.diagonal().mean())
    found: torch.Tensor = torch.linalg.solve(squares, products)
    return found.float()


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
    for part in torch.arange(min(len(rows), _SEEN_ROWS)).split(_AT_ONCE):
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
