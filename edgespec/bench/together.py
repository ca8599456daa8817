"""Together: several set-ups and policies play the same prompts, and the models speak once.

Prompt by prompt, all of them one after the other, so that what is known of one text is never needed
again once they are through with it. See bench.script for what is computed, and what is looked up.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.bench.processes import News
from edgespec.bench.report import Played
from edgespec.bench.script import TOGETHER, KnownGuesses, ScriptedGuesser, ScriptedHead, plain_texts
from edgespec.bench.simulated import (
    Setup,
    ask,
    check_prompts,
    draft_of,
    load_base,
    one_thread,
    played_in,
    ring_world,
)
from edgespec.drafting.base import Guesser
from edgespec.model.hub import local_folder
from edgespec.model.sources import open_source
from edgespec.model.tokenizer import require_same_tokenizer
from edgespec.sim.faults import Fault
from edgespec.sim.toy_model import FakeBlock
from edgespec.sim.world import CoordinatorParts, World
from edgespec.types.features import NO_NEEDS
from edgespec.wire.client_messages import Finished


class Play:
    """One policy in a world of its own."""

    def __init__(self, setup: Setup, policy: str, head: ScriptedHead, world: World) -> None:
        self.setup, self.policy, self.head, self.world = setup, policy, head, world
        self.answers: list[Finished] = []

    @property
    def played(self) -> Played:
        """What has come of it so far."""
        return played_in(self.world, self.answers)


class Together:
    """Plays that share what the models say: `add` them, then `run`.

    All have the models, prompts, sampling and number of new tokens of `first`, which must be
    Setup.is_scripted.
    """

    def __init__(self, first: Setup) -> None:
        self._first = first
        self._loaded = load_base(first.model, first.dtype, 1)
        check_prompts(first, self._loaded)
        self._known: dict[str, KnownGuesses] = {}
        self.plays: list[Play] = []

    def add(self, setup: Setup, policy: str, faults: Sequence[Fault] = ()) -> Play:
        """Another play."""
        head = ScriptedHead(setup.stages)
        draft = draft_of(setup, self._loaded.head, self._independent)
        assert draft is None or draft.needs == NO_NEEDS, "that source takes rows of the base"
        parts = CoordinatorParts(head, draft)
        world = ring_world(setup, self._loaded, parts, lambda n: FakeBlock(n - 1), faults)
        self.plays.append(Play(setup, policy, head, world))
        return self.plays[-1]

    def run(self, news: News = lambda done: None) -> list[Played]:
        """Play all prompts; `news(done)`: how many answers there are."""
        first, count = self._first, len(self._first.prompts)
        for start in range(0, count, TOGETHER):
            numbers = range(start, min(start + TOGETHER, count))
            prompts = [tuple(self._loaded.tokenizer.encode(first.prompts[n].text)) for n in numbers]
            room = self._loaded.context_length
            limits = [min(first.max_new_tokens, room - len(prompt)) for prompt in prompts]
            block, head = self._loaded.blocks[0], self._loaded.head
            texts = plain_texts(block, head, prompts, limits, first.sampling)
            for number, text in zip(numbers, texts, strict=True):
                for known in self._known.values():
                    known.begin(text.tokens, first.sampling)
                for at, play in enumerate(self.plays, 1):
                    play.head.begin(text)
                    play.answers.append(ask(play.world, play.setup, play.policy, number))
                    news(number * len(self.plays) + at)
        return [play.played for play in self.plays]

    def _independent(self, folder: str) -> Guesser:
        if folder not in self._known:
            require_same_tokenizer(local_folder(self._first.model), local_folder(folder))
            vocabulary = self._loaded.head.vocab_size
            self._known[folder] = KnownGuesses(open_source(folder), self._first.dtype, vocabulary)
        return ScriptedGuesser(self._known[folder])


def play_together(
    plays: Sequence[tuple[Setup, str]], news: News = lambda done: None
) -> list[Played]:
    """What comes of each policy on its ring (see Together)."""
    with one_thread():
        together = Together(plays[0][0])
        for setup, policy in plays:
            together.add(setup, policy)
        return together.run(news)
