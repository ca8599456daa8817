"""Checks: what must be true after every event of a run, and at its end."""

from __future__ import annotations

from collections.abc import Mapping, Set, Sized
from dataclasses import dataclass, field

from support.faulty_world import FaultyWorld
from support.toy_answers import Expected

from edgespec.decoding.request import Request
from edgespec.errors import EdgespecError
from edgespec.sim.toy_model import FakeBlock
from edgespec.sim.world import StageParts
from edgespec.wire.client_messages import Failed, Finished, Submit, Tokens
from edgespec.wire.messages import Message

PLENTY = 200_000
"""Events of one run; a run with more does not end."""

_REMEMBERED = {"_ended", "learnt"}  # what a machine may hold when no request is left
_BUSY_WITH = {"_running"}


class InvariantViolated(EdgespecError):
    """Something that must always be true is not; `invariant` is its name."""

    def __init__(self, invariant: str, problem: str) -> None:
        super().__init__(f"{invariant}: {problem}")
        self.invariant = invariant


@dataclass(frozen=True, slots=True)
class Promise:
    """What one request was promised.

    `expected`: None if it cannot be served at all. `at`: when it is asked, `cancel_at`: when its
    client gives up (s). `may_fail`: parts of the reasons with which it may fail. `recovery`: how
    long it waits for a ring that was lost (s).
    """

    submit: Submit
    expected: Expected | None
    cancel_at: float | None = None
    may_fail: tuple[str, ...] = ()
    at: float = 0.0
    recovery: float = 60.0


@dataclass(slots=True)
class _Got:
    """What a client has been told so far."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False


class Checks:
    """A watch (see sim.world) that raises InvariantViolated as soon as something is wrong.

    It looks into toy rings only: their answers are known and their caches can be counted.
    """

    def __init__(self, promises: Mapping[int, Promise], live: int = 1) -> None:
        """`promises`: by the requests' tags; `live`: requests that may be answered at once."""
        self._promises = promises
        self._live = live
        self._got = {tag: _Got() for tag in promises}
        self._read = 0
        self._events = 0
        self._newest = 0
        self._open: list[int] = []
        self._row_at: dict[tuple[int, int], int] = {}

    def after(self, world: FaultyWorld, node: int) -> None:
        """Check what an event at `node` can have changed."""
        self._events += 1
        if self._events > PLENTY:
            raise InvariantViolated("progress", f"no end after {PLENTY} events")
        while self._read < len(world.replies):
            self._check_reply(world, world.replies[self._read].message)
            self._read += 1
        if node:
            self._check_cache(world, node)
        else:
            self._find_open(world)
            for number in self._open if not world.is_faulty else ():
                _check_credits(world, number)
            if (live := world.coordinator.load()[0]) > self._live:
                raise InvariantViolated("as many as may be live", f"{live}, not {self._live}")
        for number in self._open:
            _check_ledgers(world, number)

    def drained(self, world: FaultyWorld) -> None:
        """Check that every request has ended and nothing of any is left."""
        for tag, got in self._got.items():
            if not got.ended:
                raise InvariantViolated("one end", f"request {tag} never ended")
        left: dict[str, object] = {"D0": _left_in(world.coordinator)}
        kept = set(world.coordinator.rows.kept)
        for number, stage in enumerate(world.stages, 1):
            here = set(stage.machine.ledgers())
            left[f"V{number}"] = _left_in(stage.machine, {"_held"} if here == kept else set())
            left[f"cache of V{number}"] = _left_in_cache(stage, len(kept))
            left[f"work of V{number}"] = not world.quiet(number)
            counted = world.coordinator.rows.used(0)
            if here == kept and not world.wires.lost:
                left[f"rows of V{number}"] = stage.machine.held_rows - counted
        left["ring"] = world.wires.segments
        left["draft"] = max(0, _open_requests(world.draft) - len(kept))
        found = {place: what for place, what in left.items() if what}
        if found:
            raise InvariantViolated("nothing left", f"still there at the end: {found}")

    # --- what clients see ---------------------------------------------------------------------

    def _check_reply(self, world: FaultyWorld, message: Message) -> None:
        tag = int(getattr(message, "tag", -1))
        if tag not in self._promises:
            raise InvariantViolated("one end", f"a reply to no request: {message}")
        promise, got = self._promises[tag], self._got[tag]
        if got.ended:
            raise InvariantViolated("one end", f"request {tag} got {message} behind its end")
        match message:
            case Tokens(_, token_ids, text):
                _check_prefix(promise, got, token_ids, text)
            case Finished():
                _check_finished(world, promise, got, message)
                got.ended = True
            case Failed(_, reason):
                _check_failed(world, promise, reason)
                got.ended = True

    # --- what stages hold ---------------------------------------------------------------------

    def _check_cache(self, world: FaultyWorld, node: int) -> None:
        if not world.stages or not world.quiet(node) or world.is_faulty:
            return
        stage = world.stages[node - 1]
        ledgers = stage.machine.ledgers()
        if not isinstance(stage.block, FakeBlock) or stage.machine.is_faulty:
            return
        if stage.block.open_requests != len(ledgers):
            raise InvariantViolated(
                "caches hold what the ledgers say",
                f"V{node} has {stage.block.open_requests} caches and {len(ledgers)} ledgers",
            )
        if stage.block.held_rows != stage.machine.held_rows:
            raise InvariantViolated(
                "caches hold what the ledgers say",
                f"V{node} has {stage.block.held_rows} rows, by its books {stage.machine.held_rows}",
            )
        for request, ledger in ledgers.items():
            slots = stage.block.slots(request)
            if slots != len(ledger):
                raise InvariantViolated(
                    "caches hold what the ledgers say",
                    f"V{node} has {slots} slots of request {request} and {len(ledger)} rows",
                )
            if stage.block.shares(request) != stage.machine.stems.shares(request):
                raise InvariantViolated(
                    "as many hold a row as the books say",
                    f"V{node} shares {stage.block.shares(request)} of request {request}, by its "
                    f"books {stage.machine.stems.shares(request)}",
                )
            _check_shared(world, node, request)
            row = self._row_at.setdefault((request, ledger.committed), ledger.last_committed)
            if row != ledger.last_committed:
                raise InvariantViolated(
                    "equally long committed regions end in the same row",
                    f"after {ledger.committed} rows of request {request}, V{node} has row "
                    f"{ledger.last_committed} and another stage had row {row}",
                )

    def _find_open(self, world: FaultyWorld) -> None:
        while world.coordinator.accepts(self._newest + 1) is not None:
            self._newest += 1
            self._open.append(self._newest)
        self._open = [n for n in self._open if world.coordinator.accepts(n) is not None]


