"""edgespec models: what is known to work, what fits together, and what is on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from edgespec.cli import options
from edgespec.config import MOST_STAGES
from edgespec.daemon.model_names import known_name, resolved
from edgespec.daemon.planning import DEFAULT_CONTEXT
from edgespec.daemon.precision import four_bit_for
from edgespec.errors import ConfigError
from edgespec.model.hub_cache import cached, is_here, split_file
from edgespec.model.manifest import size_text
from edgespec.planning.catalogue import MODELS, KnownModel
from edgespec.planning.memory import GIB, Needs, PlannedModel

USUAL_STAGES = 4
WIDE = 80
"""Columns of a terminal from which on family and licence are shown."""

_RINGS = (1, 2, 4, 8)


def models(
    name: str = typer.Argument(
        "",
        help="Show one model: where it comes from, what fits it, what it needs.",
        callback=options.check_model,
        show_default=False,
    ),
    stages: int = typer.Option(USUAL_STAGES, help="Stages of the ring whose memory is shown."),
    as_json: bool = options.JSON,
) -> None:
    """List the models that edgespec knows by name: size, memory a board, drafts, what is here.

    They are of families that edgespec runs. GiB: what the fullest of the stages needs, in 4 bits
    and with a context of 4096 tokens.
    """  # fmt: skip
    if not 1 <= stages <= MOST_STAGES:
        raise ConfigError(f"{stages} stages; a ring has 1 to {MOST_STAGES}")
    only = known_name(name)
    if name and not only:
        raise ConfigError(f"{name} has no short name; `edgespec models` lists those that have one")
    shown = {only: MODELS[only]} if only else MODELS
    others = {} if only else _others()
    if as_json:
        listed = [_as_object(*one, stages) for one in shown.items()]
        others_listed = [{"hub": hub, "bytes": size} for hub, size in others.items()]
        print(json.dumps({"models": listed, "others_here": others_listed}))
    elif only:
        _show_one(only, MODELS[only])
    else:
        _show_all(stages, others)


def board_bytes(model: KnownModel, stages: int) -> tuple[int, int]:
    """What the fullest stage and the coordinator, without a draft, need in 4 bits."""
    planned = PlannedModel("", model.sizes, four_bit_for(model.sizes))
    needs = Needs(planned, min(DEFAULT_CONTEXT, model.context), 1)
    layers = -(-model.sizes.layers // min(stages, model.sizes.layers))
    return needs.stage(layers).total, needs.coordinator().total


def parameters_text(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 0.95e9 else f"{count / 1e6:.0f}M"


def _others() -> dict[str, int]:
    """Models in the hub's cache that have no short name: hub id → bytes."""
    named = {split_file(one)[0] for m in MODELS.values() for one in (m.hub, m.gguf) if one}
    named |= {draft.weights for model in MODELS.values() for draft in model.drafts}
    return {hub: size for hub, size in sorted(cached().items()) if hub not in named}


def _gguf_here(model: KnownModel) -> bool:
    return bool(model.gguf) and is_here(model.gguf)


def _as_object(name: str, model: KnownModel, stages: int) -> dict[str, object]:
    stage, coordinator = board_bytes(model, stages)
    source = resolved(name)
    return {
        "name": name,
        "model": source,
        "here": is_here(source),
        "hub": model.hub,
        "gguf": model.gguf,
        "gguf_here": _gguf_here(model),
        "family": model.family,
        "parameters": model.parameters,
        "licence": model.licence,
        "gated": model.gated,
        "context": model.context,
        "tried": model.tried,
        "stages": stages,
        "stage_bytes": stage,
        "coordinator_bytes": coordinator,
        "drafts": [
            {
                "source": draft.source,
                "weights": draft.weights,
                "here": is_here(resolved(draft.weights)),
                "page": draft.page,
            }
            for draft in model.drafts
        ],
    }


# --- showing ------------------------------------------------------------------------------------


_ROOMY = 100
_MOST = {"family": 9, "licence": 10}
"""Columns that are cut on a terminal of fewer columns than _ROOMY, so that all others fit."""


def _show_all(stages: int, others: dict[str, int]) -> None:
    console = Console(markup=False, highlight=False, emoji=False)
    wide = console.width >= WIDE
    titles = ("name", "size", "GiB", *(("family", "licence") if wide else ()), "drafts", "here")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for title in titles:
        justify: JustifyMethod = "right" if title in ("size", "GiB") else "left"
        most = _MOST.get(title) if console.width < _ROOMY else None
        table.add_column(Text(title), justify=justify, no_wrap=True, max_width=most)
    for name, model in MODELS.items():
        middle = (model.family, model.licence) if wide else ()
        table.add_row(
            *(name, parameters_text(model.parameters)),
            f"{board_bytes(model, stages)[0] / GIB:.1f}",
            *middle,
            ",".join(draft.source for draft in model.drafts),
            "yes" if is_here(resolved(name)) else "gguf" if _gguf_here(model) else "",
        )
    console.print(table)
    lines = [
        f"GiB: of each board of {stages}, in 4 bits, {DEFAULT_CONTEXT} tokens of context",
        "edgespec models NAME shows one; edgespec pull NAME downloads it",
        *(f"here too: {hub}, {size_text(size)}" for hub, size in others.items()),
        "without --model: the bundled toy pair",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)


def _show_one(name: str, model: KnownModel) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for left, right in _facts(name, model):
        table.add_row(Text(left), Text(right))
    Console(markup=False, highlight=False, emoji=False).print(table)


def _facts(name: str, model: KnownModel) -> Iterator[tuple[str, str]]:
    tried = "run here" if model.tried else "its family runs; this model was not run here"
    yield name, f"{parameters_text(model.parameters)}, family {model.family}; {tried}"
    accept = f"; accept it at https://huggingface.co/{model.hub}" if model.gated else ""
    yield "licence", model.licence + accept
    source = resolved(name)
    yield "from", source + (", which is here" if is_here(source) else "")
    if model.gguf:
        yield f"{name}.gguf", model.gguf + (", which is here" if _gguf_here(model) else "")
    boards = [f"{board_bytes(model, n)[0] / GIB:.1f} of each of {n}" for n in _RINGS]
    yield "GiB in 4 bits", ", ".join(boards)
    yield "coordinator", f"{board_bytes(model, 1)[1] / GIB:.1f} GiB, and its draft"
    for draft in model.drafts:
        here = ", which is here" if is_here(resolved(draft.weights)) else ""
        yield f"--draft {draft.source}", f"{draft.weights}{here}"
    drafts = f" --draft {model.drafts[-1].source}" if model.drafts else ""
    yield "next", f"edgespec pull {name}{drafts}"
