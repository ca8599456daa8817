"""Planning: from the names and files that a user gives to a problem."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta, structs

from edgespec.config import EIGHT_BITS, FILE, HEADS, CoordinatorConfig, Quantisation
from edgespec.daemon.model_names import known_name
from edgespec.daemon.precision import (
    AUTO,
    draft_quantisation_for,
    head_quantisation_for,
    quantisation_for,
)
from edgespec.daemon.profiles import profile_named
from edgespec.daemon.settings import chosen_draft
from edgespec.drafting.choice import HYBRID, NONE, DraftChoice
from edgespec.errors import ConfigError
from edgespec.model.hub import model_files, require_model
from edgespec.model.hub_cache import is_here
from edgespec.model.manifest import Manifest, manifest_of
from edgespec.planning.architecture import Architecture, architecture_of, longest_context
from edgespec.planning.catalogue import MODELS
from edgespec.planning.cost_model import (
    NO_DRAFT,
    NO_FILE,
    PUBLISHED,
    DraftCosts,
    FileBytes,
    bits_of,
    cost_model_named,
    draft_costs_of,
    draft_head,
    eagle3_costs,
    eagle_costs,
    mtp_costs,
    one_pass_costs,
)
from edgespec.planning.memory import Device, Needs, PlannedModel
from edgespec.planning.profile import Figure, LogitTimes, Profile, RowTable
from edgespec.planning.text_part import DELTA
from edgespec.schema import FileStruct, Text, as_type, parse_json
from edgespec.types.draft_pass import HeadForm

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 4096

GGUF_BITS = 6
"""Of a weight as held, in the largest layers of a Q4_K_M file that is not here to be looked at."""
OTHER_BITS = {"Q8_0": (9, 9), "MXFP4": (9, 5)}
"""The same of files whose names say so, and of the experts in them."""


GGUF_HEAD_BITS = 9
"""The same of the output head, which has 6 to 8 bits in such a file."""


@dataclass(frozen=True, slots=True)
class Quants:
    """What `--quant`, `--head-quant` and `--draft-quant` say; "auto": as daemon.precision chooses,
    or as block files have it. `caches`: `--cache-dtype`, of which 8 bits count alone. `dtype`: of
    rows, and of what is held as values of a packed file."""

    stages: str = AUTO
    head: str = AUTO
    draft: str = AUTO
    caches: str = AUTO
    dtype: str = "bfloat16"


class _DeviceEntry(FileStruct, frozen=True):
    name: Text
    profile: Text
    memory_bytes: Annotated[int, Meta(gt=0, lt=2**60)] | None = None
    coordinator: bool = False


@dataclass(frozen=True, slots=True)
class ModelToPlan:
    """A model to be planned. `context`: the most that it takes, 0 if unknown.

    `split`: layers of the stages that a folder of block files is cut into, () for other models.
    """

    model: PlannedModel
    context: int
    split: tuple[int, ...]


def model_to_plan(model: str, quants: Quants, draft: str) -> ModelToPlan:
    """A known model, a hub id, a file, a folder or one of block files, with its draft.

    `draft`: see drafting.choice; "": none, or the small model that the catalogue has for a known
    one. Raises ConfigError for what cannot be read or is not known.
    """
    asked = _with_draft(_base(model, quants), model, quants, draft)
    coded = replace(asked.model.of, coded=quants.caches == EIGHT_BITS)
    return replace(asked, model=replace(asked.model, of=coded))


def _with_draft(asked: ModelToPlan, model: str, quants: Quants, draft: str) -> ModelToPlan:
    known = MODELS.get(known_name(model))
    choice = chosen_draft(draft or (known.draft_of("independent") if known else ""), model)
    if not choice.members:
        return asked
    if not draft:  # as the cost models charge it
        head = draft_head(asked.model.head)
        costs = cost_model_named(asked.model.name, head).draft
        return replace(asked, model=replace(asked.model, draft=costs))
    held = draft_quantisation_for(choice, model, asked.model.quantisation, quants.draft)
    costs = _draft(choice, asked.model, held, quants.dtype)
    return replace(asked, model=replace(asked.model, draft=costs, sources=_names(choice)))


def planned_needs(
    config: CoordinatorConfig, context: int, what: str, *, with_draft: bool = True
) -> Needs | None:
    """What devices need for a request of so many tokens, 0: as many as the model takes.

    None, and `what` is logged, if the planner does not know the model or its draft.
    """
    held = (config.quantisation, config.head_quantisation, config.draft_quantisation)
    stages, head, drafts = (one.name for one in held)
    quants = Quants(stages, head, drafts, config.cache_dtype, config.dtype)
    draft = config.draft if with_draft else ""
    try:
        asked = model_to_plan(config.model, quants, draft or NONE)
    except ConfigError as problem:
        log.info("%s: %s", what, problem)
        return None
    return Needs(asked.model, context or asked.context, 1, config.head_last)


def head_places(head: str, draft: str, model: str) -> tuple[str, ...]:
    """Where the output head may be, by what `--head` says. Raises ConfigError for a place that does
    not exist, or that a draft source excludes."""
    choice = chosen_draft(draft, model) if draft else DraftChoice()
    if head == AUTO:
        return HEADS[:1] if choice.needs_rows else HEADS
    if head not in HEADS:
        raise ConfigError(f"unknown head {head!r}; choose one of: {', '.join((AUTO, *HEADS))}")
    choice.check_head(head)
    return (head,)


def _base(model: str, quants: Quants) -> ModelToPlan:
    known = MODELS.get(known_name(model))
    packed = known is not None and model == known.gguf
    if known is None or Path(model).exists() or (packed and is_here(model)):
        return stored_model(model, quants)
    of, quantisation = known.sizes, quantisation_for(model, quants.stages)
    head = head_quantisation_for(model, quantisation, quants.head)
    planned = PlannedModel(
        known_name(model),
        of,
        quantisation,
        file=_usual_file(model, of) if quantisation == FILE else NO_FILE,
        head=head,
        head_file_bytes=of.head_bytes // 2 * GGUF_HEAD_BITS // 8 if head == FILE else 0,
    )
    return ModelToPlan(planned, known.context, ())


def _usual_file(model: str, of: Architecture) -> FileBytes:
    """A layer of a GGUF file that is not here."""
    dense, packed = next(
        (bits for kind, bits in OTHER_BITS.items() if kind in model), (GGUF_BITS, GGUF_BITS)
    )
    experts = of.mlp_weights * packed // 8 if of.experts else 0
    others = of.layer_weights - (of.mlp_weights if of.experts else 0)
    return FileBytes(others * dense // 8 + experts, experts)


def chosen_context(asked: ModelToPlan, context: int) -> int:
    """`context`, or the default for 0. Raises ConfigError for more than the model takes."""
    if asked.context and context > asked.context:
        raise ConfigError(
            f"context is {context} and {asked.model.name} takes {asked.context} tokens; give at "
            "most that"
        )
    return context or min(DEFAULT_CONTEXT, asked.context or DEFAULT_CONTEXT)


def devices_of(text: str) -> tuple[Device, tuple[Device, ...]]:
    """The coordinator and the other devices, from a devices file or names of profiles.

    A path (with a "/" or ending in .json) to a JSON list is a devices file; everything else is
    PROFILE or N*PROFILE, with commas between them, the coordinator's first. Raises ConfigError.
    """
    listed = _listed(text)
    devices, coordinator = _named(text) if listed is None else _described(listed, text)
    return devices[coordinator], tuple(devices[:coordinator] + devices[coordinator + 1 :])


def measured_share(profile: Profile) -> tuple[int, int]:
    """How many of a profile's figures were measured on a device, of how many."""
    entries = structs.astuple(profile)
    figures = [entry for entry in entries if isinstance(entry, Figure | RowTable | LogitTimes)]
    return sum(figure.origin.startswith("measured") for figure in figures), len(figures)


