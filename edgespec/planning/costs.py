"""Costs: what each node and link of a ring charges for its work, from profiles and a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from math import ceil

from edgespec.errors import CapacityError, ConfigError
from edgespec.planning.cost_model import CostModel
from edgespec.planning.partition import blocks_of
from edgespec.planning.profile import Profile
from edgespec.types.draft_pass import DraftPass

# The ring's key, and the header of a segment, whatever it holds, with the times of four stages: 12
# bytes each. From link to link there is one more; four are the mean of a ring of eight.
_SEGMENT_BYTES = 150
_ROW_BYTES = 3 * 8  # id, parent and position travel all the way
_TOKEN_BYTES = 8  # only as far as the first stage


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """What one device charges, in seconds; `layers` of the model are its own (D0: none).

    A forward pass of R rows through a layer costs the profile's fixed `layer_seconds`, the row
    table's time for the layer's bytes, and the reading of the `seen` cache rows. They are read
    once for all R rows, as an attention kernel does whose rows share a tile. Arithmetic of the
    attention itself is left out: at a thousand cached rows it is a few percent of the layer's.
    Of a mixture, only the experts are charged that the rows go through, each for its own rows.
    """

    profile: Profile
    model: CostModel
    layers: int

    def block_seconds(self, rows: int, seen: int) -> float:
        """Its layers over `rows` rows, each attending to up to `seen` cached rows."""
        return self.layers * self.layer_seconds(rows, seen)

    def layer_seconds(self, rows: int, seen: int) -> float:
        if rows == 0:
            return 0.0
        model = self.model
        dense_bytes = model.layer_bytes - model.expert_bytes
        dense = self._weights(rows, dense_bytes, model.bits, model.quantisation)
        return self._layer(dense + self._experts(rows), seen, model.kv_bytes)

    def gather_seconds(self, rows: int) -> float:
        """Moving `rows` cache rows of all its layers: each is read once and written once."""
        return 2 * rows * self.model.kv_bytes * self.layers / self.profile.copy_bandwidth.value

    def head_seconds(self, rows: int) -> float:
        """The base model's output head over `rows` rows."""
        return self._weights(rows, self.model.head_bytes, 16)

    def draft_work_seconds(self, work: Sequence[DraftPass]) -> float:
        """Forward passes of a draft, the rows that they see left out."""
        return sum(self.draft_seconds(rows, 0, source) for rows, source in work)

    def draft_seconds(self, rows: int, seen: int, source: str = "") -> float:
        """One forward pass of a draft source, its output head included; "": of the draft model."""
        return sum(self.draft_parts(rows, seen, source), 0.0)

    def draft_parts(self, rows: int, seen: int, source: str = "") -> list[float]:
        """The same pass layer by layer, its output head last; nothing for no rows."""
        draft = self.model.draft_of(source)
        if rows == 0:
            return []
        weights = self._weights(rows, draft.layer_bytes, draft.bits)
        layer = self._layer(weights, seen, draft.kv_bytes)
        return [layer] * draft.layers + [self._weights(rows, draft.head_bytes, 16)]

    def _layer(self, weights: float, seen: int, kv_bytes: int) -> float:
        """A layer whose weights take so many seconds."""
        cache = seen * kv_bytes / self.profile.copy_bandwidth.value
        return self.profile.layer_seconds.value + weights + cache

    def _experts(self, rows: int) -> float:
        model = self.model
        if not model.expert_bytes:
            return 0.0
        used = model.experts_of(rows)
        each = ceil(rows * model.active / used - 1e-9)  # one row is one, whatever is rounded
        used_bytes = model.expert_bytes * used / model.experts
        return self._weights(each, used_bytes, model.bits, model.quantisation)

    def _weights(self, rows: int, weight_bytes: float, bits: int, quantisation: str = "") -> float:
        """By the device's table for this very quantisation if it has one, else by the bits."""
        if rows == 0:
            return 0.0
        profile = self.profile
        if quantisation in profile.quantisations:
            seconds = profile.quantisations[quantisation].at(rows)
        elif bits == 4:
            seconds = profile.four_bit.at(rows)
        else:
            # A byte holds twice as many weights in 8 bits as in 16, so it costs the arithmetic of
            # twice the rows, and the same reading.
            seconds = profile.sixteen_bit.at(rows if bits == 16 else 2 * rows)
        return weight_bytes / 1e9 * seconds


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """A link: `latency` seconds one way, and how many bytes a second go onto it."""

    latency: float
    bytes_per_second: float

    def seconds(self, nbytes: int) -> float:
        """How long `nbytes` keep the link busy; they arrive `latency` after that."""
        return nbytes / self.bytes_per_second


