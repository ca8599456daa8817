"""Request: one prompt on its way to an answer. `handle` is the decode loop.

    rows are back from the ring → sample the tokens after them → walk the draft tree: emit what is
    committed, prune the rest everywhere → the policy decides: send rows, have guesses made
    guesses are there           → attach them to the tree      → the policy decides

The coordinator starts a request, hands it its events, and ends it. What its policy decides is
carried out by the scheduler, which knows the other requests (scheduler.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from edgespec.decoding import drafts
from edgespec.decoding.answer import Answer
from edgespec.decoding.drafts import DraftJob
from edgespec.decoding.effects import RunHead
from edgespec.decoding.events import Drafted, HeadDone, Hinted
from edgespec.decoding.flights import Landed, Leaving
from edgespec.decoding.hidden_rows import HiddenRows
from edgespec.decoding.hints import RequestHints
from edgespec.decoding.logprobs import HeadLog
from edgespec.decoding.ppd_rows import PPDRows, with_chains
from edgespec.decoding.prefix import Prefix
from edgespec.decoding.prefix_cache import ReusedPrefix
from edgespec.decoding.request_stats import RequestStats
from edgespec.decoding.retain_log import RetainLog
from edgespec.decoding.shared import Shared
from edgespec.decoding.target_walk import chosen
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import Effect, SendPeer, SendStages
from edgespec.machines.events import Event
from edgespec.planning.memory import SPECULATIVE_ROWS
from edgespec.policy.base import Decision, Policy, RequestView, Results
from edgespec.policy.estimates import RingEstimates
from edgespec.policy.pace import Pace
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.ledger import Rows
from edgespec.tree.node import Advance
from edgespec.types.features import NO_NEEDS, DraftNeeds
from edgespec.verify.rules import NO_RULES, RulesAt
from edgespec.verify.sampling import Choice, Sampling
from edgespec.verify.top_logprobs import TopLogprobs
from edgespec.wire.client_messages import Submit, Tokens
from edgespec.wire.segment import Choosing, Part

LOST_WAIT_S = 1.0
"""A result that lacks live rows is followed by the Fault of the stage that dropped them; after this
many seconds without one, the request fails, so that nothing hangs."""


class Request:
    """One prompt on its way to an answer, on one ring after another if rings are lost."""

    def __init__(
        self,
        number: int,
        peer: bytes,
        submit: Submit,
        sampling: Sampling,
        policy: Policy,
        answer: Answer,
        shared: Shared,
        needs: DraftNeeds = NO_NEEDS,
        choosing: Choosing | None = None,
    ) -> None:
        """`needs`: of its draft source. `choosing`: how the last stage does; None: it does not."""
        self.asked: Submit | None = submit  # until its prompt is encoded
        self.peer = peer
        self.tag, self.asker, self.top = submit.tag, submit.scope, submit.top
        self.sampling = sampling
        self.rules = NO_RULES  # until admission says more
        self.choosing = choosing
        self.policy = policy
        self.prompt: tuple[int, ...] = ()
        self.answer = answer
        self.stats = RequestStats()
        self.estimates = shared.estimates.setdefault(policy.name, RingEstimates())
        self.pace = Pace(self.estimates.plain_time, free=shared.free_sources)
        self.last_position = self.capacity = self.recoveries = 0
        self.waiting_since = 0.0  # for a ring that was lost
        self.told = ""  # what its client was told last that it waits for
        self.begins_with = ""  # what it is told as it starts once more
        self.needs = needs
        self.flights, self.d0 = shared.flights, shared.d0
        self._on_walk = shared.on_walk
        self._ppd = shared.ppd if policy.drafts else None
        self.hinting = shared.hinting
        self._jobs = 0
        self._begin(number)

    def _begin(self, number: int) -> None:
        """All that belongs to one ring: nothing is there yet but the committed tokens."""
        self.number = number
        self.prefix = Prefix(self.context)
        self.opening = True  # no result has committed a token yet
        self.hidden = self._hidden_from(0)
        self.ppd_rows = PPDRows(*self._ppd) if self._ppd else None
        self.tree: DraftTree | None = None
        self.hints = RequestHints()
        # Parts of segments: those that wait for their turn, on the ring or, back, in `results`.
        self.in_flight = 0
        self.leaving: deque[Leaving] = deque()
        self.results: deque[Landed] = deque()
        self.rows_before = 0  # rows of the segment sent last, if no miss has made it worthless
        self.head_job: RunHead | None = None
        self.draft: DraftJob | None = None
        self.grown: DraftJob | None = None
        self.exhausted = False
        self.rows_missing_until: float | None = None
        self.asks = False  # its policy is to be asked
        self.alone = False  # no other request goes on
        self.turn = 0  # the segment in which rows of it left last; 0: none has
        self._head_log = HeadLog()
        self.retains = RetainLog(number, len(self.prefix))

    # --- the decode loop ----------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One step of decoding; ends with `answer.finish_reason` set once the answer is whole. What
        is back from the ring waits for `take_result`."""
        match event:
            case Landed():
                self.results.append(event)
            case HeadDone():
                return self._take_tokens(event, now)
            case Drafted():
                self._take_guesses(event, now)
            case Hinted(hint):
                self.asks |= self.hints.take(self, hint)
        return []

    @property
    def has_result(self) -> bool:
        """Whether rows are back that can be taken up now. One result after the other: what the one
        before it prunes need not go to the head."""
        # The policy may want the next one to wait for a draft.
        in_step = self.policy.results is Results.IN_STEP and not self.opening
        must_wait = self.head_job is not None or (in_step and self.draft is not None)
        return bool(self.results) and not must_wait and not self.answer.finish_reason

    def take_result(self, now: float) -> list[Effect]:
        """Rows are back: have the tokens after those that are alive sampled."""
        landed = self.results.popleft()
        flight, part = landed.flight, landed.part
        self.in_flight -= 1
        self.flights.clock.result(landed.entered)
        self.retains.acknowledge(part.epoch)
        if flight.lacks_live_rows(part, self.tree):
            self.rows_missing_until = now + LOST_WAIT_S
            return []
        if part.committed:
            return self._take_prefix_rows(landed, now)
        assert self.tree is not None
        if self.ppd_rows is not None and landed.hidden is not None:
            self.ppd_rows.arrived(flight.wanted, part.ids, landed.hidden)
            self.ppd_rows.settle(self.tree)
        if landed.hidden is None:
            return self._take_verdict(part, now)
        ids = part.ids.tolist()
        if self.hidden is not None and any(i in self.tree for i in ids):
            self.hidden.arrived(landed, np.flatnonzero([i in self.tree for i in ids]))
        rows = self.tree.unverified(ids)
        return [self._sample(landed, rows, now)] if len(rows) else self._walk(now)

    def _take_tokens(self, done: HeadDone, now: float) -> list[Effect]:
        """The target tokens after the rows of a path are known: walk the tree along them."""
        if self.head_job is None or self.head_job.job != done.job:
            raise LocalProtocolError(f"head job {done.job} ended but was not running")
        ids = self.head_job.rows.ids[done.choice.rows].tolist()
        self.d0.head_ended((self.number, done.job), now)
        self.head_job = None
        return self._verify(ids, done.choice, done.top_logprobs, now)

    def _take_verdict(self, part: Part, now: float) -> list[Effect]:
        """The same if the last stage chose them; a part without rows has none."""
        if part.verdict is None:
            return self._walk(now)
        return self._verify(part.verdict.ids.tolist(), *chosen(part.verdict), now)

    def _verify(
        self, ids: list[int], choice: Choice, others: TopLogprobs | None, now: float
    ) -> list[Effect]:
        self._head_log.add(ids, choice, others)
        assert self.tree is not None
        self.tree.record(ids, choice.tokens.tolist())
        return self._walk(now)

    def _take_guesses(self, drafted: Drafted, now: float) -> None:
        """Guesses are there: attach them to the tree."""
        if self.draft is not None and self.draft.job == drafted.job:
            drafts.merge(self, drafted.guesses, now)
            self.asks = True

    def _walk(self, now: float) -> list[Effect]:
        """Walk the tree as far as target tokens are known; emit what is committed, prune the rest
        here and on every stage."""
        assert self.tree is not None
        if (self.in_flight or self.head_job) and self.policy.results is Results.TOGETHER:
            return []
        step = self.tree.advance()
        self._on_walk(self, step)
        self._learn(step, self.tree)
        self.asks = True
        if not step.tokens:
            return []
        told = SendPeer(self.peer, self._emit(step, now))
        if self.answer.finish_reason:
            return [told]
        awaited = () if self.ppd_rows is None else self.ppd_rows.awaited(self.tree)
        live = (*self.tree.ids, *awaited)
        return [told, SendStages(self.retains.next(self.tree.newest, step.passed, live))]

    # --- what leaves --------------------------------------------------------------------------

    @property
    def decodes(self) -> bool:
        """Whether its policy may be asked: from the first token on, or as soon as the prompt is on
        its way if it begins with that."""
        return self.tree is not None and (not self.opening or self.policy.starts_with_prompt)

    def decide(self) -> list[Decision]:
        """What its policy wants now."""
        self.asks = False
        return self.policy.decide(self.view()) if self.decodes else []

    def send(self, ids: Sequence[int]) -> None:
        """These nodes of the tree shall leave together, with the PPD rows that hang from them."""
        assert self.tree is not None
        rows = self.tree.send(ids)
        self.stats.rows_sent += len(rows)
        rows = with_chains(self, rows, ids)
        self.rows_before = len(rows)
        self._leave(Leaving(rows, want=len(rows)))

    def _leave(self, leaving: Leaving) -> None:
        self.in_flight += 1
        self.leaving.append(leaving)

    def view(self) -> RequestView:
        """What the policy may see."""
        assert self.tree is not None, "a request has no tree before its prompt is on its way"
        root = self.tree.root
        return RequestView(
            tree=self.tree,
            stages=self.flights.clock.stages,
            own_stage=self.d0.own_stage,
            in_flight=self.in_flight,
            verifying=int(self.head_job is not None),
            drafting=self.draft is not None,
            drafted_root=self.grown.root if self.grown else None,
            exhausted=self.exhausted,
            depth_left=self.last_position - self.tree.position(root),
            queued=self.flights.queued,
            ahead=self.rows_before if self.tree.is_sent(root) else 0,
            estimates=self.estimates,
            way=self.pace.way,
        )

    # --- what a step leaves -------------------------------------------------------------------

    def _sample(self, landed: Landed, rows: Rows, now: float) -> RunHead:
        """Have the tokens sampled after these rows of a result, down the path from the first."""
        assert landed.hidden is not None
        assert self.tree is not None
        wanted, job = set(rows.ids.tolist()), self.next_job()
        index = [n for n, i in enumerate(landed.part.ids.tolist()) if i in wanted]
        hidden = landed.hidden.take(np.array(index))
        rules = None
        if self.rules:
            path = self.tree.path(int(rows.ids[0]))
            rules = RulesAt(self.rules, (*self.answer.token_ids, *path))
        self.head_job = RunHead(job, self.number, hidden, rows, self.sampling, self.top, rules)
        self.d0.head_asked((self.number, job), len(rows), self.estimates, now)
        return self.head_job

    def _learn(self, step: Advance, tree: DraftTree) -> None:
        """Learn from a walk what guesses are worth."""
        self.stats.walked(step, opening=self.opening, drafts=self.policy.drafts)
        self.hints.learn(self, step)
        self.estimates.verified(self.sampling.without_seed, step)
        if self.ppd_rows is not None and step.tokens:
            self.ppd_rows.walked(step, tree)
        if step.missed:
            self.rows_before = 0

    def _emit(self, step: Advance, now: float) -> Tokens:
        """Take committed tokens, up to the answer's end; what the client is told."""
        text: list[str] = []
        for token in step.tokens:
            text.append(self.answer.push(token))
            if self.answer.finish_reason:
                break
        used, stats = len(text), self.stats
        ids = step.passed[:used]
        logprobs = self._head_log.as_json(ids, self.answer.codec) if self.top >= 0 else ""
        guessed = self.retains.used(ids)
        if self.hidden is not None:
            self.hidden.passed(guessed, ids[-1])
        stats.smallest_margin = min(stats.smallest_margin, self._head_log.take(ids))
        took = stats.committed(step.sources[:used], len(guessed), now, self.flights.clock.now)
        if self.alone and not self.opening:
            self.estimates.came(self.pace, used, took)
        self.opening = False
        return Tokens(self.tag, step.tokens[:used], "".join(text), logprobs)

    # --- the prompt ---------------------------------------------------------------------------

    def encoded(self, prompt: tuple[int, ...], max_new_tokens: int) -> None:
        """Its prompt's tokens are known, and so how many new ones fit: it can be started."""
        self.asked = None
        self.prompt = prompt
        self.answer.limit = max_new_tokens
        # The target token of a row after this position would be a token past the limit.
        self.last_position = len(prompt) + max_new_tokens - 2
        # Cache rows that it may come to take up on every stage.
        self.capacity = len(prompt) + max_new_tokens + SPECULATIVE_ROWS
        self._begin(self.number)

    def begin_with(self, reused: ReusedPrefix | None) -> None:
        """Read only what comes after the rows of another request, if there is one."""
        self.prefix = Prefix(self.context, reused)
        self.hidden = self._hidden_from(self.prefix.reused_rows)
        self.stats.cached = max(self.stats.cached, self.prefix.reused_rows)

    def read_ahead(self, now: float) -> Effect:
        """Have the draft source read the committed tokens, while the stages do."""
        return drafts.ask(self, drafts.READ_ONLY, now)

    def send_chunk(self, most: int) -> None:
        """The next rows of the prefix shall leave, `most` at most: they overlap along the ring.
        When all are on their way, the tree begins at the last token."""
        reserve = 0 if self.prefix.has_begun else len(self.prefix)
        rows = self.prefix.next_rows(most)
        # The first token comes of the prefix's last row; a draft source may need them all.
        want = len(rows) if self.hidden is not None else int(self.is_read)
        self._leave(Leaving(rows, want, committed=True, reserve=reserve))
        if self.is_read:
            last = len(self.prefix) - 1
            self.tree = DraftTree(last, last - 1, self.prefix.tokens[-1], last)
            self.tree.send((last,))
            # PPD rows below that row travel in a part of their own, as it is committed.
            chain = with_chains(self, Rows.none(), (last,))
            if len(chain):
                self._leave(Leaving(chain, len(chain)))

    def _take_prefix_rows(self, landed: Landed, now: float) -> list[Effect]:
        if self.hidden is not None:
            self.hidden.arrived(landed, np.arange(len(landed.part.ids)))
        effects: list[Effect] = []
        if self.tree is not None and self.tree.root in landed.part.ids:
            if landed.hidden is None:
                return self._take_verdict(landed.part, now)
            effects.append(self._sample(landed, self.tree.unverified([self.tree.root]), now))
        if self.hidden is not None and self.draft is None:
            # What the draft reads now it need not read before its first guess.
            effects.append(self.read_ahead(now))
        return effects

    # --- the end of a ring, the end of the request --------------------------------------------

    def restart(self, number: int) -> None:
        """Its ring is lost: go on from the committed tokens, on the next ring, as `number`.

        Whatever still comes of the old ring, its draft and its head names a request that is not
        known; row ids and epochs begin again.
        """
        self.recoveries += 1
        self._begin(number)

    # --- what it is ---------------------------------------------------------------------------

    def next_job(self) -> int:
        """The number of its next head or draft job."""
        self._jobs += 1
        return self._jobs

    def rows_after(self, tokens: int) -> int:
        """Cache rows that it may take up on every stage until it has so many further tokens."""
        answered = len(self.answer.token_ids)
        return min(self.capacity, len(self.prompt) + answered + tokens + SPECULATIVE_ROWS)

    @property
    def context(self) -> tuple[int, ...]:
        """All committed tokens in order, the root's included."""
        return self.prompt + tuple(self.answer.token_ids)

    @property
    def is_read(self) -> bool:
        """Whether the whole prefix is on its way."""
        return self.asked is None and self.prefix.is_sent

    def _hidden_from(self, first: int) -> HiddenRows | None:
        """What its draft source needs of the prefix from that row on, and of what follows."""
        rows = range(first, len(self.prefix))
        return HiddenRows(rows, self.needs) if self.needs.hidden else None
