"""edgespec status: its table, its JSON, its exit code; from figures, and of rings of real nodes."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.commands import Done, run_here
from support.nodes import NodeRing, until
from support.rings import submit
from support.terminals import Terminal

from edgespec.cli import status as module
from edgespec.cli.status import COLUMNS, print_status
from edgespec.daemon.cluster import ClusterFolder
from edgespec.runtime.access_policy import CLIENT
from edgespec.wire.client_messages import LiveRequest, NodeStatus, Status
from edgespec.wire.messages import Health

GIB = 1 << 30
FIRST = NodeStatus(
    stage=1,
    first=0,
    end=16,
    name="board-a",
    address="10.0.0.1:5001",
    state="ready",
    words="ready",
    heard=0.12,
    temperature=71.4,
    limit=99.0,
    memory=8 * GIB,
    free=2 * GIB + GIB // 2,
    busy=0.834,
    trip=0.0023,
)
BESIDE = replace(FIRST, stage=2, name="board-0", with_coordinator=True)
READY = "standing by; layers 0 to 15 fetched"
SPARE = NodeStatus(0, 0, 0, "tablet", "10.0.0.9:5009", "standing by", READY, 0.2)
STATUS = Status(
    ready=False,
    lines=(),
    nodes=(
        FIRST,
        replace(
            FIRST,
            stage=2,
            first=16,
            end=30,
            name="board-b",
            temperature=96.0,
            throttled=True,
            warning="hot, 1.8 times as slow as it was",
            losses=3,
            last_loss="has been silent for 1.6 s",
            lost_ago=7300.0,
        ),
        NodeStatus(3, 30, 32, "board-c", "10.0.0.3:1", "loading", "loading 1 of 2 layers", 0.3),
        NodeStatus(4, 32, 40, losses=1, last_loss="left: stopped by SIGTERM", lost_ago=65.0),
        SPARE,
    ),
    stages=4,
    ring=5,
    running=0,
    waiting=2,
)
UP = replace(STATUS, ready=True, nodes=(FIRST,), stages=1, up_for=7500.0, running=1)


@pytest.fixture
def show(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Runs `edgespec status` in this process, on a narrow terminal, with what it is to be told."""

    def run(status: Status, *arguments: str) -> Done:
        class Answering:
            def __init__(self, *_: object) -> None:
                pass

            def __enter__(self) -> Answering:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def status(self) -> Status:
                return status

        monkeypatch.setenv("COLUMNS", "60")
        monkeypatch.setattr(module, "Client", Answering)
        monkeypatch.setattr(module, "reach", lambda *_: (None, None))
        return run_here(capfd, monkeypatch, "status", *arguments)

    return run


def words_of(done: Done, node: str) -> str:
    """The table's line on a node, without its spaces."""
    rows = [line.split() for line in done.out.splitlines()]
    return " ".join(next(words for words in rows if words[:1] == [node]))


def test_the_table_has_a_line_for_each_place_and_spare(show: Callable[..., Done]) -> None:
    done = show(STATUS)
    address = "10.0.0.1:5001"
    assert words_of(done, "V1") == (
        f"V1 board-a {address} 0-15 ready 2.5 of 8.0 71 of 99 83% 2.3 0.1 0"
    )
    assert "30-31 loading 1 of 2 layers -" in words_of(done, "V3")
    assert words_of(done, "V4") == "V4 - - 32-39 missing - - - - - 1"
    assert words_of(done, "spare").startswith("spare tablet 10.0.0.9:5009 - standing by -")
    assert "…" not in done.out, "nothing is cut, however narrow the terminal"
    assert done.err == ""


def test_what_is_wrong_and_what_was_lost_is_said_below(show: Callable[..., Done]) -> None:
    out = show(STATUS).out
    assert "spare (tablet): standing by; layers 0 to 15 fetched\n" in out
    assert "V2 (board-b): hot, 1.8 times as slow as it was\n" in out
    assert "V2 was lost 2 h ago: it has been silent for 1.6 s\n" in out
    assert "V4 was lost 65 s ago: it left: stopped by SIGTERM\n" in out


