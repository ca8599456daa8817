"""The API's own process: started by hand and by `serve`, its end, a port that is taken, keys."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from support.commands import Command, Done, run_here
from support.nodes import HOST, NodeRing, until

from edgespec.cli.key import qr_lines
from edgespec.config import Address
from edgespec.daemon import api_process
from edgespec.daemon.api_keys import ApiKeys
from edgespec.daemon.api_process import ApiProcess
from edgespec.daemon.cluster import ClusterFolder, folder_of
from edgespec.types.own_module import own_command

START_S = 60.0


@pytest.fixture(scope="module")
def ring() -> Iterator[NodeRing]:
    """A ring of fake stages, of the cluster that all commands of the tests belong to."""
    with NodeRing(2) as made:
        made.await_up()
        yield made


def free_port() -> int:
    """One that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    """Whether an API is there, and reaches the ring."""
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def test_by_hand_it_says_where_it_listens_and_obeys_a_signal(ring: NodeRing) -> None:
    door = f"{HOST}:{free_port()}"
    asked = ("--http", f"{HOST}:0", "--coordinator", str(ring.address), "--ollama", door)
    with Command("api", *asked) as command:
        command.until_out("API at http://")
        url = command.out.split()[-1]
        until(lambda: answers(url), START_S)
        told = httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 3})
        assert told.json()["usage"]["completion_tokens"] == 3
        (model,) = httpx.get(f"http://{door}/api/tags").json()["models"]
        assert (model["name"], model["size"]) == ("toy", 1234)
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(START_S) == 0


@pytest.mark.thorough
def test_serves_child_is_started_again_when_it_is_killed_and_ends_with_it(
    ring: NodeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_process, "AGAIN_S", 0.1)
    port = free_port()
    url = f"http://{HOST}:{port}"
    with ApiProcess(Address(HOST, port), ring.address, ClusterFolder.open(folder_of(""))) as api:
        until(lambda: answers(url), START_S)
        first = api.child
        assert first is not None
        first.kill()
        until(lambda: api.child is not first)
        until(lambda: answers(url), START_S)
        second = api.child
        assert second is not None
    assert second.poll() is not None
    assert not answers(url)


def test_a_port_that_is_taken_is_said_once_and_not_tried_again(
    ring: NodeRing, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        http = Address(HOST, taken.getsockname()[1])
        folder = ClusterFolder.open(folder_of(""))
        with caplog.at_level(logging.WARNING), ApiProcess(http, ring.address, folder) as api:
            until(lambda: not api.thread.is_alive(), START_S)
    assert [record.message for record in caplog.records if "HTTP" in record.message] == [
        "the HTTP API has ended; the ring serves without it"
    ]
    said = capfd.readouterr().err
    assert f"cannot listen on {http}" in said
    assert "choose another address with --http" in said
    assert "Traceback" not in said


def test_it_does_not_outlive_a_parent_that_is_killed(ring: NodeRing) -> None:
    code = (
        "import sys, time\n"
        "from edgespec.config import Address\n"
        "from edgespec.daemon.api_process import ApiProcess\n"
        "from edgespec.daemon.cluster import ClusterFolder, folder_of\n"
        f"with ApiProcess(Address('{HOST}', {free_port()}), Address.parse('{ring.address}'),\n"
        "                ClusterFolder.open(folder_of(''))) as api:\n"
        "    while api.child is None: time.sleep(0.01)\n"
        "    print(api.child.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        pid = int(one.stdout.readline())
        os.kill(one.pid, signal.SIGKILL)
        one.wait(START_S)
    until(lambda: not psutil.pid_exists(pid), START_S)


def test_no_folder_of_its_name_is_taken_for_edgespec(tmp_path: Path) -> None:
    """`python -m` would look there first."""
    foreign = tmp_path / "edgespec"
    (foreign / "cli").mkdir(parents=True)
    for package in (foreign, foreign / "cli"):
        (package / "__init__.py").write_text("")
    (foreign / "cli" / "main.py").write_text("raise SystemExit('a foreign edgespec was run')\n")
    words = [*own_command("edgespec.cli.main"), "api", "--http", "none"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert "leaves nothing to serve" in done.stderr


def test_behind_a_proxy_a_key_is_asked_for(ring: NodeRing) -> None:
    key = ApiKeys(folder_of("")).new("proxied")
    asked = ("--http", f"{HOST}:0", "--coordinator", str(ring.address), "--require-key")
    try:
        with Command("api", *asked, "--cors-origin", "http://localhost:3000") as command:
            command.until_out("API at http://")
            url = command.out.split()[-1]
            until(lambda: answers(url), START_S)
            assert httpx.get(f"{url}/v1/models").status_code == 401
            told = {"authorization": f"Bearer {key}", "origin": "http://localhost:3000"}
            reply = httpx.get(f"{url}/v1/models", headers=told)
            assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
            assert reply.status_code == 200
    finally:
        ApiKeys(folder_of("")).revoke("proxied")


Run = Callable[..., Done]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process."""
    return partial(run_here, capfd, monkeypatch)


def test_others_are_not_served_without_a_key(run: Run) -> None:
    done = run("api", "--http", "0.0.0.0:0", "--coordinator", "127.0.0.1:1")
    done.assert_refused("edgespec key new NAME")
    run("api", "--http", "none").assert_refused("nothing to serve")


def test_a_phones_key_is_a_picture_of_a_link(run: Run) -> None:
    made = run("key", "new", "phone", "--qr", "--url", "http://192.168.1.10:8000/")
    try:
        link = made.out.strip()
        assert re.fullmatch(r"http://192\.168\.1\.10:8000/#key=esk-[\w-]{43}", link)
        assert not ApiKeys(folder_of("")).accepts(link.partition("=")[2])
        assert all(line in made.err for line in qr_lines(link))
        assert "within 15 minutes" in made.err
    finally:
        run("key", "revoke", "phone")
    for url in ("ftp://a", f"http://{3000 * 'a'}"):
        run("key", "new", "x", "--qr", "--url", url).assert_refused("no address of a page")
    assert json.loads(run("key", "list", "--json").out) == {"keys": []}


def test_a_qr_code_has_a_light_border() -> None:
    shown = qr_lines("http://192.168.1.10:8000/#key=esk-" + 11 * "aB3_")
    assert {len(line) for line in shown} == {33 + 8}
    assert len(shown) == (33 + 8 + 1) / 2
    assert not "".join((*shown[:2], *shown[-2:], *(line[:4] + line[-4:] for line in shown))).strip()


def test_keys_are_made_listed_and_taken_back(run: Run) -> None:
    made = run("key", "new", "laptop")
    assert (made.code, made.out.startswith("esk-")) == (0, True)
    try:
        listed = run("key", "list", "--json").out
        assert [key["name"] for key in json.loads(listed)["keys"]] == ["laptop"]
        assert made.out.strip() not in listed
        assert "laptop" in run("key", "list").out
        run("key", "new", "laptop").assert_refused("already")
    finally:
        assert run("key", "revoke", "laptop").code == 0
    assert json.loads(run("key", "list", "--json").out) == {"keys": []}
    run("key", "revoke", "laptop").assert_refused("no key 'laptop'")
