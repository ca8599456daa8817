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
from support.keys import OWN
from support.namespaces import NETWORK, NETWORK_6, Host, lan
from support.torch_rings import generated, prompts, tokenizer

from edgespec.net.keys import KeyPair, short

HERE = socket.gethostname().partition(".")[0]
NEW_TOKENS = 12
PING = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
ECHO = PING + "s.bind(('', 7)); print('ready', flush=True)\nwhile 1: s.sendto(*s.recvfrom(99))"


def ours() -> set[str]:
    """The namespaces that this process has made."""
    mark = namespaces.mark_of(os.getpid())
    return {name for name in os.listdir("/run/netns") if name.startswith(mark)}


def hears(host: Host, address: str, tries: int = 200) -> bool:
    """Whether an echo comes back from there; a minute is for a busy machine."""
    family = "AF_INET6" if ":" in address else "AF_INET"
    code = (
        f"import socket; s = socket.socket(socket.{family}, socket.SOCK_DGRAM); s.settimeout(0.3)\n"
        f"for _ in range({tries}):\n"
        f"    s.sendto(b'x', socket.getaddrinfo({address!r}, 7)[0][4])\n"
        "    try: s.recv(9); break\n"
        "    except TimeoutError: pass\n"
        "else: raise SystemExit(1)\n"
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
            assert not hears(one, "127.0.0.1", tries=1)
            two.link_down()
            assert not hears(one, two.address, tries=1)
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
        assert not hears(other, two.address, tries=1)


def test_a_process_on_a_host_is_the_program_itself() -> None:
    with lan("one") as (one,), one.program("sleep", "60") as sleeping:
        process = psutil.Process(sleeping.process.pid)
        limit = time.monotonic() + 60.0
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
        mark = namespaces.mark_of(run.pid)
        run.kill()
    assert left.is_running()
    assert any(name.startswith(mark) for name in os.listdir("/run/netns"))
    namespaces.require_namespaces()
    left.wait(60.0)
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


OURS, OTHERS = short(OWN.public), "ba9876543210"
OTHER = KeyPair.new().public


def announce(host: Host, port: int, model: str, cluster: str) -> Command:
    """Something that announces itself as a coordinator, and takes connections."""
    return host.program(sys.executable, announcer.__file__, "0.0.0.0", str(port), model, cluster)


class Cluster:
    """One cluster: the folders of its machines, and the token that lets them in."""

    def __init__(self, folder: Path, d0: Host, *options: str) -> None:
        """Made on d0, which serves the bundled pair in float64."""
        self._folder = folder
        with self.on(d0, "init", "--dtype", "float64", *options) as made:
            done = made.done()
        assert done.code == 0, done.err
        self.token = done.out.split()[-1]

    def on(self, host: Host, command: str, *arguments: str) -> Command:
        """A command on a host, which has a folder of its own."""
        return host.command(command, "--cluster", str(self._folder / host.name), *arguments)

    def join(self, host: Host, *arguments: str) -> Command:
        """A stage there."""
        return self.on(host, "join", *arguments, self.token)

    def prompt(self, host: Host, text: str, *arguments: str) -> Command:
        """A question from there."""
        length = str(NEW_TOKENS)
        options = ("--raw", "--json", "--max-new-tokens", length, "--token", self.token, *arguments)
        return self.on(host, "prompt", *options, text)


def plain_text(prompt: str) -> str:
    """What one process makes of it."""
    return str(tokenizer().decode(list(generated(prompt, NEW_TOKENS))))


PROMPT = next(iter(prompts().values()))


@pytest.mark.thorough
def test_a_ring_that_was_told_no_address_gives_plain_decodings_text(tmp_path: Path) -> None:
    with lan("d0", "v1", "v2", "user") as (d0, v1, v2, user):
        cluster = Cluster(tmp_path, d0, "--stages", "2")
        v2.link_down()
        with (
            cluster.on(d0, "serve") as d0s,
            cluster.join(v1, "--stage", "1") as first,
            cluster.join(v2, "--stage", "2") as second,
        ):
            second.until_err("looking for a coordinator")
            first.until_err(f"at {d0.address}:7430")
            v2.link_up()
            with cluster.prompt(user, PROMPT) as far, cluster.prompt(d0, PROMPT) as near:
                answers = [far.done(), near.done()]
            for done in answers:
                assert done.code == 0, done.err
                assert json.loads(done.out)["text"] == plain_text(PROMPT)
            assert (
                f"found the coordinator {HERE} (base, 2 stages) at {d0.address}" in answers[0].err
            )
            assert "looking for" not in answers[1].err
            d0s.signal(signal.SIGTERM)
            assert d0s.done().code == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unique local", "link-local", "link-local, to a neighbour alone"])
def test_a_ring_without_ipv4_gives_plain_decodings_text(kind: str, tmp_path: Path) -> None:
    """Each machine has an interface more, so that nobody can guess by which a neighbour is met."""
    with lan("d0", "v1", "v2", "user") as hosts:
        d0, v1, v2, user = hosts
        for host in hosts:
            host.add_interface("aaa0")
            host.forget(NETWORK, *([] if kind == "unique local" else [NETWORK_6]))
        home = d0.ipv6 if kind == "unique local" else f"{d0.link_local}%eth0"
        listen = home if "neighbour" in kind else "::"
        cluster = Cluster(tmp_path, d0, "--stages", "2", "--host", listen)
        with cluster.on(d0, "serve") as d0s, cluster.join(v1) as first, cluster.join(v2) as second:
            first.until_err(f"at [{home}]:7430")
            second.until_err(f"at [{home}]:7430")
            with cluster.prompt(user, PROMPT) as asking:
                done = asking.done()
            assert done.code == 0, (done.err, d0s.err, first.err, second.err)
            assert json.loads(done.out)["text"] == plain_text(PROMPT)
            assert f"found the coordinator {HERE} (base, 2 stages) at [{home}]:7430" in done.err


@pytest.mark.thorough
def test_a_ring_on_loopback_is_asked_from_its_own_machine_alone(tmp_path: Path) -> None:
    with lan("d0", "user") as (d0, user):
        cluster = Cluster(tmp_path, d0, "--stages", "1", "--host", "127.0.0.1")
        with cluster.on(d0, "serve") as serve:
            serve.until_err("waiting for 1 stage")
            with cluster.prompt(user, "x", "--wait", "3") as asking:
                asking.done().assert_refused(
                    "no coordinator was found within 3 s (asked by multicast DNS on eth0 "
                    "(10.77.0.2))",
                    "--host 0.0.0.0",
                    "UDP port 5353",
                    "--coordinator HOST[:PORT]",
                    code=1,
                )
            assert "announced" not in serve.err


def discovering(host: Host, coordinator: str) -> Command:
    """The search of a machine for the coordinator with that key; it prints what is found."""
    code = (
        "import sys; from edgespec.cli.search import Search, Silent\n"
        "from edgespec.errors import EdgespecError\n"
        "from edgespec.net.keys import Identity, KeyPair\n"
        "who = Identity(KeyPair.new(), sys.argv[1])\n"
        "try: print(Search(who).run(6.0, Silent()))\n"
        "except EdgespecError as problem: print(type(problem).__name__, problem)\n"
    )
    return host.program(sys.executable, "-c", code, coordinator)


@pytest.mark.slow
def test_of_several_coordinators_that_of_the_cluster_is_taken() -> None:
    with (
        lan("d0", "e0", "v1", "v2") as (d0, e0, v1, v2),
        announce(d0, 7430, "llama", OURS) as one,
        announce(e0, 7431, "qwen", OTHERS) as other,
    ):
        one.until_err("announced as ")
        other.until_err("announced as ")
        with discovering(v1, OWN.public) as ours, discovering(v2, OTHER) as nobodys:
            found, nobody = ours.done().out, nobodys.done().out
        assert found == f"{d0.address}:7430\n"
        assert f"PeerLost no coordinator of cluster {short(OTHER)} was found" in nobody
        assert "Coordinators of other clusters are here: " in nobody
        assert f"(llama, 2 stages), cluster {OURS}, at 10.77.0.1:7430" in nobody
        assert f"(qwen, 2 stages), cluster {OTHERS}, at 10.77.0.2:7431" in nobody


@pytest.mark.slow
def test_the_doctor_walks_to_the_coordinator(tmp_path: Path) -> None:
    with lan("d0", "v1") as (d0, v1):
        cluster = Cluster(tmp_path, d0, "--stages", "1")
        with cluster.on(d0, "serve") as serve, cluster.join(v1) as joining:
            joining.until_err("the ring is up")
            assert serve.process.poll() is None
            with cluster.on(v1, "doctor", "--json") as looking:
                done = looking.done()
        assert done.code == 0, done
        found = {one["name"]: one for one in json.loads(done.out)["findings"]}
        assert "our coordinator" in found["mDNS"]["text"]
        assert (
            f"{d0.address}:7430 (as remembered) takes connections" in found["coordinator"]["text"]
        )
        assert found["key"]["state"] == found["cluster"]["state"] == "ok", done
        assert "there and back by eth0" in found["link"]["text"]
