"""Asking: puts the prompts of a set-up to a simulated ring, and notes what comes of each when."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from edgespec.bench.load import Course
from edgespec.bench.report import Played
from edgespec.bench.setup import Setup
from edgespec.bench.workloads import submit_of
from edgespec.errors import ConfigError
from edgespec.sim.world import World
from edgespec.wire.client_messages import Failed, Finished, Tokens


class Asking:
    """One policy's answers to all prompts, in a world of its own.

    Without a load the prompts are asked one after the other, each on an idle ring. With one, each
    comes from a user of its own, at its time or behind an answer.
    """

    def __init__(
        self, world: World, setup: Setup, policy: str, asks: Callable[[int], None] = lambda n: None
    ) -> None:
        """`asks(number)`: prompt `number` is to be asked now or later."""
        self.world, self.setup, self.policy = world, setup, policy
        self._asks = asks
        self._asked: list[float] = []  # when, by the prompts' numbers
        self._tokens: list[list[float]] = []
        self._ends: dict[int, tuple[float, Finished]] = {}
        if setup.load is not None:
            for at in setup.load.times(len(setup.prompts), setup.sampling.seed):
                self._ask(at)

    @property
    def answers(self) -> list[Finished]:
        """In the order of the prompts, without their texts."""
        return [end for _, (_, end) in sorted(self._ends.items())]

    @property
    def courses(self) -> tuple[Course, ...]:
        """When all that was: of each answer, in the order of the prompts."""
        return tuple(
            Course(self._asked[number], tuple(self._tokens[number]), at)
            for number, (at, _) in sorted(self._ends.items())
        )

    @property
    def played(self) -> Played:
        """What has come of it so far."""
        world, load = self.world, self.setup.load
        courses = () if load is None else self.courses
        busy, loop = tuple(world.busy_seconds), world.loop_seconds
        return Played(tuple(self.answers), world.now, busy, load, courses, loop)

    def has_answered(self, number: int) -> bool:
        return number in self._ends

    def run(self, answers: int) -> None:
        """Go on until there are so many; behind the last one, and behind each one without a load,
        until the ring is empty. Raises ConfigError for a prompt that fails."""
        everything = answers == len(self.setup.prompts) or self.setup.load is None
        while len(self._ends) < answers:
            if not self.world.step():
                self._ask(self.world.now)
            self._read()
        if everything:
            self.world.run()
            self._read()

    def _ask(self, at: float) -> None:
        number, setup = len(self._asked), self.setup
        prompt = setup.prompts[number]
        self._asks(number)
        submit = submit_of(number, prompt.text, setup.max_new_tokens, setup.sampling, self.policy)
        if setup.load is not None:
            submit = replace(submit, scope=f"user {number}")
        self._asked.append(at)
        self._tokens.append([])
        self.world.submit(submit, at)

    def _read(self) -> None:
        """Take what the clients were told."""
        replies = self.world.replies.copy()
        self.world.replies.clear()  # the pieces of all answers would add up
        for reply in replies:
            match reply.message:
                case Tokens(number, token_ids):
                    self._tokens[number] += [reply.at] * len(token_ids)
                case Finished(number) as end:
                    assert number not in self._ends, "every request ends in exactly one way"
                    self._ends[number] = reply.at, replace(end, text="")
                    if self.setup.load is not None and len(self._asked) < len(self.setup.prompts):
                        self._ask(reply.at)
                case Failed(number, reason):
                    name = self.setup.prompts[number].id
                    raise ConfigError(f"prompt {name!r} with {self.policy}: {reason}")
