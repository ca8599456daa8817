"""First steps, as the README has them, with a wrong one at each point: every error says what to do.

All in this process but the coordinator, on loopback; what takes a LAN is in test_namespaces.py.
"""

from __future__ import annotations

import os
import pty
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.checkpoints import write_tokenizer
from support.commands import COMMAND, Command, Done, run_here
from support.mtp_heads import FILE, write_mtp

from edgespec.config import Address
from edgespec.daemon.access_store import LOOK_EVERY_S, AccessStore
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings, own_key
from edgespec.daemon.settings import usual_draft
from edgespec.errors import EXIT_USAGE, AccessRefused
from edgespec.net.keys import KeyPair, Token, short
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.runtime.access_policy import CLIENT, STAGE, admits

Here = Callable[..., Done]
HOST = "127.0.0.1"
SOON_S = 60.0
"""A wrong step is told within so many seconds, and not after LONG, which would be waited."""

LONG = ("--wait", "600")


def free_port() -> int:
    """One that nobody listens on."""
    with socket.create_server((HOST, 0)) as closing:
        return int(closing.getsockname()[1])


def made_cluster(path: Path) -> ClusterFolder:
    """A cluster of two stages on loopback."""
    settings = ClusterSettings(stages=2, dtype="float64", host=HOST, port=free_port())
    return ClusterFolder.create(path, settings)


@pytest.fixture
def here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Here:
    """Runs a command in this process, on a machine that belongs to no cluster yet."""
    monkeypatch.setenv("EDGESPEC_CLUSTER", str(tmp_path / "device"))
    return lambda *arguments: run_here(capfd, monkeypatch, *arguments)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> ClusterFolder:
    """The coordinator's folder."""
    return made_cluster(tmp_path_factory.mktemp("home") / "cluster")


@pytest.fixture
def doors(home: ClusterFolder) -> Iterator[None]:
    """The coordinator's sockets, which let in those that its access store admits."""
    transport = ZmqTransport.coordinator(
        Address.parse(home.address), home.identity, partial(admits, AccessStore(home))
    )
    yield
    transport.close()


@pytest.fixture
def serving(home: ClusterFolder) -> Iterator[None]:
    """A whole coordinator, which waits for its stages."""
    with Command("serve", "--cluster", str(home.path)) as running:
        running.until_err("waiting for 2 stage(s)")
        yield


def token_of(home: ClusterFolder, role: str = STAGE, uses: int = 0) -> Token:
    """A new token."""
    return AccessStore(home).new_token(role, uses, 600.0)


def used(home: ClusterFolder) -> Token:
    """A token of one use that has had it."""
    token = token_of(home, uses=1)
    AccessStore(home).enrol(token.pair.public, KeyPair.new().public, "another")
    return token


def revoked(home: ClusterFolder) -> Token:
    """A token that was taken back."""
    token = token_of(home)
    AccessStore(home).revoke(short(token.pair.public))
    return token


def expired(home: ClusterFolder) -> Token:
    """A token that was valid for a second, two hours ago."""
    return AccessStore(home, lambda: time.time() - 7200.0).new_token(STAGE, 0, 1.0)


# --- before there is anything -------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve",),
        ("serve", "--stages", "2"),
        ("join",),
        ("leave",),
        ("prompt", "hello"),
        ("status",),
        ("token", "new"),
        ("device", "list"),
    ],
)
def test_without_a_cluster_it_is_said_how_to_get_one(
    here: Here, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    here(*arguments).assert_refused(
        f"no cluster in {tmp_path / 'device'}",
        "make one with `edgespec init --model ... --stages N`",
        "join one with `edgespec join TOKEN`",
        "`edgespec prompt --token TOKEN`",
        "--cluster",
    )
    assert not (tmp_path / "device").exists()


def test_a_model_that_is_no_folder_is_told_where_it_comes_from(here: Here) -> None:
    done = here("init", "--model", "models/llama", "--stages", "2")
    assert done.code == 0, done
    assert "models/llama is not here: the coordinator takes it from the hub" in done.err
    assert "models/llama was not downloaded yet, and the hub cannot be reached now" in done.err
    assert "or for `edgespec pull`" in done.err


def test_a_model_with_a_bundled_head_is_served_with_it() -> None:
    assert usual_draft("HuggingFaceTB/SmolLM2-135M-Instruct") == "hybrid:ngram+dspark"
    assert usual_draft("Qwen/Qwen3-8B") == ""
    assert usual_draft("Qwen/Qwen3.5-4B") == "hybrid:ngram+mtp", "which ships one"
    assert usual_draft("") == "", "the bundled base has a draft of its own"


def test_a_folder_with_a_head_of_its_own_is_served_with_it(here: Here, tmp_path: Path) -> None:
    with_head, without = tmp_path / "with", tmp_path / "without"
    for folder in (with_head, without):
        write_mtp(folder)
        write_tokenizer(folder)
    tensors = load_file(without / FILE)
    of_base = {name: one for name, one in tensors.items() if not name.startswith("mtp.")}
    save_file(of_base, without / FILE, {"format": "pt"})
    assert usual_draft(str(without)) == ""
    done = here("init", "--model", str(with_head), "--stages", "2", "--json")
    assert done.code == 0, done
    assert "hybrid:ngram+mtp" in done.out
    done = here("init", "--model", str(without), "--stages", "2", "--draft", "mtp")
    assert done.code == 2, done
    assert "has no MTP head" in done.err


@pytest.mark.parametrize("what", ["model", "draft"])
def test_a_folder_that_is_no_model_is_refused_before_there_is_a_cluster(
    here: Here, tmp_path: Path, what: str
) -> None:
    (tmp_path / "empty").mkdir()
    model = bundled("base") if what == "draft" else str(tmp_path / "empty")
    draft = ("--draft", str(tmp_path / "empty")) if what == "draft" else ()
    done = here("init", "--model", model, *draft, "--stages", "2")
    done.assert_refused(str(tmp_path / "empty" / "config.json"))
    assert not (tmp_path / "device").exists()


def test_a_token_that_is_not_whole(here: Here) -> None:
    token = Token.new(KeyPair.new().public).text
    for text in (token[:30], token[:-1], token[5:].lstrip("-"), f"{token} {token}"):
        here("join", text).assert_refused("no token, or not all of it", "copy the whole line")


def test_a_token_that_is_not_whole_on_standard_input(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = Token.new(KeyPair.new().public).text
    for text in ("", "\n", token[:30], "é" * 5000):
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(text.encode())))
        here("join", "-").assert_refused("no token, or not all of it")
    monkeypatch.setattr(sys, "stdin", None)
    here("join", "-").assert_refused("no token, or not all of it")


