"""edgespec init: make a cluster on the coordinator's machine, or change what it serves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import typer
from msgspec import structs

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.cli.plan import commands_of, plan_as_json, played_ways
from edgespec.cli.token import with_cluster
from edgespec.config import DEFAULT_PORT, HEAD_ON_COORDINATOR, HEADS, Address, Quantisation
from edgespec.daemon.access_list import clean_name
from edgespec.daemon.access_store import AccessStore
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings, folder_of
from edgespec.daemon.model_names import resolved
from edgespec.daemon.planning import (
    Quants,
    chosen_context,
    devices_of,
    head_places,
    model_to_plan,
)
from edgespec.daemon.played_plans import PlayedPlan
from edgespec.daemon.precision import AUTO, precision_text, sixteen_bit_dtype
from edgespec.daemon.settings import (
    LAST_STAGE,
    RingOptions,
    chosen_draft,
    coordinator_config,
    look_at_models,
    look_into_models,
    usual_draft,
)
from edgespec.daemon.shelf import models_of
from edgespec.drafting.choice import NONE, DraftChoice
from edgespec.errors import AccessRefused, ConfigError
from edgespec.net.discovery_interfaces import EVERY_ADDRESS
from edgespec.planning.memory import GIB, Device
from edgespec.planning.plan import Plan
from edgespec.planning.problem import Problem
from edgespec.runtime.access_policy import STAGE

TOKEN_S = 3600.0
"""Seconds for which the printed token admits devices."""


def init(
    model: str = options.MODEL,
    draft: str = options.DRAFT,
    stages: int = typer.Option(
        0,
        help="Number of stages in the ring. Default: as --layers, --devices or the model's "
        "folder has.",
        show_default=False,
        callback=options.check_stages,
    ),
    layers: str = options.LAYERS,
    devices: str = typer.Option(
        "",
        metavar="FILE|PROFILE[,PROFILE...]",
        help="Plan the ring for these devices, as `edgespec plan` does: a JSON file, or names "
        "or files of profiles, the coordinator's first.",
    ),
    quant: options.Quant = AUTO,
    head_quant: options.HeadQuant = AUTO,
    draft_quant: options.DraftQuant = AUTO,
    with_stage: int | None = options.WITH_STAGE,
    context: int = options.CONTEXT,
    dtype: str = typer.Option(
        AUTO,
        help="float32, bfloat16, float64 or (CUDA) float16. auto: 16 bit for packed "
        "blocks on a GPU or a processor that is faster by it, else float32; with "
        "a plan (--devices) always 16 bit.",
    ),
    cache_dtype: options.CacheDtype = AUTO,
    head: options.Head = AUTO,
    add: str = typer.Option(
        "",
        metavar="NAME",
        help="Add this model to those of the cluster, under that name: `edgespec serve` then "
        "loads the one that a request asks for.",
    ),
    host: str = typer.Option(EVERY_ADDRESS, help="Address to listen on."),
    port: int = typer.Option(DEFAULT_PORT, help="Port to listen on; 0: any free."),
    cluster: str = options.CLUSTER,
    as_json: bool = options.JSON,
) -> None:
    """Make a cluster: its key, what it serves, and a token that lets devices in for an hour.

    Standard output is the one line to run on each device. Run again, it changes what is served from
    the next start on, and keeps the cluster's key, devices and tokens.
    """
    notes = Notes()
    folder = folder_of(cluster)
    if add:
        there = ClusterFolder.open(folder)
        there.path_of_added(add)
        if add == next(iter(models_of(there))):
            raise ConfigError(f"the cluster's own model is called {add}; choose another name")
    kept = _is_cluster(folder)
    if not draft and not devices and head in ("", AUTO, HEAD_ON_COORDINATOR):
        draft = usual_draft(resolved(model))
    model, draft = _absolute(model), _absolute_draft(draft, model)
    plan = None
    if devices:
        if stages or layers or with_stage not in (None, LAST_STAGE):
            raise ConfigError(
                "--devices plans how many stages there are, how many layers each has, and which "
                "one is on the coordinator's device; leave --stages, --layers and the number of "
                "--with-stage out"
            )
        quants = Quants(quant, head_quant, draft_quant, cache_dtype)
        found = _planned(model, draft, quants, context, devices, head, notes)
        plan = found[0].plan
        head = HEADS[plan.problem.head_last]
        of, context = plan.problem.model, plan.problem.context
        quant, head_quant = of.quantisation.name, of.head.name
        layers, with_stage = ",".join(map(str, plan.split)), plan.with_stage
        dtype = sixteen_bit_dtype() if dtype == AUTO else dtype
    settings, later = _settings(
        RingOptions(
            *(model, draft, stages, dtype, quant, head_quant, draft_quant, layers, context),
            with_stage=with_stage,
            head=head,
            cache_dtype=cache_dtype,
        ),
        Address(host, port),
    )
    text = ""
    if plan:
        settings = structs.replace(settings, places=_places(plan))
        base, chosen = model or bundled("base"), str(chosen_draft(draft, model))
        commands = list(commands_of(plan, base, chosen, draft_quant))
        text = json.dumps(plan_as_json(found, commands), ensure_ascii=False) + "\n"
    if add:
        own = there.settings
        there.add(add, structs.replace(settings, host=own.host, port=own.port))
        for line in _device_lines(plan) if plan else ():
            notes.say(line)
        notes.say(f"the cluster {there.cluster_id} has {add} too: restart the coordinator")
        return
    made = ClusterFolder.create(folder, settings)
    made.keep_plan(text)
    token = AccessStore(made).new_token(STAGE, 0, TOKEN_S)
    if as_json:
        print(json.dumps(_as_object(made, settings, token.text, kept), ensure_ascii=False))
        return
    for line in _device_lines(plan) if plan else ():
        notes.say(line)
    _tell(notes, made, kept, later)
    print(f"edgespec join {token.text}")


def _settings(ring: RingOptions, address: Address) -> tuple[ClusterSettings, list[str]]:
    """The settings for `edgespec serve`, checked as it does, and the models it must download.

    Raises ConfigError.
    """
    config = coordinator_config(ring, address)
    look_at_models(config)
    is_own = ring.model or (ring.draft and chosen_draft(ring.draft, ring.model).folders)
    later = look_into_models(config) if is_own else []  # the bundled models need no look
    made = replace(
        ring,
        stages=config.stages,
        dtype=config.dtype,
        quant=config.quantisation.name,
        head_quant=config.head_quantisation.name,
        draft_quant=config.draft_quantisation.name,
        host=address.host,
        port=address.port,
        with_stage=config.with_stage,
        head=config.head,
        cache_dtype=config.cache_dtype,
    )
    return ClusterSettings(**asdict(made)), later


def _planned(
    model: str, draft: str, quants: Quants, context: int, devices: str, head: str, notes: Notes
) -> list[PlayedPlan]:
    """The ways to run it with the coordinator here, the fastest first."""
    chosen = chosen_draft(draft, model)
    asked = model_to_plan(model or bundled("base"), quants, str(chosen) or NONE)
    coordinator, others = devices_of(devices)
    problem = Problem(asked.model, coordinator, others, chosen_context(asked, context))
    found = played_ways(problem, head_places(head, draft, model), True)
    here = [way for way in found if way.plan.nodes[0].device is coordinator]
    if found[0] is not here[0]:
        name = found[0].plan.nodes[0].device.name
        notes.say(f"{name} alone would be faster: make the cluster there, with no other device")
    return here


def _places(plan: Plan) -> tuple[str, ...]:
    """The devices' names in ring order; () if the plan names profiles only."""
    devices = [node.device for node in plan.nodes[1:]]
    if not all(map(_has_own_name, devices)):
        return ()
    names = tuple(clean_name(device.name) for device in devices)
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two devices would be called the same: {', '.join(names)}; give them names that "
            "differ in more than spaces"
        )
    return names