# --- models -------------------------------------------------------------------------------------


def stored_model(model: str, quants: Quants) -> ModelToPlan:
    """A model whose files are here: a folder, a file, or a hub id that was downloaded.

    Of a packed model also the forms of its matrices are looked up, which imports torch. Raises
    ConfigError, ModelError.
    """
    config, where = read_config(model)
    of = architecture_of(config, where)
    made, quant = manifest_of(model), quants.stages
    if made is not None and quant not in (AUTO, made.quantisation.name):
        raise ConfigError(
            f"{model} holds block files in {made.quantisation.name}, not {quant}; leave --quant "
            "out, or give the folder of the original model"
        )
    quantisation = quantisation_for(model, quant)
    head = head_quantisation_for(model, quantisation, quants.head)
    planned = PlannedModel(
        known_name(model) or Path(model).resolve().name,
        of,
        quantisation,
        file=_file_of(model, made, quants.dtype) if quantisation == FILE else NO_FILE,
        head=head,
        head_file_bytes=_head_file_bytes(model, made) if head == FILE else 0,
    )
    split = made.layers_of_stages if made else ()
    return ModelToPlan(planned, longest_context(config, where), split)


def _file_of(model: str, made: Manifest | None, dtype: str) -> FileBytes:
    """The largest layer, each matrix held in the form that its file has, or in `dtype`."""
    import torch

    from edgespec.model.block_file import BlockFile
    from edgespec.model.inventory import block_inventory
    from edgespec.model.loader import open_config
    from edgespec.model.quantised.linear import held_bytes
    from edgespec.model.sources import open_source

    if made is None:
        source = open_source(model, FILE)
        needed = block_inventory(source, 0, source.layers)
    else:
        config = open_config(Path(model) / "config.json")
        needed = []
        for block in made.blocks:
            file = BlockFile(Path(model) / block.name, config, FILE)
            needed += block_inventory(file, block.first, block.end)
    layers, experts, unpacked = Counter[int](), Counter[int](), False
    for one in needed:
        if one.looked_up:
            continue
        held = held_bytes(one.form, one.shape, getattr(torch, dtype))
        layers[one.layer] += held
        experts[one.layer] += held if ".experts." in one.name else 0
        unpacked = unpacked or one.form.kind == "fp8"
    del layers[-1]  # embedding and final norm
    largest = max(layers, key=layers.__getitem__)
    return FileBytes(layers[largest], experts[largest], unpacked)


