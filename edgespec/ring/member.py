"""Member machine: how a stage joins the ring, and comes back when it has lost the coordinator.

It asks for a stage until it gets one, loads, connects. When the coordinator is gone, or has given
it up, it keeps its block and asks again without end.
"""

from __future__ import annotations

from edgespec.config import RESTS, Timing
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import Effect, SendCoordinator
from edgespec.machines.events import Event, MessageArrived, Tick
from edgespec.ring.effects import (
    CloseRing,
    ConnectRing,
    DropBlock,
    FetchBlock,
    LoadBlock,
    Log,
    OpenRing,
    ResetStage,
    Stop,
)
from edgespec.ring.events import (
    BlockFetched,
    BlockLoaded,
    BlockLoading,
    ControlEnded,
    LoadFailed,
    RingBroke,
    RingFaulty,
    RingReached,
)
from edgespec.ring.reports import STILL_S, report_pause
from edgespec.wire.messages import (
    ALL_REQUESTS,
    MOST_ASSIGNS,
    NO_RING,
    THIS_RING,
    Assign,
    Connect,
    Connected,
    Fault,
    Goodbye,
    Heartbeat,
    Join,
    Loading,
    Ready,
    Refuse,
    StandBy,
)

LATER = 1.25
"""In a ring that rests a stage's beat is so many times the coordinator's, which it answers: one
wake-up does for both."""

REPORT_S = 2.0
"""Seconds between two log lines about a long wait."""


