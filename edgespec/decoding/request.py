"""Request: one prompt on its way to an answer. `handle` is the decode loop.

    rows are back from the ring → sample the tokens after them → walk the draft tree: emit what is
    committed, prune the rest everywhere → the policy decides: send rows, have guesses made
    guesses are there           → attach them to the tree      → the policy decides

The coordinator starts a request, hands it its events, and ends it. What its policy decides is
carried out by the scheduler, which knows the other requests (scheduler.py). Its client and answer
(answer.py), its rows on the ring (outbox.py) and its guesses (drafting.py) are objects of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.decoding.answer import Answer, HeadLog, RequestClient, RequestStats
from edgespec.decoding.drafting import READ_ONLY, Drafting
from edgespec.decoding.effects import RunHead
from edgespec.decoding.events import Drafted, HeadDone, PromptEncoded
from edgespec.decoding.flights import Flight, Returned
from edgespec.decoding.outbox import Outbox
from edgespec.decoding.prompt_scores import PromptScores
from edgespec.decoding.row_account import ReusedPrefix
from edgespec.decoding.shared import Shared
from edgespec.decoding.target_walk import chosen
from edgespec.decoding.told_rules import told_choosing
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import Effect, SendStages
from edgespec.machines.events import Event
from edgespec.policy.base import Decision, Policy, RequestView, Results, Send
from edgespec.policy.pace import Pace
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.ledger import Rows
from edgespec.tree.node import Advance
from edgespec.types.features import NO_NEEDS, DraftNeeds
from edgespec.types.tensor import Tensor
from edgespec.verify.rules import Rules, RulesAt
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
        client: RequestClient,
        submit: Submit,
        sampling: Sampling,
        policy: Policy,
        answer: Answer,
        shared: Shared,
        needs: DraftNeeds = NO_NEEDS,
        choosing: Choosing | None = None,
        rules: Rules | None = None,
        has_free_guesses: bool = False,
    ) -> None:
        """`needs`: of its draft source. `choosing`: how the last stage does; None: it does not.
        `rules`: what changes the logits, but for the grammar; None: nothing. `has_free_guesses`:
        see CoordinatorSettings."""
        self.client = client
        self.asked: Submit | None = submit  # until its prompt is encoded
        self.scores, self.top_logprobs = PromptScores(submit, client, answer.codec), submit.top
        self.sampling, self.policy, self.choosing = sampling, policy, choosing
        self.rules, self.needs = rules, needs
        self.answer, self.stats = answer, RequestStats(client.asked_at)
        self.prompt: tuple[int, ...] = ()
        self.thinks = False  # the prompt ends within a thought
        self.estimates = shared.learnt[policy.name]
        self._pace, self._shared = Pace(self.estimates.plain_time, free=has_free_guesses), shared
        self._last_position = self._capacity = self.recoveries = 0
        self.begin(number)

    def begin(self, number: int, reused: ReusedPrefix | None = None) -> None:
        """All that belongs to one ring: nothing is there yet but the committed tokens, of which
        rows of another request may stand for the first ones."""
        self.number = number
        self.opening = True  # no result has committed a token yet
        self.choosing = told_choosing(self.choosing, self.rules, self.answer.token_ids)
        self.outbox = Outbox(number, self.context, reused, self.scores.next_row)
        self.stats.reused(self.outbox.reused_rows)
        self.drafting = Drafting(
            number,
            self.policy,
            self.sampling,
            self.rules,
            self.estimates,
            self._shared,
            self.needs,
            self.outbox,
            self._last_position,
        )
        self.tree: DraftTree | None = None
        self.head_job: RunHead | None = None
        self._head_jobs, self._head_log = 0, HeadLog(self.top_logprobs)
        self.rows_missing_until: float | None = None
        self.wants_decision = False  # its policy is to be asked
        self.is_only_live = False  # no other request goes on

    # --- the decode loop ----------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One step of decoding; ends with `answer.finish_reason` set once the answer is whole. What
        is back from the ring waits for `take_result`."""
        match event:
            case Returned():
                self.outbox.put_returned(event)
            case HeadDone():
                return self._take_tokens(event, now)
            case Drafted():  # guesses are there: attach them to the tree
                known = len(self.prompt), self.answer.token_ids
                if self.drafting.take_guesses(event, self.tree, *known, now):
                    self.wants_decision = True
        return []

    @property
    def has_result(self) -> bool:
        """Whether rows are back that can be taken up now. One result after the other: what the one
        before it prunes need not go to the head."""
        # The policy may want the next one to wait for a draft.
        in_step = self.policy.results is Results.IN_STEP and not self.opening
        must_wait = self.head_job or (in_step and self.drafting.running)
        return bool(self.outbox.count_returned) and not must_wait and not self.answer.finish_reason

    @property
    def decides(self) -> bool:
        """Whether tokens of it are being chosen, or are to be."""
        return self.head_job is not None or self.has_result

    def take_result(self, now: float) -> list[Effect]:
        """Rows are back: have the tokens after those that are alive sampled."""
        returned = self.outbox.next_returned()
        part, tree = returned.part, self.tree
        self._shared.flights.clock.result(returned.entered)
        if returned.flight.lacks_live_rows(part, tree):
            self.rows_missing_until = now + LOST_WAIT_S
            return []
        if part.committed:
            return self._take_prefix_rows(returned, now)
        assert tree is not None
        self.drafting.keep_rows(returned, tree)
        if returned.hidden is None:
            return self._take_verdict(part, now)
        rows = tree.unverified(part.ids.tolist())
        return [self._sample(part, returned.hidden, rows, now)] if len(rows) else self._walk(now)

    def _take_tokens(self, done: HeadDone, now: float) -> list[Effect]:
        """The target tokens after the rows of a path are known: walk the tree along them."""
        if self.head_job is None or self.head_job.job != done.job:
            raise LocalProtocolError(f"head job {done.job} ended but was not running")
        ids = self.head_job.rows.ids[done.choice.rows].tolist()
        self._shared.d0.head_ended((self.number, done.job), now)
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
        told: list[Effect] = []
        if known := len(self.outbox.known(np.array(ids, np.int64))):
            told = self.scores.take(known, others)
            if self.scores.are_all:
                self.answer.end_unanswered()
            if self.scores.are_all or known == len(ids):
                return told
            ids, choice = ids[known:], choice.behind(known)
            others = others and others.part(slice(known, None))
        self._head_log.add(ids, choice, others)
        assert self.tree is not None
        self.tree.record(ids, choice.tokens.tolist())
        return told + self._walk(now)

    def _walk(self, now: float) -> list[Effect]:
        """Walk the tree as far as target tokens are known; emit what is committed, prune the rest
        here and on every stage."""
        tree = self.tree
        assert tree is not None
        if (self.outbox.in_flight or self.head_job) and self.policy.results is Results.TOGETHER:
            return []
        step = tree.advance()
        if self._shared.watcher.is_watched:
            self._shared.watcher.walked(self.number, len(self.outbox.prefix), tree, step)
        self.stats.walked(step, opening=self.opening, drafts=self.policy.drafts)
        self.drafting.walked(step, tree)
        if step.missed:
            self.outbox.missed()
        self.wants_decision = True
        if not step.tokens:
            return []
        told: list[Effect] = [self.client.reply(self._emit(step, now))]
        if not self.answer.finish_reason:
            live = (*tree.ids, *self.drafting.awaited(tree))
            told.append(SendStages(self.outbox.retains.next(tree.newest, step.passed, live)))
        return told

    def _sample(self, part: Part, hidden: Tensor, rows: Rows, now: float) -> RunHead:
        """Have the tokens after these rows sampled, down the path from the first, or scored."""
        job = self._head_jobs = self._head_jobs + 1
        index, tree = np.flatnonzero(np.isin(part.ids, rows.ids)), self.tree
        rules, known = None, self.outbox.known(rows.ids)
        if self.rules is not None and tree is not None and len(rows) > len(known):
            path = tree.path(int(rows.ids[len(known)]))
            rules = RulesAt(self.rules, (*self.answer.token_ids, *path))
        top = max(self.top_logprobs, self.scores.top) if len(known) else self.top_logprobs
        asked = self.sampling, top, rules, known
        self.head_job = RunHead(job, self.number, hidden.take(index), rows, *asked)
        self._shared.d0.heads.asked((self.number, job), len(rows), self.estimates, now)
        return self.head_job

    def _emit(self, step: Advance, now: float) -> Tokens:
        """Take committed tokens, up to the answer's end; what the client is told."""
        text: list[str] = []
        for token in step.tokens:
            text.append(self.answer.push(token))
            if self.answer.finish_reason:
                break
        used = len(text)
        ids = step.passed[:used]
        said = step.tokens[:used], "".join(text), self._head_log.as_json(ids, self.answer.codec)
        guessed = self.outbox.retains.used(ids)
        if self.drafting.hidden is not None:
            self.drafting.hidden.commit(guessed, ids[-1])
        margin, trip = self._head_log.take(ids), self._shared.flights.clock.now
        took = self.stats.committed(step.sources[:used], len(guessed), margin, now, trip)
        if self.is_only_live and not self.opening:
            self.estimates.came(self._pace, used, took)
        self.opening = False
        return Tokens(self.client.tag, *said, len(self.prompt), self.thinks)

    # --- what leaves --------------------------------------------------------------------------

    @property
    def decodes(self) -> bool:
        """Whether its policy may be asked: from the first token on, or as soon as the prompt is on
        its way if it begins with that."""
        return self.tree is not None and (not self.opening or self.policy.starts_with_prompt)

    @property
    def root_waits(self) -> bool:
        """Whether it has a root that does not even wait to leave."""
        return self.tree is not None and not self.tree.is_sent(self.tree.root)

    def want_decision(self, wanted: bool = True) -> None:
        """Its policy is to be asked, or not any more, as others decide for it."""
        self.wants_decision = wanted

    def decide(self) -> list[Decision]:
        """What its policy wants now."""
        self.wants_decision = False
        return self.policy.decide(self.view()) if self.decodes else []

    def carry_out(self, decision: Decision, now: float) -> list[Effect]:
        """Rows wait to leave from now on, or guesses are asked for."""
        if isinstance(decision, Send):
            self.send(decision.ids)
            return []
        return [self.drafting.ask(decision, self.tree, self.context, now)]

    def send(self, ids: Sequence[int]) -> None:
        """These nodes of the tree shall leave together, with the PPD rows that hang from them."""
        assert self.tree is not None
        rows = self.tree.send(ids)
        chains = self.drafting.hang_chains(self.tree, ids, rows)
        self.stats.sent(len(rows), len(chains))
        self.outbox.put_guesses(rows.joined(chains) if len(chains) else rows)

    def next_part(self, opens: Callable[[int], int]) -> Part | None:
        """What of it waits longest leaves; None if none of that is wanted any more, and its policy
        is asked again. `opens`: see Outbox.next_part."""
        tree = self.tree
        awaited = () if tree is None else self.drafting.awaited(tree)
        part = self.outbox.next_part(tree, awaited, self.choosing, opens)
        self.wants_decision |= part is None
        return part

    def has_left(self, seq: int, flight: Flight) -> None:
        """A part of it has left in that segment."""
        self.outbox.sent(seq)
        self.stats.on_ring(flight.entered)

    def view(self) -> RequestView:
        """What the policy may see."""
        tree, flights, drafting = self.tree, self._shared.flights, self.drafting
        assert tree is not None, "a request has no tree before its prompt is on its way"
        return RequestView(
            tree=tree,
            stages=flights.clock.stages,
            own_stage=self._shared.d0.own_stage,
            in_flight=self.outbox.in_flight,
            verifying=int(self.head_job is not None),
            drafting=drafting.running is not None,
            drafted_root=drafting.grown.root if drafting.grown else None,
            exhausted=drafting.exhausted,
            depth_left=min(self._last_position - tree.position(tree.root), self._shared.most_ahead),
            queued=flights.queued,
            ahead=self.outbox.rows_before if tree.is_sent(tree.root) else 0,
            estimates=self.estimates,
            way=self._pace.way,
        )

    # --- the prompt ---------------------------------------------------------------------------

    def encoded(self, told: PromptEncoded, most_new: int) -> None:
        """Its prompt's tokens are known, and so how many new ones fit: it can be started."""
        tokens, self.thinks = told.tokens, told.thinks
        self.answer.limit_to(most_new)
        self.asked, self.prompt = None, tokens
        self.scores.begin(tokens)
        self.rules = (self.rules or Rules()).begun(tokens, told.grammar, thinks=told.thinks) or None
        if told.grammar is not None:  # what alone may follow is known without a model
            self._pace = Pace(self.estimates.plain_time, free=True)
        # The target token of a row after this position would be a token past the limit.
        self._last_position = len(tokens) + most_new - 2
        # Cache rows that it may come to take up on every stage.
        self._capacity = len(tokens) + most_new + self._shared.spare_rows
        self.begin(self.number)

    def read_ahead(self, now: float) -> Effect:
        """Have the draft source read the committed tokens, while the stages do."""
        return self.drafting.ask(READ_ONLY, self.tree, self.context, now)

    def send_chunk(self, most: int) -> None:
        """The next rows of the prefix shall leave, `most` at most. When all are on their way, the
        tree begins at the last token."""
        # A draft source may need all of them.
        self.outbox.put_chunk(most, wants_all=self.drafting.hidden is not None)
        if self.is_read:
            last = len(self.outbox.prefix) - 1
            self.tree = DraftTree(last, last - 1, self.outbox.prefix[-1], last)
            self.tree.send((last,))
            # PPD rows below that row travel in a part of their own, as it is committed.
            chain = self.drafting.hang_chains(self.tree, (last,), Rows.none())
            self.stats.sent(0, len(chain))
            if len(chain):
                self.outbox.put_chain(chain)

    def _take_prefix_rows(self, returned: Returned, now: float) -> list[Effect]:
        hidden, part = self.drafting.hidden, returned.part
        if hidden is not None:
            hidden.keep(returned, np.arange(len(part.ids)))
        effects: list[Effect] = []
        if asked := len(self.outbox.asked(part.ids)):
            if returned.hidden is None:
                return self._take_verdict(part, now)
            rows = part.rows().take(np.arange(len(part.ids))[-asked:])
            effects.append(self._sample(part, returned.hidden, rows, now))
        if hidden is not None and self.drafting.running is None:
            # What the draft reads now it need not read before its first guess.
            effects.append(self.read_ahead(now))
        return effects

    # --- the end of a ring --------------------------------------------------------------------

    def restart(self, number: int, notice: str) -> None:
        """Its ring is lost: go on from the committed tokens, on the next ring, as `number`; its
        client is told that `notice` then.

        Whatever still comes of the old ring, its draft and its head names a request that is not
        known; row ids and epochs begin again.
        """
        self.recoveries += 1
        self.client.resumes(notice)
        self.begin(number)

    # --- what it is ---------------------------------------------------------------------------

    def only_live(self, alone: bool) -> None:
        """Whether no other request goes on."""
        self.is_only_live = alone

    def rows_after(self, tokens: int) -> int:
        """Cache rows that it may take up on every stage until it has so many further tokens."""
        answered = len(self.answer.token_ids)
        most = len(self.prompt) + answered + tokens + self._shared.spare_rows
        return min(self._capacity, most)

    @property
    def context(self) -> tuple[int, ...]:
        """All committed tokens in order, the root's included."""
        return self.prompt + tuple(self.answer.token_ids)

    @property
    def is_read(self) -> bool:
        """Whether the whole prefix is on its way."""
        return self.asked is None and not self.outbox.prefix_left