def _check_shared(world: FaultyWorld, node: int, request: int) -> None:
    """Any two requests that a stage and the coordinator both know share as many rows here as
    there."""
    machine = world.stages[node - 1].machine
    for other in machine.ledgers():
        counted = world.coordinator.rows.together(request, other)
        if other < request and counted is not None:
            here = machine.stems.together(request, other)
            if here != counted:
                raise InvariantViolated(
                    "stages share what the coordinator counts",
                    f"requests {other} and {request} share {here} rows on V{node}, the coordinator "
                    f"counts {counted}",
                )


def _check_prefix(promise: Promise, got: _Got, token_ids: tuple[int, ...], text: str) -> None:
    got.tokens += token_ids
    got.text += text
    tag = promise.submit.tag
    if promise.expected is None or not token_ids:
        raise InvariantViolated("plain answer", f"request {tag} streamed {token_ids} {text!r}")
    right = promise.expected
    same = right.token_ids[: len(got.tokens)] == tuple(got.tokens)
    if not same or not right.text.startswith(got.text):
        raise InvariantViolated(
            "plain answer",
            f"request {tag} streamed {got.tokens} {got.text!r}, plain decoding gives "
            f"{right.token_ids} {right.text!r}",
        )


def _check_finished(world: FaultyWorld, promise: Promise, got: _Got, end: Finished) -> None:
    if (end.token_ids, end.text) != (tuple(got.tokens), got.text):
        raise InvariantViolated(
            "the end repeats the stream",
            f"request {end.tag} streamed {got.tokens} {got.text!r}; its end says {end}",
        )
    if end.finish_reason == "cancelled":
        if promise.cancel_at is None or world.now < promise.cancel_at:
            raise InvariantViolated("plain answer", f"request {end.tag} was not cancelled")
        return
    right, came = promise.expected, (end.token_ids, end.text, end.finish_reason)
    if right is None or came != (right.token_ids, right.text, right.finish_reason):
        raise InvariantViolated("plain answer", f"request {end.tag} got {end}, not {right}")
    # The first token of each ring comes of the prompt, every other one of a row that was sent.
    used = end.rows_sent - end.rows_wasted
    fewest, most = end.new_tokens - 1 - end.recoveries, end.new_tokens - 1
    if not 0 <= end.rows_wasted <= end.rows_sent or not fewest <= used <= most:
        raise InvariantViolated("figures add up", f"the figures of {end} do not")