def _head_file_bytes(model: str, made: Manifest | None) -> int:
    """Bytes of the output head, held in the form that its file has."""
    import torch

    from edgespec.model.block_folder import BlockFolder
    from edgespec.model.inventory import head_inventory
    from edgespec.model.quantised.linear import held_bytes
    from edgespec.model.sources import open_source

    source = open_source(model, FILE) if made is None else BlockFolder(Path(model)).head()
    (head,) = head_inventory(source)
    return held_bytes(head.form, head.shape, torch.bfloat16)


def _names(choice: DraftChoice) -> str:
    """The sources without their folders, as `--draft` has them for the bundled base."""
    names = [str(member) if member.is_own else member.name for member in choice.members]
    return f"{HYBRID}:{'+'.join(names)}" if len(names) > 1 else "".join(names)


def _draft(
    choice: DraftChoice, base: PlannedModel, quantisation: Quantisation, dtype: str
) -> DraftCosts:
    """Memory and time that the sources take on D0; n-grams take almost none. `dtype`: see
    Quants."""
    if any(member.name == "ppd" for member in choice.members):
        raise ConfigError(
            "plan does not reckon with ppd, whose rows go round with the base's; plan without "
            "--draft: its weights are small"
        )
    for member in choice.members:
        if member.is_own:
            log.warning("what draft %s needs is not known: it is planned as nothing", member.name)
    one = next((one for one in choice.members if one.weights or one.name in _HEADS), None)
    if one is None:
        return replace(NO_DRAFT, name=_names(choice))
    of = base.of
    if one.name == "mtp" and of.family not in DELTA:
        raise ConfigError(
            f"{base.name} ships no MTP head that edgespec reads; plan another --draft"
        )
    if one.name in ("dspark", *_HEADS):
        if one.weights:
            require_model(one.folder)
        bits, head = bits_of(quantisation), base.costs.head
        if one.name == "dspark":
            form = _head_form(one.folder, of)
            return one_pass_costs(base.name, of, bits, head, form)
        return _HEADS[one.name](base.name, of, bits, head)
    known = MODELS.get(known_name(one.folder))
    of = known.sizes if known else architecture_of(*read_config(one.folder))
    name = known_name(one.folder) or Path(one.folder).resolve().name
    packed = NO_FILE
    if quantisation == FILE:
        here = known is None or is_here(one.folder)
        packed = _file_of(one.folder, None, dtype) if here else _usual_file(one.folder, of)
    return draft_costs_of(name, of, quantisation, draft_head(base.head), packed)


