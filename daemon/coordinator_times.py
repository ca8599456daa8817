"""Coordinator times: how long its own loop takes here, choosing tokens, ranking guesses and noise.

A machine of the product answers on a toy ring in virtual time, plainly and with trees. What each of
its events takes, and its messages to and from bytes, is timed in seconds of the thread. What a turn
of the node around it takes on top, with its sockets, is timed with messages over the loopback.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch

from edgespec.backends.charged_time import is_charged, rows_of
from edgespec.config import Address
from edgespec.daemon.layer_times import settled
from edgespec.daemon.profile_figures import tidy
from edgespec.daemon.profiles import profile_named
from edgespec.daemon.timing import Sample, shown, timed
from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.effects import SendRing
from edgespec.decoding.events import SegmentArrived
from edgespec.decoding.stage import StageMachine
from edgespec.drafting.guess_scores import best_guesses
from edgespec.machines.effects import Effect, SendPeer, SendStages
from edgespec.machines.events import Event, MessageArrived
from edgespec.net.keys import Identity, KeyPair
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.planning.cost_model import cost_model_named
from edgespec.planning.costs import ring_costs
from edgespec.planning.profile import Figure, LogitTime, LogitTimes, LoopSeconds
from edgespec.sim.durations import charged_durations, network_of
from edgespec.sim.oracle import Oracle
from edgespec.sim.toy import VOCABULARY, ToyCodec
from edgespec.sim.toy_model import FakeBlock, FakeHead, toy_next
from edgespec.sim.world import CoordinatorParts, StageParts, World
from edgespec.types.draft_pass import TokenChoice
from edgespec.verify.noise import gumbel_row
from edgespec.verify.sampling import Sampling, choose
from edgespec.wire.client_messages import Submit
from edgespec.wire.codec import decode, encode
from edgespec.wire.messages import Credit, Message

POLICIES = ("autoregressive", "flowspec", "adaptive")
STAGES, ACCURACY = 4, 0.75
TOKENS = 8, 64
"""Of each answer: at least, and at most; A_SECOND of the time that is given."""
A_SECOND = 4
RUNS = 3
"""Of each answer; of each event, which is the same in all, the median counts."""
DEVICE, MODEL = "jetson-orin-nano-8gb", "llama-2-13b"
"""What is charged in virtual time: so the trees are as on a ring of Orin Nanos."""
CONTEXT, PREFILL = 4096, 64
TURNS = 200
LONGEST_S = 1.0

Timed = tuple[float, int]
"""Seconds of an event, and its rows."""


def measure_loop(conditions: str, seconds: float) -> LoopSeconds:
    """For a profile that `seconds` are given to; `conditions`: the beginning of its origin."""
    least, most = TOKENS
    tokens = max(min(round(A_SECOND * seconds), most), least)
    runs = [
        [one for policy in POLICIES for one in machine_times(policy, tokens)] for _ in range(RUNS)
    ]
    events = list(map(median, zip(*runs, strict=True)))
    turn = turn_seconds()
    event, row = fit(events)
    return LoopSeconds(
        float(f"{event + turn:.3g}"),
        float(f"{row:.3g}"),
        f"{conditions}, times of the thread: a line through the {len(events)} events of a "
        f"toy ring ({', '.join(POLICIES)}; medians of {RUNS} runs), and {shown(turn)} for a turn "
        "of the node, its sockets included",
    )


def fit(events: list[Timed]) -> tuple[float, float]:
    """Seconds of an event and of a row by least squares: they give back what all took together."""
    seconds, rows = (np.array(column, np.float64) for column in zip(*events, strict=True))
    off = rows - rows.mean()
    row = max(float(off @ seconds / (off @ off)), 0.0)
    return max(float(seconds.mean() - row * rows.mean()), 0.0), row


def machine_times(policy: str, tokens: int) -> list[Timed]:
    """Of the machine's events in one answer of `policy`, messages to and from bytes included."""
    found: list[Timed] = []

    class TimedMachine(CoordinatorMachine):
        def handle(self, event: Event, now: float) -> list[Effect]:
            message: Message | None = None
            if isinstance(event, SegmentArrived):
                message = event.segment
            elif isinstance(event, MessageArrived):
                message = event.message
            frame = None if message is None else encode(message)
            began = time.thread_time()
            if frame is not None:
                decode(frame)
            effects = super().handle(event, now)
            for effect in effects:
                match effect:
                    case SendRing(sent) | SendStages(sent) | SendPeer(_, sent):
                        encode(sent)
            took = time.thread_time() - began
            if is_charged(event):
                found.append((took, rows_of(event, effects)))
            return effects

    _asked(policy, tokens, TimedMachine).run()
    return found


