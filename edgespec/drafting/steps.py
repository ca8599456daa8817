"""Steps: the work of guessing, request by request, with one pass of a model for several of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

Found = TypeVar("Found")
Given = TypeVar("Given")
Params = ParamSpec("Params")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call(Generic[Given]):
    """What one request's steps wait for: `run([given, ...])` does the same for several requests, as
    many results, in their order. Calls with equal `run` are joined.

    `late`: it waits until no request has another call that is not: guesses are ranked together,
    once all that they follow was run. If `run` raises, it has changed nothing.
    """

    run: Callable[[Sequence[Given]], Sequence[Any]]
    given: Given
    late: bool = False


Steps: TypeAlias = Generator[Call[Any], Any, Result]
"""One request's work, up to its result; `together` carries it out."""


def call(
    run: Callable[[Sequence[Given]], Sequence[Found]], given: Given, *, late: bool = False
) -> Steps[Found]:
    """One call; returns what `run` found for `given`."""
    found: Found = yield Call(run, given, late)
    return found


def at_once(work: Callable[Params, Result]) -> Callable[Params, Steps[Result]]:
    """What calls nothing, as steps."""

    @functools.wraps(work)
    def steps(*args: Params.args, **kwargs: Params.kwargs) -> Steps[Result]:
        yield from ()
        return work(*args, **kwargs)

    return steps


def alone(steps: Steps[Result]) -> Result:
    """The result of one request's steps. Raises what they raise."""
    (found,) = together([steps])
    if isinstance(found, Exception):
        raise found
    return found


def together(every: Sequence[Steps[Result]]) -> list[Result | Exception]:
    """The results of several requests' steps, in their order; what one raises stands for its own.

    If joined calls fail, each is tried by itself, so that no request fails with another.
    """
    results: dict[int, Result | Exception] = {}
    waiting: dict[int, Call[Any]] = {}

    def go_on(number: int, found: object) -> None:
        steps = every[number]
        try:
            if isinstance(found, Exception):
                waiting[number] = steps.throw(found)
            else:
                waiting[number] = steps.send(found)
        except StopIteration as end:
            results[number] = end.value
        except Exception as problem:
            results[number] = problem

    for number in range(len(every)):
        go_on(number, None)
    while waiting:
        first = min(waiting.values(), key=lambda call: call.late)
        numbers = [number for number, call in waiting.items() if call.run == first.run]
        calls = [waiting.pop(number) for number in numbers]
        for number, found in zip(numbers, _run(calls), strict=True):
            go_on(number, found)
    return [results[number] for number in range(len(every))]


def _run(calls: Sequence[Call[Any]]) -> Sequence[object]:
    """What equal calls found; an exception where one failed."""
    try:
        return calls[0].run([call.given for call in calls])
    except Exception as problem:
        if len(calls) == 1:
            return [problem]
        return [found for call in calls for found in _run([call])]
