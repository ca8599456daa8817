"""`edgespec prompt` at a ring of fake stages: what goes where, cancelling, wrong input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import fields
from support.cases import case
from support.commands import COMMAND, PATIENCE_S, Command, Done, run, run_here, to_prompt
from support.nodes import NodeRing, until
from support.rings import submit

from edgespec.errors import EXIT_NO_READER, ConfigError
from edgespec.sim.toy import text_of
from edgespec.types.record import MOST_CHARS
from edgespec.wire.client_messages import Finished

Here = Callable[..., Done]


@pytest.fixture(scope="module")
def ring() -> Iterator[NodeRing]:
    """One ring for all prompts."""
    with NodeRing(2) as made:
        made.await_up()
        yield made


@pytest.fixture
def here(
    ring: NodeRing, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Here]:
    """Runs a prompt at the ring in this process; the ring is free and answers afterwards."""

    def ask(*arguments: str) -> Done:
        return run_here(capfd, monkeypatch, *to_prompt(ring.address, *arguments))

    yield ask
    ring.assert_free()
    good = submit()
    ring.assert_right(good, ring.ask(good))


@pytest.fixture
def slow(ring: NodeRing) -> Iterator[NodeRing]:
    """The same ring, with stages that take their time."""
    for block in ring.blocks:
        block.delay = 0.02
    yield ring
    for block in ring.blocks:
        block.delay = 0.0


# --- what goes where ------------------------------------------------------------------------------


def test_the_text_alone_is_on_standard_output(ring: NodeRing, here: Here) -> None:
    right = ring.expected(submit(max_new_tokens=25)).text + "\n"
    figures = ("tokens/s", "trips", "accepted", "rows", "adaptive")
    for options, shown in (((), ()), (("--verbose",), figures)):
        done = here("hello", "--max-new-tokens", "25", *options)
        assert (done.code, done.out) == (0, right)
        assert re.search(r"^25 tokens, [\d.]+ tokens a second \(cut", done.err, re.MULTILINE)
        assert [figure for figure in figures if figure in done.err] == [*shown], done.err


def test_json_is_one_object_with_every_figure(ring: NodeRing, here: Here) -> None:
    done = here("hello", "--max-new-tokens", "25", "--json", "--seed", "3")
    assert done.code == 0
    assert done.out.endswith("}\n")
    assert done.out.count("\n") == 1
    answer = json.loads(done.out)
    assert set(answer) == {f.name for f in fields(Finished)} - {"tag"} | {
        "tokens_per_second",
        "tokens_per_trip",
    }
    right = ring.expected(submit(max_new_tokens=25, seed=3))
    assert (answer["text"], answer["token_ids"]) == (right.text, list(right.token_ids))
    assert answer["text"] == "".join(text_of(token) for token in answer["token_ids"])
    assert (answer["finish_reason"], answer["policy"]) == ("length", "adaptive")
    assert (answer["draft"], answer["stages"]) == ("fake", 2)
    assert (answer["prompt_tokens"], answer["new_tokens"]) == (5, 25)
    assert answer["tokens_per_second"] == pytest.approx(25 / answer["seconds"])
    assert answer["tokens_per_trip"] == pytest.approx(25 / answer["trips"])
    assert 0 < answer["first_token_seconds"] <= answer["seconds"]
    # The first token comes of the prompt; each other one of one row that was sent.
    assert sum(n * times for n, times in enumerate(answer["accepted_histogram"])) >= 24
    assert answer["rows_sent"] - answer["rows_wasted"] == 24


def test_the_manual_defines_every_figure(here: Here) -> None:
    manual = Path(__file__).parents[2] / "docs" / "figures.md"
    section = manual.read_text(encoding="utf-8").partition("\n## JSON\n")[2]
    rows = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    defined = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert defined == list(dict.fromkeys(defined))
    assert set(defined) == set(json.loads(here("hello", "--json").out))


def test_autoregressive_decoding_costs_a_trip_a_token(here: Here) -> None:
    answer = json.loads(here("hello", "--policy", "autoregressive", "--json").out)
    assert answer["policy"] == "autoregressive"
    assert answer["draft"] == "none"
    assert answer["trips"] == answer["new_tokens"] == 128
    assert answer["tokens_per_trip"] == 1.0
    assert answer["accepted_histogram"] == [0, 127]
    assert (answer["rows_sent"], answer["rows_wasted"]) == (127, 0)


@pytest.mark.parametrize("policy", ["autoregressive", "naive_tree", "flowspec"])
def test_one_token_is_an_answer(ring: NodeRing, here: Here, policy: str) -> None:
    done = here("hello", "--max-new-tokens", "1", "--policy", policy, "--json")
    answer = json.loads(done.out)
    assert answer["token_ids"] == list(ring.expected(submit(max_new_tokens=1)).token_ids)
    assert answer["finish_reason"] == "length"


def test_stop_strings_end_the_text_before_them(ring: NodeRing, here: Here) -> None:
    whole = ring.expected(submit(max_new_tokens=40)).text
    stop = whole[10:13]
    done = here("hello", "--max-new-tokens", "40", "--stop", stop, "--stop", "never")
    right = ring.expected(submit(max_new_tokens=40, stop=(stop, "never")))
    assert done.out == right.text + "\n"
    assert re.search(r"tokens a second$", done.err, re.MULTILINE), "the answer is whole"
    assert len(right.text) <= 10


def test_options_reach_the_coordinator(ring: NodeRing, here: Here) -> None:
    for seed in (0, 7, 2**64 - 1):
        answer = json.loads(
            here("hello", "--seed", str(seed), "--max-new-tokens", "9", "--json").out
        )
        if seed < 2**63:
            right = ring.expected(submit(seed=seed, max_new_tokens=9))
            assert answer["token_ids"] == list(right.token_ids)
        assert answer["new_tokens"] == 9


def test_the_prompt_may_come_from_standard_input(ring: NodeRing) -> None:
    done = run(*to_prompt(ring.address, "-", "--max-new-tokens", "9"), stdin=b"hello")
    assert done.code == 0
    assert done.out == ring.expected(submit(max_new_tokens=9)).text + "\n"


@pytest.mark.thorough
def test_several_commands_at_once_are_each_answered(slow: NodeRing) -> None:
    asks = [submit(prompt=f"prompt {n}", max_new_tokens=20, seed=n) for n in range(3)]
    done: dict[int, Done] = {}

    def one(n: int) -> None:
        arguments = [asks[n].prompt, "--max-new-tokens", "20", "--seed", str(n)]
        done[n] = run(*to_prompt(slow.address, *arguments))

    for block in slow.blocks:
        block.delay = 1.0  # the first is not answered before the last has asked
    threads = [threading.Thread(target=one, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(slow.machine._requests) == 3, PATIENCE_S)
    for block in slow.blocks:
        block.delay = 0.0
    for thread in threads:
        thread.join()
    for n, ask in enumerate(asks):
        assert done[n].code == 0, done[n]
        assert done[n].out == slow.expected(ask).text + "\n"
    assert any("waiting behind" in d.err for d in done.values())


def test_an_output_that_is_none_is_no_traceback(ring: NodeRing, tmp_path: Path) -> None:
    """Closed by the shell (cron, a service), or on a full disk."""
    asking = " ".join([*COMMAND, *to_prompt(ring.address, "hello", "--max-new-tokens", "3")])
    for stream, code, words in (
        (">&-", 0, "3 tokens, "),
        (">&- 2>&- <&-", 0, ""),
        (">/dev/full", 1, "edgespec: error: cannot write: No space left on device"),
    ):
        command = ["sh", "-c", f"{asking} {stream}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        with case(stream, done):
            assert (done.returncode, done.stdout) == (code, "")
            assert words in done.stderr
            assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_a_reader_that_goes_away_is_no_traceback(slow: NodeRing) -> None:
    arguments = [*COMMAND, *to_prompt(slow.address, "hello", "--max-new-tokens", "300")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(3)
    process.stdout.close()
    assert process.wait(PATIENCE_S) == EXIT_NO_READER
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    slow.assert_free()


@pytest.mark.thorough
def test_an_output_that_lacks_characters_is_no_traceback(ring: NodeRing) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    code = (
        "import sys; from edgespec.cli import answering;"
        "from edgespec.wire.client_messages import *;"
        "from edgespec.cli import main; from edgespec.cli.notes import Notes;"
        "f = Finished(1, 'né', (1,), 'stop', 'p', 'd', 1, 1, 1, 1.0, 1.0, 1.0, (), 0, 0, 0, 0.0);"
        "show = lambda: answering.show([Tokens(1, (1,), 'né'), f], sys.argv[1] == 'json', Notes());"
        "main.application = lambda word, **_: show; main.main()"
    )
    for kind, expected in (("text", "n?\n"), ("json", '{"text": "n\\u00e9"')):
        command = [sys.executable, "-c", code, kind]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(expected)


# --- Ctrl-C, and worse ----------------------------------------------------------------------------


def test_ctrl_c_cancels_through_the_ring_and_the_next_prompt_works(slow: NodeRing) -> None:
    right = slow.expected(submit(max_new_tokens=300))
    with Command(*to_prompt(slow.address, "hello", "--max-new-tokens", "300")) as command:
        command.until_out(right.text[:5])
        assert any(block.open_requests for block in slow.blocks)
        command.signal(signal.SIGINT)
        done = command.done()
    assert done.code == 130
    assert "Traceback" not in done.err
    assert "(cancelled)" in done.err
    assert 5 <= len(done.out.strip()) < 300
    assert right.text.startswith(done.out.rstrip("\n")), "the streamed text is part of the answer"
    slow.assert_free()
    ask = submit()
    slow.assert_right(ask, slow.ask(ask))


@pytest.mark.thorough
def test_ctrl_c_with_json_still_prints_what_there_is(slow: NodeRing) -> None:
    with Command(*to_prompt(slow.address, "hello", "--max-new-tokens", "300", "--json")) as command:
        until(lambda: slow.blocks[-1].open_requests)
        command.signal(signal.SIGINT)
        done = command.done()
    assert done.code == 130
    assert json.loads(done.out)["finish_reason"] == "cancelled"
    slow.assert_free()


@pytest.mark.thorough
def test_ctrl_c_while_waiting_behind_another(slow: NodeRing) -> None:
    with Command(*to_prompt(slow.address, "first", "--max-new-tokens", "390")) as first:
        until(lambda: slow.blocks[-1].open_requests)
        with Command(*to_prompt(slow.address, "second")) as second:
            second.until_err("waiting behind 1 other request(s)")
            second.signal(signal.SIGINT)
            done = second.done()
        assert done.code == 130
        assert done.out == ""
        first.signal(signal.SIGINT)
        assert first.done().code == 130
    slow.assert_free()


@pytest.mark.thorough
def test_ctrl_c_while_nobody_answers() -> None:
    with Command(*to_prompt("127.0.0.1:9", "hello", "--wait", "60")) as command:
        command.until_err("nothing listens at 127.0.0.1:9; trying 127.0.0.1:9 again, for 60 s")
        command.signal(signal.SIGINT)
        done = command.done()
    assert done.code == 130
    assert "Traceback" not in done.err


def test_a_killed_client_is_freed(slow: NodeRing) -> None:
    with Command(*to_prompt(slow.address, "hello", "--max-new-tokens", "300")) as command:
        command.until_out("".join(slow.expected(submit(max_new_tokens=300)).text[:3]))
        command.signal(signal.SIGKILL)
        assert command.done().code == -signal.SIGKILL
    slow.assert_free()


@pytest.mark.thorough
def test_a_coordinator_that_ends_is_an_error_of_the_prompt() -> None:
    with NodeRing(1) as ring:
        ring.await_up()
        ring.blocks[0].delay = 0.02
        with Command(*to_prompt(ring.address, "hello", "--max-new-tokens", "300")) as command:
            until(lambda: ring.blocks[0].open_requests)
            ring.threads[0].leave()
            done = command.done()
    assert done.code == 1
    assert "edgespec: error: the ring ended: stopped by SIGTERM" in done.err
    assert "Traceback" not in done.err


# --- wrong input ----------------------------------------------------------------------------------

WRONG: dict[str, tuple[list[str], str]] = {
    "empty prompt": ([""], "the prompt is empty"),
    "only spaces": ([" \n "], "the prompt is empty"),
    "temperature": (["x", "--temperature", "-1"], "temperature is -1.0; it must be"),
    "temperature of no API": (["x", "--temperature", "2.1"], "a number from 0 to 2"),
    "temperature nan": (["x", "--temperature", "nan"], "temperature is nan"),
    "top_p": (["x", "--top-p", "2"], "top_p is 2.0"),
    "top_p zero": (["x", "--top-p", "0"], "top_p is 0.0"),
    "min_p": (["x", "--min-p", "-0.1"], "min_p is -0.1"),
    "top_k": (["x", "--top-k", "-1"], "top_k is -1"),
    "top_k huge": (["x", "--top-k", str(2**70)], "top_k"),
    "seed": (["x", "--seed", "-1"], "seed is -1"),
    "seed huge": (["x", "--seed", str(2**64)], "seed is"),
    "no tokens": (["x", "--max-new-tokens", "0"], "max-new-tokens is 0"),
    "huge max-new-tokens": (["x", "--max-new-tokens", str(2**70)], "max_new_tokens"),
    "policy": (["x", "--policy", "magic"], "unknown policy 'magic'; choose one of: adaptive"),
    "empty stop": (["x", "--stop", ""], "stop[0] is empty"),
    "too many stops": (["x", *["--stop", "y"] * 300], "cannot be sent"),
    "too long": (["x" * (MOST_CHARS + 1)], "characters; at most"),
    "invalid UTF-8": (["x\udcff"], "the prompt is not valid UTF-8"),
    "stop of invalid UTF-8": (["x", "--stop", "\udcff"], "stop string is not valid UTF-8"),
    "policy of invalid UTF-8": (["x", "--policy", "\udcff"], "unknown policy '\\udcff'"),
    "unknown option": (["x", "--colour"], "No such option"),
    "no number": (["x", "--top-k", "many"], "'--top-k'"),
    "no such file": (["--file", "/no/such/file"], "cannot read '/no/such/file': No such file"),
    "folder": (["--file", "/"], "cannot read '/'"),
    "no file name": (["--file", "a\0b"], "cannot read"),
    "binary file": (["--file", sys.executable], "is not valid UTF-8"),
    "endless file": (["--file", "/dev/zero"], "/dev/zero is too long: at most"),
    "empty file": (["--file", "/dev/null"], "the prompt is empty"),
    "empty prompt of a conversation": (["", "--system", "be brief"], "the prompt is empty"),
    "bare text with a system message": (["x", "--raw", "--system", "y"], "--raw continues"),
    "system of invalid UTF-8": (["x", "--system", "\udcff"], "conversation is not valid UTF-8"),
    "wait": (["x", "--wait", "0"], "wait is 0.0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_one_clear_error(
    ring: NodeRing,
    what: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments, words = WRONG[what]
    for options in ([], ["--json"]):
        done = run_here(capfd, monkeypatch, *to_prompt(ring.address, *arguments, *options))
        done.assert_refused(words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x" * 400], "the prompt has 400 tokens and the model's context is 400"),
    ],
)
def test_what_only_the_coordinator_can_tell_is_an_error_too(
    here: Here, arguments: list[str], words: str
) -> None:
    here(*arguments).assert_refused(words, code=1)
    here(*arguments, "--json").assert_refused(words, code=1)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:0", "ports go from 1 to 65535"),
        ("127.0.0.1:99999", "99999 is no port"),
        ("127.0.0.1:http", "is no HOST:PORT"),
        (":7430", "is no host name"),
        ("", "is no host name"),
        ("tcp://a:7430", "is no host name"),
    ],
)
def test_an_address_that_is_none_is_refused(
    address: str,
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_here(capfd, monkeypatch, *to_prompt(address, "x")).assert_refused(words)


def test_an_unknown_host_is_said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_here(capfd, monkeypatch, *to_prompt("no-such-host.invalid", "x"))
    done.assert_refused("the host 'no-such-host.invalid' is unknown", code=1)


def test_no_coordinator_is_said_within_the_wait(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in ([], ["--json"]):
        done = run_here(
            capfd, monkeypatch, *to_prompt("127.0.0.1:9", "x", "--wait", "0.1", *options)
        )
        done.assert_refused("no coordinator answered at 127.0.0.1:9", "edgespec serve", code=1)


def test_no_draft_is_said_with_what_to_do(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with NodeRing(1, draft=False) as ring:
        for options in ([], ["--json"]):
            arguments = to_prompt(ring.address, "x", "--policy", "flowspec", *options)
            done = run_here(capfd, monkeypatch, *arguments)
            done.assert_refused("flowspec needs a draft model", "--draft", code=1)


@pytest.mark.thorough
def test_invalid_utf8_on_standard_input(ring: NodeRing) -> None:
    done = run(*to_prompt(ring.address, "-", "--json"), stdin=b"abc\xff\xfe")
    done.assert_refused("standard input is not valid UTF-8 (byte 3)")


def test_invalid_utf8_as_an_argument(ring: NodeRing) -> None:
    run("prompt", "--coordinator", str(ring.address), b"abc\xff").assert_refused(
        "the prompt is not valid UTF-8"
    )


def test_reading_a_prompt_raises_what_main_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.cli.prompt import read_prompt

    class Bad:
        class buffer:
            @staticmethod
            def read(most: int) -> bytes:
                return b"\xc3("

    monkeypatch.setattr(sys, "stdin", Bad)
    with pytest.raises(ConfigError, match="byte 0"):
        read_prompt("-")
