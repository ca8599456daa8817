"""A LAN of network namespaces: its hosts and cables, and commands that find each other on it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support import announcer, namespaces
from support.commands import Command
from support.namespaces import Host, lan
from support.torch_rings import generated, prompts, tokenizer

from edgespec.cli.discover import discovered
from edgespec.errors import PeerLost
from edgespec.net.discovery import Found
from edgespec.wire.codec import VERSION

HERE = socket.gethostname().partition(".")[0]
NEW_TOKENS = 12
PING = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
ECHO = PING + "s.bind(('', 7)); print('ready', flush=True)\nwhile 1: s.sendto(*s.recvfrom(99))"


def ours() -> set[str]:
    """The namespaces that this process has made."""
    mark = namespaces._mark(os.getpid())
    return {name for name in os.listdir("/run/netns") if name.startswith(mark)}


def hears(host: Host, address: str) -> bool:
    """Whether an echo comes back from there."""
    family = "AF_INET6" if ":" in address else "AF_INET"
    code = (
        f"import socket; s = socket.socket(socket.{family}, socket.SOCK_DGRAM); s.settimeout(0.3); "
        f"s.sendto(b'x', socket.getaddrinfo({address!r}, 7)[0][4]); print(s.recv(9))"
    )
    with host.program(sys.executable, "-S", "-c", code) as asking:
        return asking.done().code == 0


# --- the LAN itself -----------------------------------------------------------------------------


def test_hosts_hear_each_other_while_their_cables_are_in() -> None:
    with lan("one", "two") as (one, two):
        assert (one.address, two.address) == ("10.77.0.1", "10.77.0.2")
        with two.program(sys.executable, "-S", "-c", ECHO) as echo:
            echo.until_out("ready")
            assert hears(one, two.address)
            assert not hears(one, "127.0.0.1")
            two.link_down()
            assert not hears(one, two.address)
            two.link_up()
            assert hears(one, two.address)
    assert not ours()


def test_two_lans_with_the_same_addresses_do_not_meet() -> None:
    with (
        lan("one", "two") as (one, two),
        lan("one", "two") as (other, _),
        two.program(sys.executable, "-S", "-c", ECHO) as echo,
    ):
        echo.until_out("ready")
        assert hears(one, two.address)
        assert not hears(other, two.address)


def test_a_process_on_a_host_is_the_program_itself() -> None:
    with lan("one") as (one,), one.program("sleep", "60") as sleeping:
        process = psutil.Process(sleeping.process.pid)
        limit = time.monotonic() + 5.0
        while process.name() != "sleep" and time.monotonic() < limit:
            time.sleep(0.01)
        assert process.name() == "sleep"
        assert process.ppid() == os.getpid()
        assert not process.children()
        sleeping.signal(signal.SIGTERM)
        assert sleeping.done().code == -signal.SIGTERM


def test_all_is_removed_when_a_test_fails() -> None:
    def failing() -> None:
        with lan("one"):
            assert len(ours()) == 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert not ours()


def test_what_a_killed_run_left_is_ended_and_removed() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from support.namespaces import lan\n"
        "with lan('one') as (one,), one.program('sleep', '600') as left:\n"
        "    print(left.process.pid, flush=True)\n"
        "    left.done()\n"
    )
    root = Path(__file__).resolve().parent.parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        left = psutil.Process(int(run.stdout.readline()))
        mark = namespaces._mark(run.pid)
        run.kill()
    assert left.is_running()
    assert any(name.startswith(mark) for name in os.listdir("/run/netns"))
    namespaces.require_namespaces()
    left.wait(5.0)
    assert not any(name.startswith(mark) for name in os.listdir("/run/netns"))


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)]
)
def test_a_test_is_left_out_only_outside_ci(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(outcome, match="install iproute2"), lan("one"):
        pass


# --- commands that find each other --------------------------------------------------------------


def announce(host: Host, port: int, model: str) -> Command:
    """Something that announces itself as a coordinator, and takes connections."""
    return host.program(sys.executable, announcer.__file__, "0.0.0.0", str(port), model)


def test_a_ring_that_was_told_no_address_gives_plain_decodings_text() -> None:
    prompt = next(iter(prompts().values()))
    plain = tokenizer().decode(list(generated(prompt, NEW_TOKENS)))
    ask = ("prompt", "--json", "--max-new-tokens", str(NEW_TOKENS), prompt)
    with lan("d0", "v1", "v2", "user") as (d0, v1, v2, user):
        v2.link_down()
        with (
            d0.command("serve", "--host", "0.0.0.0", "--stages", "2", "--dtype", "float64") as d0s,
            v1.command("join", "--stage", "1") as first,
            v2.command("join", "--stage", "2") as second,
        ):
            second.until_err("looking for a coordinator")
            first.until_err(f"at {d0.address}:7430")
            v2.link_up()
            with user.command(*ask) as far, d0.command(*ask) as near:
                answers = [far.done(), near.done()]
            for done in answers:
                assert done.code == 0, done.err
                assert json.loads(done.out)["text"] == plain
            assert (
                f"found the coordinator {HERE} (base, 2 stages) at {d0.address}" in answers[0].err
            )
            assert "looking for" not in answers[1].err
            d0s.signal(signal.SIGTERM)
            assert d0s.done().code == 0


def test_a_ring_on_loopback_is_asked_from_its_own_machine_alone() -> None:
    with lan("d0", "user") as (d0, user), d0.command("serve", "--stages", "1") as serve:
        serve.until_err("waiting for 1 stage")
        with user.command("prompt", "x", "--wait", "3") as asking:
            asking.done().assert_refused(
                "no coordinator was found within 3 s (asked by multicast DNS on eth0 (10.77.0.2))",
                "--host 0.0.0.0",
                "UDP port 5353",
                "--coordinator HOST[:PORT]",
                code=1,
            )
        assert "announced" not in serve.err


def test_of_several_coordinators_the_user_has_to_choose() -> None:
    with (
        lan("d0", "e0", "v1") as (d0, e0, v1),
        announce(d0, 7430, "llama") as one,
        announce(e0, 7431, "qwen") as other,
    ):
        one.until_err("announced as ")
        other.until_err("announced as ")
        with v1.command("join", "--stage", "1") as joining:
            done = joining.done()
        assert done.code == 2
        assert "2 coordinators are on this network; say which: --coordinator 10.77.0." in done.err
        for choice in ("--coordinator 10.77.0.1:7430 for ", "--coordinator 10.77.0.2:7431 for "):
            assert choice in done.err
        for model in ("(llama, 2 stages)", "(qwen, 2 stages)"):
            assert model in done.err
        other.process.kill()  # it withdraws nothing, and is announced no longer
        with v1.command("join", "--stage", "1", "--wait", "3") as joining:
            joining.until_err(f"(llama, 2 stages) at {d0.address}:7430")


def test_a_coordinator_that_takes_no_connection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closing:
        port = closing.getsockname()[1]
    gone = Found("board", ("127.0.0.1", "127.0.0.2"), port, str(VERSION), "llama", "3")
    monkeypatch.setattr("edgespec.cli.discover.find_coordinators", lambda _: [gone])
    said: list[str] = []
    with pytest.raises(PeerLost, match=r"no connection can be made; does a firewall") as lost:
        discovered(0.3, said.append)
    assert f"board (llama, 3 stages) is announced at 127.0.0.1:{port}, 127.0.0.2:" in str(
        lost.value
    )
    assert len(said) == 1


def test_a_machine_without_a_network_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("cli.discover", "net.discovery"):
        monkeypatch.setattr(f"edgespec.{room}.own_interfaces", list)
    with pytest.raises(PeerLost, match="no network interface is up here"):
        discovered(0.3, lambda _: None)
