"""Scenes: what who watches sees, that it is true, and that nobody who does not watch pays."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from support.rings import FakeRing, submit

from edgespec.decoding.snapshot import MOST_WATCHERS, SNAPSHOT_S
from edgespec.decoding.stage_stats import LONGEST_WATCH_S, RAN_S, RunLog
from edgespec.machines.effects import (
    Effect,
    SendPeer,
    SendStages,
)
from edgespec.machines.events import (
    Event,
    MessageArrived,
    PeerGone,
    Tick,
)
from edgespec.sim.toy import ToyCodec
from edgespec.wire.client_messages import Finished, Tokens
from edgespec.wire.codec import decode, encode
from edgespec.wire.snapshots import (
    MOST_NODES,
    MOST_RUNS,
    Snapshot,
    StageActivity,
    StageRun,
    Subscribe,
    SubscribeActivity,
)

WATCHER = b"page"
STEP_S = 0.01


def watch(
    ring: FakeRing,
    seconds: float = LONGEST_WATCH_S,
    peer: bytes = WATCHER,
    requests: tuple[int, ...] = (),
) -> None:
    """Begin, or renew, a watch."""
    ring.tell(MessageArrived(peer, Subscribe(seconds, requests)))


def tick(ring: FakeRing) -> None:
    """Let time pass, and give every machine whose deadline came its Tick."""
    local = ring.ring
    local.now += STEP_S
    for number, machine in enumerate((ring.coordinator, *ring.machines)):
        deadline = machine.deadline()
        if deadline is not None and local.now >= deadline:
            local.dispatch(number, machine.handle(Tick(), local.now))


def play(ring: FakeRing) -> Iterator[None]:
    """Single steps with a little time between them, until nothing is left to do."""
    while True:
        while ring.take_turns(1):
            tick(ring)
            yield
        if not any(m.deadline() is not None for m in (ring.coordinator, *ring.machines)):
            return
        tick(ring)


def answering(ring: FakeRing, ends: int = 40, **asked: object) -> list[Snapshot]:
    """All scenes of an answer that have tokens."""
    watch(ring)
    ring.tell(MessageArrived(b"client", submit(max_new_tokens=ends, **asked)))  # type: ignore[arg-type]
    return [scene for scene in run(ring) if scene.tokens]


@pytest.mark.parametrize("prompt", ["hello", "x" * 40])
def test_without_speculation_each_token_is_a_trip(prompt: str) -> None:
    """Also while the next one is on its way or being sampled, and for a prompt in many chunks."""
    seen = answering(FakeRing(3), prompt=prompt, policy="autoregressive")
    assert len(seen) > 10
    assert all(scene.tokens / scene.trips == pytest.approx(1.0) for scene in seen)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["adaptive", "flowspec", "pipedec"])
def test_trips_are_those_that_made_the_tokens(policy: str) -> None:
    ring = FakeRing(3, accuracy=1.0)
    seen = answering(ring, prompt="x" * 40, policy=policy)
    assert min(scene.tokens / scene.trips for scene in seen) > 0.999
    assert max(scene.tokens / scene.trips for scene in seen) > 1.5


@pytest.mark.thorough
def test_the_end_of_an_answer_and_what_is_behind_it_are_no_accepted_guesses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ToyCodec, "token", lambda self, token: (f"<{token}>", None))
    tokens = FakeRing(3).expected(submit(max_new_tokens=30)).token_ids
    for place in range(4, 30):
        answer, end = tokens[:place], tokens[place]
        if end in answer:
            continue
        ring = FakeRing(3, accuracy=1.0, eos_ids={end})
        answering(ring, policy="adaptive")
        accepted = {n.text for s in scenes(ring) for n in s.nodes if n.state == "accepted"}
        assert {f"<{token}>" for token in answer[-3:]} <= accepted
        root = {f"<{ring.codec.encode('hello')[-1]}>"}
        assert accepted - root <= {f"<{token}>" for token in answer}, end


def run(ring: FakeRing) -> list[Snapshot]:
    """To the end; all scenes on the way."""
    for _ in play(ring):
        pass
    return scenes(ring)


def scenes(ring: FakeRing) -> list[Snapshot]:
    """All so far."""
    return [m for m in ring.ring.replies if isinstance(m, Snapshot)]


@pytest.fixture
def ring() -> FakeRing:
    """Three stages and a draft that is right seven times out of ten."""
    return FakeRing(3)


@pytest.mark.parametrize("policy", ["flowspec", "adaptive", "autoregressive"])
def test_watching_changes_no_answer(policy: str) -> None:
    ask = submit(max_new_tokens=40, policy=policy)
    answers = []
    for watched in (False, True):
        ring = FakeRing(3)
        if watched:
            watch(ring)
        ring.ring.submit(ask)
        run(ring)
        answers.append(next(m for m in ring.ring.replies if isinstance(m, Finished)))
        assert bool(scenes(ring)) == watched
    assert answers[0].token_ids == answers[1].token_ids == ring.expected(ask).token_ids
    if policy != "adaptive":  # which learns times, and this ring's clock moves with every event
        assert answers[0].rows_sent == answers[1].rows_sent


def test_without_a_watcher_nobody_does_anything(ring: FakeRing) -> None:
    keeper = ring.coordinator._snapshot
    ring.ring.submit(submit(max_new_tokens=40))
    for _ in play(ring):
        assert keeper.deadline(True) is None
        assert all(machine.deadline() is None for machine in ring.machines)
        waiting = [m for node in range(4) for m in ring.ring.waiting_control(node)]
        assert not any(isinstance(m, StageActivity | SubscribeActivity) for m in waiting)
    assert not scenes(ring)
    assert not any((keeper._trails, keeper._runs, keeper._texts))


@pytest.mark.parametrize("policy", ["flowspec", "adaptive"])
def test_what_is_shown_is_true(policy: str) -> None:
    """Every accepted node is a token of the answer, in its place; states agree with the tree."""
    ring = FakeRing(3)
    ask = submit(prompt="hello", max_new_tokens=40, policy=policy)
    watch(ring)
    ring.ring.submit(ask)
    seen: Counter[str] = Counter()
    sources: set[str] = set()
    told = 0
    texts = [ring.codec.token(t)[0] for t in ring.expected(ask).token_ids]
    for _ in play(ring):
        found = scenes(ring)
        request = next(iter(ring.coordinator._requests.values()), None)
        tree = request.tree if request is not None else None
        if len(found) == told or tree is None or found[-1].root != tree.root:
            told = len(found)
            continue
        told, scene = len(found), found[-1]
        assert (scene.policy, scene.request) == (policy, request.number)
        for node in scene.nodes:
            seen[node.state] += 1
            sources.add(node.source)
            assert (node.id in tree) == (node.state != "pruned") or node.state == "accepted"
            assert 0.0 <= node.probability <= 1.0
            if node.id in tree and node.id != tree.root:
                assert node.state == ("sent" if tree[node.id].sent else "waiting")
                assert node.parent == tree[node.id].parent
        trunk = [node for node in scene.nodes if node.state == "accepted"]
        assert trunk[-1].id == tree.root
        assert all(b.parent == a.id for a, b in itertools.pairwise(trunk))
        shown = [node.text for node in trunk if node.source != "prompt"]
        assert texts[: scene.tokens][-len(shown) :] == shown or not shown
    assert set(seen) == {"accepted", "sent", "waiting", "pruned"}
    assert sources == {"prompt", "model", "levels" if policy == "flowspec" else "expansion"}


def test_of_several_requests_each_watcher_sees_the_oldest_and_what_it_has_chosen() -> None:
    """Each with its own accepted tokens: they read as one text."""
    ring = FakeRing(2, live=3)
    watch(ring)
    watch(ring, peer=b"other page", requests=(3, 99))
    shown: list[tuple[bytes, Snapshot]] = []
    handle = ring.coordinator.handle

    def noting(event: Event, now: float) -> list[Effect]:
        effects = handle(event, now)
        told = [e for e in effects if isinstance(e, SendPeer) and isinstance(e.message, Snapshot)]
        shown.extend((e.peer, e.message) for e in told)  # type: ignore[misc]
        return effects

    ring.coordinator.handle = noting  # type: ignore[method-assign]
    for tag in range(1, 4):
        ring.tell(MessageArrived(b"client", submit(tag, "hello", 40, seed=tag)))
    for _ in play(ring):
        pass
    seen = {
        peer: {s.request for p, s in shown if p == peer} - {0} for peer in (WATCHER, b"other page")
    }
    assert 1 in seen[WATCHER]
    assert seen[b"other page"] == {*seen[WATCHER], 3}
    of_the_third = [s for p, s in shown if p == b"other page" and s.request == 3 and s.place]
    assert {s.place for s in of_the_third} <= {1, 2}
    assert max(sum(n.state == "accepted" for n in s.nodes) for s in of_the_third) > 5
    ends = {r.tag: r.text for r in ring.ring.replies if isinstance(r, Finished)}
    for one in of_the_third:
        accepted = [n for n in one.nodes if n.state == "accepted" and n.source != "prompt"]
        assert "".join(n.text for n in accepted) in ends[3]


def test_at_most_eight_scenes_a_second(ring: FakeRing) -> None:
    watch(ring)
    ring.ring.submit(submit(max_new_tokens=60))
    when: list[float] = []
    for _ in play(ring):
        if len(scenes(ring)) > len(when):
            when.append(ring.ring.now)
    assert len(when) > 5
    # The first one is seen a step late.
    assert all(b - a > SNAPSHOT_S - 1.5 * STEP_S for a, b in itertools.pairwise(when))
    assert len(when) <= 2 + when[-1] / SNAPSHOT_S


def test_runs_of_the_stages_are_told_with_their_waste(ring: FakeRing) -> None:
    watch(ring)
    ring.ring.submit(submit(max_new_tokens=40, policy="flowspec"))
    found = run(ring)
    runs = [run for scene in found for run in scene.runs]
    assert {run.seq for run in runs} >= set(range(2, 10))
    assert any(run.wasted > 0 for run in runs)
    assert all(0 <= run.wasted <= run.rows and run.rows > 0 and run.ago >= 0.0 for run in runs)
    assert found[-1].state == "idle"
    assert found[-1].segments == ()


def test_segments_on_the_ring_and_what_of_them_is_dead(ring: FakeRing) -> None:
    watch(ring)
    ring.ring.submit(submit(max_new_tokens=40, policy="flowspec"))
    found = [scene for scene in run(ring) if scene.segments]
    assert any(s.dead for scene in found for s in scene.segments)
    assert all(0 <= s.dead <= s.rows for scene in found for s in scene.segments)


def test_a_watch_ends_by_itself_and_by_word(ring: FakeRing) -> None:
    ring.ring.submit(submit(max_new_tokens=100))
    playing = play(ring)
    for seconds in (1.0, 5.0):
        watch(ring, seconds)
        if seconds > 1.0:
            watch(ring, 0.0)
        until = ring.ring.now + 1.0
        while ring.ring.now < until + SNAPSHOT_S:
            next(playing)
        before = len(scenes(ring))
        for _ in range(40):
            next(playing)
        assert len(scenes(ring)) == before
    assert ring.coordinator._snapshot.deadline(True) is None


def test_who_is_gone_is_shown_nothing(ring: FakeRing) -> None:
    watch(ring)
    ring.tell(PeerGone(WATCHER))
    ring.ring.submit(submit())
    shown = len(scenes(ring))
    assert len(run(ring)) == shown


def test_only_so_many_may_watch_and_none_can_flood_the_stages(ring: FakeRing) -> None:
    watchers = [b"%d" % number for number in range(2 * MOST_WATCHERS)]
    told = []
    for peer in watchers * 3:
        effects = ring.coordinator.handle(MessageArrived(peer, Subscribe(1e9)), 0.0)
        told += [e for e in effects if isinstance(e, SendStages)]
    assert [e.message for e in told] == [SubscribeActivity(LONGEST_WATCH_S)]
    ring.ring.submit(submit())
    effects = ring.coordinator.handle(Tick(), 1.0)
    scenes_to = [
        e.peer for e in effects if isinstance(e, SendPeer) and isinstance(e.message, Snapshot)
    ]
    assert scenes_to == watchers[:MOST_WATCHERS]


def test_a_lost_ring_is_shown_as_paused_and_watched_again_when_it_is_back(ring: FakeRing) -> None:
    ask = submit(max_new_tokens=60)
    watch(ring)
    ring.ring.submit(ask)
    ring.ring.submit(submit(2, max_new_tokens=1))  # which waits behind it
    ring.take_turns(60)
    ring.ring.lose("stage 2 is gone")
    ring.ring.now += 1.0
    ring.tell(Tick())
    assert scenes(ring)[-1].state == "paused"
    assert scenes(ring)[-1].tokens > 0, "it is not the one that waits"
    assert scenes(ring)[-1].nodes == ()
    ring.ring.mend()
    assert all(
        any(isinstance(m, SubscribeActivity) for m in ring.ring.waiting_control(stage))
        for stage in (1, 2, 3)
    )
    run(ring)
    end = next(m for m in ring.ring.replies if isinstance(m, Finished))
    assert end.token_ids == ring.expected(ask).token_ids
    assert any(scene.state == "answering" for scene in scenes(ring))


def test_a_huge_tree_stays_within_what_a_message_holds() -> None:
    """A slow ring and an eager draft: more nodes than a scene may have."""
    ring = FakeRing(3, accuracy=0.2)
    watch(ring)
    ring.ring.submit(submit(max_new_tokens=60, policy="pipedec16"))
    most = 0
    for scene in run(ring):
        most = max(most, len(scene.nodes))
        ids = {node.id for node in scene.nodes}
        live = [n for n in scene.nodes if n.state in ("sent", "waiting")]
        assert all(node.parent in ids for node in live)
        assert decode(encode(scene)) == scene
    assert 50 < most <= MOST_NODES


def test_a_stage_tells_its_runs_four_times_a_second_at_most() -> None:
    log = RunLog()
    log.ended(1, 1, 0.0, 4, 4, 0.5)
    assert log.deadline() is None  # nobody asked
    log.observe(5.0, 0.0)
    told: list[tuple[float, tuple[StageRun, ...]]] = []
    for step in range(1, 1000):
        now = step * 0.01
        log.ended(1, step, now - 0.01, 4, 3, now)
        told += [(now, effect.message.runs) for effect in log.tell(now)]  # type: ignore[attr-defined]
    assert told[-1][0] < 5.0 + RAN_S
    assert all(b[0] - a[0] > RAN_S - 1e-6 for a, b in itertools.pairwise(told))
    assert sum(len(runs) for _, runs in told) == 499
    assert {run.wasted for _, runs in told for run in runs} == {1}
    for now, runs in told:
        ends = [now - run.ago for run in runs]
        assert ends == pytest.approx([run.seq * 0.01 for run in runs])


def test_a_stage_that_is_fast_keeps_the_newest_runs() -> None:
    log = RunLog()
    log.observe(5.0, 0.0)
    log.tell(0.0)
    for seq in range(1000):
        log.ended(1, seq, 0.0, 1, 1, 0.001)
    (effect,) = log.tell(1.0)
    assert [run.seq for run in effect.message.runs] == list(range(1000 - MOST_RUNS, 1000))  # type: ignore[union-attr]


def test_tokens_are_told_whether_or_not_anybody_watches(ring: FakeRing) -> None:
    watch(ring)
    ring.ring.submit(submit(max_new_tokens=30))
    run(ring)
    tokens = [t for m in ring.ring.replies if isinstance(m, Tokens) for t in m.token_ids]
    assert len(tokens) == 30
