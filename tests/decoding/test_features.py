"""What a draft source needs beyond tokens: each committed row's hidden row, once, in order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from support.fake_draft import FakeDraft
from support.rings import FakeRing, assert_one_end, submit
from support.segments import run_block
from support.tiers import thorough, tiered

from edgespec.decoding.drafting import HiddenRows
from edgespec.decoding.flights import PartFlight, Returned
from edgespec.drafting.grower import NOTHING_FURTHER, Further
from edgespec.drafting.steps import Steps
from edgespec.policy.adaptive import Adaptive
from edgespec.policy.registry import POLICIES
from edgespec.sim.toy import VOCABULARY
from edgespec.sim.toy_model import FakeBlock
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.tree.ledger import Rows
from edgespec.types.features import NO_FEATURES, DraftNeeds, Features
from edgespec.types.tensor import Layers, Tensor
from edgespec.verify.rules import Grammar
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import Finished
from edgespec.wire.segment import Part

STAGES = 2
DRAFTING = sorted(name for name, policy in POLICIES.items() if policy.drafts)


@pytest.fixture(autouse=True)
def _small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing costs anything, as here, the adaptive policy would guess without end."""
    monkeypatch.setitem(POLICIES, "adaptive", Adaptive(width=3, most_rows=6))


def plain_run(tokens: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """The toy model's last hidden number at every position, and those that enter each layer, all
    tokens in one run."""
    entered: list[list[int]] = []
    ids = np.arange(len(tokens))
    rows = Rows(ids, ids - 1, np.array(tokens, np.int64), ids)
    hidden: Tensor | None = None
    for stage in range(STAGES):
        block = FakeBlock(stage)
        block.open(1, 0)
        sees = np.tri(len(tokens), dtype=np.bool_)
        job = run_block(1, 1, rows, hidden, 0, sees, Layers(tuple(range(STAGES))))
        hidden = block.run(job, lambda: False)
        entered.append(numbers(block.take_aux_hidden()))
    assert hidden is not None
    return numbers(hidden), entered


def numbers(hidden: Tensor | None) -> list[int]:
    """The rows of a toy tensor [n, 1]."""
    return [] if hidden is None else np.frombuffer(hidden.data, np.uint64).tolist()


class NeedyDraft(FakeDraft):
    """Writes down the hidden rows and the taps that it is given, by request."""

    def __init__(self, accuracy: float, *aux_hidden: int) -> None:
        super().__init__(STAGES, VOCABULARY, accuracy)
        self.needs = DraftNeeds(final_hidden=True, aux_layers=Layers(aux_hidden))
        self.aux_hidden = aux_hidden
        self.given: dict[int, list[int]] = {}
        self.aux_layers: dict[int, list[list[int]]] = {}
        self.contexts: dict[int, tuple[int, ...]] = {}

    def open(
        self, request: int, sampling: Sampling, grammar: Grammar | None = None, prompt: int = 0
    ) -> None:
        """Start a request."""
        super().open(request, sampling, grammar, prompt)
        self.given[request] = []
        self.aux_layers[request] = []

    def fork(self, request: int, base: int, rows: int, ends: bool) -> None:
        """What was given for the base is not given again."""
        assert len(self.given[base]) >= rows, "all of it came before"
        self.given[request] = self.given[base][:rows]
        self.aux_layers[request] = self.aux_layers[base][:rows]

    def refreshing(
        self,
        request: int,
        context: Sequence[int],
        depth: int,
        width: int,
        features: Features = NO_FEATURES,
    ) -> Steps[DraftedTree]:
        """A tree."""
        self._note(request, context, features)
        return super().refreshing(request, context, depth, width)

    def expanding(
        self,
        request: int,
        context: Sequence[int],
        paths: Sequence[Sequence[int]],
        width: int,
        features: Features = NO_FEATURES,
        further: Further = NOTHING_FURTHER,
    ) -> Steps[Children]:
        """Children."""
        self._note(request, context, features)
        return super().expanding(request, context, paths, width, NO_FEATURES, further)

    def _note(self, request: int, context: Sequence[int], features: Features) -> None:
        before = self.contexts.get(request, ())
        assert tuple(context[: len(before)]) == before
        self.contexts[request] = tuple(context)
        self.given[request] += numbers(features.final)
        if features.aux_hidden is not None:
            assert features.aux_layers == self.aux_hidden
            rows = np.frombuffer(features.aux_hidden.data, np.uint64).reshape(
                -1, len(self.aux_hidden)
            )
            self.aux_layers[request] += rows.tolist()
        if before and len(context) > len(before):
            assert len(self.given[request]) == len(context) - 1, "all but the newest token's"


@pytest.mark.parametrize("policy", DRAFTING)
@pytest.mark.parametrize(
    ("accuracy", "aux_hidden"), [(0.3, (0, 1)), thorough(0.9, (1,)), thorough(0.6, ())]
)
def test_every_certain_row_comes_once_and_in_order(
    policy: str, accuracy: float, aux_hidden: tuple[int, ...]
) -> None:
    """With what entered the tapped layers, however rows were pruned on the way."""
    draft = NeedyDraft(accuracy, *aux_hidden)
    fake = FakeRing(STAGES, draft=draft, prefill_chunk=3)
    asks = [submit(tag, prompt, 20, policy) for tag, prompt in ((1, "hello you"), (2, "a"))]
    for ask in asks:
        fake.ring.submit(ask)
    fake.ring.run()
    for request, ask in enumerate(asks, start=1):
        end = assert_one_end(fake.ring.replies, ask.tag)
        assert isinstance(end, Finished)
        assert end.token_ids == fake.expected(ask).token_ids
        whole = [*fake.codec.encode(ask.prompt), *end.token_ids]
        given = draft.given[request]
        hidden, entered = plain_run(whole)
        assert given == hidden[: len(given)]
        wanted = [list(row) for row in zip(*(entered[layer] for layer in aux_hidden), strict=True)]
        assert draft.aux_layers[request] == wanted[: len(given)]
        assert len(given) >= len(draft.contexts[request]) - 1


def test_a_lost_ring_doubles_no_row() -> None:
    rng = random.Random(7)
    for _ in range(40):
        draft = NeedyDraft(0.6)
        fake = FakeRing(STAGES, draft=draft, prefill_chunk=3)
        ask = submit(1, "hello", 8, rng.choice(DRAFTING))
        fake.ring.submit(ask)
        fake.take_turns(rng.randrange(120))
        fake.ring.lose("gone")
        fake.take_turns(rng.randrange(5))
        fake.ring.mend()
        fake.ring.run()
        end = assert_one_end(fake.ring.replies, 1)
        assert isinstance(end, Finished)
        hidden, _ = plain_run([*fake.codec.encode(ask.prompt), *end.token_ids])
        for given in draft.given.values():
            assert given == hidden[: len(given)]


@pytest.mark.parametrize("seed", tiered(range(8), range(2)))
def test_the_next_turn_goes_on_from_the_rows_that_were_given(seed: int) -> None:
    """In any conversation, by any policies, some of which draft nothing: of those nothing is kept
    for a source that needs the rows."""
    rng = random.Random(seed)
    draft = NeedyDraft(rng.choice([0.3, 0.9]), *rng.choice([(), (0, 1)]))
    fake = FakeRing(STAGES, draft=draft, prefill_chunk=rng.choice([3, 64]), kept_rows=2000)
    text, cached, drafted = "", 0, False
    for tag in range(1, 9):
        text = text[: rng.randint(20, 200)] + "".join(rng.choices("abcdef ", k=rng.randint(1, 30)))
        policy = rng.choice([*DRAFTING, "autoregressive"])
        ask = submit(tag, text, rng.randint(1, 25), policy)
        fake.ring.submit(ask)
        fake.ring.run()
        end = assert_one_end(fake.ring.replies, tag)
        assert isinstance(end, Finished)
        assert end.token_ids == fake.expected(ask).token_ids
        assert drafted or not end.cached_tokens
        cached += end.cached_tokens
        drafted |= policy in DRAFTING
        if policy in DRAFTING:
            hidden, _ = plain_run([*fake.codec.encode(text), *end.token_ids])
            given = draft.given[max(draft.given)]
            assert given == hidden[: len(given)]
            assert len(given) >= len(hidden) - 1
        text += end.text
    assert cached


def arrived(
    rows: HiddenRows, ids: list[int], hidden: Tensor, aux_hidden: Tensor | None = None
) -> None:
    """These rows came back."""
    numbers = np.array(ids, np.int64)
    part = Part(1, 0, False, 0, len(ids), numbers, numbers - 1, numbers, numbers[:0])
    flight = PartFlight(1, False, frozenset(ids), len(ids))
    returned = Returned(flight, Fraction(0), part, hidden, aux_hidden)
    rows.keep(returned, np.arange(len(ids)))


def test_rows_wait_for_those_before_them_and_dead_ones_go() -> None:
    hidden = HiddenRows(range(2), DraftNeeds(final_hidden=True))
    tensor = Tensor("uint8", (4, 1), bytes([10, 11, 12, 13]))
    arrived(hidden, [1, 2, 3, 4], tensor)
    assert hidden.take() == NO_FEATURES
    arrived(hidden, [0], Tensor("uint8", (1, 1), bytes([9])))
    assert hidden.take().final == Tensor("uint8", (2, 1), bytes([9, 10]))
    hidden.commit([3], 3)
    assert hidden.take().final == Tensor("uint8", (1, 1), bytes([12]))
    assert hidden.take() == NO_FEATURES
    hidden.commit([4, 5], 5)
    assert bytes(hidden.take().final.data) == bytes([13])  # type: ignore[union-attr]
    assert hidden._rows == {}


def test_taps_that_a_stage_forgot_or_changed_are_passed_over() -> None:
    hidden = Tensor("uint8", (1, 1), b"h")
    for bad in (None, Tensor("uint8", (1, 4), b"1234")):
        rows = HiddenRows(range(3), DraftNeeds(aux_layers=Layers((1, 4))))
        arrived(rows, [0], hidden, Tensor("uint8", (1, 2), b"ab"))
        arrived(rows, [1], hidden, bad)
        arrived(rows, [2], hidden, Tensor("uint8", (1, 2), b"cd"))
        taken = rows.take()
        assert taken.final is None
        assert taken.aux_layers == (1, 4)
        assert taken.aux_hidden == Tensor("uint8", (1, 2), b"ab")
        assert rows.take() == NO_FEATURES