def _asked(policy: str, tokens: int, machine: type[CoordinatorMachine]) -> World:
    """One request on a toy ring of such devices, with a draft that is told the answer."""
    costs = ring_costs([profile_named(DEVICE)] * (STAGES + 1), cost_model_named(MODEL))
    codec, head, draft = ToyCodec(), FakeHead(VOCABULARY), Oracle(random.Random(1), ACCURACY)
    submit = Submit(0, "a question " * 8, tokens, 0.0, 0, 1.0, 0.0, 1, (), policy)
    text = list(codec.encode(submit.prompt))
    for _ in range(tokens):
        text.append(toy_next(text, STAGES, VOCABULARY, submit.seed))
    draft.tell(text)

    def stages() -> list[StageParts]:
        return [
            StageParts(
                StageMachine(is_first=n == 1, is_last=n == STAGES, row_limit=CONTEXT),
                FakeBlock(n - 1),
            )
            for n in range(1, STAGES + 1)
        ]

    world = World(
        machine(
            CoordinatorSettings(STAGES, CONTEXT, draft.name, PREFILL, needs=draft.needs), codec
        ),
        CoordinatorParts(head, draft),
        stages,
        charged_durations(costs, draft, loop_free=True),
        network_of(costs),
    )
    world.submit(submit)
    return world


def turn_seconds() -> float:
    """Of the thread that reads a message from a coordinator's sockets, and answers it."""
    own = KeyPair.new()
    home = ZmqTransport.coordinator(
        Address("127.0.0.1", 0), Identity.of_coordinator(own), lambda key: ""
    )
    peer = ZmqTransport.client(
        Address("127.0.0.1", home.control_port), Identity(KeyPair.new(), own.public)
    )
    found = []
    try:
        for number in range(TURNS):
            peer.send_control(b"", Credit(number))
            began = time.thread_time()
            for one in home.poll(LONGEST_S):
                home.send_control(one.peer, one.message)
            found.append(time.thread_time() - began)
            peer.poll(LONGEST_S)
    finally:
        peer.close()
        home.close()
    return median(found)


NARROW, WIDE = 1 << 12, 1 << 17
"""Tokens of the two vocabularies that give what a call and what its logits cost."""
ROWS = 8
"""Rows that are ranked at once."""
WAYS: dict[TokenChoice, Sampling] = {
    "greedy": Sampling(),
    "sampled": Sampling(1.0),
    "filtered": Sampling(0.8, top_p=0.95),
}
_GUESSES = 8
_LEVEL = 4  # rows that share a position, as those of a tree's level do

_Key = tuple[str, str, int]


def measure_logits(
    device: torch.device, conditions: str, seconds: float
) -> tuple[LogitTimes, LogitTimes, Figure]:
    """Choosing, ranking and noise, for a profile; `conditions`: the beginning of each origin."""
    works: dict[_Key, Callable[[], object]] = {}
    for way, sampling in WAYS.items():
        for rows, width in ((1, NARROW), (ROWS, WIDE)):
            logits = torch.from_numpy(_logits(rows, width)).to(device)
            works["choosing", way, width] = partial(_choose, logits, sampling)
            works["ranking", way, width] = partial(_rank, logits, sampling)
    fresh = itertools.count()
    works["noise", "", WIDE] = lambda: torch.tensor(
        gumbel_row(1, next(fresh), WIDE), dtype=torch.float32, device=device
    )
    found = timed(works, seconds)
    noise = found["noise", "", WIDE]
    return (
        _times("choosing", 1, found, f"{conditions}: the token after a row of logits"),
        _times("ranking", ROWS, found, f"{conditions}: the {_GUESSES} best guesses of each row"),
        Figure(
            tidy(noise.median * 1e6 / WIDE),
            f"{conditions}: the noise of a position for {WIDE} tokens ({noise})",
        ),
    )


def _times(kind: str, rows: int, found: dict[_Key, Sample], what: str) -> LogitTimes:
    """The line through one row of NARROW tokens and so many of WIDE, for each way."""
    times = {}
    for way in WAYS:
        short, long = (found[kind, way, width].median for width in (NARROW, WIDE))
        each = max(0.0, long - short) / (rows * WIDE - NARROW)
        times[way] = LogitTime(tidy(max(0.0, short - each * NARROW)), tidy(each * 1e6))
    long_one = found[kind, "sampled", WIDE]
    return LogitTimes(
        **times,
        origin=f"{what}, of logits as of a text: from 1 row of {NARROW} tokens and {rows} of "
        f"{WIDE}, noise made before; the latter at temperature 1: {long_one}",
    )


def _choose(logits: torch.Tensor, sampling: Sampling) -> None:
    """As the head does: a row leaves the device, then its token is taken."""
    choose(logits[0].cpu().numpy()[None], np.array([1]), sampling)


def _rank(logits: torch.Tensor, sampling: Sampling) -> None:
    positions = 1 + np.arange(len(logits)) // _LEVEL
    best_guesses(logits, positions, sampling, _GUESSES)
    settled(logits.device)


def _logits(rows: int, width: int) -> np.ndarray:
    """Float32 [rows, width], by falling frequency as words have them, with some noise."""
    random = np.random.default_rng(0)
    heights = -1.5 * np.log(np.arange(1, width + 1)) + random.standard_normal((rows, width))
    return np.ascontiguousarray(heights[:, random.permutation(width)], np.float32)