def _device_lines(plan: Plan) -> Iterator[str]:
    for node in plan.nodes:
        what = f"layers {node.first} to {node.end - 1}" if node.stage else "coordinator"
        yield (
            f"{'V' if node.stage else 'D'}{node.stage} {node.device.name}: {what}, needs "
            f"{node.need.total / GIB:.2f} of {node.device.memory / GIB:.2f} GiB"
        )
    for device, reason in plan.left_out:
        yield f"left out: {device.name} ({reason})"


def _has_own_name(device: Device) -> bool:
    """Whether it has a name other than its profile's: then it is one particular device."""
    kind = device.profile.name
    return device.name != kind and not device.name.startswith(f"{kind}#")


def _absolute(model: str) -> str:
    """An absolute path for what is here, as `serve` may start elsewhere; a hub id is unchanged."""
    return os.path.abspath(model) if model and Path(model).exists() else model


def _absolute_draft(draft: str, model: str) -> str:
    if draft in ("", NONE):
        return draft
    chosen = chosen_draft(draft, model)
    members = (m if m.is_own else replace(m, folder=_absolute(m.folder)) for m in chosen.members)
    return str(DraftChoice(tuple(members)))


def _is_cluster(folder: Path) -> bool:
    try:
        return ClusterFolder.open(folder).is_coordinator
    except AccessRefused:
        return False  # any other cause is raised again by `create`


def _tell(notes: Notes, made: ClusterFolder, kept: bool, later: list[str]) -> None:
    if kept:
        notes.say(
            f"the cluster {made.cluster_id} in {made.path} keeps its key, devices and tokens; its "
            "settings are changed: restart the coordinator"
        )
    else:
        notes.say(f"made the cluster {made.cluster_id} in {made.path}")
    settings = made.settings
    folders = chosen_draft(settings.draft, settings.model).folders if settings.draft else ()
    for model in filter(None, (settings.model, *folders)):
        if not Path(model).exists():
            notes.say(f"{model} is not here: the coordinator takes it from the hub")
        if model in later:
            notes.say(
                f"{model} was not downloaded yet, and the hub cannot be reached now: connect this "
                "machine before `edgespec serve`, or for `edgespec pull`"
            )
    quant, head = Quantisation.parse(settings.quant), Quantisation.parse(settings.head_quant)
    if text := precision_text(quant, head, settings.dtype, settings.cache_dtype):
        notes.say(text)
    notes.say(f"start the coordinator:        {with_cluster('edgespec serve', made.path)}")
    notes.say(f"another token, when needed:   {with_cluster('edgespec token new', made.path)}")
    own = settings.with_stage
    if names := [name for stage, name in enumerate(settings.places, start=1) if stage != own]:
        kept_for = " ".join(names)
        notes.say(f"places in the ring are kept for the devices with these host names: {kept_for}")
    if own:
        notes.say(f"stage {own} runs on this machine: `edgespec serve` starts it")
    notes.say("on each device, within an hour:")


def _as_object(
    made: ClusterFolder, settings: ClusterSettings, token: str, kept: bool
) -> dict[str, object]:
    return {
        "cluster": made.cluster_id,
        "folder": str(made.path),
        "kept": kept,
        "token": token,
        "valid_seconds": TOKEN_S,
        "join": f"edgespec join {token}",
        "settings": structs.asdict(settings),
    }