def test_a_ring_that_is_not_up_says_who_is_missing_and_ends_with_1(
    show: Callable[..., Done],
) -> None:
    done = show(STATUS)
    assert done.code == 1
    last = done.out.splitlines()[-1]
    assert last == (
        "the ring of 4 stage(s) is not up: V3 is loading, V4 is missing; 0 request(s) running, 2 "
        "waiting"
    )


def test_a_ring_that_is_up_ends_with_0(show: Callable[..., Done]) -> None:
    done = show(UP)
    assert done.code == 0
    assert done.out.splitlines()[-1] == (
        "the ring of 1 stage(s) is up since 2 h (ring number 5); 1 request(s) running, 2 waiting"
    )


def test_each_request_that_runs_has_its_speed(show: Callable[..., Done]) -> None:
    live = (LiveRequest(7, "adaptive", 12, 40, 5.25), LiveRequest(9, "specpipe", 200, 0, 0.0))
    done = show(replace(UP, running=2, live=live))
    assert done.out.splitlines()[-3:-1] == [
        "request 7 (adaptive): 40 token(s) behind a prompt of 12, 5.2 a second",
        "request 9 (specpipe): 0 token(s) behind a prompt of 200, 0.0 a second",
    ]
    told = json.loads(show(replace(UP, running=2, live=live), "--json").out)["requests"]
    assert told[0] == {
        "number": 7,
        "policy": "adaptive",
        "prompt_tokens": 12,
        "tokens": 40,
        "tokens_per_second": 5.25,
    }
    assert len(told) == 2


def test_the_rows_of_the_caches_are_told_where_they_have_a_limit(show: Callable[..., Done]) -> None:
    """With the memory that they take at most on the stage with the most layers, of 16."""
    state = replace(UP, rows_live=434, rows_kept=812, rows_room=10240)
    line = (
        "cache rows of every stage: 434 for running requests, 812 kept of answered ones, room for "
        "10240"
    )
    assert show(state).out.splitlines()[-2] == line
    known = replace(state, row_bytes=2048)
    assert show(known).out.splitlines()[-2] == f"{line} (320 MiB at most)"
    assert json.loads(show(known, "--json").out)["row_bytes_of_a_layer"] == 2048
    told = json.loads(show(state, "--json").out)
    assert (told["rows_live"], told["rows_kept"], told["rows_room"]) == (434, 812, 10240)
    assert "cache rows" not in show(UP).out
    assert json.loads(show(UP, "--json").out)["rows_room"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (119.0, "119 s"), (120.0, "2 min"), (7199.0, "120 min"), (172800.0, "2 days")],
)
def test_times_are_told_in_fit_units(show: Callable[..., Done], seconds: float, text: str) -> None:
    assert f"is up since {text} (" in show(replace(UP, up_for=seconds)).out


