"""From the options of a command to a CoordinatorConfig, with defaults filled in."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from edgespec.config import (
    DEFAULT_PORT,
    HEAD_ON_COORDINATOR,
    LOOPBACK,
    MOST_STAGES,
    Address,
    CoordinatorConfig,
    Emulation,
)
from edgespec.daemon.bundled_models import bundled, bundled_weights
from edgespec.daemon.cluster import ClusterSettings
from edgespec.daemon.model_names import known_name, resolved, spoken, weights_at_hand
from edgespec.daemon.precision import (
    AUTO,
    cache_dtype_for,
    draft_quantisation_for,
    dtype_for,
    head_quantisation_for,
    quantisation_for,
)
from edgespec.drafting.choice import HYBRID, NONE, SOURCES, DraftChoice, parse_draft
from edgespec.drafting.own import own_class
from edgespec.errors import ConfigError, ModelError
from edgespec.model.hub import NotHereYet, model_files, require_model
from edgespec.model.manifest import manifest_of
from edgespec.model.reading import read_object, reading
from edgespec.planning.catalogue import MODELS, KnownModel
from edgespec.planning.partition import blocks_of, parse_split
from edgespec.planning.text_part import DELTA, text_settings
from edgespec.planning.uneven import bound_layers

Value = TypeVar("Value", str, int, tuple[int, ...])

LAST_STAGE = -1
"""As `with_stage`: the one that the cluster's settings name, or else the ring's last. That one does
not embed tokens, which saves the busiest machine the memory of a second large matrix."""

SAME_VOCABULARY = 0.99
"""Sizes of one vocabulary that are at least so much alike: models pad it in different ways."""

_OF_ANY_RING = ("host", "port", "with_stage")
"""Options that change the cluster's ring; every other one describes a ring of its own."""


@dataclass(frozen=True, slots=True)
class RingOptions:
    """The ring options of a command; those that were not given are empty, or None.

    `quant`, `head_quant`, `draft_quant` and `dtype` may be "auto" (see daemon.precision), and so
    may `head`: a plan chooses it (`edgespec init --devices`), without one it is on the coordinator.
    `with_stage` may be LAST_STAGE.
    """

    model: str
    draft: str
    stages: int
    dtype: str
    quant: str = ""
    head_quant: str = ""
    draft_quant: str = ""
    layers: str = ""
    context: int = 0
    host: str = ""
    port: int | None = None
    with_stage: int | None = None
    head: str = ""
    cache_dtype: str = ""

    @property
    def describes(self) -> bool:
        """Whether they describe a ring of their own."""
        return any(value for name, value in asdict(self).items() if name not in _OF_ANY_RING)


def served_config(
    settings: ClusterSettings, asked: RingOptions, emulation: Emulation | None
) -> CoordinatorConfig:
    """The ring of the options, or else that of the cluster. Raises ConfigError."""
    if asked.describes:
        ring = replace(
            asked,
            quant=asked.quant or AUTO,
            dtype=asked.dtype or AUTO,
            head_quant=asked.head_quant or AUTO,
            draft_quant=asked.draft_quant or AUTO,
        )
        port = DEFAULT_PORT if asked.port is None else asked.port
        return coordinator_config(ring, Address(asked.host or LOOPBACK, port), emulation)
    port = settings.port if asked.port is None else asked.port
    config = coordinator_config(settings, Address(asked.host or settings.host, port), emulation)
    with_stage = settings.with_stage if asked.with_stage is None else asked.with_stage
    if with_stage == LAST_STAGE:
        with_stage = settings.with_stage or config.stages
    share = settings.share_prefixes
    return replace(config, places=settings.places, with_stage=with_stage, share_prefixes=share)


def coordinator_config(
    ring: RingOptions | ClusterSettings,
    address: Address,
    emulation: Emulation | None = None,
    *,
    usual_stages: int = 0,
) -> CoordinatorConfig:
    """Settings with the bundled pair where no model is named. `ring.draft`: see drafting.choice.

    Without `quant` ("", or "auto"), `stages` (0) or `layers` those of a folder that `edgespec
    shard` made count; a folder with other ones is refused. `usual_stages`: how many if nothing else
    says so. "auto" becomes what daemon.precision chooses, and so do caches that options
    say nothing of. Raises ConfigError, ModelError.
    """
    model, stages, quant, split = ring.model, ring.stages, ring.quant, parse_split(ring.layers)
    if stages < 0:
        raise ConfigError(f"{stages} stages; a ring has 1 to {MOST_STAGES}")
    choice = chosen_draft(ring.draft, model)
    head = HEAD_ON_COORDINATOR if ring.head in ("", AUTO) else ring.head
    choice.check_head(head)
    if not model:
        model = bundled("base")
    made = manifest_of(model)
    if made is not None:
        quant = "" if quant == AUTO else quant
        quant = _agreed("quant", quant, made.quantisation.name, model)
        split = _agreed("layers", split, made.layers_of_stages, model)
        stages = _agreed("stages", stages, len(made.layers_of_stages), model)
    stages = stages or len(split) or usual_stages
    if not stages:
        raise ConfigError("how many stages has the ring? Give --stages N, or --layers N,N,...")
    quantisation = quantisation_for(model, quant or "none")
    dtype = dtype_for(quantisation, ring.dtype)
    cache_dtype = ring.cache_dtype or (AUTO if isinstance(ring, RingOptions) else "")
    return CoordinatorConfig(
        model,
        str(choice),
        stages,
        dtype,
        address,
        emulation=emulation,
        quantisation=quantisation,
        head_quantisation=head_quantisation_for(model, quantisation, ring.head_quant),
        draft_quantisation=draft_quantisation_for(choice, model, quantisation, ring.draft_quant),
        layers=split,
        context=ring.context,
        with_stage=stages if ring.with_stage == LAST_STAGE else ring.with_stage or 0,
        head=head,
        cache_dtype=cache_dtype_for(quantisation, dtype, cache_dtype),
    )


