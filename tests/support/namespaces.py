"""A LAN on this machine: hosts that are network namespaces, on the bridge of a further one.

    with lan("d0", "v1") as (d0, v1), v1.command("join", "--stage", "1") as joining: ...

Each host has an Ethernet of its own (eth0: 10.77.0.N/24, fd77::N/64 and fe80::N), a loopback and
nothing else: no default route, no way out. The bridge lies in a namespace too, so that neither the
machine's network nor its firewall is touched, and several LANs may exist at once with the same
addresses. It takes root and `ip` of iproute2.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from support.commands import COMMAND, Command

PREFIX = "edgespec-test"
INTERFACE = "eth0"
SWITCH = str(Path(__file__).with_name("switch.py"))
NETWORK = "10.77.0"
NETWORK_6 = "fd77"

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Host:
    """One machine of the LAN."""

    name: str
    namespace: str
    address: str  # IPv4
    switch: str
    port: str
    _first: tuple[str, ...] = ()  # what comes before each command line

    @property
    def ipv6(self) -> str:
        """Its address that is its own on every network."""
        return f"{NETWORK_6}::{self.address.rpartition('.')[2]}"

    @property
    def link_local(self) -> str:
        """Its address that means it on this LAN only, without a zone."""
        return f"fe80::{self.address.rpartition('.')[2]}"

    def forget(self, *networks: str) -> None:
        """Take the addresses of these networks (NETWORK, NETWORK_6) away from it."""
        masks = {NETWORK: ".0/24", NETWORK_6: "::/64"}
        _ip(
            *(f"addr flush dev {INTERFACE} to {network}{masks[network]}" for network in networks),
            namespace=self.namespace,
        )

    def add_interface(self, name: str) -> None:
        """Another interface that is up and leads nowhere, with a link-local address alone."""
        _ip(
            f"link add {name} type veth peer name {name}-end",
            f"link set {name}-end up",
            f"link set {name} addrgenmode none",
            f"link set {name} up",
            f"addr add fe80::aa/64 dev {name} nodad",
            namespace=self.namespace,
        )

    def inside(self, *arguments: str) -> list[str]:
        """A command line that runs another one on this host.

        `ip` becomes that program (exec), so the process that is started is the program itself:
        signals reach it, and its parent is the one who started it.
        """
        return ["ip", "netns", "exec", self.namespace, *self._first, *arguments]

    def without(self, folder: Path, cache: Path) -> Host:
        """The same machine, on which that folder is empty, and with a cache of its own."""
        hide = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
        return replace(self, _first=(*hide, str(folder), "env", f"XDG_CACHE_HOME={cache}"))

    def limit_speed(self, mbits: int) -> None:
        """Send no more than so many Mbit/s."""
        limit = ("tbf", "rate", f"{mbits}mbit", "burst", "256kb", "latency", "50ms")
        with self.program("tc", "qdisc", "add", "dev", INTERFACE, "root", *limit) as setting:
            assert setting.done().code == 0, setting.err

    def command(self, *arguments: str, stdin: bytes | None = None) -> Command:
        """An edgespec command on this host; a context manager, as Command is."""
        return Command(*arguments, stdin=stdin, command=self.inside(*COMMAND))

    def program(self, *arguments: str) -> Command:
        """Any other program on this host."""
        return Command(command=self.inside(*arguments))

    def sent_bytes(self) -> int:
        """What has left it so far, with all headers."""
        words = ["ip", "-n", self.namespace, "-s", "-j", "link", "show", "dev", INTERFACE]
        told = subprocess.run(words, capture_output=True, check=True).stdout
        return int(json.loads(told)[0]["stats64"]["tx"]["bytes"])

    def link_down(self) -> None:
        """Pull the cable out: the interface keeps its addresses and loses its carrier."""
        _ip(f"link set {self.port} down", namespace=self.switch)

    def link_up(self) -> None:
        """Put the cable back."""
        _ip(f"link set {self.port} up", namespace=self.switch)


@dataclass(frozen=True)
class Cable:
    """What a cable of a LAN takes, each way, in place of a bridge that takes nothing."""

    delay_ms: float
    mbit: float


@contextmanager
def lan(*names: str, cable: Cable | None = None) -> Iterator[tuple[Host, ...]]:
    """Hosts on one bridge, or a switch with such cables, in the order of their names; all is
    removed at the end."""
    require_namespaces()
    mark = f"{mark_of(os.getpid())}-{next(_numbers)}"
    switch = f"{mark}-switch"
    hosts = tuple(
        Host(name, f"{mark}-{name}", f"{NETWORK}.{number}", switch, f"port{number}")
        for number, name in enumerate(names, start=1)
    )
    try:
        _build(switch, hosts, bridge=cable is None)
        with ExitStack() as stack:
            if cable:
                words = (SWITCH, str(cable.delay_ms), str(cable.mbit), *(h.port for h in hosts))
                inside = ("ip", "netns", "exec", switch, sys.executable, *words)
                stack.enter_context(Command(command=inside)).until_out("up")
            yield hosts
    finally:
        for namespace in _namespaces():
            if namespace.startswith(f"{mark}-"):
                _ip(f"netns del {namespace}")


def require_namespaces() -> None:
    """Skip a test where namespaces cannot be made; in CI, where that would go unseen, fail it."""
    reason = _obstacle()
    if reason and os.environ.get("CI"):
        pytest.fail(f"this test must not be left out in CI: {reason}")
    if reason:
        pytest.skip(reason)
    _remove_leftovers()


def _build(switch: str, hosts: Sequence[Host], *, bridge: bool) -> None:
    """Namespaces, bridge, cables and addresses."""
    _ip(f"netns add {switch}", *(f"netns add {host.namespace}" for host in hosts))
    _ip(
        # A bridge that learns for seconds first, or that waits for a multicast querier which is
        # not there, is not what people have at home.
        "link add bridge type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
        "link set bridge up",
        namespace=switch,
    )
    for number, host in enumerate(hosts, start=1):
        _ip(
            f"link add {INTERFACE} netns {host.namespace} type veth "
            f"peer name {host.port} netns {switch}"
        )
        _ip(
            *([f"link set {host.port} master bridge"] if bridge else []),
            f"link set {host.port} up",
            namespace=switch,
        )
        with_ipv6 = Path("/proc/sys/net/ipv6").exists()
        _ip(
            "link set lo up",
            f"addr add {host.address}/24 brd + dev {INTERFACE}",
            # The kernel's own link-local address is not to be used for the first two seconds.
            *([f"link set {INTERFACE} addrgenmode none"] if with_ipv6 else []),
            f"link set {INTERFACE} up",
            *(
                f"addr add {prefix}::{number}/64 dev {INTERFACE} nodad"
                for prefix in ("fe80", NETWORK_6)
                if with_ipv6
            ),
            namespace=host.namespace,
        )


def _ip(*commands: str, namespace: str = "") -> str:
    """Run commands of `ip` in one go; the first that fails is the AssertionError."""
    arguments = ["ip", *(["-n", namespace] if namespace else []), "-batch", "-"]
    done = subprocess.run(
        arguments, input="\n".join(commands) + "\n", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{arguments}: {commands}\n{done.stderr}"
    return done.stdout


def _obstacle() -> str:
    """Why namespaces cannot be made here; "" if they can."""
    probe = f"{mark_of(os.getpid())}-probe"
    try:
        _ip(f"netns add {probe}", f"netns del {probe}")
    except FileNotFoundError:
        return "network namespaces need `ip`: install iproute2"
    except AssertionError as problem:
        return f"network namespaces cannot be made (are you root?): {problem}"
    return ""


def mark_of(pid: int) -> str:
    """What namespaces of a process are called; a later process of the same id is another one."""
    started = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    return f"{PREFIX}-{pid}.{started}"


def _namespaces() -> list[str]:
    """All that tests made, of this process and of others."""
    names = (line.split()[0] for line in _ip("netns list").splitlines() if line.strip())
    return [name for name in names if name.startswith(PREFIX)]


def _remove_leftovers() -> None:
    """End and remove what test processes that were killed left behind."""
    for namespace in _namespaces():
        pid = namespace.removeprefix(f"{PREFIX}-").partition(".")[0]
        try:
            if namespace.startswith(mark_of(int(pid))):
                continue  # its process is alive
        except OSError:
            pass  # it is not
        for left in _ip(f"netns pids {namespace}").split():
            try:
                psutil.Process(int(left)).send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        _ip(f"netns del {namespace}")
