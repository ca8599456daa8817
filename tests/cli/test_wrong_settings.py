"""What `serve`, `join`, `demo` and the command itself say to settings that cannot be."""

from __future__ import annotations

import json
import logging
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Done, run_here

from edgespec import __version__
from edgespec.daemon.bundled_models import bundled

Here = Callable[..., Done]


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Runs a command in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: run_here(capfd, monkeypatch, *arguments)


TOY_DEMO = ["demo", "--model", bundled("base")]
SERVE = ["serve", "--port", "0"]

_TURNS = ["serve", "--idle", "600", "--http", "127.0.0.1:0", "--port", "0"]
WRONG: dict[str, tuple[list[str], str]] = {
    "no command": (["nothing"], "No such command 'nothing'"),
    "no stages": ([*SERVE, "--dtype", "float64"], "Give --stages N, or --layers N,N,..."),
    "fewer than no stages": ([*SERVE, "--stages", "-1"], "-1 stages; a ring has 1 to 256"),
    "too many stages": ([*SERVE, "--stages", "257"], "257 stages; a ring has 1 to 256"),
    "layers in words": ([*SERVE, "--layers", "two,six"], "layers is 'two,six'; give one number"),
    "no layer for a stage": ([*SERVE, "--layers", "8,0"], "0 layers; a stage needs at least one"),
    "layers of another model": ([*SERVE, "--layers", "4,5"], "no split of 8 layers over 2"),
    "layers for other stages": (
        [*SERVE, "--stages", "3", "--layers", "4,4"],
        "layers for 2 stages, but 3 stages",
    ),
    "quantisation": (
        [*SERVE, "--stages", "1", "--quant", "int3"],
        "unknown quantisation 'int3'; choose one of: none, int8, int4,",
    ),
    "draft's quantisation": (
        [*SERVE, "--stages", "1", "--draft-quant", "int3"],
        "unknown quantisation 'int3'",
    ),
    "context": ([*SERVE, "--stages", "1", "--context", "1"], "context is 1; it must be at least 2"),
    "context beyond the model's": (
        [*SERVE, "--stages", "1", "--context", "1025"],
        "a context of 1025 tokens is more than",
    ),
    "stages in words": ([*SERVE, "--stages", "three"], "'--stages'"),
    "more stages than layers": ([*SERVE, "--stages", "9"], "9 stages for a model of 8 layers"),
    "no model": ([*SERVE, "--stages", "1", "--model", "/none"], "there is no model folder /none"),
    "no draft": (
        [*SERVE, "--stages", "1", "--draft", "/none"],
        "there is no model folder /none",
    ),
    "no such model": ([*SERVE, "--only", "small"], "the cluster has no model small; it has base"),
    "idle of no API": ([*SERVE, "--idle", "9", "--http", "none"], "are for one model that stays"),
    "idle of another ring": (
        [*SERVE, "--stages", "1", "--idle", "9"],
        "--idle is for the cluster's models",
    ),
    "dtype": ([*SERVE, "--stages", "1", "--dtype", "int3"], "unknown dtype 'int3'"),
    "port": (["serve", "--stages", "1", "--port", "70000"], "70000 is no port"),
    "own stage": (["serve", "--stages", "2", "--with-stage", "3"], "has the stages 1 to 2"),
    "own stage's device": (
        [
            *("serve", "--stages", "1", "--with-stage", "--emulate"),
            "jetson-agx-orin-64gb,raspberry-pi-5-8gb",
        ],
        "a device of its own for each node",
    ),
    "model of invalid UTF-8": (
        [*SERVE, "--stages", "1", "--model", "/m\udcff"],
        "model folder's name '/m\\udcff' is not valid UTF-8",
    ),
    "stage minus one": (["join", "--stage", "-1", "--coordinator", "127.0.0.1:9"], "stage -1; st"),
    "recovery below zero": ([*SERVE, "--stages", "1", "--recovery", "-1"], "recovery is -1.0"),
    "none at once": ([*_TURNS, "--live", "0"], "value for '--live'"),
    "stage in words": (["join", "--stage", "one", "--coordinator", "127.0.0.1:9"], "'--stage'"),
    "no coordinator": (["join", "--stage", "1", "--coordinator", ""], "is no host name"),
    "no wait to look": (["join", "--stage", "1", "--wait", "0"], "wait is 0.0"),
    "no time to look": (["prompt", "x", "--wait", "nan"], "wait is nan"),
    "no address": (["join", "--stage", "1", "--coordinator", "a:b"], "is no HOST:PORT"),
    "no wait": (["join", "--stage", "1", "--coordinator", "a:1", "--wait", "nan"], "wait is nan"),
    "demo without stages": (["demo", "--stages", "-1"], "-1 stages"),
    "demo with too many": ([*TOY_DEMO, "--stages", "9"], "9 stages for a model of 8 layers"),
    "demo without a model": (["demo", "--model", "/none"], "there is no model folder /none"),
    "demo of nothing": (["demo", "--prompt", ""], "the prompt is empty"),
    "demo by magic": (["demo", "--policy", "magic"], "unknown policy 'magic'"),
    "demo too hot": (["demo", "--temperature", "-1"], "temperature is -1.0"),
    "demo top_p": (["demo", "--top-p", "2"], "top_p is 2.0"),
    "demo seed": (["demo", "--seed", "-1"], "seed is -1"),
    "demo dtype": (["demo", "--dtype", "int3"], "unknown dtype"),
    "demo of invalid UTF-8": (["demo", "--prompt", "\udcff"], "the prompt is not valid UTF-8"),
}


