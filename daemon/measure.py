"""Measures this device and makes its profile; each figure says how it was measured."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from edgespec import __version__
from edgespec.config import FILE, Address, Quantisation
from edgespec.daemon.bandwidths import Rate, gather_rate, memory_rate
from edgespec.daemon.coordinator_times import measure_logits, measure_loop
from edgespec.daemon.device import (
    board_facts,
    gpu_facts,
    interface_of,
    interface_speed,
    last_level_cache,
    warnings,
)
from edgespec.daemon.kernels import is_four_bit, sixteen_bit_type
from edgespec.daemon.layer_times import (
    LayerTimes,
    Shape,
    check_room,
    default_shape,
    depth_on,
    measure_layer,
    misfits,
    shape_of,
)
from edgespec.daemon.memory import Available, available_memory
from edgespec.daemon.precision import quantisation_for
from edgespec.daemon.profile_figures import (
    SIXTEEN_BIT,
    ProfileFigures,
    best_four_bit,
    by_layer,
    called,
    doubts,
    fit,
    tidy,
)
from edgespec.daemon.timing import round_trips
from edgespec.errors import ModelError
from edgespec.model.block import row_math
from edgespec.model.sources import open_source
from edgespec.model.tensors import best_device, compute_dtype
from edgespec.net.keys import Identity
from edgespec.net.slowness import slowness
from edgespec.net.sockets import own_address_towards
from edgespec.planning.profile import Figure, Profile

PAYLOAD = 0.936
"""The share of an Ethernet's bits that TCP has for its payload."""
ASSUMED_LATENCY = 0.25e-3
ASSUMED_BITS = 1e9
ROUND_TRIPS = 30
COORDINATOR_WAIT_S = 5.0

_MEMORY_SHARE = 0.03  # of the given time, for each of the two kinds of copying
_LOGITS_SHARE = 0.1
_BUSY = 0.7  # load average, before anything is measured


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """What to measure. `model`: a folder, "" for none; `seconds`: about how long."""

    name: str
    model: str = ""
    coordinator: Address | None = None
    identity: Identity | None = None
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A device's profile, and what it was made of.

    `shape`: the name of the model whose layer was measured. `stored`: bytes of the layer, and
    `layer`: seconds of it by rows, for each quantisation ("none": 16 bit). `notes`: what a reader
    of the figures should know.
    """

    profile: Profile
    shape: str
    stored: Mapping[str, int]
    layer: Mapping[str, Mapping[int, float]]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Session:
    """State of one measurement that its steps share."""

    request: MeasureRequest
    say: Callable[[str], None]
    device: torch.device = field(default_factory=best_device)
    facts: dict[str, str] = field(default_factory=lambda: {**board_facts(), **gpu_facts()})
    notes: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)
    room: Available = field(init=False)

    def __post_init__(self) -> None:
        self.room = available_memory(self.device.type)  # before anything is loaded

    @property
    def beyond_cache(self) -> int:
        """Bytes of which most have left the caches when the last of them were used."""
        return 2 * last_level_cache()

    @property
    def dtype(self) -> str:
        """The 16-bit type that this device computes in."""
        return sixteen_bit_type(self.device)

    @property
    def title(self) -> str:
        """The device's name for users."""
        parts = ("board", "GPU") if "board" in self.facts else ("CPU", "GPU", "RAM")
        found = ", ".join(self.facts[part] for part in parts if part in self.facts)
        return found + (" of RAM" if "RAM" in parts else "")

    @property
    def conditions(self) -> str:
        """The beginning of each origin."""
        on = "CUDA" if self.device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
        more = [self.facts[name] for name in ("power mode", "GPU clock") if name in self.facts]
        setting = ", ".join((f"torch {torch.__version__}", on, self.dtype, *more))
        today = datetime.date.today().isoformat()
        return (
            f"measured on {today} by `edgespec profile` {__version__} on {self.title} ({setting}; "
            "wall clock)"
        )

    def rate(self, measured: Callable[..., Rate], *what: object) -> Rate:
        """The rate of one of the two kinds of copying."""
        return measured(
            self.device,
            *what,
            room=self.room.bytes,
            beyond_cache=self.beyond_cache,
            seconds=_MEMORY_SHARE * self.request.seconds,
        )