def _check_failed(world: FaultyWorld, promise: Promise, reason: str) -> None:
    if any(part in reason for part in promise.may_fail):
        return
    if "was lost" in reason and "in a row" not in reason and not world.is_up:
        waited = world.now - max(world.down_since, promise.at)
        if waited < promise.recovery - 1e-9:
            raise InvariantViolated(
                "as long as promised",
                f"request {promise.submit.tag} waited {waited} of {promise.recovery} s: {reason}",
            )
        return
    raise InvariantViolated("plain answer", f"request {promise.submit.tag} failed: {reason}")


def _check_credits(world: FaultyWorld, number: int) -> None:
    """Every segment that the coordinator counts is on the ring, or waits for its turn."""
    request = world.coordinator.accepts(number)
    if request is None:
        return
    flying = sum(number in owners for owners in world.wires.segments.values())
    outbox = request.outbox
    waiting = outbox.waiting + outbox.count_returned
    if outbox.in_flight != flying + waiting:
        raise InvariantViolated(
            "credits",
            f"request {number} counts {outbox.in_flight} segments; {flying} are on the ring and "
            f"{waiting} wait",
        )


def _check_ledgers(world: FaultyWorld, number: int) -> None:
    """With nothing of it under way, every stage holds the request's committed and live rows.

    A stage that never got the newest retained set may hold dead rows as well, but lacks no live
    one. PPD tokens come and go with the retained sets, and nothing hangs from them.
    """
    if world.wires.control[number] or world.work[number] or _is_flying(world, number):
        return
    request = world.coordinator.accepts(number)
    if world.gone or request is None or not request.is_read or request.outbox.waiting:
        return
    committed, last, live = _held(request)
    epoch, ppd_rows = request.outbox.retains.epoch, request.drafting.ppd_rows or ()
    first: tuple[int, ...] | None = None
    for node, stage in enumerate(world.stages, 1):
        ledger = stage.machine.ledgers().get(number)
        if ledger is None:
            raise InvariantViolated("ledgers agree", f"V{node} knows no request {number}")
        rows = tuple(row for row in ledger.speculative if row not in ppd_rows)
        if world.wires.lost.get((node, number)) == epoch:
            accepted = ledger.committed + sum(row not in live for row in rows)
            if not live.issubset(rows) or accepted < committed:
                raise InvariantViolated(
                    "ledgers agree", f"V{node} lacks live rows of request {number}: {rows}"
                )
            continue
        held = (ledger.epoch, ledger.committed, ledger.last_committed)
        if held != (epoch, committed, last) or live != set(rows):
            raise InvariantViolated(
                "ledgers agree",
                f"V{node} holds (epoch, committed, last) {held} and {rows} of request {number}; "
                f"the coordinator's are {(epoch, committed, last)} and {sorted(live)}",
            )
        first = rows if first is None else first
        if rows != first:
            raise InvariantViolated(
                "ledgers agree", f"request {number} has rows {rows} on V{node}, {first} before it"
            )


def _is_flying(world: FaultyWorld, number: int) -> bool:
    return any(number in owners for owners in world.wires.segments.values())


def _held(request: Request) -> tuple[int, int, set[int]]:
    """What every stage must hold: committed rows, the last one's id, and the live rows."""
    tree, prefix = request.tree, len(request.outbox.prefix)
    if tree is None:
        return prefix, prefix - 1, set()
    root = tree[tree.root]
    live = {i for i in tree.ids if tree[i].sent}
    if root.id < prefix:  # the prefix's last row, which is committed
        return root.position + 1, root.id, live - {root.id}
    return root.position, root.parent, live


def _left_in(machine: object, known: Set[str] = frozenset()) -> dict[str, object]:
    """Whatever a machine still holds of any request; a leak in a new attribute is found too."""
    return {
        name: value
        for name, value in vars(machine).items()
        if name not in _REMEMBERED | known
        and ((isinstance(value, Sized) and len(value) > 0) or name in _BUSY_WITH)
        and value is not None
    }


def _open_requests(holder: object) -> int:
    """How many requests a toy block or draft holds; 0 for what cannot tell."""
    return int(getattr(holder, "open_requests", 0))


def _left_in_cache(stage: StageParts, kept: int) -> int:
    """How many requests more than the kept ones a toy block holds, or rows more than its stage
    knows of a block of torch; 0 for what cannot tell."""
    if hasattr(stage.block, "open_requests"):
        return _open_requests(stage.block) - kept
    known = stage.machine.held_rows
    return int(getattr(stage.block, "held", (known,))[0]) - known
