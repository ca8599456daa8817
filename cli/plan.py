"""edgespec plan: which devices run which layers, what fits, and how fast it would be."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import typer

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.cli.tables import show_table
from edgespec.config import EIGHT_BITS, HEADS, cache_complaint
from edgespec.daemon.cache_rows import live_requests, planned_rows, state_rows
from edgespec.daemon.model_names import known_name, spoken
from edgespec.daemon.planning import (
    ModelToPlan,
    Quants,
    chosen_context,
    devices_of,
    head_places,
    measured_share,
    model_to_plan,
)
from edgespec.daemon.played_plans import SHORT_CONTEXT, PlayedPlan, fastest_plans
from edgespec.daemon.precision import AUTO
from edgespec.daemon.profiles import unproven
from edgespec.drafting.choice import NONE
from edgespec.errors import ConfigError
from edgespec.planning.catalogue import MODELS
from edgespec.planning.memory import GIB, gib
from edgespec.planning.plan import Plan, PlannedNode
from edgespec.planning.problem import SEGMENT_ROWS, Problem

DTYPE = "bfloat16"
"""What planned rings compute in, and hold caches in."""

SHORT_REQUEST = 512
"""Tokens of a short request, of which is said how many may be live, beside those of full length."""

_LEFT = ("node", "device", "layers")
_COLUMNS = (
    *(*_LEFT, "weights", "KV", "overhead", "total", "of GiB"),
    *("ms, 1 row", f"ms, {SEGMENT_ROWS} rows"),
)


def plan(
    model: str = typer.Option(
        ...,
        help="The base model: a name of `edgespec models`, a hub id (ORG/NAME), a folder in "
        "Hugging Face format (its config.json is enough), or one that `edgespec shard` made.",
        callback=options.check_model,
    ),
    devices: str = typer.Option(
        ...,
        metavar="FILE|PROFILE[,PROFILE...]",
        help="The devices, the coordinator's first: a JSON file, or names or files of "
        "profiles; N*PROFILE stands for N of them.",
    ),
    draft: str = typer.Option(
        "",
        help="Who guesses: as `edgespec init` takes it, but ppd. Default: the small model that "
        "`edgespec models` has for the base, or none.",
    ),
    quant: options.Quant = AUTO,
    head_quant: options.HeadQuant = AUTO,
    head: str = typer.Option(
        AUTO,
        help="Where the output head is: coordinator, or last-stage. auto: where a token takes less "
        "time by the formula.",
    ),
    draft_quant: options.DraftQuant = AUTO,
    cache_dtype: options.CacheDtype = AUTO,
    context: int = typer.Option(
        0,
        help="Tokens that prompt and answer may have together. Default: 4096, or what the "
        "model takes.",
    ),
    requests: int = typer.Option(1, help="Requests that are open at once."),
    as_json_object: bool = options.JSON,
) -> None:
    """Plan a ring: which devices, in which order, with how many layers each.

    It finds the rings that fit and may be the fastest, plays each of them and each board alone in
    virtual time, and plans the fastest: that may be one board. It says what is measured and what is
    estimated. docs/planning.md has the problem.
    """
    if cache_dtype not in (AUTO, DTYPE) and (complaint := cache_complaint(DTYPE, cache_dtype)):
        raise ConfigError(complaint)
    quants = Quants(quant, head_quant, draft_quant, cache_dtype)
    asked = model_to_plan(model, quants, draft)
    coordinator, others = devices_of(devices)
    problem = Problem(asked.model, coordinator, others, chosen_context(asked, context), requests)
    found = played_ways(problem, head_places(head, draft, model), bool(draft))
    made = found[0].plan
    commands = list(commands_of(made, model, draft, draft_quant))
    if as_json_object:
        told = plan_as_json(found, commands) | {"file_bytes": _file_bytes(model)}
        print(json.dumps(told, ensure_ascii=False))
        return
    remarks = (*_remarks(found, model), *_other_cut(asked, made))
    show_table(_COLUMNS, _rows(made), *remarks, "", *commands, left=_LEFT)


def played_ways(problem: Problem, heads: tuple[str, ...], needs_draft: bool) -> list[PlayedPlan]:
    """The ways to run it, the fastest first (see daemon.played_plans), with a line of progress."""
    with Notes().waiting("playing the plans in virtual time") as waiting:
        return fastest_plans(
            problem,
            heads,
            needs_draft,
            lambda done: waiting(f"playing the plans in virtual time: {done} answers"),
        )


# --- showing ------------------------------------------------------------------------------------


def _rows(made: Plan) -> Iterator[tuple[str, ...]]:
    own = [] if made.problem.head_last else ["head"]
    own += ["draft"] if made.problem.model.draft.layers else []
    last = len(made.split)
    for node in made.nodes:
        need = node.need
        has_head = made.problem.head_last and node.stage == last
        layers = [f"{node.first}-{node.end - 1}", *["head"] * has_head]
        sizes = (need.weights, need.cache, need.overhead, need.total, node.device.memory)
        yield (
            "D0" if not node.stage else f"V{node.stage}",
            node.device.name,
            ", ".join(layers if node.stage else own),
            *(f"{size / GIB:.2f}" for size in sizes),
            *(f"{_seconds(made, node, rows) * 1e3:.1f}" for rows in (1, SEGMENT_ROWS)),
        )


def _seconds(made: Plan, node: PlannedNode, rows: int) -> float:
    """Seconds of a segment on a node, at half the context."""
    last = made.problem.head_last
    costs = made.costs.stages[node.stage - 1] if node.stage else made.costs.coordinator
    has_head = node.stage == len(made.split) if last else not node.stage
    head = costs.head_seconds(rows) if has_head else 0.0
    return head + costs.block_seconds(rows, made.problem.context // 2)


def _remarks(found: list[PlayedPlan], model: str) -> Iterator[str]:
    made = found[0].plan
    problem = made.problem
    of, draft = problem.model, problem.model.draft
    yield (
        f"{of.name}, {of.quantisation.name}, head as {of.head.name}, embedding in its file; "
        f"{problem.requests} "
        f"request(s) of {problem.context} tokens; memory in GiB, times at half the context"
    )
    if published := _file_bytes(model):
        yield f"its files on the hub: {gib(published)}"
    rows = planned_rows(made, DTYPE)
    lengths = sorted({problem.context, min(SHORT_REQUEST, problem.context)}, reverse=True)
    states = state_rows(of.of, DTYPE)
    counts = (f"{live_requests(rows, tokens, states)} of {tokens} tokens" for tokens in lengths)
    yield f"live at once: by memory {rows} cache rows, for {' or '.join(counts)} (serve --live)"
    for device, reason in made.left_out:
        yield f"left out: {device.name} ({reason})"
    if bound := of.of.bound:
        yield (
            f"the last {bound} of {of.of.layers} layers are on one stage: some read the keys of "
            f"those from number {of.of.layers - bound} on"
        )
    if tables := of.of.table_weights:
        yield f"{gib(2 * tables)} more in the stages' files: what layers look up of each token"
    if made.with_stage:
        whole = sum(node.need.total for node in (made.nodes[0], made.nodes[made.with_stage]))
        yield (
            f"V{made.with_stage} is on the coordinator's board and shares its time; both need "
            f"{whole / GIB:.2f} of {made.nodes[0].device.memory / GIB:.2f} GiB"
        )
    else:
        yield f"no layers on the coordinator's board ({made.why_idle})"
    yield (
        f"plain decoding: {1 / made.trip_seconds(SHORT_CONTEXT):.2f} tokens/s at "
        f"{SHORT_CONTEXT} cached rows, {1 / made.trip_seconds(problem.context):.2f} at "
        f"{problem.context}; by the cost model, exactly"
    )
    if draft.name:
        yield (
            f"with guesses: {_guessing(found[0])} (adaptive, short questions); charged as "
            f"{draft.name}, but the guesses are those of the bundled pair: how often yours are "
            "right decides"
        )
    else:
        yield f"with guesses: not predicted, as there is no draft{_drafts_of(model)}"
    yield from _compared(found)
    yield from _sureness(made)


def _file_bytes(model: str) -> int:
    """Of its files on the hub; 0 if they are not known."""
    known = MODELS.get(known_name(model))
    return known.file_bytes(model) if known else 0


def _drafts_of(model: str) -> str:
    """Those that are known to fit it, as `--draft` takes them."""
    known = MODELS.get(known_name(model))
    if known is None or not known.drafts:
        return "; name one with --draft (ngram fits any model)"
    names = (f"--draft {one.source} ({one.weights})" for one in known.drafts)
    return f"; known for this model: {', '.join(names)}, --draft ngram"


def _guessing(way: PlayedPlan) -> str:
    if way.guessing is None:
        return "not played"
    return f"{way.guessing:.1f} tokens/s in virtual time, {way.right:.0%} of the tokens guessed"


def _called(made: Plan) -> str:
    """A plan among others."""
    device = made.nodes[0].device.name
    if made.is_alone:
        return f"{device} alone"
    own = f", V{made.with_stage} on {device}" if made.with_stage else f", none on {device}"
    return f"{len(made.split)} stages of {_joined(made.split)} layers{own}"


def _compared(found: list[PlayedPlan]) -> Iterator[str]:
    """The other ways to run it, and from when on the ring is faster than a board alone."""
    best, *others = found
    for way in others:
        draft = way.plan.problem.model.draft.name
        guessing = f", with guesses {_guessing(way)}" if draft else ", without a draft"
        yield f"instead, {_called(way.plan)}: plain {way.plain:.2f} tokens/s{guessing}"
    if best.plan.is_alone and best.plan.left_out:
        yield f"{_called(best.plan)} is the fastest: use the other boards for something else"
    yield from _each_its_own(found)
    ring = next((way for way in found if not way.plan.is_alone), None)
    alone = next((way for way in found if way.plan.is_alone), None)
    if ring is None or alone is None or ring.guessing is None:
        return
    share = ring.break_even(alone)
    name = alone.plan.nodes[0].device.name
    if share is not None:
        yield (
            f"the ring is faster than {name} alone only if more than {share:.0%} of the tokens are "
            f"guessed right; the bundled pair has {ring.right:.0%}"
        )
    elif ring.plain < alone.plain:
        yield f"by these figures {name} alone is faster however many tokens are guessed right"


def _each_its_own(found: list[PlayedPlan]) -> Iterator[str]:
    """What the boards would do for several users, with a whole model each."""
    problem = max((way.plan.problem for way in found), key=lambda one: len(one.others))
    alone = {way.plan.nodes[0].device.profile: way.speed for way in found if way.plan.is_alone}
    boards = [device.profile for device in (problem.coordinator, *problem.others)]
    able = [alone[profile] for profile in boards if profile in alone]
    if len(able) > 1 and sum(able) > found[0].speed:
        yield f"a model on each of {len(able)} boards: {sum(able):.1f} tokens/s, for as many users"


def _sureness(made: Plan) -> Iterator[str]:
    """For each profile in the ring: how many of its figures were measured."""
    profiles = {node.device.profile.name: node.device.profile for node in made.nodes}
    for name, profile in profiles.items():
        measured, all_of_them = measured_share(profile)
        rest = "" if measured == all_of_them else "; the others are estimates, not measurements"
        yield f"figures of {name}: {measured} of {all_of_them} measured on a device{rest}"
    yield from unproven(profiles.values())


def _other_cut(asked: ModelToPlan, made: Plan) -> Iterator[str]:
    if asked.split and asked.split != made.split:
        yield (
            f"the block files are cut into {_joined(asked.split)} layers; for this plan make them "
            f"anew: edgespec shard MODEL --stages {len(made.split)} --layers {_joined(made.split)}"
        )


def commands_of(made: Plan, model: str, draft: str, draft_quant: str) -> Iterator[str]:
    """The command of each device."""
    of = made.problem.model
    drafting = (draft or of.draft.name) if of.draft.name else NONE if draft else ""
    if drafting:
        drafting = f" --draft {shlex.quote(drafting)}"
        drafting += f" --draft-quant {draft_quant}" if draft_quant != AUTO else ""
    coordinator = made.nodes[0].device.name
    yield (
        f"{coordinator}: edgespec init --model {shlex.quote(spoken(model))}{drafting} "
        f"--quant {of.quantisation.name} --head-quant {of.head.name} "
        f"--layers {_joined(made.split)} "
        + (f"--with-stage {made.with_stage} " if made.with_stage else "")
        + ("--head last-stage " if made.problem.head_last else "")
        + f"--context {made.problem.context} --dtype {DTYPE}"
        + (f" --cache-dtype {EIGHT_BITS}" if of.of.coded else "")
    )
    yield f"{coordinator}: edgespec serve"
    for node in made.nodes[1:]:
        if node.stage == made.with_stage:
            continue
        yield f"{node.device.name}: edgespec join TOKEN --stage {node.stage}"


def _joined(split: tuple[int, ...]) -> str:
    return ",".join(map(str, split))


def plan_as_json(found: list[PlayedPlan], commands: list[str]) -> dict[str, object]:
    """The plan that is the fastest, and what the others would do."""
    made = found[0].plan
    problem = made.problem
    profiles = {node.device.profile.name: node.device.profile for node in made.nodes}
    return {
        "model": problem.model.name,
        "quantisation": problem.model.quantisation.name,
        "head_quantisation": problem.model.head.name,
        "draft": problem.model.draft.name,
        "context": problem.context,
        "requests": problem.requests,
        "rows": planned_rows(made, DTYPE),
        "layers": list(made.split),
        "with_stage": made.with_stage,
        "head": HEADS[made.problem.head_last],
        "nodes": [
            {
                "stage": node.stage,
                "device": node.device.name,
                "profile": node.device.profile.name,
                "first": node.first,
                "end": node.end,
                "weight_bytes": node.need.weights,
                "cache_bytes": node.need.cache,
                "overhead_bytes": node.need.overhead,
                "needed_bytes": node.need.total,
                "memory_bytes": node.device.memory,
                "seconds": {str(rows): _seconds(made, node, rows) for rows in (1, SEGMENT_ROWS)},
            }
            for node in made.nodes
        ],
        "left_out": [{"device": d.name, "reason": reason} for d, reason in made.left_out],
        "plain_tokens_per_second": 1 / made.trip_seconds(SHORT_CONTEXT),
        "plain_tokens_per_second_full": 1 / made.trip_seconds(problem.context),
        "speculative_tokens_per_second": found[0].guessing,
        "ways": [
            {
                "devices": [node.device.name for node in way.plan.nodes],
                "layers": list(way.plan.split),
                "with_stage": way.plan.with_stage,
                "draft": way.plan.problem.model.draft.name,
                "plain_tokens_per_second": way.plain,
                "speculative_tokens_per_second": way.guessing,
                "guessed_right": way.right if way.guessing else None,
            }
            for way in found
        ],
        "figures_measured": {n: list(measured_share(p)) for n, p in profiles.items()},
        "commands": commands,
    }
