"""edgespec top: its screen at any width, keys and sizes of a terminal, plain output, lost rings."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace
from rich.console import Console
from support.commands import run_here
from support.nodes import QUICK, NodeRing, aging, until
from support.terminals import Terminal
from support.tiers import examples

from edgespec.cli import top as module
from edgespec.cli.status import print_status
from edgespec.cli.top_view import HISTORY, BusyHistory, TopView, bar, screen
from edgespec.serving.metrics import Metrics
from edgespec.types.record import as_dict
from edgespec.wire.client_messages import LiveRequest, NodeStatus, Status

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
    free=2 * GIB,
    busy=0.5,
    trip=0.0023,
)
HOT = replace(FIRST, stage=2, name="board-b", temperature=96.0, throttled=True, warning="hot")
LOADING = NodeStatus(3, 30, 32, "board-c", "10.0.0.3:1", "loading", "loading 1 of 2 layers", 0.3)
MISSING = NodeStatus(4, 32, 40, losses=1, last_loss="left: stopped by SIGTERM", lost_ago=65.0)
STATUS = Status(False, (), (FIRST, HOT, LOADING, MISSING), stages=4, ring=5, waiting=2)


def drawn(view: TopView, width: int, encoding: str = "utf-8") -> str:
    """The screen as text."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="replace")
    console = Console(file=file, width=width, markup=False, highlight=False, emoji=False)
    console.print(screen(view, console))
    file.flush()
    return raw.getvalue().decode(encoding)


def view(state: Status | None = STATUS, problem: str = "") -> TopView:
    """With a few looks at it."""
    busy = BusyHistory()
    for share in (0.0, 0.5, 1.0):
        if state is not None:
            nodes = tuple(replace(node, busy=share) for node in state.nodes)
            busy.add(replace(state, nodes=nodes))
    return TopView("10.0.0.9:7430", state, busy, problem, 12.0, "12:00:00")


# --- what it shows --------------------------------------------------------------------------------


def test_running_requests_are_listed_with_their_speeds() -> None:
    live = (LiveRequest(7, "adaptive", 12, 40, 5.25), LiveRequest(9, "specpipe", 20, 2, 1.0))
    text = drawn(view(replace(STATUS, running=2, live=live)), 160)
    assert "request 7 (adaptive): 40 token(s) behind a prompt of 12, 5.2 a second\n" in text
    assert "request 9 (specpipe): 2 token(s) behind a prompt of 20, 1.0 a second\n" in text


def test_a_wide_terminal_shows_all() -> None:
    text = drawn(view(), 160)
    assert "edgespec top  coordinator at 10.0.0.9:7430  12:00:00\n" in text
    assert "the ring of 4 stage(s) is not up: V3 is loading, V4 is missing; 0 request(s)" in text
    (first,) = [line.split() for line in text.splitlines() if line.startswith("V1")]
    assert " ".join(first) == (
        "V1 board-a 10.0.0.1:5001 0-15 ready ██████░░ 2.0 of 8.0 71 of 99 ████░░░░ 50% ▁▅█ 2.3 "
        "0.1 0"
    )
    (missing,) = [line.split() for line in text.splitlines() if line.startswith("V4 ")][:1]
    assert missing == ["V4", "-", "-", "32-39", "missing", *"-------", "1"]
    assert "V2 (board-b): hot" in text
    assert "V4 was lost 65 s ago: it left: stopped by SIGTERM" in text
    assert "q or Ctrl-C leaves" in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160, 300])
def test_nothing_is_cut_off_at_any_width(width: int) -> None:
    text = drawn(view(), width)
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    for node, state in (("V1", "ready"), ("V3", "loading"), ("V4", "missing")):
        assert re.search(rf"^{node} .*{state}", text, re.MULTILINE)


def test_a_coordinator_that_is_gone_is_said_above_what_it_said_last() -> None:
    text = " ".join(drawn(view(problem="no answer"), 120).split())
    assert "the coordinator cannot be reached (for 12 s); trying again: no answer" in text
    assert text.index("what it said last:") < text.index("V1 board-a")
    assert "is not up" not in text, "that is not known now"
    never = drawn(view(None, "no answer"), 120)
    assert "cannot be reached" in never
    assert "waiting for the coordinator" in drawn(view(None), 120)


def test_a_terminal_without_block_characters_gets_others() -> None:
    text = drawn(view(), 160, "ascii")
    assert "####.... 50%" in " ".join(text.split())
    assert " 049 " in text


def test_names_cannot_change_the_terminal() -> None:
    odd = replace(FIRST, name="\033[31mred[bold]", warning="\033]0;x\a")
    text = drawn(view(replace(STATUS, nodes=(odd,))), 160)
    assert "\033" not in text
    assert "[bold]" in text


@pytest.mark.parametrize(("share", "full"), [(-1.0, 0), (0.0, 0), (0.5, 4), (1.0, 8), (9.0, 8)])
def test_bars(share: float, full: int) -> None:
    assert bar(share, "red", blocks=False).plain == "#" * full + "." * (8 - full)


def test_the_history_is_short_and_of_those_who_are_there() -> None:
    busy = BusyHistory()
    for _ in range(3 * HISTORY):
        busy.add(STATUS)
    assert len(busy.of(FIRST)) == HISTORY
    busy.add(replace(STATUS, nodes=(HOT,)))
    assert busy.of(FIRST) == ()
    assert len(busy.of(HOT)) == HISTORY


