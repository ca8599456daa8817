"""edgespec models: what is known to work, what fits together, and what is on this machine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from edgespec.cli import options
from edgespec.cli.tables import show_table
from edgespec.config import HEADS, MOST_STAGES
from edgespec.daemon.bundled_models import HYBRID
from edgespec.daemon.model_names import known_name, resolved, spoken
from edgespec.daemon.planning import (
    DEFAULT_CONTEXT,
    Quants,
    chosen_context,
    devices_of,
    model_to_plan,
)
from edgespec.daemon.played_plans import SHORT_CONTEXT
from edgespec.daemon.precision import four_bit_for
from edgespec.drafting.choice import NONE
from edgespec.errors import CapacityError, ConfigError
from edgespec.model.hub_cache import cached, is_here, split_file
from edgespec.model.manifest import size_text
from edgespec.planning.catalogue import MODELS, REFUSED, KnownModel
from edgespec.planning.memory import GIB, Needs, PlannedModel
from edgespec.planning.plan import Plan, candidates
from edgespec.planning.problem import Problem

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
    fits: str = typer.Option(
        "",
        metavar="FILE|PROFILE[,PROFILE...]",
        help="List what would run on these devices, and how fast; as `edgespec plan` takes them.",
    ),
    as_json: bool = options.JSON,
) -> None:
    """List the models that edgespec knows by name: size, memory a board, drafts, what is here.

    They are of families that edgespec runs. GiB: what the fullest of the stages needs, in 4 bits
    and with a context of 4096 tokens.
    """  # fmt: skip
    if fits:
        _list_fitting(name, fits, as_json)
        return
    if not 1 <= stages <= MOST_STAGES:
        raise ConfigError(f"{stages} stages; a ring has 1 to {MOST_STAGES}")
    only = known_name(name)
    if name and not only:
        raise ConfigError(f"{spoken(name)} is not in the list; `edgespec models` shows what is")
    shown = {only: MODELS[only]} if only else MODELS
    others = {} if only else _others()
    if as_json:
        listed = [_as_object(*one, stages) for one in shown.items()]
        others_listed = [{"hub": hub, "bytes": size} for hub, size in others.items()]
        refused = {} if only else {name: str(one.refusal) for name, one in REFUSED.items()}
        told = {"models": listed, "others_here": others_listed, "refused": refused}
        print(json.dumps(told))
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
        "also": list(model.also),
        "bytes": model.file_bytes(source),
        "gguf_bytes": model.file_bytes(model.gguf) if model.gguf else 0,
        "sampling": model.sampling,
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


# --- what fits ----------------------------------------------------------------------------------


def _list_fitting(name: str, devices: str, as_json: bool) -> None:
    """Each model, or that of the name, as its fastest ring on those devices without a draft."""
    coordinator, others = devices_of(devices)
    only = known_name(name)
    wanted = {only: MODELS[only]} if only else MODELS
    found = {}
    for one, model in wanted.items():
        asked = model_to_plan(model.hub, Quants(), NONE)
        context = chosen_context(asked, 0)
        problem = Problem(asked.model, coordinator, others, context)
        with suppress(CapacityError):
            ways = candidates(problem, HEADS, needs_draft=False)
            found[one] = min(ways, key=lambda way: way.trip_seconds(SHORT_CONTEXT))
    if as_json:
        print(json.dumps({"models": [_fitting_object(*one) for one in found.items()]}))
        return
    if not found:
        raise CapacityError(
            f"no model of `edgespec models` fits {devices}; plan one with --context"
        )
    largest = sorted(found, key=lambda one: -MODELS[one].parameters)
    titles = ("name", "size", "boards", "layers", "GiB", "tokens/s", "drafts")
    rows = [_fitting_row(one, found[one]) for one in largest]
    notes = (
        f"GiB: what the fullest board needs, in 4 bits, {DEFAULT_CONTEXT} tokens of context",
        "tokens/s: of plain decoding by the cost model; edgespec plan plays a ring with its draft",
        f"{len(wanted) - len(found)} other models do not fit",
    )
    show_table(titles, rows, *notes, left=("name", "layers", "drafts"))


def _fitting_row(name: str, made: Plan) -> tuple[str, ...]:
    model = MODELS[name]
    return (
        *(name, parameters_text(model.parameters), str(len(_boards(made)))),
        ",".join(map(str, made.split)),
        f"{max(_boards(made).values()) / GIB:.1f}",
        f"{1 / made.trip_seconds(SHORT_CONTEXT):.1f}",
        ",".join(draft.source for draft in model.drafts),
    )


def _boards(made: Plan) -> dict[str, int]:
    """Bytes that each of its devices needs; the coordinator's may be a stage too."""
    needed = Counter[str]()
    for node in made.nodes:
        needed[node.device.name] += node.need.total
    return needed


def _fitting_object(name: str, made: Plan) -> dict[str, object]:
    return {
        "name": name,
        "layers": list(made.split),
        "needed_bytes": _boards(made),
        "plain_tokens_per_second": 1 / made.trip_seconds(SHORT_CONTEXT),
        "drafts": [draft.source for draft in MODELS[name].drafts],
    }


# --- showing ------------------------------------------------------------------------------------


_ROOMY = 100
_MOST = {"family": 9, "licence": 10, "drafts": 16}
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
        "edgespec models NAME shows one, or why it does not run; edgespec pull NAME downloads it",
        *(f"here too: {hub}, {size_text(size)}" for hub, size in others.items()),
        f"without --model: the bundled toy pair; --model {HYBRID}: a bundled toy with states",
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


def _where(model: KnownModel, source: str) -> str:
    return ", which is here" if is_here(source) else f", {size_text(model.file_bytes(source))}"


def _facts(name: str, model: KnownModel) -> Iterator[tuple[str, str]]:
    tried = "run here" if model.tried else "its family runs; this model was not run here"
    yield name, f"{parameters_text(model.parameters)}, family {model.family}; {tried}"
    accept = f"; accept it at https://huggingface.co/{model.hub}" if model.gated else ""
    yield "licence", model.licence + accept
    source = resolved(name)
    yield "from", source + _where(model, source)
    if model.gguf:
        yield f"{name}.gguf", model.gguf + _where(model, model.gguf)
    if model.also:
        yield "also called", ", ".join(model.also)
    if model.sampling:
        yield "its own settings", ", ".join(f"{n} {v:g}" for n, v in model.sampling.items())
    boards = [f"{board_bytes(model, n)[0] / GIB:.1f} of each of {n}" for n in _RINGS]
    yield "GiB in 4 bits", ", ".join(boards)
    yield "coordinator", f"{board_bytes(model, 1)[1] / GIB:.1f} GiB, and its draft"
    for draft in model.drafts:
        here = ", which is here" if is_here(resolved(draft.weights)) else ""
        yield f"--draft {draft.source}", f"{draft.weights}{here}"
    drafts = f" --draft {model.drafts[-1].source}" if model.drafts else ""
    yield "next", f"edgespec pull {name}{drafts}"
