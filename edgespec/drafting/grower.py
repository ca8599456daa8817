"""Draft source: grows trees of any guesser's guesses, level by level."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from edgespec.drafting.base import Guesser, TokenPath
from edgespec.drafting.steps import Steps
from edgespec.errors import LocalProtocolError
from edgespec.tree.drafted import FROM_ROOT, Children, DraftedTree, Floats
from edgespec.tree.ledger import IntArray
from edgespec.types.draft_pass import DraftWork
from edgespec.types.features import NO_FEATURES, Features
from edgespec.verify.rules import Grammar, Mask, chain, forced
from edgespec.verify.sampling import Sampling

MOST_CERTAIN = 64
"""Tokens of a chain that are looked for at once, if nothing else may come."""


@dataclass(slots=True)
class _Tree:
    """The tree that grows below one root. Guesses are numbered from 0 in topological order."""

    root_position: int
    parents: list[IntArray] = field(default_factory=list)
    tokens: list[IntArray] = field(default_factory=list)
    scores: list[Floats] = field(default_factory=list)
    sources: list[IntArray] = field(default_factory=list)
    paths: list[TokenPath] = field(default_factory=list)  # of the last level's guesses
    size: int = 0

    def frontier(self, width: int) -> tuple[list[TokenPath], IntArray, Floats]:
        """The `width` best guesses of the last level, in order: paths, indices, scores.

        Ties go to the smaller index. Before the first level it is the root alone.
        """
        if not self.tokens:
            return [()], np.array([FROM_ROOT]), np.zeros(1)
        newest = self.scores[-1]
        best = np.sort(np.argsort(-newest, kind="stable")[:width])
        paths = [self.paths[index] for index in best.tolist()]
        return paths, best + (self.size - len(newest)), newest[best]

    def add(self, above: list[TokenPath], at: IntArray, scores: Floats, children: Children) -> None:
        """Add one level: the children of the frontier's guesses, which have those paths, indices
        and scores."""
        rows, tokens = children.parents, children.tokens
        self.parents.append(at[rows])
        self.tokens.append(tokens)
        self.scores.append(scores[rows] + children.scores)
        self.sources.append(children.made_by)
        self.paths = [
            (*above[row], token) for row, token in zip(rows.tolist(), tokens.tolist(), strict=True)
        ]
        self.size += len(children)

    def drafted(self) -> DraftedTree:
        if not self.tokens:
            return DraftedTree.empty()
        return DraftedTree(
            np.concatenate(self.parents),
            np.concatenate(self.tokens),
            np.concatenate(self.scores),
            np.concatenate(self.sources),
        )


class Further(NamedTuple):
    """What else an expansion may expand: the best guesses by the score of their whole path, until
    `most` paths are expanded in all, none whose score is below `least`. `scores`: of the paths that
    are asked for. `free`: no model is run for any; what it would be given comes later."""

    scores: Sequence[float] = ()
    most: int = 0
    least: float = 0.0
    free: bool = False


NOTHING_FURTHER = Further()
AT_ONCE = 8
"""Guesses that are expanded together: nearly in the order of one by one, with an eighth of the
products."""


@dataclass(slots=True)
class _Drafting:
    """One request: the committed tokens that the guesser read, and the tree of the last refresh."""

    context: tuple[int, ...] = ()
    tree: _Tree | None = None
    grammar: Grammar | None = None
    prompt: int = 0  # tokens before the answer that the grammar is of


class TreeGrower:
    """Grows trees of a guesser's guesses; all that machines and backends see of drafting.

    Calls come from one thread, in order. Those that name a request raise LocalProtocolError if it
    is not open. What guesses comes as steps, so that several requests share passes (see
    drafting.steps).
    """

    def __init__(self, guesser: Guesser) -> None:
        self.name, self.sources, self.needs = guesser.name, guesser.sources, guesser.needs
        self._guesser = guesser
        self._let_in: Callable[[], object] = lambda: None
        self._requests: dict[int, _Drafting] = {}

    def open(
        self, request: int, sampling: Sampling, grammar: Grammar | None = None, prompt: int = 0
    ) -> None:
        """Start a request; with a `grammar` for what comes after the first `prompt` tokens, nothing
        else is guessed, and what is certain by it is so without asking the guesser."""
        self._requests[request] = _Drafting(grammar=grammar, prompt=prompt)
        self._guesser.open(request, sampling)

    def fork(self, request: int, base: int, rows: int, ends: bool) -> None:
        self._guesser.fork(request, base, rows, ends)

    def reading_part(self, request: int, context: Sequence[int], rows: int) -> Steps[None]:
        """Read the first `rows` tokens of a `context` that the request's next draft reads on."""
        self._state(request)
        yield from self._guesser.reading_part(request, context, rows)

    def refreshing(
        self,
        request: int,
        context: Sequence[int],
        depth: int,
        width: int,
        features: Features = NO_FEATURES,
    ) -> Steps[DraftedTree]:
        """Grow a new tree below the last token of `context` (all committed tokens, in order).

        `depth` levels below the root; at every level the `width` best frontier guesses get
        `width` children each (EAGLE-2; FlowSpec §3.2, initial tree generation). Returns every
        candidate, at most width + (depth - 1) * width**2; fewer levels, or none, where the guesser
        has nothing to say. Raises LocalProtocolError if the context did not only grow.
        """
        state = self._state(request)
        state.tree = None
        if not (yield from self._reading(request, state, context, features)):
            return DraftedTree.empty()
        state.tree = _Tree(root_position=len(context) - 1)
        return (yield from self._growing(request, state, state.tree, depth, width))

    def deepening(self, request: int, levels: int, width: int) -> Steps[DraftedTree]:
        """Grow the last tree by `levels` more (FlowSpec §3.4, score-aware); return all of it.

        Empty if there is none. A tree whose root is no longer the last token, as `expanding` was
        given a longer context, grows no further.
        """
        state = self._state(request)
        if state.tree is None:
            return DraftedTree.empty()
        return (yield from self._growing(request, state, state.tree, levels, width))

    def expanding(
        self,
        request: int,
        context: Sequence[int],
        paths: Sequence[TokenPath],
        width: int,
        features: Features = NO_FEATURES,
        further: Further = NOTHING_FURTHER,
    ) -> Steps[Children]:
        """Guess the `width` best children of each path after `context`; of a guesser that needs no
        pass for it, what is `further` wanted too.

        An empty path stands for the context's last token. A model runs what it lacks in one forward
        pass, a path's missing ancestors included (a head that reads its own output: one for each
        level); rows that were run before and still lie after the context are not run again,
        whatever draft ran them, unless what they read is known better by now. No children where
        `refreshing` would guess nothing. Raises as that does.
        """
        state = self._state(request)
        self._guesser.spare(request, further.free)
        able = not further.free or self._guesser.is_free
        able = able and (yield from self._reading(request, state, context, features))
        if width < 1 or not paths:
            return Children.none()
        found = yield from self._guessing(request, state, context, paths, width if able else 0)
        every = found
        if able and self._guesser.one_pass and further.most:
            every = yield from self._best_first(request, state, paths, found, width, further)
        if state.grammar is None:
            return every
        answer = tuple(context[state.prompt :])
        columns = found.parents[found.certain].tolist(), found.tokens[found.certain].tolist()
        sure = zip(*columns, strict=True)
        chains = [
            (at, (token, *chain(state.grammar, (*answer, *paths[at], token), MOST_CERTAIN)))
            for at, token in sure
        ]
        return replace(every, chains=tuple(chains))

    def let_in(self, call: Callable[[], object]) -> None:
        """Have `call()` made from now on between two layers of whatever models run, and between two
        paths that a grammar is asked about: it may do any work but this source's. The guesses are
        the same."""
        self._let_in = call
        self._guesser.let_in(call)

    def take_work(self) -> tuple[DraftWork, ...]:
        return self._guesser.take_work()

    def close(self, request: int) -> None:
        self._requests.pop(request, None)
        self._guesser.close(request)

    def _state(self, request: int) -> _Drafting:
        if request not in self._requests:
            raise LocalProtocolError(f"request {request} is not open on this draft source")
        return self._requests[request]

    def _reading(
        self, request: int, state: _Drafting, context: Sequence[int], features: Features
    ) -> Steps[bool]:
        """Hand the committed tokens on; False if nothing can be guessed after them."""
        committed = tuple(context)
        if not committed or committed[: len(state.context)] != state.context:
            raise LocalProtocolError(f"the context of request {request} did not only grow")
        if not (yield from self._guesser.reading(request, committed, features)):
            return False
        state.context = committed
        return True

    def _guessing(
        self,
        request: int,
        state: _Drafting,
        context: Sequence[int],
        paths: Sequence[TokenPath],
        width: int,
    ) -> Steps[Children]:
        """The `width` best children of each path after `context` that may come after it; with 0
        those that are certain alone."""
        if state.grammar is None:
            if not width:
                return Children.none()
            return (yield from self._guesser.guessing(request, paths, width))
        answer = tuple(context[state.prompt :])
        masks = []
        for path in paths:
            masks.append(state.grammar.allowed((*answer, *path)))
            self._let_in()  # a mask may take milliseconds
        known = {at: token for at, mask in enumerate(masks) if (token := forced(mask)) is not None}
        open_ones = [at for at, mask in enumerate(masks) if at not in known and mask.any()]
        found = Children.none()
        if open_ones and width:
            asked = [tuple(paths[at]) for at in open_ones]
            self._guesser.allow(
                request, {path: masks[at] for path, at in zip(asked, open_ones, strict=True)}
            )
            found = yield from self._guesser.guessing(request, asked, width)
            found = replace(found, parents=np.array(open_ones)[found.parents])
        return _merged(found, masks, known)

    def _best_first(
        self,
        request: int,
        state: _Drafting,
        asked: Sequence[TokenPath],
        children: Children,
        width: int,
        further: Further,
    ) -> Steps[Children]:
        """Those children, and what follows the best guesses among them and below them."""
        paths = [tuple(path) for path in asked]
        scores = list(further.scores)
        parts = [children]
        waiting: list[tuple[float, int]] = []  # guesses that may be expanded: score, and place
        expanded = len(paths)
        while True:
            newest = parts[-1]
            for at, token, score in zip(
                newest.parents.tolist(), newest.tokens.tolist(), newest.scores.tolist(), strict=True
            ):
                if scores[at] + score >= further.least:
                    heapq.heappush(waiting, (-(scores[at] + score), len(paths)))
                paths.append((*paths[at], token))
                scores.append(scores[at] + score)
            count = min(len(waiting), AT_ONCE, further.most - expanded)
            if count <= 0:
                break
            chosen = sorted(heapq.heappop(waiting)[1] for _ in range(count))
            expanded += count
            above = [paths[at] for at in chosen]
            below = yield from self._guessing(request, state, state.context, above, width)
            parts.append(replace(below, parents=np.array(chosen, np.int64)[below.parents]))
        return Children(
            np.concatenate([part.parents for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.scores for part in parts]),
            np.concatenate([part.made_by for part in parts]),
        )

    def _growing(
        self, request: int, state: _Drafting, tree: _Tree, levels: int, width: int
    ) -> Steps[DraftedTree]:
        """Grow `levels` levels, or as many as the guesser has something to say about."""
        if tree.root_position != len(state.context) - 1:
            return tree.drafted()
        for _ in range(levels if width > 0 else 0):
            paths, indices, above = tree.frontier(width)
            children = yield from self._guessing(request, state, state.context, paths, width)
            if not len(children):
                break
            tree.add(paths, indices, above, children)
        return tree.drafted()


def _merged(found: Children, masks: Sequence[Mask], known: Mapping[int, int]) -> Children:
    """The guesses that may come after their paths, with those that are certain, in order."""
    rows = zip(found.parents.tolist(), found.tokens.tolist(), strict=True)
    may = np.array([token < len(masks[at]) and masks[at][token] for at, token in rows], np.bool_)
    sure = np.array([*known], np.int64)
    parents = np.concatenate([found.parents[may], sure])
    order = np.argsort(parents, kind="stable")
    tokens = np.concatenate([found.tokens[may], np.array([*known.values()], np.int64)])
    scores = np.concatenate([found.scores[may], np.zeros(len(sure))])
    made_by = np.concatenate([found.made_by[may], np.zeros(len(sure), np.int64)])
    return Children(parents[order], tokens[order], scores[order], made_by[order])
