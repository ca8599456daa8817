"""From what a command was told to a CoordinatorConfig: what is left out is filled in here."""

from __future__ import annotations

from typing import TypeVar

from edgespec.config import (
    MOST_STAGES,
    Address,
    CoordinatorConfig,
    Emulation,
    Quantisation,
    Timing,
)
from edgespec.daemon.bundled import bundled
from edgespec.errors import ConfigError
from edgespec.model.manifest import manifest_of
from edgespec.planning.partition import parse_split

Value = TypeVar("Value", str, int, tuple[int, ...])


def coordinator_config(
    model: str,
    draft: str,
    stages: int,
    dtype: str,
    address: Address,
    emulation: Emulation | None = None,
    trace: str = "",
    *,
    quant: str = "",
    draft_quant: str = "none",
    layers: str = "",
    context: int = 0,
    cache: str = "",
    usual_stages: int = 0,
    timing: Timing | None = None,
) -> CoordinatorConfig:
    """Settings with the bundled pair where no model is named.

    Without `quant`, `stages` (0) or `layers` those of a folder that `edgespec shard` made count; a
    folder with other ones is refused. `usual_stages`: how many if nothing else says so. Raises
    ConfigError.
    """
    if stages < 0:
        raise ConfigError(f"{stages} stages; a ring has 1 to {MOST_STAGES}")
    if not model:
        model, draft = bundled("base"), draft or bundled("draft")
    split = parse_split(layers)
    made = manifest_of(model)
    if made is not None:
        quant = _agreed("quant", quant, made.quantisation.name, model)
        split = _agreed("layers", split, made.layers_of_stages, model)
        stages = _agreed("stages", stages, len(made.layers_of_stages), model)
    stages = stages or len(split) or usual_stages
    if not stages:
        raise ConfigError("how many stages has the ring? Give --stages N, or --layers N,N,...")
    return CoordinatorConfig(
        model,
        draft,
        stages,
        dtype,
        address,
        timing=timing or Timing(),
        emulation=emulation,
        trace=trace,
        quantisation=Quantisation.parse(quant or "none"),
        draft_quantisation=Quantisation.parse(draft_quant),
        layers=split,
        context=context,
        cache=cache,
    )


def _agreed(what: str, asked: Value, made: Value, model: str) -> Value:
    """What the folder was made with, unless something else is asked for."""
    if asked and asked != made:
        raise ConfigError(
            f"{model} was made with {what} {_shown(made)}, not {_shown(asked)}; leave --{what} "
            "out, or make another folder with `edgespec shard`"
        )
    return made


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