NOT_NOW: dict[str, tuple[list[str], str]] = {
    "host of several": ([*_TURNS, "--host", "192.0.2.1"], "cannot listen on 192.0.2.1:0"),
    "host": ([*SERVE, "--stages", "1", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1:0"),
    "no host": (["join", "--stage", "1", "--coordinator", "x.invalid"], "'x.invalid' is unknown"),
}


@pytest.mark.parametrize("what", NOT_NOW)
def test_an_address_that_may_work_later_is_no_wrong_setting(here: Here, what: str) -> None:
    arguments, words = NOT_NOW[what]
    here(*arguments).assert_refused(words, code=1)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_setting_is_one_clear_error(here: Here, what: str) -> None:
    arguments, words = WRONG[what]
    here(*arguments).assert_refused(words)
    if arguments[0] == "demo":
        here(*arguments, "--json").assert_refused(words)


@pytest.mark.parametrize("options", [["--stages", "1"], [*_TURNS[1:5], "--host", "127.0.0.1"]])
def test_a_port_in_use_is_said_with_what_to_do(here: Here, options: list[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        done = here("serve", *options, "--port", port)
    done.assert_refused(f"cannot listen on 127.0.0.1:{port}", "in use", "--port", code=1)


def test_a_draft_with_another_tokenizer_is_refused(here: Here, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(bundled("draft"), other)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    done = here("serve", "--port", "0", "--stages", "1", "--draft", str(other))
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "tokenizer" in done.err
    assert str(other) in done.err


def test_a_stage_that_finds_no_coordinator_says_so(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "edgespec")
    done = here("join", "--stage", "1", "--coordinator", "127.0.0.1:9", "--wait", "0.2")
    done.assert_refused("no coordinator answered at 127.0.0.1:9 within 0 s (nothing", code=1)
    assert "nothing listens at 127.0.0.1:9; trying 127.0.0.1:9 again" in caplog.text


def test_help_names_every_command_and_the_exit_codes(here: Here) -> None:
    done = here("--help")
    assert done.code == 0
    for word in ("demo", "serve", "join", "prompt", "130"):
        assert word in done.out
    for command in ("demo", "serve", "join", "prompt"):
        assert here(command, "--help").code == 0


def test_version(here: Here) -> None:
    done = here("--version")
    assert (done.code, done.out) == (0, f"edgespec {__version__}\n")