@pytest.mark.thorough
def test_a_token_that_is_typed_is_not_shown(here: Here) -> None:
    """The terminal answers with all that it shows."""
    token = Token.new(KeyPair.new().public).text[:-1]
    terminal, its = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "join", "-"], stdin=its, stdout=its, stderr=its, start_new_session=True
    ) as child:
        os.close(its)
        shown = b""
        while b"token: " not in shown:
            shown += os.read(terminal, 1024)
        os.write(terminal, token.encode() + b"\n")
        with suppress(OSError):  # its end
            while piece := os.read(terminal, 1024):
                shown += piece
    os.close(terminal)
    assert child.returncode == EXIT_USAGE
    assert b"no token, or not all of it" in b" ".join(shown.split())
    assert token.encode() not in shown


@pytest.mark.thorough
def test_a_device_and_a_client_take_their_token_from_standard_input(
    home: ClusterFolder, serving: None, tmp_path: Path
) -> None:
    """So that nobody reads it in the list of processes."""
    for role, words in ((STAGE, ["join", "-"]), (CLIENT, ["prompt", "--token", "-"])):
        token = token_of(home, role).text
        folder = str(tmp_path / role)
        told = [*words, "--cluster", folder, "--coordinator", home.address]
        with Command(*told, stdin=f"{token}\nthe prompt\n".encode()) as asking:
            asking.until_err(f"of the cluster {home.cluster_id} from now on")
            asking.until_err("waiting for" if role == CLIENT else "joined as stage 1 of 2")


def test_a_folder_that_cannot_be_used_is_told_before_anybody_is_looked_for(
    here: Here, tmp_path: Path
) -> None:
    token = Token.new(KeyPair.new().public).text
    file = tmp_path / "file"
    file.write_text("not a folder")
    started = time.monotonic()
    for folder in (str(file), "/proc/x"):
        done = here("join", token, "--cluster", folder, *LONG)
        done.assert_refused(f"cannot use the folder {folder}")
    assert time.monotonic() - started < SOON_S


def test_nobody_is_there(here: Here) -> None:
    token, address = Token.new(KeyPair.new().public).text, f"{HOST}:{free_port()}"
    here("join", token, "--coordinator", address, "--wait", "0.5").assert_refused(
        f"no coordinator answered at {address}", "is `edgespec serve` running there", code=1
    )


# --- a coordinator, and a device that comes to it in the wrong way ------------------------------


