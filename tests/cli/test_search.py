"""The coordinator is found where it is known to be or on the network, whichever it is first."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.keys import OWN

from edgespec.cli import search
from edgespec.cli.reach import address_of, admitted
from edgespec.cli.search import Search, Silent
from edgespec.config import Address
from edgespec.daemon.cluster import ClusterFolder
from edgespec.errors import AccessRefused, AddressUnavailable, ConfigError, PeerLost
from edgespec.net import discovery
from edgespec.net.discovery import Found
from edgespec.net.keys import Identity, KeyPair, Token, short
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.wire.codec import VERSION

LONG_S = 600.0
"""A wait that no test may come to the end of."""

DEVICE = Identity(KeyPair.new(), OWN.public)
CLUSTER = short(OWN.public)


class Told(Silent):
    """What was said."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes coordinators at the end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What discovery hears, turn by turn; a function is called and hears nothing. After the last
    turn nothing can come any more, so that a search which goes on fails."""

    def hear(*each: list[Found] | Callable[[], object]) -> None:
        left = list(each)

        def find(timeout: float) -> list[Found]:
            assert timeout <= search.TURN_S, "the known address waits for this"
            assert left, "it should have ended"
            one = left.pop(0)
            if isinstance(one, list):
                return one
            one()
            return []

        monkeypatch.setattr(search, "find_coordinators", find)
        for name in ("PAUSE_S", "SOON_S"):
            monkeypatch.setattr(search, name, 0.0)

    return hear


def free_port(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as closing_soon:
        return int(closing_soon.getsockname()[1])


def listening(
    opened: ExitStack, address: Address, own: KeyPair = OWN, why_not: str = ""
) -> Address:
    """A coordinator with this key, which says why it admits no other."""
    made = ZmqTransport.coordinator(address, Identity.of_coordinator(own), lambda _: why_not)
    opened.enter_context(closing(made))
    return replace(address, port=made.control_port)


def announced(address: Address, cluster: str = CLUSTER) -> Found:
    return Found("board", (address.host,), address.port, str(VERSION), "llama", "3", cluster)


def device(path: Path, address: str) -> ClusterFolder:
    return ClusterFolder.remember(path, DEVICE.own, OWN.public, "board", address)


def remembered(folder: ClusterFolder) -> str:
    return ClusterFolder.open(folder.path).address


# --- a coordinator that comes later ---------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_it_comes_where_it_was_without_any_multicast(
    host: str, tmp_path: Path, told: Told, opened: ExitStack, turns: Callable[..., None]
) -> None:
    """Boards are up before their coordinator, and no announcement ever comes through."""
    number = "127.0.0.1" if host == "localhost" else host
    home = Address(host, free_port(number))
    folder = device(tmp_path / "board", str(home))
    turns(list, list, lambda: listening(opened, Address(number, home.port)))
    assert address_of(folder, None, LONG_S, told) == home
    assert told.texts == [
        f"nothing listens at {home}; trying {home} again and looking for a coordinator on the "
        "local network, for 600 s at most"
    ]


def test_it_comes_where_the_user_says(
    told: Told, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Address("127.0.0.1", free_port())
    monkeypatch.setattr(search, "find_coordinators", None)  # nothing is announced on loopback
    pauses = [lambda: None, lambda: listening(opened, home)]
    monkeypatch.setattr(search.time, "sleep", lambda _: pauses.pop(0)())
    asked = Search(DEVICE, home, is_given=True, is_member=False)
    assert asked.run(LONG_S, told) == home
    assert told.texts == [f"nothing listens at {home}; trying {home} again, for 600 s at most"]


def test_it_has_moved_and_that_is_remembered(
    tmp_path: Path, opened: ExitStack, turns: Callable[..., None]
) -> None:
    folder = device(tmp_path / "board", f"127.0.0.1:{free_port()}")
    new = listening(opened, Address("127.0.0.1", 0))
    turns([announced(new)])
    assert address_of(folder, None, LONG_S, Silent()) == new
    assert remembered(folder) == str(new)


def test_another_cluster_has_its_old_address(
    tmp_path: Path, told: Told, opened: ExitStack, turns: Callable[..., None]
) -> None:
    other = listening(opened, Address("127.0.0.1", 0), KeyPair.new())
    new = listening(opened, Address("127.0.0.1", 0))
    folder = device(tmp_path / "board", str(other))
    turns(list, [announced(new)])
    assert address_of(folder, None, LONG_S, told) == new
    assert told.texts[0].startswith(f"another program than the coordinator listens at {other}; try")
    assert remembered(folder) == str(new)


def test_what_listens_and_proves_nothing_is_not_remembered(
    tmp_path: Path, opened: ExitStack, turns: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator may be too busy for a handshake: it is taken if it does not become another."""
    monkeypatch.setattr(search, "look", lambda *_: search.Seen.BUSY)
    folder = device(tmp_path / "board", "10.0.0.5:7430")
    turns(list)
    assert str(address_of(folder, None, LONG_S, Silent())) == "10.0.0.5:7430"
    assert str(address_of(folder, "10.0.0.6", LONG_S, Silent())) == "10.0.0.6:7430"
    assert remembered(folder) == "10.0.0.5:7430"


