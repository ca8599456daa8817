"""Turns: which of several models has the ring, and who waits for another one.

One is loaded at a time. Requests come first, first served: who asks for the loaded one is let
through, and another is loaded when nothing runs. From the moment that somebody waits for another
one, the loaded one has so many seconds more for new requests; what comes later waits, too. So
nobody waits for longer than a turn of each model, the answers that run at its end, and the loads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec.structs import replace

from edgespec.errors import EdgespecError
from edgespec.planning.catalogue import squeezed
from edgespec.serving.problems import ApiProblem
from edgespec.wire.client_messages import Status

MOST_WAIT_S = 600.0
"""Seconds that a request waits for its model."""

log = logging.getLogger(__name__)


class Loader(Protocol):
    """Loads one model, and gives up the one before."""

    @property
    def runs(self) -> bool:
        """Whether what was loaded last is still there."""

    async def load(self, name: str, is_wanted: Callable[[], bool]) -> Status:
        """The status of a ring that has it. Raises EdgespecError, also if it is wanted no more."""

    async def unload(self) -> None:
        """Have nothing loaded."""


class ModelTurn:
    """A request's turn: from its wait for a model to its `end`."""

    def __init__(self, turns: ModelTurns, name: str, since: float) -> None:
        """`since`: when it came, as `ModelTurns.now` tells."""
        self.name, self.since = name, since
        self._turns = turns
        self.given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the model is there for it; fails with an ApiProblem."""

    @property
    def words(self) -> str:
        """What it waits for."""
        return self._turns.waited_for(self.name)

    def check_wait(self) -> None:
        """Raise ApiProblem if it has waited for too long."""
        if self._turns.now() - self.since >= MOST_WAIT_S:
            raise _not_now(
                f"the model {self.name} was not there within {MOST_WAIT_S:.0f} s: {self.words}"
            )

    def end(self) -> None:
        """The request has its answer, or is given up."""
        self._turns.ended(self)


class ModelTurns:
    """The models, of which one has the ring. Everything runs in one event loop."""

    def __init__(
        self,
        loader: Loader,
        models: Iterable[Status],
        longest: float,
        idle: float = math.inf,
        drain: float = 0.0,
        leaving: Callable[[float], None] = lambda seconds: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`models`: what is known of each; the first is asked where a request names none.
        `longest`: seconds of a turn while others wait. `idle`: seconds without a request after
        which the loaded one is given up. `drain`: seconds that answers have at the end, of which
        `leaving` is told when it begins."""
        self._loader = loader
        self._known = {one.model: one for one in models}
        self._longest, self._idle, self._drain = longest, idle, drain
        self._leaving = leaving
        self.now = now
        self.closing = ""
        """Why nothing more is taken."""
        self._loaded = self._loading = ""
        self._loaded_at = 0.0
        self._running: set[ModelTurn] = set()
        self._waiting: list[ModelTurn] = []
        self._work: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._then: Callable[[], None] | None = None

    @property
    def loaded(self) -> str:
        """The model that has the ring; "": none, or it has ended by itself."""
        return self._loaded if self._loader.runs else ""

    @property
    def models(self) -> list[Status]:
        """What is known of each, as it was told last; whether the loaded one is `ready`, only its
        ring knows."""
        return [*self._known.values()]

    @property
    def waiting(self) -> int:
        """Requests that wait for their model."""
        return len(self._waiting)

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    @property
    def absence(self) -> str:
        """Why no model has the ring; "": one has."""
        if self.loaded:
            return ""
        words = f"the model {self._loading} is being loaded" if self._loading else ""
        return words or "no model is loaded; the next question has one loaded"

    def named(self, name: str) -> str:
        """The model that a request asks for; "": none is called so. Its own name comes before what
        it is called elsewhere. Without a name it is the one that is there or comes, or the
        first."""
        if not name:
            return self.loaded or self._loading or next(iter(self._known))
        if name in self._known:
            return name
        asked = squeezed(name)
        called = (
            one.model
            for one in self._known.values()
            if asked in map(squeezed, (one.model, *one.names))
        )
        return next(called, "")

    def take(self, name: str) -> ModelTurn:
        """A turn of that model. Raises ApiProblem if nothing is taken any more."""
        if self.closing:
            raise _not_now(self.closing)
        turn = ModelTurn(self, name, self.now())
        self._waiting.append(turn)
        self._step()
        return turn

    def begin(self) -> None:
        """Load the first one before it is asked for: stages and faults show up early."""
        self._change_to(next(iter(self._known)))

    def give_up(self, name: str) -> None:
        """Unload that one, if it is there and nobody uses it or waits."""
        if self.loaded == name and not (self._running or self._waiting or self._work):
            self._change_to("")

    def close(self, why: str, then: Callable[[], None]) -> None:
        """Take no more requests; call `then`, once, when those that run have ended, or have had
        their time."""
        self.closing, self._then = why, then
        self._leaving(self._drain)
        for one in [*self._waiting]:
            self._waiting.remove(one)
            one.given.set_exception(_not_now(why))
        asyncio.get_running_loop().call_later(self._drain, self._finish)
        if not self._running:
            self._finish()

    async def aclose(self) -> None:
        """Unload, at the end of all."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work})
        await self._loader.unload()

    def waited_for(self, name: str) -> str:
        """What a request for that model waits for."""
        behind = "" if name in (self._loading, self.loaded) else f"; {name} comes after it"
        if self._loading:
            return f"loading the model {self._loading}{behind}"
        if running := len(self._running):
            return f"the model {self._loaded} answers {running} request(s), and others wait{behind}"
        return f"the model {name} is not loaded"

    def ended(self, turn: ModelTurn) -> None:
        """See ModelTurn.end."""
        self._running.discard(turn)
        if turn in self._waiting:
            self._waiting.remove(turn)
        if turn.given.done() and not turn.given.cancelled():
            turn.given.exception()  # mark it as read
        self._step()

    def _step(self) -> None:
        """Let through who may be, and load what the first one waits for when nothing runs."""
        if self._timer is not None:
            self._timer.cancel()
        if self._work is not None:
            return
        rival = next((one for one in self._waiting if one.name != self.loaded), None)
        began = self._loaded_at if rival is None else max(rival.since, self._loaded_at)
        is_over = self.now() >= began + self._longest
        for one in [*self._waiting]:
            if one is rival and is_over:
                break
            if one.name == self.loaded:
                self._waiting.remove(one)
                self._running.add(one)
                one.given.set_result(None)
        if self._running:
            return
        if self.closing:
            self._finish()
        elif self._waiting:
            self._change_to(self._waiting[0].name)
        elif self.loaded and self._idle < math.inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._idle, self.give_up, self.loaded)

    def _finish(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()

    def _change_to(self, name: str) -> None:
        before, self._loaded, self._loading = self._loaded, "", name
        log.info("loading the model %s" if name else "giving up the model %s", name or before)
        self._work = asyncio.get_running_loop().create_task(self._change(name))

    async def _change(self, name: str) -> None:
        def is_wanted() -> bool:
            return not self._waiting or any(one.name == name for one in self._waiting)

        try:
            if name:
                told = await self._loader.load(name, is_wanted)
                self._known[name] = replace(told, ready=False)
                self._loaded = name
            else:
                await self._loader.unload()
        except Exception as problem:  # a bug, too, must end the requests that wait for it
            is_told = isinstance(problem, EdgespecError)
            log.warning("%s", problem, exc_info=not is_told)
            why = str(problem) if is_told else f"the model {name} cannot be loaded: {problem}"
            for one in [one for one in self._waiting if one.name == name]:
                self._waiting.remove(one)
                one.given.set_exception(_not_now(why))
        finally:
            self._work, self._loading, self._loaded_at = None, "", self.now()
        self._step()


def _not_now(words: str) -> ApiProblem:
    return ApiProblem(503, words, code="model_not_loaded")