@pytest.mark.parametrize("make", [used, revoked, expired])
def test_a_token_that_counts_no_more(
    here: Here,
    home: ClusterFolder,
    doors: None,
    make: Callable[[ClusterFolder], Token],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    token = make(home).text
    time.sleep(2 * LOOK_EVERY_S)  # until the coordinator has looked at its file again
    started = time.monotonic()
    here("join", token, "--coordinator", home.address, *LONG).assert_refused(
        f"the coordinator at {home.address} does not accept", "edgespec token new"
    )
    assert time.monotonic() - started < SOON_S
    said = {used: "was used", revoked: "was revoked", expired: "has expired"}[make]
    assert f"its token {said}" in caplog.text, "the coordinator's log says why"
    with pytest.raises(AccessRefused, match="no cluster in"):
        ClusterFolder.open(tmp_path / "device")


def test_a_token_of_another_cluster(
    here: Here, home: ClusterFolder, doors: None, tmp_path: Path
) -> None:
    token = token_of(made_cluster(tmp_path / "other")).text
    here("join", token, "--coordinator", home.address).assert_refused(
        f"who listens at {home.address} is not the coordinator of the cluster"
    )


class WebServer(socketserver.BaseRequestHandler):
    """What answers whoever connects as a web server does that understands nothing."""

    def handle(self) -> None:
        """One connection."""
        with suppress(OSError):
            self.request.recv(4096)
            self.request.sendall(b"HTTP/1.0 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def test_a_port_at_which_something_else_listens(here: Here, home: ClusterFolder) -> None:
    token = token_of(home).text
    with socketserver.ThreadingTCPServer((HOST, 0), WebServer) as web:
        threading.Thread(target=web.serve_forever, args=(0.01,)).start()
        started = time.monotonic()
        done = here("join", token, "--coordinator", f"{HOST}:{web.server_address[1]}")
        web.shutdown()
    done.assert_refused("is not the coordinator of the cluster that this machine")
    assert time.monotonic() - started < SOON_S


def test_a_copied_address_and_a_key_that_nobody_knows(
    here: Here, home: ClusterFolder, doors: None, tmp_path: Path
) -> None:
    folder = tmp_path / "device"
    key = home.identity.coordinator
    ClusterFolder.remember(folder, own_key(folder), key, "board", home.address)
    for arguments in (("prompt", "hello"), ("status",)):
        here(*arguments).assert_refused("does not accept the key of this machine", "token new")


def test_a_second_coordinator_on_the_port(here: Here, home: ClusterFolder, doors: None) -> None:
    here("serve", "--cluster", str(home.path)).assert_refused(
        f"cannot listen on {home.address}", "stop the program that uses it", code=1
    )


@pytest.mark.thorough
def test_a_cluster_is_served_once(here: Here, home: ClusterFolder, serving: None) -> None:
    """Commands beside the coordinator go on; on another port, a second one does not start."""
    there = ("--cluster", str(home.path))
    with Command("serve", *there, "--port", "0") as second:
        second.done().assert_refused(
            f"the cluster {home.cluster_id} is served by another `edgespec serve`", code=1
        )
    here("token", "new", *there)
    assert "the ring of 2 stage(s) is not up" in here("status", *there).out


@pytest.mark.thorough
def test_a_cluster_can_be_served_again_at_once_when_its_coordinator_was_killed(
    home: ClusterFolder,
) -> None:
    words = ("serve", "--cluster", str(home.path), "--port", "0")
    with Command(*words) as first:
        first.until_out("coordinator at")
        first.signal(signal.SIGKILL)
        first.done()
        with Command(*words) as second:
            second.until_out("coordinator at")


# --- the right thing on the wrong machine -------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("init", "--stages", "2"), ("device of another cluster", "edgespec leave", "--cluster")),
        (("serve",), ("that of a device", "do this on the coordinator")),
        (("token", "new"), ("known on the coordinator's machine, do this there",)),
        (("device", "list"), ("known on the coordinator's machine, do this there",)),
        (("device", "remove", "x"), ("known on the coordinator's machine, do this there",)),
    ],
)
def test_what_a_device_cannot_do(
    here: Here, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    folder = tmp_path / "device"
    ClusterFolder.remember(folder, own_key(folder), KeyPair.new().public, "board", "10.0.0.1:7430")
    here(*arguments).assert_refused(*words)


def test_what_the_coordinator_cannot_do(here: Here, home: ClusterFolder) -> None:
    there = ("--cluster", str(home.path))
    here("leave", *there).assert_refused("leaves no cluster", "this folder deleted")
    here("device", "remove", "nobody", *there).assert_refused("'nobody'", "edgespec device list")
    here("token", "revoke", "0", *there).assert_refused("no token '0'", "edgespec token list")
    other = Token.new(KeyPair.new().public).text
    here("join", other, *there).assert_refused("coordinator's own folder", "--cluster")


def test_a_device_leaves_while_the_coordinator_is_away(here: Here, tmp_path: Path) -> None:
    folder, address = tmp_path / "device", f"{HOST}:{free_port()}"
    ClusterFolder.remember(folder, own_key(folder), KeyPair.new().public, "board", address)
    done = here("leave", "--coordinator", address, "--wait", "0.5")
    assert done.code == 0, done
    assert f"no coordinator answered at {address}" in done.err
    assert "edgespec device remove board" in done.err
    assert "is no part of the cluster" in done.err
    assert os.listdir(folder) == []


# --- a place that is none, a key that may not -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "arguments", "words"),
    [
        (STAGE, ("--stage", "7"), "there is no stage 7: this ring has 2 stage(s)"),
        (CLIENT, (), "client"),
    ],
)
def test_a_device_that_gets_no_place(
    home: ClusterFolder,
    serving: None,
    tmp_path: Path,
    role: str,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    token = token_of(home, role).text
    folder = ("--cluster", str(tmp_path / "device"))
    to = ("--coordinator", home.address)
    with Command("join", token, *folder, *to, *arguments) as joining:
        done = joining.done()
    assert done.code == 1, done
    assert "the coordinator refused: " in done.err
    assert words in done.err
    assert "Traceback" not in done.err