def measure(
    request: MeasureRequest,
    usable: Sequence[str],
    unusable: Mapping[str, str],
    say: Callable[[str], None],
) -> Measured:
    """Measure this device, telling `say` what is being done.

    `usable`: names of the quantisations that run here, one of 4 bits among them; `unusable`: why
    the others do not. Raises ModelError for models that cannot be used, CapacityError if there is
    too little memory, PeerLost if the coordinator does not answer.
    """
    session = _Session(request, say)
    if (load := os.getloadavg()[0]) > _BUSY:
        session.notes.append(
            f"{load:.1f} processes were running here before this began (load average of a minute): "
            "end them and measure again"
        )
    depth = depth_on(session.device)
    room = session.room.bytes
    if request.model:
        source = open_source(request.model, quantisation_for(request.model))
        shape = shape_of(source, Path(request.model).name)
        check_room(shape, room, depth)
    else:
        shape = default_shape(room, depth)
    unusable = {**unusable, **misfits(shape, [name for name in usable if name != SIXTEEN_BIT])}
    usable = [name for name in usable if name not in unusable]
    if not any(is_four_bit(name) for name in usable):
        raise ModelError(f"no 4-bit quantisation fits {shape.name}: {'; '.join(unusable.values())}")
    if shape.forms:
        usable.append(FILE.name)
    latency, bandwidth = _link(session)
    say("reading memory")
    memory = session.rate(memory_rate)
    say("moving cache rows")
    heads = int(shape.config.num_key_value_heads)
    dtype = compute_dtype(session.dtype)
    gather = session.rate(gather_rate, dtype, heads, shape.config.head_dim)
    say("choosing tokens and ranking guesses")
    choosing, ranking, noise = measure_logits(
        session.device, session.conditions, _LOGITS_SHARE * request.seconds
    )
    say("the coordinator's own loop")
    loop = measure_loop(session.conditions, request.seconds)
    times = _layers(session, shape, usable, memory.per_second)
    chosen = best_four_bit(times)
    overlaps = session.device.type == "cuda"
    found = fit(times, chosen, memory.per_second if overlaps else None)
    figures = ProfileFigures(session.conditions, shape, times, found, chosen, overlaps)
    session.notes += warnings()
    session.notes += doubts(times)
    profile = Profile(
        name=request.name,
        title=session.title,
        memory_bytes=Figure(room, f"{session.conditions}: {session.room.source}"),
        memory_bandwidth=Figure(
            tidy(memory.per_second),
            f"{session.conditions}, not that of a data sheet: the sum of {memory.bytes / 1e9:.3g} "
            f"GB of float32; {memory.sample}",
        ),
        four_bit=figures.four_bit(),
        sixteen_bit=figures.table(SIXTEEN_BIT),
        layer_seconds=figures.layer_seconds(),
        launch_seconds=figures.launch_seconds(),
        launches_ahead=overlaps,
        choosing=choosing,
        ranking=ranking,
        noise=noise,
        copy_bandwidth=figures.copy_bandwidth(gather),
        link_latency=latency,
        link_bandwidth=bandwidth,
        loop_seconds=loop,
        quantisation=chosen,
        kernels=row_math(session.device, compute_dtype(session.dtype)).kernels,
        quantisations={name: figures.table(name) for name in times if name != SIXTEEN_BIT},
        unusable=dict(unusable),
        board=session.facts,
    )
    stored = {name: one.stored for name, one in times.items()}
    layer = {name: by_layer(one) for name, one in times.items()}
    return Measured(profile, shape.name, stored, layer, tuple(session.notes))


# --- steps --------------------------------------------------------------------------------------


def _layers(
    session: _Session, shape: Shape, usable: Sequence[str], bandwidth: float
) -> dict[str, LayerTimes]:
    """Measure a layer with each quantisation; the time that is left is shared equally."""
    names = (SIXTEEN_BIT, *(name for name in usable if name != SIXTEEN_BIT))
    times = {}
    for number, name in enumerate(names):
        session.say(f"a layer of {shape.name}, {called(name)} ({number + 1} of {len(names)})")
        left = _until(session.start + session.request.seconds)
        end = time.perf_counter() + left / (len(names) - number)
        times[name] = measure_layer(
            shape,
            Quantisation.parse(name),
            session.dtype,
            session.device,
            beyond_cache=session.beyond_cache,
            bandwidth=bandwidth,
            room=session.room.bytes // 4,
            seconds=partial(_until, end),
        )
    return times


def _until(end: float) -> float:
    return max(0.0, end - time.perf_counter())


def _link(session: _Session) -> tuple[Figure, Figure]:
    """(latency, bandwidth) of the link to the coordinator; what was not measured is assumed."""
    coordinator = session.request.coordinator
    if coordinator is None:
        origin = (
            "assumed, not measured: one TCP message over 1 Gbit/s Ethernet and one switch; give "
            "--coordinator HOST:PORT to measure it"
        )
        return Figure(ASSUMED_LATENCY, origin), _link_bandwidth("")
    session.say(f"the link to {coordinator}")
    assert session.request.identity is not None, "a request that names a coordinator has its keys"
    patience = COORDINATOR_WAIT_S * slowness()
    trips = round_trips(coordinator, session.request.identity, patience, ROUND_TRIPS)
    own = own_address_towards(coordinator)
    if own.startswith("127."):
        session.notes.append(
            f"the coordinator at {coordinator} is on this machine: link_latency says nothing about "
            "a network"
        )
    origin = (
        f"{session.conditions}: half of the way there and back of a status request to the "
        f"coordinator at {coordinator}; there and back: {trips}"
    )
    return Figure(tidy(trips.median / 2), origin), _link_bandwidth(interface_of(own))


def _link_bandwidth(interface: str) -> Figure:
    told = interface_speed(interface)
    bits = told[1] if told else ASSUMED_BITS
    what = "1 Gbit/s Ethernet, as the network interface does not tell its speed"
    if told:
        what = f"the {bits / 1e6:.0f} Mbit/s of {told[0]}"
    return Figure(round(PAYLOAD * bits / 8), f"assumed, not measured: what TCP carries over {what}")
