"""Every policy on even and uneven rings, and the times that `adaptive` learns there; run by name.

    python tests/benchmarks/rings.py --prompts FILE [--rings even,heavy-last,…] [--temperatures 0,1]
        [--policies all] [--new-tokens 64] [--limit N] [--check]

As `edgespec simulate` with the bundled pair, many times as fast: what the base answers is computed
once, and what the draft guesses behind a path too. Stages compute nothing, the head looks the
answer up; it is asked off the answer's path too, where its word is never used. All that is charged
is charged as ever, so that the figures are those of the command; `--check` plays the policies with
the real models too, on rings that have no slow stage, and compares. Prompts that were looked at
here must be none that reports are about.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from edgespec.backends.base import BlockBackend
from edgespec.bench.report import Played
from edgespec.bench.simulated import (
    LoadedBase,
    Setup,
    chosen_policies,
    load_base,
    one_thread,
    play,
    play_in,
    ring_world,
    world_of,
)
from edgespec.bench.workloads import Prompt, read_prompts
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.profiles import profile_named
from edgespec.daemon.settings import chosen_draft
from edgespec.drafting.base import TokenPath
from edgespec.drafting.grower import DraftSource
from edgespec.drafting.guess_scores import best_guesses
from edgespec.drafting.independent import GuessCache, IndependentGuesser
from edgespec.drafting.ranking import Ranking
from edgespec.drafting.whole_model import WholeModelGuesser
from edgespec.machines.effects import (
    RunBlock,
)
from edgespec.model.loader import Checkpoint
from edgespec.planning.cost_model import cost_model_named
from edgespec.sim.faults import SlowStage
from edgespec.sim.world import CoordinatorParts
from edgespec.tree.drafted import Children
from edgespec.tree.ledger import IntArray, Rows
from edgespec.types.features import NO_FEATURES
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Choice, Sampling, path_of
from edgespec.verify.top_logprobs import TopLogprobs

NANO, NX = "jetson-orin-nano-8gb", "jetson-orin-nx-16gb"
MOST_CHILDREN = 16  # of a path that any policy asks for


@dataclass(frozen=True)
class RingCase:
    """D0 is a Nano; `stages` are the others. `split`: layers of each; none given: evenly.
    `slow`: the stage that takes twice as long; 0: none."""

    stages: tuple[str, ...] = (NANO,) * 4
    split: tuple[int, ...] = ()
    slow: int = 0
    model: str = "llama-2-13b"


RINGS = {
    "even": RingCase(),
    "heavy-last": RingCase(split=(9, 9, 10, 12)),
    "mixed": RingCase((NX, NX, NX, NANO)),
    "slow-1": RingCase(slow=1),
    "slow-2": RingCase(slow=2),
    "slow-4": RingCase(slow=4),
    "one": RingCase((NANO,), model="llama-2-7b"),
    "two": RingCase((NANO,) * 2, model="llama-2-7b"),
    "even-8": RingCase((NANO,) * 8),
    "heavy-last-8": RingCase((NANO,) * 8, (4, 5, 5, 5, 5, 5, 5, 6)),
}


def setup_of(
    case: RingCase, prompts: Sequence[Prompt], temperature: float, new_tokens: int
) -> Setup:
    """What `edgespec simulate` would play."""
    return Setup(
        model=bundled("base"),
        draft=str(chosen_draft("", "")),
        dtype="float64",
        profiles=tuple(profile_named(name) for name in (NANO, *case.stages)),
        cost_model=cost_model_named(case.model),
        link=None,
        prompts=tuple(prompts),
        max_new_tokens=new_tokens,
        sampling=Sampling(temperature),
        split=case.split,
    )


@dataclass
class Endless:
    """A tokenizer none of whose tokens ends an answer: target tokens after such a token are
    used."""

    tokenizer: Any
    eos_ids: Collection[int] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


class Script:
    """What the models say about some prompts at one temperature, computed once."""

    def __init__(self, setup: Setup) -> None:
        self._loaded = load_base(setup.model, setup.dtype, setup.stages)
        endless = replace(self._loaded, tokenizer=cast("Any", Endless(self._loaded.tokenizer)))
        plain = play_in(world_of(replace(setup, draft=""), endless), setup, "autoregressive")
        read = [self._loaded.tokenizer.encode(prompt.text) for prompt in setup.prompts]
        self._texts = [
            (*prompt, *answer) for prompt, answer in zip(read, plain.tokens, strict=True)
        ]
        self._sampling = setup.sampling
        self.draft = IndependentGuesser(
            Checkpoint(bundled("draft")), setup.dtype, vocab_size=self._loaded.head.vocab_size
        )
        self._known: dict[tuple[object, ...], tuple[IntArray, np.ndarray]] = {}
        self._lengths = [len(prompt) for prompt in read]
        self._open = -1

    def text_of(self, context: Sequence[int]) -> int:
        """The number of the text that begins so."""
        size = len(context)
        return next(n for n, text in enumerate(self._texts) if text[:size] == tuple(context))

    def token(self, text: int, position: int) -> int:
        """The token at that position; 0 beyond the text."""
        whole = self._texts[text]
        return whole[position] if position < len(whole) else 0

    def children(
        self, text: int, context: int, paths: Sequence[TokenPath], draft_temperature: float | None
    ) -> list[tuple[IntArray, np.ndarray]]:
        """Tokens and log scores of the best children of each path behind `context` tokens."""
        keys = [(*self._place(text, context, path), text, draft_temperature) for path in paths]
        missing = [n for n, key in enumerate(keys) if key not in self._known]
        if missing:
            asked = [tuple(paths[n]) for n in missing]
            found = self._guess(text, context, asked, draft_temperature)
            self._known.update(zip((keys[n] for n in missing), found, strict=True))
        return [self._known[key] for key in keys]

    def _place(self, text: int, context: int, path: TokenPath) -> tuple[int, tuple[int, ...]]:
        """The same for all ways to say it: where the text is left, and what follows there."""
        at = 0
        while at < len(path) and self.token(text, context + at) == path[at]:
            at += 1
        return context + at, tuple(path[at:])

    def _guess(
        self, text: int, context: int, paths: list[tuple[int, ...]], draft_temperature: float | None
    ) -> list[tuple[IntArray, np.ndarray]]:
        draft = self.draft
        rows = draft._rows.get(0)
        if rows is None or self._open != text or len(rows.context) > context:
            draft.open(0, Sampling())
            self._open = text
        draft.read(0, self._texts[text][:context], NO_FEATURES)
        hidden = draft._rows[0].hidden_behind(paths)
        logits = draft._head.logits(hidden)[:, : draft._vocab_size]
        positions = context + np.array([len(path) for path in paths])
        rows, columns, scores = best_guesses(
            logits, positions, self._sampling, MOST_CHILDREN, draft_temperature
        )
        ends = np.searchsorted(rows, np.arange(1, len(paths)))
        return list(zip(np.split(columns, ends), np.split(scores, ends), strict=True))

    def play(self, setup: Setup, policy: str, slow: int = 0) -> tuple[Played, Any]:
        """One policy on that ring; with it what it has learnt of it."""
        head = ScriptedHead(self)
        guesser = ScriptedGuesser(self, head)
        draft = DraftSource(guesser) if setup.draft else None
        faults = [SlowStage(slow, 2.0, 0.0, 1e9)] if slow else []
        block = cast("Callable[[int], BlockBackend]", lambda number: ScriptedBlock())
        parts = CoordinatorParts(head, draft)
        head.lengths = self._lengths
        world = ring_world(setup, cast("LoadedBase", self._loaded), parts, block, faults)
        played = play_in(world, setup, policy, head.answered)
        return played, world.coordinator.estimates_of(policy)


class ScriptedHead:
    """A Head that looks the next token up; requests come one after the other."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.text = 0
        self.lengths: list[int] = []

    def answered(self, texts: int) -> None:
        """So many are."""
        self.text = texts

    def choose(
        self, hidden: Tensor, rows: Rows, sampling: Sampling, top: int = -1
    ) -> tuple[Choice, TopLogprobs | None]:
        """See Head."""

        def target(row: int) -> int:
            return self._script.token(self.text, int(rows.positions[row]) + 1)

        path = path_of(target, rows)
        taken = np.array([target(row) for row in path.tolist()], np.int64)
        return Choice(path, taken, np.zeros(len(path))), None


