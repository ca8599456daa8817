"""Shared: what the requests of one coordinator share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.decoding.d0_times import D0Times
from edgespec.decoding.flights import Flights
from edgespec.decoding.hints import HintingStages
from edgespec.decoding.ppd_chains import ChainValues
from edgespec.policy.estimates import RingEstimates
from edgespec.tree.node import Advance
from edgespec.types.features import PPDTable

if TYPE_CHECKING:
    from edgespec.decoding.request import Request


@dataclass(frozen=True, slots=True)
class Shared:
    """What the requests of one coordinator share. `on_walk` is told of every walk of a tree. `ppd`:
    for a draft source that needs PPD rows. `estimates`: what requests of each policy taught.
    `hinting`: the stages that can say what they expect behind rows. `free_sources`: some members of
    the draft source, not all, run no model."""

    flights: Flights
    d0: D0Times
    on_walk: Callable[[Request, Advance], None]
    ppd: tuple[PPDTable, ChainValues] | None
    estimates: dict[str, RingEstimates]
    hinting: HintingStages
    free_sources: bool
