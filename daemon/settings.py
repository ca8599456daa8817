"""From what a command was told to a CoordinatorConfig: what is left out is filled in here."""

from __future__ import annotations

from typing import TypeVar

from edgespec.config import Address, CoordinatorConfig, Emulation, Quantisation
from edgespec.daemon.bundled import bundled
from edgespec.errors import ConfigError
from edgespec.model.manifest import manifest_of

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
) -> CoordinatorConfig:
    """Settings with the bundled pair where no model is named.

    Without `quant`, `stages` (0) or `layers` those of a folder that `edgespec shard` made count; a
    folder with other ones is refused. Raises ConfigError.
    """
    if not model:
        model, draft = bundled("base"), draft or bundled("draft")
    split = _numbers(layers)
    made = manifest_of(model)
    if made is not None:
        quant = _agreed("quant", quant, made.quantisation.name, model)
        split = _agreed("layers", split, made.layers_of_stages, model)
        stages = _agreed("stages", stages, len(made.layers_of_stages), model)
    if not stages:
        stages = len(split)
    if not stages:
        raise ConfigError("how many stages has the ring? Give --stages N, or --layers N,N,...")
    return CoordinatorConfig(
        model,
        draft,
        stages,
        dtype,
        address,
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


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of "10,12,10"."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(
            f"layers is {text!r}; give one number for each stage, with commas: 10,12,10"
        ) from None