def test_a_name_that_was_good_once_may_be_so_again(
    tmp_path: Path, told: Told, opened: ExitStack, turns: Callable[..., None]
) -> None:
    """At boot, names come up after the board."""
    folder = device(tmp_path / "board", "board-a.invalid:7430")
    new = listening(opened, Address("127.0.0.1", 0))
    turns(list, [announced(new)], [announced(new)])
    assert address_of(folder, "board-a.invalid", LONG_S, told) == new
    assert "the host 'board-a.invalid' is unknown" in told.texts[0]


def test_what_may_take_long_begins_once_mistakes_have_been_told(
    opened: ExitStack, turns: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, begun = Address("127.0.0.2", free_port()), []
    turns(list, list, lambda: listening(opened, home))
    stranger = Search(DEVICE, home, is_member=False)
    stranger.run(LONG_S, Silent(), lambda: begun.append("at once"))
    monkeypatch.setattr(search, "PATIENT_S", 0.0)
    late = Address("127.0.0.3", free_port())
    turns(list, list, lambda: listening(opened, late))
    stranger = Search(DEVICE, late, is_member=False)
    stranger.run(LONG_S, Silent(), lambda: begun.append("later"))
    assert begun == ["later"]


def test_a_member_uses_the_time_and_looks_again_soon(
    opened: ExitStack, turns: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its coordinator may have been started together with it."""
    home = Address("127.0.0.2", free_port())
    turns()
    monkeypatch.setattr(search, "SOON_S", LONG_S)
    monkeypatch.setattr(search.time, "sleep", lambda seconds: None)
    begun = []
    search_of_member = Search(DEVICE, home)
    search_of_member.run(LONG_S, Silent(), lambda: begun.append(listening(opened, home)))
    assert begun == [home]


# --- mistakes -------------------------------------------------------------------------------------


def test_a_token_of_another_cluster_is_told_at_once(
    tmp_path: Path, opened: ExitStack, turns: Callable[..., None]
) -> None:
    """On the network, and at the address that is given."""
    token = Token.new(KeyPair.new().public)
    here = listening(opened, Address("127.0.0.1", 0))
    turns([announced(here)], [announced(here)])
    with pytest.raises(
        PeerLost, match=rf"no coordinator of cluster {short(token.coordinator)} was"
    ):
        admitted(tmp_path / "board", token, None, LONG_S, Silent())
    with pytest.raises(AccessRefused, match="is not the coordinator of the cluster"):
        admitted(tmp_path / "board", token, str(here), LONG_S, Silent())


def test_a_member_waits_for_its_own_coordinator_and_says_who_is_there(
    tmp_path: Path, told: Told, opened: ExitStack, turns: Callable[..., None]
) -> None:
    home = Address("127.0.0.1", free_port())
    other = announced(Address("10.0.0.9", 7430), "f" * 12)
    turns([other], [other], lambda: listening(opened, home))
    assert address_of(device(tmp_path / "board", str(home)), None, LONG_S, told) == home
    assert "there are only coordinators of other clusters here: board (llama, 3 s" in told.texts[-1]


def test_a_key_that_is_not_let_in_is_told_at_once(tmp_path: Path, opened: ExitStack) -> None:
    home = listening(opened, Address("127.0.0.1", 0), why_not="it was removed")
    folder = device(tmp_path / "board", str(home))
    with pytest.raises(AccessRefused, match="does not accept the key of this machine"):
        address_of(folder, None, LONG_S, Silent())
    with pytest.raises(AccessRefused, match="does not accept the key of this machine"):
        address_of(folder, str(home), LONG_S, Silent())


def test_an_unknown_host_is_told_at_once(tmp_path: Path) -> None:
    folder = device(tmp_path / "board", "10.0.0.5:7430")
    for host, words in (("x.invalid", "the host 'x.invalid' is unknown"), ("fe80::1", "%eth0")):
        with pytest.raises(AddressUnavailable, match=words):
            address_of(folder, host, LONG_S, Silent())


def test_where_no_coordinator_came_is_said_in_the_end(told: Told) -> None:
    home = Address("127.0.0.1", free_port())
    with pytest.raises(PeerLost, match=rf"^no coordinator answered at {home} within 0 s \(nothing"):
        Search(DEVICE, home, is_given=True).run(0.01, told)
    for wait in (0.0, float("nan"), 86401.0):
        with pytest.raises(ConfigError, match="wait is "):
            Search(DEVICE).run(wait, told)


def test_a_coordinator_that_takes_no_connection_is_named(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = replace(announced(Address("x", free_port())), addresses=("127.0.0.1", "127.0.0.2"))
    monkeypatch.setattr(search, "find_coordinators", lambda _: [gone])
    with pytest.raises(PeerLost, match=r"no connection can be made; does a firewall") as lost:
        Search(DEVICE).run(0.3, told)
    place = f"board (llama, 3 stages) is announced at 127.0.0.1:{gone.port}, 127.0.0.2:"
    assert place in str(lost.value)
    assert len(told.texts) == 1


def test_a_machine_without_a_network_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (search, discovery):
        monkeypatch.setattr(module, "own_interfaces", list)
    with pytest.raises(PeerLost, match="no network interface is up here"):
        Search(DEVICE).run(0.3, Silent())
