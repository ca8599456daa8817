"""Costs: what each node and link of a ring charges for its work, from profiles and a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from math import ceil, hypot

from edgespec.errors import CapacityError, ConfigError
from edgespec.planning.cost_model import CostModel, HeadCosts, packed_bytes
from edgespec.planning.operations import DRAFT_HEAD_OPERATIONS, USUAL_OPERATIONS
from edgespec.planning.partition import blocks_of
from edgespec.planning.profile import DATA_SHEET, ROWS, Profile, RowPrice
from edgespec.types.draft_pass import DraftPass, HeadForm, TokenChoice

_HEADER_BYTES = 22  # of a segment, without what its requests and their rows take
_PART_BYTES = 19  # of every request in it
_HIDDEN_HEADER_BYTES = 13  # type and shape of the hidden rows
_RAN_BYTES = 11  # rows and seconds of a stage that has computed it
_COLUMNS = 3  # id, parent and position of a row travel all the way; its token only as far as the
# first stage, unless the last one chooses
_CHOSEN_COLUMNS = 3  # id, target token and margin of a row that the last stage looked at

_PART_LAUNCHES = 0.4
"""What the host launches for every further request of a pass, as a share of a usual layer with one:
attention and the cache's new rows go request by request. Measured on a CPU with 1 to 8 requests in
layers that take the host all the time: 0.25 to 0.44."""

_FOUR_OF_SIXTEEN = packed_bytes(2**20, 4) / packed_bytes(2**20, 16)
"""Weights in 16 bits that are in as many bytes as one in 4."""


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """What one device charges, in seconds; `layers` of the model are its own (D0: none).

    A forward pass of R rows through a layer takes the device the profile's fixed `layer_seconds`,
    the row table's time for the layer's bytes, and the reading of the `seen` cache rows. They are
    read once for all R rows, as an attention kernel does whose rows share a tile; of several
    requests, `seen` are the rows of all their caches. Arithmetic of the attention itself is left
    out: at a thousand cached rows it is a few percent of the layer's.
    Of a mixture, only the experts are charged that the rows go through, each for its own rows.

    The host launches a layer's operations one by one: `launch_seconds` for USUAL_OPERATIONS of
    them, others in proportion (see planning.operations). A GPU computes meanwhile, so that L layers
    take max(L × launch, L × device); on a CPU the two add up.

    D0's work on logits is charged too: choosing tokens row by row, as verification looks at them,
    noise once a position, ranking a draft's guesses. With a `row_price` every row after the first
    costs that share of what the weights take for one row, whatever the profile's tables say; but a
    pass of few rows takes no longer than one of ROWS[-1], which is what a prompt's chunk has: for
    those engines have kernels that work by tiles, and rows of prompts have a price of their own.
    """

    profile: Profile
    model: CostModel
    layers: int
    row_price: RowPrice | None = None

    def block_seconds(self, rows: int, seen: int, requests: int = 1) -> float:
        """Its layers over `rows` rows of so many requests, which have `seen` cached rows."""
        return self.layers * self.layer_seconds(rows, seen, requests)

    def launch_seconds(self, layers: int) -> float:
        """What the host takes to launch so many layers of a usual model."""
        return layers * self.profile.launch_seconds.value

    def layer_seconds(self, rows: int, seen: int, requests: int = 1) -> float:
        if rows == 0:
            return 0.0
        model = self.model
        dense_bytes = model.layer_bytes - model.expert_bytes
        dense = self._matrices(rows, dense_bytes, model.bits)
        launch = self._launch(requests, model.operations(rows, self.profile.launches_ahead))
        read = model.kv_bytes * model.of.seen_share
        return self._layer(dense + self._experts(rows), seen, read, launch)

    def gather_seconds(self, rows: int) -> float:
        """Moving `rows` cache rows of all its layers: each is read once and written once."""
        return 2 * rows * self.model.kv_bytes * self.layers / self.profile.copy_bandwidth.value

    def head_seconds(self, rows: int) -> float:
        """The base model's output head over `rows` rows."""
        return self._head(rows, self.model.head)

    def choose_seconds(self, rows: int, way: TokenChoice) -> float:
        """Taking the tokens after `rows` rows of logits, one row after the other."""
        return rows * self.profile.choosing.of(way).seconds(self.model.vocab)

    def noise_seconds(self, positions: int) -> float:
        """Making the noise of so many positions, which choosing and ranking share."""
        return positions * self.profile.noise.value * self.model.vocab / 1e6

    def pass_parts(self, one: DraftPass, seen: int, requests: int = 1) -> list[float]:
        """A pass as the draft source told it, by its parts (see draft_parts).

        The matrix that joins rows of the base takes those that are new, and is launched with the
        first layer.
        """
        parts = self.draft_parts(one.rows, seen, one.source, requests, one.form)
        if parts:
            draft = self.model.draft_of(one.source, one.form)
            parts[0] += self._head(one.joined, draft.joining)
        return parts

    def draft_seconds(self, rows: int, seen: int, source: str = "", requests: int = 1) -> float:
        """One forward pass through the layers of a draft source; "": of the draft model."""
        return sum(self.draft_parts(rows, seen, source, requests), 0.0)

    def draft_parts(
        self,
        rows: int,
        seen: int,
        source: str = "",
        requests: int = 1,
        form: HeadForm | None = None,
    ) -> list[float]:
        """The same pass by the parts between which it can be interrupted; nothing for no rows."""
        draft = self.model.draft_of(source, form)
        if rows == 0:
            return []
        weights = self._weights(rows, draft.layer_bytes, draft.bits)
        operations = DRAFT_HEAD_OPERATIONS if source == "easyspec" else draft.operations
        launch = self._launch(requests, operations)
        return [self._layer(weights, seen, draft.kv_bytes, launch)] * draft.layers

    def rank_seconds(
        self,
        rows: int,
        way: TokenChoice,
        source: str = "",
        product: int | None = None,
        form: HeadForm | None = None,
    ) -> float:
        """A draft source's output head over `product` rows, None: `rows`, and the best guesses of
        the logits of `rows` rows.

        A look-up without logits takes no longer than the fixed part of choosing a token.
        """
        draft, profile = self.model.draft_of(source, form), self.profile
        if rows == 0:
            return 0.0
        if not draft.vocab:
            return rows * profile.choosing.of("greedy" if way == "greedy" else "filtered").call
        ranked = profile.ranking.of(way).seconds(rows * min(draft.vocab, self.model.vocab))
        products = self._head(rows if product is None else product, draft.head)
        return products + self._head(rows, draft.markov) + ranked

    def _head(self, rows: int, head: HeadCosts) -> float:
        return self._weights(rows, head.bytes, head.bits, head.quantisation)

    def _launch(self, requests: int, operations: float) -> float:
        """What the host takes to launch a layer of so many operations."""
        usual = operations / USUAL_OPERATIONS + _PART_LAUNCHES * (requests - 1)
        return self.profile.launch_seconds.value * usual

    def _layer(self, weights: float, seen: int, kv_bytes: float, launch: float) -> float:
        """A layer whose weights take so many seconds."""
        profile = self.profile
        cache = seen * kv_bytes / profile.copy_bandwidth.value
        device = profile.layer_seconds.value + weights + cache
        return max(device, launch) if profile.launches_ahead else device + launch

    def _experts(self, rows: int) -> float:
        model = self.model
        if not model.expert_bytes:
            return 0.0
        used = model.experts_of(rows)
        each = ceil(rows * model.active / used - 1e-9)  # one row is one, whatever is rounded
        used_bytes = model.expert_bytes * used / model.experts
        return self._matrices(each, used_bytes, model.expert_bits)

    def _matrices(self, rows: int, weight_bytes: float, bits: int) -> float:
        """Of the base's layers."""
        if self.model.unpacked and self.profile.launches_ahead:
            # A byte is read and two are written, and these are multiplied (see LevelsLinear).
            unpacking = 3 * weight_bytes / self.profile.copy_bandwidth.value
            return self._weights(rows, 2 * weight_bytes, 16) + unpacking
        return self._weights(rows, weight_bytes, bits, self.model.quantisation)

    def _weights(self, rows: int, weight_bytes: float, bits: int, quantisation: str = "") -> float:
        """By the device's table for this very quantisation if it has one, else by the bits."""
        if rows == 0:
            return 0.0
        profile, price = self.profile, self.row_price
        table = profile.quantisations.get(quantisation)
        # A byte holds twice as many weights in 8 bits as in 16, so it costs the arithmetic of
        # twice the rows, and the same reading.
        twice = 2 if bits == 8 and table is None else 1
        if table is None:
            table = profile.four_bit if bits == 4 else profile.sixteen_bit
        if price is None:
            seconds = table.at(twice * rows)
        elif price == DATA_SHEET:
            least = profile.least_row_seconds
            share = 1.0 if bits == 4 else _FOUR_OF_SIXTEEN
            seconds = (
                table.at(twice * rows)
                if least is None
                else hypot(table.at(1), twice * rows * share * least.value)
            )
        else:
            line = table.at(twice) * (1 + price * (rows - 1))
            seconds = min(line, table.at(twice * max(rows, ROWS[-1])))
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

    def segment_bytes(self, rows: int, ran: int, tokens: bool = False, requests: int = 1) -> int:
        """Bytes on the wire of a segment of so many requests that `ran` stages have computed.

        From D0 (0) it holds tokens, then hidden states, and the tokens still if the last stage
        chooses (`tokens`).
        """
        total = _header_bytes(rows, ran, tokens or not ran, requests)
        if ran:
            total += _HIDDEN_HEADER_BYTES + _field_bytes(rows * self.row_bytes)
        return frame_bytes(total)

    def verdict_bytes(
        self, rows: int, ran: int, chosen: int, numbers: int = 0, requests: int = 1
    ) -> int:
        """The same of one whose last stage has `chosen` tokens: these in the place of hidden
        states, and `numbers` more of 8 bytes for log-probabilities."""
        own = _CHOSEN_COLUMNS * _field_bytes(8 * chosen // requests)
        own += _HIDDEN_HEADER_BYTES + _field_bytes(8 * numbers // requests)
        return frame_bytes(_header_bytes(rows, ran, True, requests) + requests * own)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's hidden state on the wire."""
        return self.coordinator.model.activation_bytes


def _header_bytes(rows: int, ran: int, tokens: bool, requests: int) -> int:
    """Of a segment, without hidden rows; each request has about as many rows."""
    column = _field_bytes(8 * rows // requests)
    columns = (_COLUMNS + 1) * column if tokens else _COLUMNS * column + _field_bytes(0)
    return _HEADER_BYTES + requests * (_PART_BYTES + columns) + ran * _RAN_BYTES


def _field_bytes(content: int) -> int:
    """Bytes of a field that holds bytes, in MessagePack."""
    return content + (2 if content < 1 << 8 else 3 if content < 1 << 16 else 5)


def frame_bytes(content: int) -> int:
    """Bytes of a message's frame as ZeroMQ sends it.

    A MESSAGE command of CurveZMQ (RFC 26) has a name and a nonce of 8 bytes each, an authenticator
    of 16 and a flag; ZMTP's header (RFC 23) has 2 or 9.
    """
    body = 33 + content
    return body + (2 if body < 256 else 9)


def link_between(near: Profile, far: Profile) -> LinkCosts:
    """The link of two devices: the larger latency and the smaller bandwidth of the two."""
    return LinkCosts(
        max(near.link_latency.value, far.link_latency.value),
        min(near.link_bandwidth.value, far.link_bandwidth.value),
    )


def ring_costs(
    profiles: Sequence[Profile],
    model: CostModel,
    split: Sequence[int] = (),
    row_price: RowPrice | None = None,
    with_stage: int = 0,
    head_last: bool = False,
) -> RingCosts:
    """The costs of a ring of these devices: profiles[0] is D0's, then those of V1 … VN.

    `with_stage`: the stage that is on D0's device, 0: none; its profile is D0's.
    `split`: how many layers each stage has; none given: as `split_layers` does. `row_price`: see
    NodeCosts. Memory: a stage needs room for its block, and with `head_last` the last one for the
    output head. KV caches, and what D0 holds, are not
    counted here (see planning.plan).

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
    blocks = blocks_of(model.layers, len(profiles) - 1, split, model.of.bound)
    stages = []
    for stage, (profile, (first, end)) in enumerate(zip(profiles[1:], blocks, strict=True), 1):
        needed = (end - first) * model.layer_bytes
        needed += model.head.bytes if head_last and stage == len(blocks) else 0
        if needed > profile.memory_bytes.value:
            raise CapacityError(
                f"stage {stage} ({profile.name}) needs {needed / 1e9:.2f} GB for layers {first} to "
                f"{end - 1} of {model.name} and has {profile.memory_bytes.value / 1e9:.2f} GB; "
                "use more stages or a device with more memory"
            )
        stages.append(NodeCosts(profile, model, end - first, row_price))
    links = list(starmap(link_between, pairwise([*profiles, profiles[0]])))
    for number in local_links(len(stages), with_stage):
        links[number] = LOCAL_LINK
    coordinator = NodeCosts(profiles[0], model, 0, row_price)
    return RingCosts(coordinator, tuple(stages), tuple(links), with_stage)


def local_links(stages: int, with_stage: int) -> list[int]:
    """The links of a ring that stay on D0's device, on which that stage is (0: none)."""
    into, back = [0] * (with_stage == 1), [stages] * (0 < with_stage == stages)
    return into + back