LOCAL_LINK = LinkCosts(1e-4, 1e9)
"""Between two processes of one board. Estimated: it saves network and switch of the 0.25 ms that a
profile charges, and both processes still encrypt; loopback carries some GB a second."""


@dataclass(frozen=True, slots=True)
class RingCosts:
    """A ring of N stages: D0, V1 … VN, and the N + 1 links.

    Link i leaves node i (0 is D0, i is Vi) for the next one; the last returns to D0. `with_stage`:
    the stage on D0's own device, whose time they share (see backends.charged_time); 0: none.
    """

    coordinator: NodeCosts
    stages: tuple[NodeCosts, ...]
    links: tuple[LinkCosts, ...]
    with_stage: int = 0

    def segment_bytes(self, rows: int, hidden: bool) -> int:
        """Bytes of a segment on the wire; without `hidden` states (D0 to V1) it holds tokens."""
        row = self.coordinator.model.activation_bytes if hidden else _TOKEN_BYTES
        return _SEGMENT_BYTES + rows * (_ROW_BYTES + row)


def link_between(near: Profile, far: Profile) -> LinkCosts:
    """The link of two devices: the larger latency and the smaller bandwidth of the two."""
    return LinkCosts(
        max(near.link_latency.value, far.link_latency.value),
        min(near.link_bandwidth.value, far.link_bandwidth.value),
    )


def ring_costs(
    profiles: Sequence[Profile], model: CostModel, split: Sequence[int] = (), with_stage: int = 0
) -> RingCosts:
    """The costs of a ring of these devices: profiles[0] is D0's, then those of V1 … VN.

    `with_stage`: the stage that is on D0's device, 0: none; its profile is D0's.

    `split`: how many layers each stage has; none given: as `split_layers` does. Memory: a stage
    needs room for its block, and V1 for the input embedding too (16 bit). KV caches, and what D0
    holds, are not counted here (see planning.plan).

    Raises ConfigError without a stage, with more stages than layers or a split that does not fit
    them, for a `with_stage` that cannot be, and CapacityError if a stage's block does not fit its
    device.
    """
    if len(profiles) < 2:
        raise ConfigError(
            f"{len(profiles)} devices make no ring; it needs a coordinator and at least one stage"
        )
    if not 0 <= with_stage < len(profiles):
        raise ConfigError(
            f"with-stage is {with_stage}; the ring has stages 1 to {len(profiles) - 1} (0: none of "
            "them is on the coordinator's device)"
        )
    if with_stage and profiles[with_stage] != profiles[0]:
        raise ConfigError(
            f"stage {with_stage} is on the coordinator's device, a {profiles[0].name}, and its "
            f"profile is {profiles[with_stage].name}; give the same one for both"
        )
    blocks = blocks_of(model.layers, len(profiles) - 1, split)
    stages = []
    for stage, (profile, (first, end)) in enumerate(zip(profiles[1:], blocks, strict=True), 1):
        needed = (end - first) * model.layer_bytes + (model.head_bytes if stage == 1 else 0)
        if needed > profile.memory_bytes.value:
            raise CapacityError(
                f"stage {stage} ({profile.name}) needs {needed / 1e9:.2f} GB for layers {first} to "
                f"{end - 1} of {model.name} and has {profile.memory_bytes.value / 1e9:.2f} GB; "
                "use more stages or a device with more memory"
            )
        stages.append(NodeCosts(profile, model, end - first))
    links = list(starmap(link_between, pairwise([*profiles, profiles[0]])))
    for number in local_links(len(stages), with_stage):
        links[number] = LOCAL_LINK
    coordinator = NodeCosts(profiles[0], model, 0)
    return RingCosts(coordinator, tuple(stages), tuple(links), with_stage)


def local_links(stages: int, with_stage: int) -> list[int]:
    """The links of a ring that stay on D0's device, on which that stage is (0: none)."""
    into, back = [0] * (with_stage == 1), [stages] * (0 < with_stage == stages)
    return into + back