class ScriptedBlock:
    """A BlockBackend that computes nothing."""

    def open(self, request: int, reserve: int) -> None:
        """Nothing to do."""

    def fork(self, request: int, fork_of: int) -> None:
        """Nothing to do."""

    def run(self, job: RunBlock, stop: Callable[[], bool]) -> Tensor | None:
        """A byte a row."""
        rows = len(job.rows)
        return None if stop() else Tensor("uint8", (rows, 1), bytes(rows))

    def take_aux_hidden(self) -> Tensor | None:
        """There are none."""

    def gather(self, request: int, start: int, order: IntArray) -> None:
        """Nothing to do."""

    def close(self, request: int) -> None:
        """Nothing to do."""


class NoModel:
    """Stands for a draft's block, cache and output matrix: shapes alone are right."""

    device = torch.device("cpu")
    vocab_size = 1 << 31

    def new_cache(self, reserve: int) -> NoModel:
        """Itself."""
        return self

    def gather(self, start: int, order: IntArray) -> None:
        """Nothing to do."""

    def forward(self, tokens: torch.Tensor, *_: object) -> torch.Tensor:
        """Hidden rows of one number."""
        return torch.zeros(len(tokens), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As many rows."""
        return hidden


class ScriptedRanking(Ranking):
    """Takes the script's children, and learns its temperature as ever."""

    def __init__(self, script: Script, head: ScriptedHead) -> None:
        super().__init__()
        self._script, self._head = script, head

    def children(
        self,
        request: int,
        paths: Sequence[TokenPath],
        logits: torch.Tensor,
        positions: IntArray,
        width: int,
        token_ids: IntArray | None = None,
    ) -> Children:
        """See Ranking."""
        state = self._requests[request]
        context = int(positions[0]) - len(paths[0])
        found = self._script.children(self._head.text, context, paths, state.draft_temperature)
        cut = [(tokens[:width], scores[:width]) for tokens, scores in found]
        if state.draft_temperature is not None:
            state.feedback.guessed(paths, cut)
        parents = np.repeat(np.arange(len(cut)), [len(tokens) for tokens, _ in cut])
        tokens, scores = (np.concatenate([one[part] for one in cut]) for part in (0, 1))
        return Children(parents, tokens, scores)


class ScriptedGuesser(WholeModelGuesser[GuessCache]):
    """The bundled draft with the rows that it would run, and the script's guesses."""

    def __init__(self, script: Script, head: ScriptedHead) -> None:
        real, nothing = script.draft, cast("Any", NoModel())
        super().__init__(
            "independent",
            lambda: GuessCache(nothing, self.ran, self.between_layers),
            nothing,
            known=real._known,
            most_rows=real._max_rows,
            vocab_size=real._vocab_size,
        )
        self._ranking = ScriptedRanking(script, head)


def learnt_against_charged(setup: Setup, case: RingCase, estimates: Any, seen: int) -> str:
    """Seconds of the slowest stage by rows, and the spread, each learnt over charged."""
    slowness = [2.0 if number == case.slow else 1.0 for number in range(1, setup.stages + 1)]

    def each(rows: int) -> list[float]:
        costs = setup.costs().stages
        return [s * cost.block_seconds(rows, seen) for s, cost in zip(slowness, costs, strict=True)]

    words = []
    for rows in (1, 2, 4, 8, 16, 32):
        learnt = estimates.step.seconds(rows)
        words.append(f"{rows}: {learnt * 1e3:.1f}/{max(each(rows)) * 1e3:.1f}")
    spread = sum(each(4)) / max(each(4))
    return f"ms by rows {', '.join(words)}; spread {estimates.step.spread:.2f}/{spread:.2f}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--rings", default=",".join(RINGS))
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--policies", default="all")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    prompts = read_prompts(chosen.prompts, chosen.limit)
    policies = chosen_policies(chosen.policies.split(","), "independent")
    print("| ring | T | " + " | ".join(policies) + " | adaptive / best other |")
    print("| --- " * (3 + len(policies)) + "|", flush=True)
    with one_thread():
        for temperature in map(float, chosen.temperatures.split(",")):
            first = setup_of(RINGS["even"], prompts, temperature, chosen.new_tokens)
            script = Script(first)
            for name in chosen.rings.split(","):
                _row(script, name, first, policies, check=chosen.check)
    return 0


def _row(script: Script, name: str, first: Setup, policies: Sequence[str], *, check: bool) -> None:
    case = RINGS[name]
    setup = setup_of(case, first.prompts, float(first.sampling.temperature), first.max_new_tokens)
    speeds = {}
    learnt = ""
    for policy in policies:
        played, estimates = script.play(setup, policy, case.slow)
        speeds[policy] = played.speed
        if policy == "adaptive":
            seen = sum(a.prompt_tokens + a.new_tokens // 2 for a in played.answers)
            learnt = learnt_against_charged(setup, case, estimates, seen // len(played.answers))
        if check and not case.slow:
            assert play(setup, policy).speed == played.speed, f"{policy} on {name} is not the same"
    others = max((speeds[p] for p in policies if p != "adaptive"), default=0.0)
    ratio = f"{speeds['adaptive'] / others:.3f}" if others and "adaptive" in speeds else ""
    cells = " | ".join(f"{speeds[policy]:.2f}" for policy in policies)
    print(f"| {name} | {first.sampling.temperature:g} | {cells} | {ratio} |", flush=True)
    print(f"  {name}: {learnt}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
