"""Jobs: what a worker makes of effects that wait, so that one pass serves several requests."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from edgespec.decoding.effects import Draft, RunHead
from edgespec.errors import ConfigError, EdgespecError
from edgespec.machines.effects import Effect
from edgespec.machines.events import NO_JOB, ComputeFailed, Event

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JointJob(Effect):
    """Two or more effects that are carried out together; comes back as JointDone."""

    effects: tuple[RunHead, ...] | tuple[Draft, ...]


@dataclass(frozen=True, slots=True)
class RunHeads(JointJob):
    """Walks of several results: one product with the output matrix."""

    effects: tuple[RunHead, ...]


@dataclass(frozen=True, slots=True)
class Drafts(JointJob):
    """Drafts of as many requests, all of which expand or all of which grow trees."""

    effects: tuple[Draft, ...]


@dataclass(frozen=True, slots=True)
class ReadPart(Effect):
    """Have the draft source read the first `rows` tokens of the `context` of a draft that waits;
    no event comes of it."""

    request: int
    context: tuple[int, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class JointDone(Event):
    """What came of each effect of a JointJob, in their order: no machine is told this itself."""

    events: tuple[Event, ...]


def effects_of(effect: Effect) -> tuple[Effect, ...]:
    """The effects that a job carries out: itself, if it is no joint one."""
    return effect.effects if isinstance(effect, JointJob) else (effect,)


def events_of(event: Event | None) -> tuple[Event, ...]:
    """What machines are told when a job is done."""
    if event is None:
        return ()
    return event.events if isinstance(event, JointDone) else (event,)


def failure(effect: Effect, problem: Exception) -> ComputeFailed | JointDone:
    """What comes of a job that raised: its requests fail, and no other. What is no EdgespecError is
    a bug, or the device, and is logged."""
    reason, kind = str(problem), ""
    if isinstance(problem, EdgespecError):
        # What the request asks for cannot be done; a device that is full is not its fault.
        kind = "invalid" if isinstance(problem, ConfigError) else ""
    else:
        log.error("%s failed", type(effect).__name__, exc_info=problem)
        reason = f"{type(problem).__name__}: {problem}"
    failed = tuple(
        ComputeFailed(getattr(one, "job", NO_JOB), getattr(one, "request", -1), reason, kind)
        for one in effects_of(effect)
    )
    return JointDone(failed) if isinstance(effect, JointJob) else failed[0]