_HEADS = {"eagle": eagle_costs, "eagle3": eagle3_costs, "mtp": mtp_costs}


def _head_form(folder: str, base: Architecture) -> HeadForm:
    """What a one-pass head is made of by its config.json, if it is here; as for published ones
    where that does not say it."""
    if not is_here(folder):
        return PUBLISHED
    content, _ = read_config(folder)
    nested = content.get("dflash_config")
    said = {**content, **nested} if isinstance(nested, dict) else content

    def count(name: str, usual: int) -> int:
        value = said.get(name)
        return value if type(value) is int and value >= 0 else usual

    taps = said.get("target_layer_ids")
    return HeadForm(
        layers=count("num_hidden_layers", PUBLISHED.layers) or PUBLISHED.layers,
        taps=len(taps) if isinstance(taps, list) else PUBLISHED.taps,
        mlp=count("intermediate_size", base.intermediate) / base.intermediate,
        markov_rank=count("markov_rank", 0),
    )


def read_config(model: str) -> tuple[dict[str, object], str]:
    """The content and the path of a model's config.json."""
    file = model_files(model).file("config.json")
    content = _read_json(file)
    if not isinstance(content, dict):
        raise ConfigError(f"{file} does not hold a JSON object; download the model again")
    return content, str(file)


def _read_json(file: Path) -> object:
    try:
        content = file.read_bytes()
    except OSError as problem:
        raise ConfigError(f"cannot read {file}: {problem.strerror}") from None
    return parse_json(content, str(file))


# --- devices ------------------------------------------------------------------------------------


def _listed(text: str) -> list[object] | None:
    """The content of a devices file; None if `text` is no path, or that of a profile."""
    if "," in text or not ("/" in text or text.endswith(".json")):
        return None
    if "*" in text and not Path(text).is_file():
        return None  # N*PATH
    content = _read_json(Path(text))
    return content if isinstance(content, list) else None


def _named(text: str) -> tuple[list[Device], int]:
    """Devices from names of profiles; what occurs more than once is numbered."""
    profiles: list[Profile] = []
    for part in text.split(","):
        count, star, name = part.strip().partition("*")
        if not star:
            count, name = "1", count
        if not (count.isascii() and count.isdecimal() and 0 < int(count[:4]) < 1000):
            raise ConfigError(f"{part.strip()!r} names no devices; give PROFILE or N*PROFILE")
        profiles += [profile_named(name.strip())] * int(count)
    names = [profile.name for profile in profiles]
    devices = []
    for place, (name, profile) in enumerate(zip(names, profiles, strict=True), 1):
        number = f"#{names[:place].count(name)}" if names.count(name) > 1 else ""
        devices.append(Device(name + number, profile))
    return devices, 0


def _described(listed: list[object], file: str) -> tuple[list[Device], int]:
    """Devices from a file's list, and which of them is the coordinator."""
    devices: list[Device] = []
    coordinators: list[int] = []
    for number, entry in enumerate(listed):
        where = f"{file}: device {number + 1}"
        described = as_type(_DeviceEntry, entry, where)
        device = _device(described, where)
        if any(device.name == other.name for other in devices):
            raise ConfigError(f"{where}: the name {device.name!r} is taken; name each differently")
        devices.append(device)
        coordinators += [number] * described.coordinator
    if not devices or len(coordinators) > 1:
        raise ConfigError(
            f"{file}: {len(devices)} devices, {len(coordinators)} of them the coordinator; give at "
            "least two, at most one of them with coordinator true"
        )
    return devices, coordinators[0] if coordinators else 0


def _device(entry: _DeviceEntry, where: str) -> Device:
    profile = profile_named(entry.profile)
    if entry.memory_bytes is not None:
        memory = Figure(entry.memory_bytes, f"given in {where}")
        profile = structs.replace(profile, memory_bytes=memory)
    return Device(entry.name, profile)
