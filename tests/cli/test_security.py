"""A whole cluster on a LAN that is listened to, and everybody who should not get in."""

from __future__ import annotations

import json
import random
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from msgspec import msgpack
from support import commands
from support.capture import Capture, capturing
from support.commands import COMMAND, Command
from support.namespaces import Host, lan
from support.torch_rings import generated, tokenizer

from edgespec.daemon.bundled_models import bundled
from edgespec.net.keys import Token, short
from edgespec.wire.client_messages import StatusRequest
from edgespec.wire.codec import encode

PROMPT = "Once upon a time the little fox Zebulon found a purple lighthouse"
NEW_TOKENS = 24
WINDOW, CHARS = 64, 12
"""Bytes of a block, and characters of a text, that are looked for: too many for chance."""

SAY = (
    "import socket, sys\n"
    "with socket.create_server(('', 9)) as server:\n"
    "    print('ready', flush=True)\n"
    "    with server.accept()[0] as one:\n"
    "        while one.recv(65536): pass\n"
)
TELL = (
    "import socket, sys\n"
    "with socket.create_connection((sys.argv[1], 9)) as one:\n"
    "    one.sendall(open(sys.argv[2], 'rb').read())\n"
)
NO_KEY = (
    "import sys, zmq\n"
    "asking = zmq.Context().socket(zmq.DEALER)\n"
    "asking.linger = 0\n"
    "asking.connect(sys.argv[1])\n"
    "asking.send(bytes.fromhex(sys.argv[2]))\n"
    "print('answered' if asking.poll(2000) else 'nothing', flush=True)\n"
    "asking.context.destroy()\n"
)


class Machines:
    """A cluster whose machines have a folder and a cache each, as if each had a disk."""

    def __init__(self, folder: Path, d0: Host) -> None:
        self._folder, self._d0 = folder, d0
        self.token = self.owner("init", "--stages", "2", "--dtype", "float64").split()[-1]

    def on(self, host: Host, command: str, *arguments: str) -> Command:
        """A command on a host."""
        return host.program(*self._words(host, command, *arguments))

    def bare(self, host: Host, command: str, *arguments: str) -> Command:
        """The same where the model is not on the disk, so that the coordinator has to send it."""
        hide = f"mount -t tmpfs none {shlex.quote(str(bundled('base')))}"
        words = shlex.join(self._words(host, command, *arguments))
        return host.program("sh", "-c", f"{hide} && exec {words}")

    def owner(self, command: str, *arguments: str) -> str:
        """What a command on the coordinator's machine says; it must succeed."""
        with self.on(self._d0, command, *arguments) as running:
            done = running.done()
        assert done.code == 0, done
        return done.out

    def block(self, host: Host) -> bytes:
        """The block file that it was sent."""
        (file,) = (self._folder / f"{host.name}-cache").rglob("*.safetensors")
        return file.read_bytes()

    def _words(self, host: Host, command: str, *arguments: str) -> list[str]:
        where = {"EDGESPEC_CLUSTER": host.name, "XDG_CACHE_HOME": f"{host.name}-cache"}
        given = [f"{name}={self._folder / value}" for name, value in where.items()]
        return ["env", *given, *COMMAND, *command.split(), *arguments]


# --- what is looked for ---------------------------------------------------------------------------


def windows(text: str) -> list[str]:
    """A text in pieces, of which each would give it away."""
    return [text[at : at + CHARS] for at in range(0, len(text) - CHARS + 1, CHARS)]


def of_texts(texts: Iterable[str]) -> Iterator[bytes]:
    """Pieces as they would be in clear: UTF-8 (which msgpack has, too) and UTF-16."""
    for text in texts:
        for piece in windows(text):
            yield from (piece.encode(), piece.encode("utf-16-le"), piece.encode("utf-16-be"))
        yield bytes(msgpack.encode(text))


def of_tokens(text: str) -> Iterator[bytes]:
    """Three tokens after each other, as a segment or an answer would hold them."""
    ids = np.array(tokenizer().encode(text), "<i8")
    for at in range(len(ids) - 2):
        yield ids[at : at + 3].tobytes()
        yield b"".join(bytes(msgpack.encode(int(one))) for one in ids[at : at + 3]) * 2


def of_block(block: bytes) -> Iterator[bytes]:
    """Pieces from all over a block file that are not all the same."""
    places = random.Random(0).sample(range(len(block) - WINDOW), 60)
    for at in (0, len(block) - WINDOW, *places):
        if len(set(piece := block[at : at + WINDOW])) > 8:
            yield piece


def found(capture: Capture, needles: Iterable[bytes]) -> list[bytes]:
    """Which of them are there."""
    return [needle for needle in needles if capture.holds(needle)]


def secrets_of(texts: list[str], blocks: list[bytes]) -> list[bytes]:
    """All that must not be heard."""
    needles = [*of_texts(texts), *of_tokens(PROMPT)]
    for block in blocks:
        needles += of_block(block)
    return needles


