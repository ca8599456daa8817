"""Together: several set-ups and policies play the same prompts, and the models speak once.

Answer by answer, all of them one after the other, so that what is known of one text is hardly ever
needed again once they are through with it. See bench.script for what is computed, and what is
looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.bench.asking import Asking
from edgespec.bench.processes import News
from edgespec.bench.report import Played
from edgespec.bench.script import (
    TOGETHER,
    KnownGuesses,
    ScriptedGuesser,
    ScriptedHead,
    Text,
    plain_texts,
)
from edgespec.bench.setup import Setup, draft_of, load_base, one_thread, ring_world
from edgespec.drafting.base import Guesser
from edgespec.drafting.independent import IndependentGuesser
from edgespec.model.families import folds
from edgespec.model.hub import local_folder
from edgespec.model.sources import open_source
from edgespec.model.tokenizer import require_same_tokenizer
from edgespec.sim.toy_model import FakeBlock
from edgespec.sim.world import CoordinatorParts, World
from edgespec.types.features import NO_NEEDS


class Together:
    """Plays that share what the models say: `add` them, then `run`.

    All have the models, prompts, sampling and number of new tokens of `first`, which must be
    Setup.is_scripted.
    """

    def __init__(self, first: Setup) -> None:
        self._first = first
        self._loaded = load_base(first.model, first.dtype, 1)
        self._known: dict[str, KnownGuesses] = {}
        self._texts: list[Text] = []
        self.plays: list[Asking] = []

    def add(self, setup: Setup, policy: str, world: Callable[..., World] = World) -> Asking:
        """Another play; `world`: what makes its ring (see ring_world)."""
        head = ScriptedHead(setup.stages)
        draft = draft_of(setup, self._loaded.head, self._independent)
        assert draft is None or draft.needs == NO_NEEDS, "that source takes rows of the base"
        parts = CoordinatorParts(head, draft)
        ring = ring_world(setup, self._loaded, parts, lambda n: FakeBlock(n - 1), world)
        self.plays.append(Asking(ring, setup, policy, lambda number: self._begin(number, head)))
        return self.plays[-1]

    def run(self, news: News = lambda done: None) -> list[Played]:
        """Play all prompts; `news(done)`: how many answers there are."""
        count = len(self._first.prompts)
        for answers in range(1, count + 1):
            for at, play in enumerate(self.plays, 1):
                play.run(answers)
                news((answers - 1) * len(self.plays) + at)
            for number in range(count):
                if all(play.has_answered(number) for play in self.plays):
                    for known in self._known.values():
                        known.forget(number)
        return [play.played for play in self.plays]

    def _begin(self, number: int, head: ScriptedHead) -> None:
        """Somebody is going to ask that prompt."""
        while number >= len(self._texts):
            self._texts += self._next_texts()
        text = self._texts[number]
        head.add(text)
        for known in self._known.values():
            known.begin(number, text.tokens)

    def _next_texts(self) -> list[Text]:
        """Of the next few prompts."""
        first, start = self._first, len(self._texts)
        asked = first.prompts[start : start + TOGETHER]
        prompts = [tuple(self._loaded.tokenizer.encode(prompt.text)) for prompt in asked]
        room = self._loaded.context_length
        limits = [min(first.max_new_tokens, room - len(prompt)) for prompt in prompts]
        return plain_texts(
            self._loaded.blocks[0], self._loaded.head, prompts, limits, first.sampling
        )

    def _independent(self, folder: str) -> Guesser:
        if folder not in self._known:
            require_same_tokenizer(local_folder(self._first.model), local_folder(folder))
            source, dtype = open_source(folder), self._first.dtype
            vocabulary = self._loaded.head.vocab_size
            if folds(source.config):  # whose rows cannot be put together anew
                return IndependentGuesser(source, dtype, vocab_size=vocabulary)
            self._known[folder] = KnownGuesses(source, dtype, vocabulary)
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