# --- at a ring ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ring() -> Iterator[NodeRing]:
    """One ring for all looks."""
    with NodeRing(2) as made:
        made.await_up()
        yield made


def looking(ring: NodeRing, *steps: Callable[[], object]) -> None:
    """`edgespec top` in this thread, while another one takes the steps, each a function.

    A step that fails leaves top, and fails the test.
    """
    failures: list[BaseException] = []

    def act() -> None:
        try:
            for step in steps:
                step()
        except BaseException as problem:
            failures.append(problem)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        module.top(str(ring.address), 10.0, "")
    finally:
        thread.join()
    if failures:
        raise failures[0]


def sees(terminal: Terminal, pattern: str) -> Callable[[], None]:
    """A step: wait until that is written."""
    return lambda: until(lambda: re.search(pattern, terminal.text))


def test_it_is_live_follows_the_terminals_size_and_q_leaves(ring: NodeRing) -> None:
    with Terminal() as terminal:
        looking(
            ring,
            sees(terminal, r"\033\[\?1049h"),  # the other screen
            sees(terminal, r"V1 +toybox .* ready +.*"),
            sees(terminal, r"the ring of 2 stage\(s\) is up"),
            terminal.forget,
            sees(terminal, "edgespec top"),  # another second, another look
            lambda: terminal.resize(24, 44),
            terminal.forget,
            sees(terminal, r"node +device +layers +state +GiB free +°C"),
            lambda: terminal.type("q"),
        )
        assert "\033[?1049l" in terminal.text, "the screen before is back"
        assert "\033[?25h" in terminal.text, "and the cursor"
        assert terminal.is_as_before()


def test_ctrl_c_leaves_too(ring: NodeRing) -> None:
    with Terminal() as terminal:
        looking(
            ring,
            sees(terminal, "V1"),
            lambda: os.kill(os.getpid(), signal.SIGINT),
        )
        assert "\033[?1049l" in terminal.text
        assert terminal.is_as_before()


@pytest.mark.thorough
def test_a_stage_and_a_coordinator_that_are_lost_are_said_and_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 1.0)
    timing = dataclasses.replace(QUICK, answer_silence=2.0)  # lost too early, it is found again
    monkeypatch.setattr(module, "Client", partial(module.Client, timing=timing))
    monkeypatch.setattr(module, "EVERY_S", 0.1)
    with NodeRing(2, timing=timing) as ring, Terminal() as terminal:
        ring.await_up()
        member = ring.threads[1].node.member  # type: ignore[attr-defined]

        def end_coordinator() -> None:
            ring.threads[0].vanish()
            with aging(member):
                until(lambda: member.asking_since is not None)

        looking(
            ring,
            sees(terminal, "is up"),
            lambda: (ring.threads[2].vanish(), ring.outwait(2)),
            sees(terminal, "is not up: V2 is missing"),
            end_coordinator,
            sees(terminal, "the coordinator cannot be reached"),
            lambda: ring.restart_coordinator(),
            terminal.forget,
            sees(terminal, "is not up: V2 is missing"),
            lambda: terminal.type("q"),
        )


def test_where_there_is_no_terminal_a_block_is_printed_every_second(
    ring: NodeRing, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.1)
    pieces: list[str] = []

    def two_blocks() -> bool:
        pieces.append(capfd.readouterr().out)
        return "".join(pieces).count("is up since") >= 2

    looking(ring, lambda: until(two_blocks), lambda: os.kill(os.getpid(), signal.SIGINT))
    text = "".join(pieces)
    assert "\033" not in text
    assert f"coordinator at {ring.address}\n" in text
    assert "toybox" in text


def test_what_no_wait_mends_ends_it(
    ring: NodeRing, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgespec.errors import AccessRefused, OtherVersion

    for problem, code in (AccessRefused("the key"), 2), (OtherVersion("the version"), 1):

        def refused(self: object, problem: Exception = problem) -> Status:
            raise problem

        monkeypatch.setattr(module.Client, "status", refused)
        done = run_here(capfd, monkeypatch, "top", "--coordinator", str(ring.address))
        done.assert_refused(str(problem), code=code)


WHOLE = st.integers(-(2**63), 2**64 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def any_numbers(kind: type[NodeStatus | Status | LiveRequest]) -> st.SearchStrategy[Any]:
    """With whatever numbers the codec lets through, and words that are there."""
    values = {int: WHOLE, float: FINITE, str: st.just("a word"), bool: st.booleans()}
    hints = get_type_hints(kind)
    known = {f.name: values[hints[f.name]] for f in fields(kind) if hints[f.name] in values}
    if kind is Status:
        nodes = st.lists(any_numbers(NodeStatus), max_size=3).map(tuple)
        live = st.lists(any_numbers(LiveRequest), max_size=3).map(tuple)
        known |= {"lines": st.just(()), "nodes": nodes, "live": live}
    return st.builds(kind, **known)


@examples(20)
@given(state=any_numbers(Status))
def test_no_number_of_a_coordinator_breaks_what_shows_it(state: Status) -> None:
    busy = BusyHistory()
    busy.add(state)
    for width in (40, 200):
        assert drawn(TopView("here", state, busy), width)
    with redirect_stdout(io.StringIO()) as shown:
        print_status(state)
    assert shown.getvalue()
    json.dumps(as_dict(state), allow_nan=False)
    assert Metrics().text(state)