def chosen_draft(draft: str, model: str) -> DraftChoice:
    """The sources for this base, with the short names of their weights resolved.

    A name alone finds the weights that are bundled or that the catalogue has for this base. Nothing
    said is no draft, for the bundled base ("") its own. Raises ConfigError.
    """
    if model and not draft:
        return DraftChoice()
    choice = parse_draft(draft, weights_at_hand(model) if model else bundled_weights)
    for one in choice.members:
        if one.is_own:
            own_class(one.name)
    try:
        members = [
            one if one.is_own else replace(one, folder=resolved(one.folder))
            for one in choice.members
        ]
    except ModelError as problem:
        raise _no_draft(problem) from None
    return DraftChoice(tuple(members))


def usual_draft(model: str) -> str:
    """The `--draft` with which a base is served if none is named: n-grams and the head that is
    bundled for it, which was shown to gain even on one machine, or that it ships; else ""."""
    head = bundled_weights(f"{known_name(model)}-dspark") if model else ""
    if head or (model and _ships_head(model)):
        return f"{HYBRID}:ngram+{'dspark' if head else 'mtp'}"
    return ""


def _ships_head(model: str) -> bool:
    """Whether a base brings an MTP head, by what was published or by its files if they are here."""
    known = MODELS.get(known_name(model))
    if known is not None and model == known.hub:
        return known.family in DELTA
    try:
        if text_settings(read_object(_config_of(model))).get("model_type") not in DELTA:
            return False
        from edgespec.drafting.mtp import has_mtp  # late: they import torch
        from edgespec.model.sources import open_source

        return has_mtp(open_source(model))
    except ModelError:
        return False  # the loader knows what to say


def _no_draft(problem: ModelError) -> ModelError:
    names = ", ".join((NONE, *SOURCES, HYBRID))
    return ModelError(f"{problem}; or name a draft source: {names}")


def look_at_models(config: CoordinatorConfig) -> None:
    """Find the commonest mistakes early: before slow imports, and before stages start."""
    require_model(config.model)
    for folder in parse_draft(config.draft).folders:
        try:
            require_model(folder)
        except ModelError as problem:
            raise _no_draft(problem) from None
    known = MODELS.get(known_name(config.model))
    file = _config_of(config.model)
    try:
        settings = text_settings(read_object(file))
        with reading(file):
            layers = int(settings["num_hidden_layers"])
            longest = int(settings.get("max_position_embeddings", config.context))
            bound = bound_layers(
                settings.get("layer_types") or (), settings.get("num_kv_shared_layers") or 0
            )
    except ModelError:
        if known is None:
            return  # the loader knows what to say
        layers, longest, bound = known.sizes.layers, known.context, known.sizes.bound
    blocks_of(layers, config.stages, config.layers, bound)
    context_of(config, longest)
    if known is not None:
        _require_like_tokenizers(config, known)


def _require_like_tokenizers(config: CoordinatorConfig, base: KnownModel) -> None:
    """Refuse a draft model whose vocabulary is clearly another; the rest is seen when both models
    are here. Raises ConfigError."""
    for folder in parse_draft(config.draft).folders:
        draft = MODELS.get(known_name(folder))
        if draft is None:
            continue
        sizes = base.sizes.vocab, draft.sizes.vocab
        if min(sizes) < SAME_VOCABULARY * max(sizes):
            raise ConfigError(
                f"the draft {spoken(folder)} has another tokenizer than {spoken(config.model)} "
                f"({sizes[1]} tokens, not {sizes[0]}), and a draft must have the same; `edgespec "
                f"models {known_name(config.model)}` names drafts that fit"
            )


def _config_of(model: str) -> Path:
    """Where its config.json is, or would be; nothing is downloaded."""
    here = Path(model).exists()
    return model_files(model).file("config.json") if here else Path(model) / "config.json"


def look_into_models(config: CoordinatorConfig) -> list[str]:
    """Open base and drafts as the coordinator does when it starts, without their weights.

    Returns the hub ids of those that are not here yet and cannot be asked for now: the coordinator
    downloads them. Raises ModelError for what it could not serve. Imports torch.
    """
    later = []
    for model in (config.model, *parse_draft(config.draft).folders):
        try:
            model_files(model).file("config.json").open("rb").close()
            if model == config.model:
                from edgespec.daemon.ring_model import RingModel
                from edgespec.drafting.mtp import mtp_form

                source = RingModel(config).head
                if any(one.name == "mtp" for one in parse_draft(config.draft).members):
                    mtp_form(source)
        except NotHereYet:
            later.append(model)
        except OSError as problem:
            raise ModelError(f"cannot read {problem.filename}: {problem.strerror}") from None
    return later


def context_of(config: CoordinatorConfig, longest: int) -> int:
    """Tokens that a request may have. Raises ConfigError if that is more than the model takes."""
    if config.context > longest:
        raise ConfigError(
            f"a context of {config.context} tokens is more than {config.model} takes; the most is "
            f"{longest}"
        )
    return config.context or longest


def _agreed(what: str, asked: Value, made: Value, model: str) -> Value:
    """The value that the folder was made with. Raises ConfigError if another one was given."""
    if asked and asked != made:
        raise ConfigError(
            f"{model} was made with {what} {_shown(made)}, not {_shown(asked)}; leave --{what} "
            "out, or make another folder with `edgespec shard`"
        )
    return made


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
