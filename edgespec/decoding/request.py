"""The coordinator's state of one request: who asked, its tokens, its tree, its figures."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgespec.decoding.answer import Answer
from edgespec.decoding.effects import (
    RunHead,
)
from edgespec.decoding.figures import RequestStats, RingClock
from edgespec.decoding.flights import InFlight
from edgespec.decoding.hidden_rows import HiddenRows
from edgespec.decoding.logprobs import TokenLogprobs, token_logprobs
from edgespec.decoding.ppd_chains import ChainValues
from edgespec.decoding.ppd_rows import PPDRows
from edgespec.decoding.prefix_cache import CachedPrefix, ReusedPrefix
from edgespec.policy.base import Policy, View
from edgespec.policy.estimates import RingEstimates
from edgespec.tree.draft_tree import Advance, DraftTree
from edgespec.tree.ledger import IntArray, Rows
from edgespec.types.features import (
    NO_FEATURES,
    PPD_TOKENS,
    Features,
    PPDTable,
    aux_layers,
)
from edgespec.verify.sampling import Choice, Sampling
from edgespec.verify.top_logprobs import TopLogprobs
from edgespec.wire.client_messages import Finished, Submit, Tokens
from edgespec.wire.messages import Retain, Segment

SPECULATIVE_ROWS = 256
"""Cache rows reserved for guesses beside the prompt and the answer; more make the cache grow."""


@dataclass(frozen=True, slots=True)
class DraftJob:
    """A draft at work: below which root, how long the context was, what to merge of it.

    `expanding`: the nodes whose children are guessed; none if whole levels are grown. `started`:
    when it was asked for. `heads`: head jobs of the request so far, -1 if one was at work: a draft
    that had to wait for a head does not tell what drafting takes. `reads`: committed rows that it
    reads beside.
    """

    job: int
    root: int
    context_length: int
    keep: int
    only_new: bool
    expanding: tuple[int, ...] = ()
    started: float = 0.0
    heads: int = 0
    reads: int = 0


@dataclass(frozen=True, slots=True)
class HeadJob:
    """A result at the output head: the row ids whose next tokens are being sampled."""

    request: int
    ids: tuple[int, ...]


class Request:
    """One prompt on its way to an answer."""

    def __init__(
        self,
        number: int,
        peer: bytes,
        submit: Submit,
        sampling: Sampling,
        policy: Policy,
        answer: Answer,
        stages: int,
        needs: frozenset[str] = frozenset(),
    ) -> None:
        """`needs`: which of types.features its draft source must be given."""
        self.asked: Submit | None = submit  # until its prompt is encoded
        self.peer = peer
        self.tag = submit.tag
        self.asker = submit.scope
        self.top = submit.top
        self.sampling = sampling
        self.policy = policy
        self.prompt: tuple[int, ...] = ()
        self.answer = answer
        self.stats = RequestStats()
        self.estimates = RingEstimates()  # replaced by what earlier requests of the policy taught
        self.clock = RingClock(stages)
        self.last_position = self.reserve = 0
        self.recoveries = 0
        self.waiting_since = 0.0  # for a ring that was lost
        self.told = ""  # what its client was told last that it waits for
        self.needs = needs
        self._prompting: tuple[PPDTable, ChainValues] | None = None
        self._begin(number)

    def _begin(self, number: int) -> None:
        """All that belongs to one ring: nothing is there yet but the tokens that are committed."""
        self.number = number
        self.prefix = self.context
        self.opening = True  # no result has made a token committed yet
        self.prefilled = 0
        self.base: ReusedPrefix | None = None
        self._used_rows: list[int] = []
        self.hidden = self._hidden_from(0)
        self.prompts = PPDRows(*self._prompting) if self._prompting else None
        self.chunk = len(self.prefix)  # rows of the prefix that travel together
        self.tree: DraftTree | None = None
        self.in_flight = 0  # segments on the ring or, back from it, in `results`
        self.results: deque[tuple[InFlight, Segment]] = deque()
        self.ahead = 0  # rows of the segment sent last, if a miss has not made it worthless
        self.verifying = 0
        self.heads = 0
        self.draft: DraftJob | None = None
        self.grown: DraftJob | None = None
        self.exhausted = False
        self.margins: dict[int, float] = {}
        self._chances: dict[int, TokenLogprobs] = {}
        self.rows_missing_until: float | None = None
        self._epoch = 0
        self._accepted: list[tuple[int, tuple[int, ...]]] = []

    def encoded(self, prompt: tuple[int, ...], max_new_tokens: int) -> None:
        """Its prompt's tokens are known, and so how many new ones fit: it can be started."""
        self.asked = None
        self.prompt = prompt
        self.answer.limit = max_new_tokens
        # The verdict of a row behind this position would be a token past the limit.
        self.last_position = len(prompt) + max_new_tokens - 2
        self.reserve = len(prompt) + max_new_tokens + SPECULATIVE_ROWS
        self._begin(self.number)

    def restart(self, number: int) -> None:
        """Its ring is lost: go on from the committed tokens, on the next ring, as `number`.

        A new number makes whatever still comes of the old ring, its draft and its head a matter of
        a request that nobody knows any more; row ids and epochs begin again with it.
        """
        self.recoveries += 1
        self._begin(number)

    def use_prompts(self, table: PPDTable, values: ChainValues) -> None:
        """Its guesses carry prompt rows, as its draft source needs."""
        self._prompting = table, values
        self.prompts = PPDRows(table, values)

    def begin_with(self, base: ReusedPrefix | None) -> None:
        """Read only what comes behind the rows of an answered request, if there is one."""
        self.base = base
        if base is not None:
            self.hidden = self._hidden_from(len(base.ids))
            self.prefilled = len(base.ids)
            self.stats.cached = max(self.stats.cached, len(base.ids))

    def _hidden_from(self, first: int) -> HiddenRows | None:
        """What its draft source needs of the prefix from that row on, and of what follows."""
        rows = self.needs - {PPD_TOKENS}
        return HiddenRows(range(first, len(self.prefix)), rows) if rows else None

    @property
    def has_opened(self) -> bool:
        """Whether any of its rows is on its way."""
        return self.prefilled > (len(self.base.ids) if self.base else 0)

    @property
    def capacity(self) -> int:
        """Cache rows that it takes up on every stage."""
        return max(self.reserve, self.base.capacity if self.base else 0)

    def kept(self) -> CachedPrefix:
        """What every stage holds of it once it is answered: the rows of all committed tokens but
        the last, which nobody has had to run."""
        ids = (*range(len(self.prefix)), *self._used_rows)
        own = (self.base.own if self.base else 0) or len(self.prompt) - 1
        tokens = self.context[: len(ids)]
        return CachedPrefix(tokens, ids, self.capacity, self.asker, len(self.prompt), own)

    @property
    def is_in_step(self) -> bool:
        """Whether the policy wants the draft and the head to be done before the next result."""
        busy = self.draft is not None or self.verifying > 0
        return self.policy.drafts_in_step and not self.opening and busy

    @property
    def may_decide(self) -> bool:
        """Whether its policy may be asked: from the first token on, or as soon as the prompt is on
        its way if the policy begins with that."""
        started = self.policy.starts_with_prompt or not self.opening
        return started and self.tree is not None

    @property
    def calm(self) -> int:
        """Head jobs so far; -1 while one is at work."""
        return -1 if self.verifying else self.heads

    @property
    def epoch(self) -> int:
        """The newest retained set that was made."""
        return self._epoch

    @property
    def context(self) -> tuple[int, ...]:
        """All committed tokens in order, the root's included."""
        return self.prompt + tuple(self.answer.token_ids)

    def view(self, stages: int, queued: int) -> View:
        """What the policy may see."""
        assert self.tree is not None, "a request has no tree before its prompt is on its way"
        return View(
            tree=self.tree,
            stages=stages,
            in_flight=self.in_flight,
            verifying=self.verifying,
            drafting=self.draft is not None,
            drafted_root=self.grown.root if self.grown else None,
            exhausted=self.exhausted,
            depth_left=self.last_position - self.tree[self.tree.root].position,
            queued=queued,
            ahead=self.ahead if self.tree[self.tree.root].sent else 0,
            estimates=self.estimates,
        )

    def features(self) -> Features:
        """What the draft source needs of the committed rows and has not had yet."""
        features = NO_FEATURES if self.hidden is None else self.hidden.take()
        chain = None if self.prompts is None else self.prompts.take()
        if chain is None:
            return features
        return replace(features, anchor=chain[0], prompts=chain[1])

    @property
    def is_read(self) -> bool:
        """Whether the whole prefix is on its way."""
        return self.asked is None and self.prefilled == len(self.prefix)

    def next_chunk(self) -> Rows:
        """The rows of the prefix that travel next."""
        first = self.prefilled
        last = self.prefilled = min(first + self.chunk, len(self.prefix))
        ids = np.arange(first, last, dtype=np.int64)
        return Rows(ids, ids - 1, np.array(self.prefix[first:last], np.int64), ids)

    def rows_back(self, rows: Rows) -> int:
        """How many of the last rows of that chunk are wanted back: the first token comes of the
        prefix's last, and a draft source may need them all."""
        return len(rows) if self.hidden is not None else int(self.is_read)

    def plant(self) -> None:
        """Begin the tree at the prefix's last token, whose row is on its way."""
        last = len(self.prefix) - 1
        self.tree = DraftTree(last, last - 1, self.prefix[-1], last)
        self.tree.send((last,))

    def advanced(self, step: Advance) -> None:
        """Keep what the tree's walk tells; the first token comes of the prompt, not of guesses."""
        if not self.opening or len(step.tokens) > 1:
            self.stats.accepted_per_step[len(step.tokens) - self.opening] += 1
        self.estimates.verified(self.sampling.without_seed, step)
        if self.prompts is not None and step.tokens:
            assert self.tree is not None
            newest = self.tree[self.tree.root].position
            self.prompts.judge(len(step.tokens), step.missed, newest)
            self.prompts.settle(self.tree)
        if step.missed:
            self.ahead = 0
            self.stats.misses += self.policy.drafts and not self.opening

    def with_prompts(self, rows: Rows, ids: Sequence[int]) -> Rows:
        """These rows, with the prompt rows that hang from nodes `ids`."""
        if self.prompts is None:
            return rows
        assert self.tree is not None
        step = self.estimates.step
        chains = self.prompts.hang(self.tree, ids, len(rows), self.last_position, step)
        self.stats.prompt_rows += len(chains)
        return rows.joined(chains)

    def owns_prompt(self, row_id: int) -> bool:
        """Whether that row is, or was, one of its prompt rows."""
        return self.prompts is not None and row_id in self.prompts

    def arrived(self, segment: Segment, index: IntArray) -> None:
        """Keep these rows of a result, if the draft source needs them once they are committed."""
        if self.hidden is not None and segment.hidden is not None:
            aux_hidden = None if segment.aux_hidden is None else segment.aux_hidden.take(index)
            ids = segment.ids[index].tolist()
            self.hidden.arrived(ids, segment.hidden.take(index), aux_hidden)

    def sample(self, job: int, segment: Segment, index: IntArray) -> RunHead:
        """Have the tokens behind these rows of a result sampled."""
        assert segment.hidden is not None
        self.verifying += 1
        self.heads += 1
        hidden, positions = segment.hidden.take(index), segment.positions[index] + 1
        return RunHead(job, self.number, hidden, positions, self.sampling, self.top)

    def note_choice(self, ids: tuple[int, ...], choice: Choice, others: TopLogprobs | None) -> None:
        """Keep what the head said of these rows until they are committed, or gone."""
        self.margins.update(zip(ids, choice.margins.tolist(), strict=True))
        if others is not None:
            self._chances.update(zip(ids, token_logprobs(choice, others), strict=True))

    def push(self, step: Advance, now: float) -> Tokens:
        """Take committed tokens, up to the answer's end; what the client shall be told."""
        self.clock.committed()
        text: list[str] = []
        for token in step.tokens:
            text.append(self.answer.push(token))
            if self.answer.finish_reason:
                break
        used = len(text)
        log_probs = self._told(step.passed[:used])
        self._passed(step.passed[:used], now)
        self.stats.sources.update(step.sources[:used])
        self.opening = False
        return Tokens(self.tag, step.tokens[:used], "".join(text), log_probs)

    def _told(self, ids: tuple[int, ...]) -> str:
        """What the client is told of these rows' tokens, if it asked for it (see Tokens)."""
        if self.top < 0:
            return ""
        codec = self.answer.codec
        return json.dumps([self._chances[i].as_json(codec) for i in ids], ensure_ascii=False)

    def _passed(self, ids: tuple[int, ...], now: float) -> None:
        """Keep the figures of rows whose verdicts were used; forget those of older rows."""
        stats, newest = self.stats, ids[-1]
        if stats.first_token is None:
            stats.first_token = now
        guessed = [i for i in ids if i >= len(self.prefix)]
        stats.rows_used += len(guessed)
        self._used_rows += guessed
        if self.hidden is not None:
            self.hidden.passed(guessed, newest)
        stats.smallest_margin = min(stats.smallest_margin, *(self.margins[i] for i in ids))
        self.margins = {i: m for i, m in self.margins.items() if i > newest}
        self._chances = {i: c for i, c in self._chances.items() if i > newest}

    def retain(self, passed: tuple[int, ...]) -> Retain:
        """The retained set after `passed` became committed (FlowSpec §3.3).

        The accepted list reaches back to what every stage has acknowledged, so that a lost, late
        or repeated set is harmless.
        """
        assert self.tree is not None
        self._epoch += 1
        guessed = tuple(i for i in passed if i >= len(self.prefix))  # the prefix is committed
        self._accepted.append((self._epoch, guessed))
        accepted = tuple(i for _, ids in self._accepted for i in ids)
        awaited = () if self.prompts is None else self.prompts.awaited(self.tree)
        retained = (*self.tree.ids, *awaited)
        return Retain(self.number, self._epoch, self.tree.newest, accepted, retained)

    def last_retain(self) -> Retain:
        """It is answered: of its guesses none is wanted any more."""
        assert self.tree is not None
        self._epoch += 1
        accepted = tuple(self._used_rows)
        return Retain(self.number, self._epoch, self.tree.newest, accepted, ())

    def acknowledged(self, epoch: int) -> None:
        """Every stage has applied the retained sets up to `epoch`."""
        self._accepted = [entry for entry in self._accepted if entry[0] > epoch]

    def finished(
        self, reason: str, stages: int, draft: str, sources: tuple[str, ...], now: float
    ) -> Finished:
        """The request's good end; `sources`: the names of the draft's members."""
        stats, answer = self.stats, self.answer
        margin = stats.smallest_margin
        first = stats.started if stats.first_token is None else stats.first_token
        return Finished(
            tag=self.tag,
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            finish_reason=reason,
            policy=self.policy.name,
            draft=draft if self.policy.drafts else "none",
            stages=stages,
            prompt_tokens=len(self.prompt),
            new_tokens=len(answer.token_ids),
            seconds=now - stats.started,
            first_token_seconds=first - stats.started,
            trips=self.clock.trips,
            accepted_histogram=stats.histogram(),
            rows_sent=stats.rows_sent,
            rows_wasted=stats.rows_sent - stats.rows_used,
            misses=stats.misses,
            smallest_margin=margin if margin < float("inf") else 0.0,
            recoveries=self.recoveries,
            cached_tokens=stats.cached,
            sources=stats.of_sources(sources if self.policy.drafts else ()),
            prompt_rows=stats.prompt_rows,
        )


def segment_of(
    request: Request, seq: int, rows: Rows, committed: bool, reserve: int, want: int
) -> Segment:
    """Rows of a request as they enter the ring."""
    return Segment(
        request.number,
        seq,
        request.epoch,
        committed,
        reserve,
        want,
        rows.ids,
        rows.parents,
        rows.positions,
        rows.tokens,
        None,
        base=request.base.request if reserve and request.base else 0,
        base_ids=request.base.ids if reserve and request.base else (),
        aux_layers=aux_layers(request.needs),
        prompts=request.prompts.vectors(rows.tokens) if request.prompts else None,
    )