class MemberMachine:
    """A stage's or spare's part in the ring, without I/O."""

    def __init__(self, join: Join, coordinator: str, wait: float, timing: Timing) -> None:
        """`wait`: seconds to keep asking a coordinator that has never answered."""
        self._join = join
        self._coordinator = coordinator
        self._wait = wait
        self._timing = timing
        self._silence = timing.silence
        self.rests = False
        """Whether nothing runs in the ring, as its coordinator says, and its nodes are seldom
        heard."""
        self.asking_since: float | None = None  # None before the start and as a member
        self._heard: float | None = None  # the coordinator, ever
        self._next = 0.0
        self._reported = float("-inf")
        self._place: Assign | None = None  # the newest one
        self._was_placed = False
        self._block: object = None  # what is, or is being, loaded
        self._plan: Assign | None = None  # to prepare for, whose block is fetched
        self._loading = 0  # blocks that are being loaded: all but the last are obsolete
        self._doing = ""  # how far that is
        self._began_at = 0.0
        self._newest = 0  # the number of the newest place, or of the newest StandBy
        self._connecting = False  # as a Connect for its place asked
        self._is_up = False
        # Why it cannot go on in its place, or in this ring, until it has another one.
        self._broke = self._faulty = ""
        self._started = False

    @property
    def place(self) -> Assign | None:
        """The newest Assign, also while it asks for another; None as a spare."""
        return self._place

    def deadline(self) -> float | None:
        """When to call with Tick next."""
        return self._next

    def handle(self, event: Event, now: float) -> list[Effect]:
        """React to one event; the first Tick starts it."""
        match event:
            case Tick():
                return self._on_tick(now)
            case MessageArrived(_, message):
                if self._heard is None:
                    self._next = now  # from now on it sends heartbeats
                # Over an emulated link, what was due earlier may come after a heartbeat.
                self._heard = max(self._heard or now, now)
                return self._on_message(message, now)
            case BlockLoading(text):
                return self._on_loading(text, now)
            case BlockLoaded(seconds):
                return self._on_loaded(seconds, now)
            case BlockFetched(assign, seconds):
                if assign != self._plan:
                    return []  # it prepares for another place now, or for none
                self._plan = None
                fetched = f"layers {assign.first} to {assign.end - 1} are on the disk"
                return [SendCoordinator(Ready(seconds, assign.number)), Log(fetched)]
            case LoadFailed(reason):
                return self._on_load_failed(reason)
            case RingReached():
                assert self._place is not None, "a connection comes with a place"
                if self._broke:
                    return []
                connected = SendCoordinator(Connected(self._place.number))
                self._is_up = True
                return [connected, Log("the ring is up")]
            case ControlEnded():  # a new one is another node's to the coordinator
                awake = self._silence / RESTS if self.rests else self._silence
                self._follow(awake, False, now)
                return []
            case RingBroke(why):
                self._broke = why
                return [*self._fault(), *self._ask_again(why, now)]
            case RingFaulty(why, by_sender):
                self._faulty = f"the node before it {why}" if by_sender else why
                return [*self._fault(), Log(f"this ring is at its end: {self._faulty}")]
            case _:
                raise LocalProtocolError(f"a member cannot handle {type(event).__name__}")

    def _on_message(self, message: object, now: float) -> list[Effect]:
        match message:
            case Assign(ring=ring) if ring == NO_RING:
                return self._on_plan(message)
            case Assign(number=number) | StandBy(number=number) if self._is_obsolete(number):
                return []  # it comes late
            case Assign():
                return self._on_assign(message, now)
            case Heartbeat(silence=silence, rests=rests):
                self._follow(silence or self._timing.silence, rests, now)
                return []
            case StandBy(text):
                self._take(None, now)
                return [*self._fetch_nothing(), CloseRing(), Log(text)]
            case Connect():
                return self._on_connect(message)
            case Refuse(reason) if not self._was_placed:
                return [Stop(f"the coordinator refused: {reason}", failed=True)]
            case Refuse(reason):
                return self._ask_again(
                    f"the coordinator refused: {reason}", now, self._timing.retry
                )
            case Goodbye(reason, unloads) if self._was_placed:
                why = f"the coordinator let it go: {reason}"
                if not unloads:
                    return self._ask_again(why, now)
                self._block = None
                return [DropBlock(), *self._ask_again(f"{why}; its layers are given up", now)]
        return []

    @property
    def _beat(self) -> float:
        """Seconds between its heartbeats: more in a ring that rests, where silences are longer."""
        return (LATER * RESTS if self.rests else 1.0) * self._timing.beat

    def _follow(self, silence: float, rests: bool, now: float) -> None:
        """The coordinator may be silent for so many seconds, and is as patient itself: say at once
        that this node lives if that are less than before, or its beat is due soon."""
        is_less, self._silence, self.rests = silence < self._silence, silence, rests
        is_soon = self.rests and self._next - now < self._beat / 2
        if self.asking_since is None and (is_less or is_soon):
            self._next = now

    def _is_obsolete(self, number: int) -> bool:
        """Whether a place of that number is older than the newest one; if not, it is the newest."""
        is_older = 0 < self._newest - number < MOST_ASSIGNS
        self._newest = self._newest if is_older else number
        return is_older

    # --- a stage and its block ----------------------------------------------------------------

    def _take(self, place: Assign | None, now: float) -> None:
        """It has this place from now on; None: it is a spare."""
        self.asking_since, self._was_placed, self._next = None, True, now
        self._place = place
        self._connecting = self._is_up = False
        self._broke = self._faulty = ""

    def _on_assign(self, assign: Assign, now: float) -> list[Effect]:
        before = self._place
        if before == assign:  # the coordinator was missed for a while and is back, or asks again
            if self._broke:
                return []
            if self.asking_since is not None:
                self.asking_since, self._next = None, now
            return [] if self._loading else [SendCoordinator(Ready(0.0, assign.number))]
        self._take(assign, now)
        place = f"stage {assign.stage} of {assign.stages}"
        effects: list[Effect] = [*self._fetch_nothing(), OpenRing(assign.ring_key)]
        if self._block == assign.block:
            if self._loading:
                return effects
            layers = f"layers {assign.first} to {assign.end - 1}"
            again = f"joined as {place}: {layers} are loaded already"
            self._wait_for_others(now)
            ready = SendCoordinator(Ready(0.0, assign.number))
            return [*effects, ResetStage(assign), ready, Log(again)]
        self._block = assign.block
        self._loading += 1
        self._reported = self._began_at = now
        self._doing = f"loading layers {assign.first} to {assign.end - 1}"
        return [Log(f"joined as {place}: {self._doing}"), *effects, LoadBlock(assign)]

    def _on_plan(self, assign: Assign) -> list[Effect]:
        """Put another block on the disk; the one that it may have runs on."""
        if self._block == assign.block:
            return [*self._fetch_nothing(), SendCoordinator(Ready(0.0, assign.number))]
        if self._plan == assign:
            return []
        self._plan = assign
        layers = f"layers {assign.first} to {assign.end - 1}"
        place = f"stage {assign.stage} of {assign.stages}"
        return [Log(f"preparing for {place}: fetching {layers}"), FetchBlock(assign)]

    def _fetch_nothing(self) -> list[Effect]:
        if self._plan is None:
            return []
        self._plan = None
        return [FetchBlock(None)]

    def _on_connect(self, message: Connect) -> list[Effect]:
        if self._place is None or message.number != self._place.number:
            return []  # for a place that it has no more
        if self._is_up:
            return [SendCoordinator(Connected(message.number))]  # that it was, may have been lost
        if self._connecting or self._broke:
            return []
        self._connecting = True
        return [ConnectRing(message.host, message.port, message.key)]

    def _fault(self) -> list[Effect]:
        """Tell the coordinator why it cannot go on, if that is so."""
        why, request = self._broke or self._faulty, ALL_REQUESTS if self._broke else THIS_RING
        if not why or self._place is None:
            return []
        return [SendCoordinator(Fault(request, why, self._place.number))]

    def _on_loading(self, text: str, now: float) -> list[Effect]:
        effects: list[Effect] = [SendCoordinator(Loading(text))]
        self._doing = text
        if now - self._reported >= REPORT_S:
            self._reported = now
            effects.append(Log(text))
        return effects

    def _wait_for_others(self, now: float) -> None:
        self._reported = self._began_at = now
        self._doing = "waiting for the other stages"

    def _on_loaded(self, seconds: float, now: float) -> list[Effect]:
        self._loading -= 1
        if self._loading:
            return []  # an obsolete block
        self._wait_for_others(now)
        loaded = f"layers loaded in {seconds:.1f} s; waiting for the other stages"
        if self._place is None or self._block is None:
            return [Log(loaded)]  # it stands by, or gave it up meanwhile
        # Meanwhile it may have got another stage or ring for the same block.
        ready = []
        if self.asking_since is None:
            ready = [SendCoordinator(Ready(seconds, self._place.number))]
        return [ResetStage(self._place), *ready, Log(loaded)]

    def _on_load_failed(self, reason: str) -> list[Effect]:
        self._loading -= 1
        if self._loading:
            return []
        self._broke = reason
        return [*self._fault(), Stop(reason, failed=True)]

    # --- without a stage ----------------------------------------------------------------------

    def _ask_again(self, why: str, now: float, after: float = 0.0) -> list[Effect]:
        """The ring may end, this daemon does not: it keeps its block and asks to join again."""
        first = self.asking_since is None
        if first:
            self.asking_since = self._reported = now
        self._next = now + after
        return [Log(f"{why}; asking for a place again")] if first else []

    def _on_tick(self, now: float) -> list[Effect]:
        if not self._started:
            self._started = True
            self.asking_since = self._next = now
        if now < self._next:
            return []
        if self.asking_since is not None:
            return self._ask(now, now - self.asking_since)
        assert self._heard is not None, "a place comes with a message"
        self._next = now + self._beat
        silent = now - self._heard
        if silent > self._silence:
            silence = f"the coordinator at {self._coordinator} has been silent for {silent:.1f} s"
            return self._ask_again(silence, now)
        effects: list[Effect] = [SendCoordinator(Heartbeat()), *self._fault()]
        waited = now - self._began_at
        is_due = self._loading or not (self._is_up or self._place is None)
        if is_due and now - self._reported >= report_pause(STILL_S, waited):
            self._reported = now
            effects.append(Log(f"still {self._doing} ({waited:.0f} s)"))
        return effects

    def _ask(self, now: float, waited: float) -> list[Effect]:
        if self._heard is None and waited > self._wait:
            return [
                Stop(
                    f"no coordinator answered at {self._coordinator} within {self._wait:.0f} s; "
                    "is `edgespec serve` running there, has it finished loading, and is the port "
                    "open?",
                    failed=True,
                )
            ]
        self._next = now + self._timing.retry
        effects: list[Effect] = [*self._fault(), SendCoordinator(self._join)]
        pause = report_pause(REPORT_S, waited)
        if waited >= self._timing.retry and now - self._reported >= pause:
            self._reported = now
            text = f"waiting for the coordinator at {self._coordinator} ({waited:.0f} s)"
            effects.append(Log(text))
        return effects