# --- what passes the switch -----------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_who_listens_hears_nothing_and_who_is_not_admitted_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "PATIENCE_S", 200.0)  # ten programs start, most of them torch
    with lan("d0", "v1", "v2", "user", "thief") as (d0, v1, v2, user, thief):
        cluster = Machines(tmp_path, d0)
        with cluster.on(d0, "serve") as serve:
            client = cluster.owner("token new", "--client").split()[-1]
            serve.until_err("waiting for 2 stage")
            with capturing(v1, tmp_path / "packets") as heard, ExitStack() as stack:
                joining = [
                    stack.enter_context(cluster.bare(v, "join", cluster.token)) for v in (v1, v2)
                ]
                for one in joining:
                    one.until_err("the ring is up")
                asked = cluster.on(
                    user, "prompt", "--raw", "--token", client, "--json",
                    "--max-new-tokens", str(NEW_TOKENS), PROMPT,
                )  # fmt: skip
                with asked as asking:
                    done = asking.done()
            assert done.code == 0, (done.err, serve.err)
            answer = json.loads(done.out)["text"]
            assert answer == tokenizer().decode(list(generated(PROMPT, NEW_TOKENS)))
            assert len(answer) > CHARS
            blocks = [cluster.block(v) for v in (v1, v2)]
            config = (Path(bundled("base")) / "config.json").read_text(encoding="utf-8")
            texts = [PROMPT, answer, cluster.token, client, config]
            assert_unheard(heard, secrets_of(texts, blocks), blocks)
            assert_search_works(user, thief, texts, blocks, tmp_path)
            assert_kept_out(cluster, serve, (d0, user, thief), client)


def assert_unheard(heard: Capture, needles: list[bytes], blocks: list[bytes]) -> None:
    """All of it passed, and none of it could be read."""
    assert heard.lost == 0
    assert heard.size > sum(map(len, blocks)), "the blocks were not sent"
    assert len(needles) > 300
    assert found(heard, needles) == []


def assert_search_works(
    one: Host, other: Host, texts: list[str], blocks: list[bytes], folder: Path
) -> None:
    """The same search finds all of it in a connection that is not encrypted."""
    plain = folder / "plain"
    forms = [text.encode(form) for text in texts for form in ("utf-8", "utf-16-le", "utf-16-be")]
    forms += [bytes(msgpack.encode(text)) for text in texts]
    forms += [*of_tokens(PROMPT), *blocks]
    plain.write_bytes(b"\n".join(forms))
    with (
        capturing(one, folder / "plain packets") as heard,
        one.program(sys.executable, "-S", "-c", SAY) as listening,
    ):
        listening.until_out("ready")
        told = other.program(sys.executable, "-S", "-c", TELL, one.address, str(plain))
        with told as telling:
            assert telling.done().code == 0
    needles = secrets_of(texts, blocks)
    assert found(heard, needles) == needles


# --- who is kept out ------------------------------------------------------------------------------


def assert_kept_out(
    cluster: Machines, serve: Command, hosts: tuple[Host, Host, Host], used: str
) -> None:
    """Each gets nothing and is told what to do; the coordinator says who it was."""
    d0, user, thief = hosts
    expired, revoked = (
        Token.parse(cluster.owner("token new", "--valid", valid).split()[-1])
        for valid in ("1s", "1h")
    )
    cluster.owner("token revoke", short(revoked.pair.public))
    devices = json.loads(cluster.owner("device list", "--json"))["devices"]
    (removed,) = (one for one in devices if one["role"] == "client")
    cluster.owner("device remove", removed["name"])
    time.sleep(1.2)  # the token's one second, and the coordinator's look at its file
    at = ("--coordinator", d0.address)
    tokens = {"expired": expired.text, "used": used, "revoked": revoked.text}
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(_elsewhere(cluster, thief, name, "join", *at, token))
            for name, token in tokens.items()
        }
        started["removed"] = stack.enter_context(cluster.on(user, "prompt", *at, "x"))
        question = encode(StatusRequest())
        words = (sys.executable, "-c", NO_KEY, f"tcp://{d0.address}:7430", question.hex())
        keyless = stack.enter_context(thief.program(*words))
        ended = {name: running.done() for name, running in started.items()}
        assert keyless.done().out == "nothing\n"
    for name, done in ended.items():
        done.assert_refused(f"the coordinator at {d0.address}:7430", "edgespec token new")
        assert done.out == "", name
    assert_logged(serve, user.address, removed["fingerprint"])
    for token in (expired, Token.parse(used), revoked):
        assert_logged(serve, thief.address, short(token.pair.public))
    assert "has no key, takes this for another cluster" in serve.err
    assert "Traceback" not in serve.err
    assert serve.process.poll() is None


def _elsewhere(
    cluster: Machines, host: Host, folder: str, command: str, *arguments: str
) -> Command:
    """A command on a host, in a cluster folder of its own."""
    return cluster.on(host, command, *arguments, "--cluster", str(cluster._folder / folder))


def assert_logged(serve: Command, address: str, key: str) -> None:
    """The coordinator's log has a line with both."""
    pattern = f"{re.escape(address)} wants to use [a-z ]+ with the key {key}: "
    assert re.search(pattern, " ".join(serve.err.split())), (pattern, serve.err)
