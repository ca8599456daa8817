"""Enrolment: a token lets one device in, once, into its own cluster; and leaving."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from support.keys import OWN, OWNER_IDENTITY
from support.nodes import HOST, PATIENCE_S, NodeRing, NodeThread
from support.rings import submit

from edgespec.config import Address
from edgespec.errors import AccessRefused, PeerLost
from edgespec.net.keys import Identity, KeyPair, Token
from edgespec.runtime.access_policy import CLIENT, STAGE, TOKEN
from edgespec.runtime.client import Client
from edgespec.runtime.enrolment import enrol, leave, require_stage


@pytest.fixture
def ring() -> Iterator[NodeRing]:
    """A coordinator without stages."""
    made = NodeRing(1)
    made.start_coordinator()
    yield made
    made.__exit__()


def token_of(ring: NodeRing) -> Token:
    """A valid one, as its user types it."""
    token = Token.parse(Token.new(OWN.public).text)
    ring.keys.roles[token.pair.public] = TOKEN
    return token


def test_a_device_that_is_enrolled_joins_with_its_own_key(ring: NodeRing) -> None:
    own = KeyPair.new()
    assert enrol(ring.address, token_of(ring), own, "jetson-1", PATIENCE_S) == "jetson-1"
    assert ring.keys.role_of(own.public) == STAGE
    assert ring.keys.names == {own.public: "jetson-1"}
    ring.threads[1] = NodeThread(ring.stage_node(1, who=Identity(own, OWN.public)))
    ask = submit(max_new_tokens=5)
    ring.assert_right(ask, ring.ask(ask))


def test_a_token_that_was_used_lets_nobody_in(ring: NodeRing) -> None:
    token = token_of(ring)
    enrol(ring.address, token, KeyPair.new(), "jetson-1", PATIENCE_S)
    other = KeyPair.new()
    with pytest.raises(AccessRefused, match=r"does not accept .*is used up.*edgespec token new"):
        enrol(ring.address, token, other, "jetson-2", PATIENCE_S)
    assert ring.keys.role_of(other.public) is None


def test_of_two_who_use_a_token_at_once_one_is_let_in(ring: NodeRing) -> None:
    """Both may be connected already when the first is admitted."""
    token, pairs = token_of(ring), [KeyPair.new() for _ in range(6)]
    problems: list[AccessRefused] = []

    def one(pair: KeyPair) -> None:
        try:
            enrol(ring.address, token, pair, "jetson", PATIENCE_S)
        except AccessRefused as problem:
            problems.append(problem)

    threads = [threading.Thread(target=one, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(problems) == 5
    assert [ring.keys.role_of(pair.public) for pair in pairs].count(STAGE) == 1


def test_a_token_is_good_for_nothing_else(ring: NodeRing) -> None:
    token = token_of(ring)
    who = Identity(token.pair, token.coordinator)
    with pytest.raises(AccessRefused, match="the role token does not allow that"):
        leave(ring.address, who, PATIENCE_S)
    assert ring.keys.role_of(token.pair.public) == TOKEN
    with Client(ring.address, who, PATIENCE_S, ring.timing) as client:
        with pytest.raises(AccessRefused, match="the role token does not allow that"):
            client.status()
        with pytest.raises(AccessRefused, match="the role token does not allow that"):
            list(client.ask(submit()))


def test_a_token_of_another_cluster_is_told_apart(ring: NodeRing) -> None:
    token = Token.new(KeyPair.new().public)
    started = time.monotonic()
    with pytest.raises(AccessRefused, match="is not the coordinator of the cluster"):
        enrol(ring.address, token, KeyPair.new(), "jetson-1", 100.0)
    assert time.monotonic() - started < 50.0, "it did not wait for one that may come yet"


def test_a_token_that_the_coordinator_never_made_is_refused(ring: NodeRing) -> None:
    with pytest.raises(AccessRefused, match="does not accept the key of this machine"):
        enrol(ring.address, Token.new(OWN.public), KeyPair.new(), "jetson-1", PATIENCE_S)


def test_nobody_there_is_an_error_that_says_what_to_look_at() -> None:
    started, used = time.monotonic(), threading.Event()
    token, device = Token.new(OWN.public), KeyPair.new()
    with pytest.raises(PeerLost, match=rf"no coordinator answered at {HOST}:9 within 1 s; is `ed"):
        enrol(Address(HOST, 9), token, device, "jetson-1", 0.6, used.set)
    assert used.is_set(), "the time is"
    assert time.monotonic() - started > 0.5


def test_a_stage_that_the_ring_has_not_is_refused_and_takes_no_place(ring: NodeRing) -> None:
    who = ring.keys.add("a board", STAGE)
    with pytest.raises(AccessRefused, match=r"refused: there is no stage 7: this ring has 1 stage"):
        require_stage(ring.address, who, 7, 60.0)
    require_stage(ring.address, who, 1, 60.0)
    assert ring.membership.status().nodes[0].state == "missing"


@pytest.mark.parametrize("role", [STAGE, CLIENT])
def test_who_leaves_is_forgotten(ring: NodeRing, role: str) -> None:
    who = ring.keys.add("who leaves", role)
    leave(ring.address, who, PATIENCE_S)
    assert ring.keys.role_of(who.own.public) is None
    with pytest.raises(AccessRefused, match="does not accept the key of this machine"):
        leave(ring.address, who, PATIENCE_S)


def test_the_owner_cannot_leave(ring: NodeRing) -> None:
    with pytest.raises(AccessRefused, match="the role owner does not allow that"):
        leave(ring.address, OWNER_IDENTITY, PATIENCE_S)