def test_json_has_all_with_units_and_null_for_what_is_not_known(
    show: Callable[..., Done],
) -> None:
    done = show(STATUS, "--json")
    assert done.code == 1
    told = json.loads(done.out)
    assert (told["ready"], told["stages"], told["ring"]) == (False, 4, 5)
    assert (told["requests_running"], told["requests_waiting"]) == (0, 2)
    first, second, _, missing, spare = told["nodes"]
    assert (first["celsius"], first["celsius_limit"], first["busy"]) == (71.4, 99.0, 0.834)
    assert (first["free_bytes"], first["memory_bytes"]) == (2 * GIB + GIB // 2, 8 * GIB)
    assert first["link_milliseconds"] == pytest.approx(2.3)
    assert (first["warning"], first["last_loss"], first["losses"]) == (None, None, 0)
    assert (second["throttled"], second["last_loss_seconds_ago"]) == (True, 7300.0)
    assert (missing["device"], missing["busy"], missing["heard_seconds_ago"]) == (None,) * 3
    assert (missing["first_layer"], missing["end_layer"]) == (32, 40)
    assert (spare["stage"], spare["first_layer"], spare["losses"]) == (0, None, None)


def test_the_stage_on_the_coordinator_s_board_is_named_so(show: Callable[..., Done]) -> None:
    state = replace(UP, nodes=(FIRST, BESIDE), stages=2)
    first, second = (line for line in show(state).out.splitlines() if line[1:2] == "V")
    assert "board-a " in first
    assert "D0" not in first
    assert "board-0 (D0)" in second
    nodes = json.loads(show(state, "--json").out)["nodes"]
    assert [node["with_coordinator"] for node in nodes] == [False, True]


def test_markup_in_names_is_shown_as_it_is(show: Callable[..., Done]) -> None:
    odd = replace(UP, nodes=(replace(FIRST, name="[red]x[/red]:smile:", warning="[bold]"),))
    out = show(odd).out
    assert "[red]x[/red]:smile:" in out
    assert "[bold]" in out


# --- of rings of real nodes -----------------------------------------------------------------------


def member_folder(ring: NodeRing, path: Path) -> str:
    """The cluster folder of somebody who may ask."""
    who = ring.keys.add("viewer", CLIENT)
    ClusterFolder.remember(path, who.own, who.coordinator, "viewer", str(ring.address))
    return str(path)


def test_the_status_of_a_real_ring(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with NodeRing(2) as ring:
        for number in (1, 2):
            warm = Health(60.0 + number, 95.0, 8 * GIB, 3 * GIB, 0.0, False, "")
            ring.threads[number].node.device = lambda warm=warm: warm  # type: ignore[misc]
        ring.await_up()
        secret = "a prompt that nobody else should read"
        ask = submit(prompt=secret)
        ring.assert_right(ask, ring.ask(ask))
        until(lambda: all(node.free and node.trip for node in ring.membership.status().nodes))
        arguments = ("status", "--cluster", member_folder(ring, tmp_path / "cluster"), "--json")
        done = run_here(capfd, monkeypatch, *arguments)
        assert done.code == 0, done.err
        told = json.loads(done.out)
        assert [node["celsius"] for node in told["nodes"]] == [61.0, 62.0]
        assert [node["device"] for node in told["nodes"]] == ["toybox", "toybox"]
        assert all(0.0 < node["link_milliseconds"] < 1000.0 for node in told["nodes"])
        assert all(0.0 <= node["busy"] <= 1.0 for node in told["nodes"])
        assert secret not in done.out
        ring.threads[2].leave()
        until(lambda: not ring.membership.status().ready)
        done = run_here(capfd, monkeypatch, *arguments[:-1])
    assert done.code == 1, done.err
    assert "V2 is missing" in done.out
    assert "ago: it left: stopped by SIGTERM" in done.out


def test_a_coordinator_that_does_not_answer_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with NodeRing(1) as ring:
        folder = member_folder(ring, tmp_path / "cluster")
    done = run_here(
        capfd,
        monkeypatch,
        *("status", "--cluster", folder, "--coordinator", str(ring.address), "--wait", "0.3"),
    )
    assert done.code == 1
    assert "no coordinator answered" in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


def test_commands_that_look_for_the_coordinator_are_not_logged_as_strangers(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They were given no address, and try the one that they remember."""
    with NodeRing(1) as ring:
        ring.await_up()
        folder = member_folder(ring, tmp_path / "cluster")
        caplog.set_level(logging.WARNING)
        for words in (["status"], ["prompt", "x", "--max-new-tokens", "2"]):
            done = run_here(capfd, monkeypatch, *words, "--cluster", folder)
            assert done.code == 0, done.err
        assert not [text for text in caplog.messages if "refused" in text]
        with socket.create_connection((ring.address.host, ring.address.port)):
            pass
        until(lambda: [text for text in caplog.messages if "has no key" in text])


def test_the_help_says_what_the_exit_codes_mean(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_here(capfd, monkeypatch, "status", "--help")
    assert done.code == 0
    assert "exit code is 0 if the ring is up, and 1 if it is not" in " ".join(done.out.split())


@pytest.mark.parametrize(("columns", "titles"), [(160, list(COLUMNS)), (60, ["node", "state"])])
def test_a_terminal_is_shown_the_columns_that_it_has_room_for(
    columns: int, titles: list[str]
) -> None:
    with Terminal(30, columns) as terminal:
        print_status(STATUS)
        lines = terminal.text.splitlines()
    table = lines[: next(n for n, line in enumerate(lines) if "V3" in line) + 1]
    assert all(len(line.rstrip()) <= columns for line in table)
    assert all(title in "".join(table) for title in titles)
    assert "board-a" in "".join(table), "the device is left out last of all"
