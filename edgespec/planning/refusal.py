"""Refusal: a model that does not fit, in numbers, and the changes that make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from msgspec import structs

from edgespec.config import QUANTISATIONS
from edgespec.planning.cost_model import NO_DRAFT, NO_FILE
from edgespec.planning.memory import GIB, Device, gib
from edgespec.planning.problem import MOST_DEVICES, Problem
from edgespec.planning.profile import Figure

CONTEXT_STEP = 64
"""Advice names contexts that are multiples of it."""
LEAST_CONTEXT = 256
"""The shortest context that is advised."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A device that cannot hold its share. `stage` 0: D0; `index`: among the boards, D0: -1."""

    stage: int
    index: int
    device: Device
    need: int
    share: str

    def __str__(self) -> str:
        who = f"stage {self.stage}" if self.stage else "the coordinator"
        # Rounded up and down to a hundredth, so that the shown need exceeds what the device has.
        return (
            f"{who} ({self.device.name}) needs {gib(self.need + GIB / 200)} for {self.share}, "
            f"has {gib(max(0, self.device.memory - GIB / 200))}"
        )


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change, in words, and the problem with it made: that one fits."""

    words: str
    problem: Problem


def refusal(problem: Problem) -> str:
    """Why a problem does not fit, and every remedy that was found."""
    short = "; ".join(map(str, shortages(problem)))
    bound = problem.model.of.bound
    if not short:  # what is needed for layers is there
        short = "no device that can be the last stage has room for the output head too"
    if bound and not any(one.fitting(True) for one in problem.candidates):
        short = f"no device has room for the last {bound} layers, which have to be together"
    ways = ", or ".join(remedy.words for remedy in remedies(problem))
    of = problem.model
    return (
        f"{of.name} ({of.quantisation.name}, {problem.requests} request(s) of {problem.context} "
        f"tokens) does not fit: {short}; {ways}"
    )


def shortages(problem: Problem) -> list[Shortage]:
    """The coordinator if it is short of memory, and the stage that is most so."""
    found = []
    need, stage = problem.needs.coordinator().total, _short_stage(problem)
    alone = not problem.others  # then what the stage needs includes it
    if need > problem.coordinator.memory and not (stage and alone):
        found.append(Shortage(0, -1, problem.coordinator, need, _own_share(problem)))
    return [*found, stage] if stage else found


def remedies(problem: Problem) -> list[Remedy]:
    """Single changes that make everything fit, the mildest first; never none."""
    ways = (
        *(_head_here, _shorter_context, _fewer_requests, _smaller_quantisation),
        *(_no_draft, _more_devices),
    )
    found = [remedy for way in ways if (remedy := way(problem)) is not None]
    return found or [_more_memory(problem)]


def _head_here(problem: Problem) -> Remedy | None:
    changed = replace(problem, head_last=False)
    if not problem.head_last or not changed.fits():
        return None
    return Remedy("leave the output head on the coordinator (--head coordinator)", changed)


def _own_share(problem: Problem) -> str:
    draft = problem.model.draft.name
    if problem.head_last:
        return f"the draft {draft}" if draft else "its own process"
    return f"the output head and the draft {draft}" if draft else "the output head"


def _short_stage(problem: Problem) -> Shortage | None:
    """If the layers do not fit: the stage that lacks most memory when the rest is spread.

    Every board is filled up; each layer that is left goes to the board that then lacks least. Of
    the coordinator's, the need of D0 is named too.
    """
    needs, candidates = problem.needs, problem.candidates
    devices, own = problem.boards, len(problem.others)

    def short(index: int, layers: int, stage: int) -> Shortage:
        need = needs.stage(layers).total + devices[index].memory - problem.room(index)
        beside = f" beside {_own_share(problem)}" if index == own else ""
        return Shortage(stage, index, devices[index], need, f"{layers} layer(s){beside}")

    if candidates[own].most == problem.model.of.layers:
        return None
    usable = [i for i in range(own) if candidates[i].most]
    if not usable:
        first = max(range(own), key=lambda i: devices[i].memory, default=own)
        return short(first, 1 if problem.others else problem.model.of.layers, 1)
    first = usable[0]
    counts = [candidate.most for candidate in candidates]
    missing = problem.model.of.layers - sum(counts)
    if missing <= 0:
        return None

    def lack(index: int, layers: int) -> int:
        return needs.stage(layers).total - problem.room(index)

    taking = [i for i in range(len(devices)) if counts[i]]
    for _ in range(missing):
        least = min(taking, key=lambda i: lack(i, counts[i] + 1))
        counts[least] += 1
    worst = max(taking, key=lambda i: lack(i, counts[i]))
    order = [first, *(i for i in taking if i != first)]
    return short(worst, counts[worst], order.index(worst) + 1)


# --- ways out -----------------------------------------------------------------------------------


def _shorter_context(problem: Problem) -> Remedy | None:
    def at(steps: int) -> Problem:
        return replace(problem, context=steps * CONTEXT_STEP)

    steps = _largest(
        lambda count: at(count).fits(),
        LEAST_CONTEXT // CONTEXT_STEP,
        (problem.context - 1) // CONTEXT_STEP,
    )
    return Remedy(f"drop --context to {at(steps).context}", at(steps)) if steps else None


def _fewer_requests(problem: Problem) -> Remedy | None:
    def of(count: int) -> Problem:
        return replace(problem, requests=count)

    count = _largest(lambda count: of(count).fits(), 1, problem.requests - 1)
    return Remedy(f"drop --requests to {count}", of(count)) if count else None


def _smaller_quantisation(problem: Problem) -> Remedy | None:
    """The largest one that fits, as it loses least."""
    now = problem.model.costs.layer_bytes
    others = [
        replace(problem.model, quantisation=one, file=NO_FILE) for one in QUANTISATIONS.values()
    ]
    others.sort(key=lambda other: -other.costs.layer_bytes)
    for other in others:
        changed = replace(problem, model=other)
        if other.costs.layer_bytes < now and changed.runs() and changed.fits():
            return Remedy(f"use --quant {other.quantisation.name}", changed)
    return None


def _no_draft(problem: Problem) -> Remedy | None:
    """Without the draft; a smaller one does as well, if it is small enough."""
    changed = replace(problem, model=replace(problem.model, draft=NO_DRAFT))
    if not problem.model.draft.name or not changed.fits():
        return None
    largest = gib(max(0, draft_room(problem) - GIB / 200))  # rounded down
    return Remedy(f"choose a draft of at most {largest} with its cache, or none", changed)


def draft_room(problem: Problem) -> int:
    """Bytes that a draft and its cache may have on D0 if everything else is to fit."""

    def fits(size: int) -> bool:
        draft = replace(NO_DRAFT, name="a smaller one", ends_bytes=size)
        return replace(problem, model=replace(problem.model, draft=draft)).fits()

    return _largest(fits, 0, problem.coordinator.memory)


def _more_devices(problem: Problem) -> Remedy | None:
    """The fewest further devices like the one that is short."""
    stage = _short_stage(problem)
    if stage is None:
        return None
    for count in range(1, MOST_DEVICES - len(problem.others)):
        changed = replace(problem, others=problem.others + (stage.device,) * count)
        if changed.fits():
            return Remedy(f"add {count} device(s) like {stage.device.name}", changed)
    return None


def _more_memory(problem: Problem) -> Remedy:
    """Larger devices in place of those that are short."""
    changed, words = problem, []
    for shortage in shortages(problem):
        tenths = -(-shortage.need * 10 // GIB)
        if shortage.index >= 0:
            # Whether the layers fit, whatever the coordinator has.
            sizes = (n for n in _from(tenths) if not _short_stage(_grown(changed, shortage, n)))
            tenths = next(sizes)
        changed = _grown(changed, shortage, tenths)
        words.append(f"{tenths / 10:.1f} GiB in place of {shortage.device.name}")
    return Remedy(f"use a device of {' and one of '.join(words)}", changed)


def _from(start: int) -> Iterator[int]:
    """`start` and what follows, in steps that grow by a tenth: no search takes long."""
    while True:
        yield start
        start += max(1, start // 10)


def _grown(problem: Problem, shortage: Shortage, tenths: int) -> Problem:
    """The problem with so many tenths of a GiB on the device that is short."""
    memory = Figure(tenths * GIB // 10, "the planner's advice")
    device = shortage.device
    grown = replace(device, profile=structs.replace(device.profile, memory_bytes=memory))
    if shortage.index in (-1, len(problem.others)):
        return replace(problem, coordinator=grown)
    others = list(problem.others)
    others[shortage.index] = grown
    return replace(problem, others=tuple(others))


def _largest(good: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from `low` to `high` that is good, 0 if none is.

    Whatever is below a good number is good too.
    """
    if high < low or not good(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low
