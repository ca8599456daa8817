"""edgespec chat: conversations with a ring of fake stages, typed, piped and cancelled."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import Done, run_here
from support.nodes import CONTEXT, NodeRing, until
from support.rings import submit
from support.terminals import Terminal

from edgespec.cli.chat_commands import WORDS, changed
from edgespec.cli.conversation import Conversation, Turn
from edgespec.cli.line_input import history_file
from edgespec.cli.main import main
from edgespec.door.asking import RequestSettings
from edgespec.errors import AccessRefused, ConfigError, OtherVersion
from edgespec.runtime.client import Client
from edgespec.sim.toy import ToyCodec

Chat = Callable[..., Done]

SHORT = ("--max-new-tokens", "12", "--policy", "flowspec")


@pytest.fixture(scope="module")
def ring() -> Iterator[NodeRing]:
    """One ring for all conversations."""
    with NodeRing(2) as made:
        made.await_up()
        yield made


@pytest.fixture
def slow(ring: NodeRing) -> Iterator[NodeRing]:
    """The same ring, with stages that take their time."""
    for block in ring.blocks:
        block.delay = 0.02
    yield ring
    for block in ring.blocks:
        block.delay = 0.0


class Piped:
    """Standard input that is no terminal."""

    def __init__(self, raw: bytes) -> None:
        self.buffer = io.BytesIO(raw)

    def isatty(self) -> bool:
        return False


class Typed(Piped):
    """Standard input that says it is a terminal; `input` reads from it all the same."""

    def isatty(self) -> bool:
        return True

    def line(self, sign: str = "") -> str:
        line = self.buffer.readline().decode()
        if line == "^C\n":
            raise KeyboardInterrupt
        if not line:
            raise EOFError
        return line.rstrip("\n")


@pytest.fixture
def chat(
    ring: NodeRing,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Chat]:
    """Runs a chat with the ring in this process, with what is piped in or typed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*lines: str, typed: bool = False, options: tuple[str, ...] = SHORT) -> Done:
        raw = "".join(f"{line}\n" for line in lines).encode()
        stdin = Typed(raw) if typed else Piped(raw)
        monkeypatch.setattr(sys, "stdin", stdin)
        if isinstance(stdin, Typed):
            monkeypatch.setattr("builtins.input", stdin.line)
        arguments = ("chat", "--coordinator", str(ring.address), *options)
        return run_here(capfd, monkeypatch, *arguments)

    yield run
    ring.assert_free()


def answers(ring: NodeRing, *questions: str, system: str = "", tokens: int = 12) -> list[str]:
    """What plain decoding gives for each turn, in a conversation of whole answers."""
    said = system
    texts = []
    for question in questions:
        said += question
        texts.append(ring.expected(submit(prompt=said, max_new_tokens=tokens)).text)
        said += texts[-1]
    return texts


# --- piped in -------------------------------------------------------------------------------------


def test_each_line_of_a_pipe_is_a_turn_and_the_answers_alone_are_printed(
    ring: NodeRing, chat: Chat
) -> None:
    done = chat("hello", "", "and then", "why")
    assert done.code == 0
    assert done.out.splitlines() == answers(ring, "hello", "and then", "why")
    assert "> " not in done.out + done.err


def test_the_system_message_comes_before_all(ring: NodeRing, chat: Chat) -> None:
    done = chat("hello", "/system", "hello", options=(*SHORT, "--system", "be brief"))
    first, _ = answers(ring, "hello", "hello", system="be brief")
    second = answers(ring, "hello" + first + "hello")[0]
    assert done.out.splitlines() == [first, second]


def test_lines_may_belong_together(ring: NodeRing, chat: Chat) -> None:
    done = chat("one\\", "two", '"""', "three", "/four", '"""', '"""five"""', "six\\")
    questions = ("one\ntwo", "three\n/four", "five", "six")
    assert done.out.splitlines() == answers(ring, *questions)


@pytest.mark.parametrize(
    ("lines", "words", "code"),
    [
        (["hello", "/sing"], "there is no command /sing; /help lists them", 2),
        (["/undo"], "there is nothing to take back", 2),
        (["/retry"], "there is no question", 2),
        (["/stats"], "nothing was answered yet", 2),
        (["/quit now"], "/quit takes nothing behind it", 2),
        (["/set temperature hot"], "temperature must be a number, not 'hot'", 2),
        (["/set temperature -1"], "temperature is -1.0", 2),
        (["/set top_k 1.5"], "top_k must be a whole number", 2),
        (["/set colour red"], "there is no setting 'colour'; there are: policy", 2),
        (["/set policy magic"], "unknown policy 'magic'", 2),
        (["/save"], "/save takes the name of a file", 2),
        (["/load /nowhere/at/all"], "cannot read /nowhere/at/all", 2),
        (["x" * (CONTEXT + 5)], f"the model's context is {CONTEXT}", 1),
        (["x" * (1 << 20) + "x"], "characters; at most", 2),
    ],
)
def test_the_first_error_of_a_pipe_ends_it(
    chat: Chat, lines: list[str], words: str, code: int
) -> None:
    done = chat(*lines, "never")
    assert done.code == code
    assert words in " ".join(done.err.split())
    assert len(done.out.splitlines()) == len(lines) - 1
    assert "Traceback" not in done.err


def test_a_pipe_that_is_no_text_is_refused(
    ring: NodeRing, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Piped(b"\xff\xfe\n"))
    done = run_here(capfd, monkeypatch, "chat", "--coordinator", str(ring.address))
    done.assert_refused("line 1 of standard input is not valid UTF-8")


def test_a_model_without_a_chat_template_ends_it(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: ToyCodec, *_: object) -> list[int]:
        raise ConfigError("this model has no chat template; it completes texts alone")

    monkeypatch.setattr(ToyCodec, "encode_chat", refuse)
    for typed in (False, True):
        done = chat("hello", "hello", typed=typed)
        assert done.code == 1
        assert done.err.count("edgespec: error: this model has no chat template") == 1
        assert done.out == ""


# --- typed ----------------------------------------------------------------------------------------


def test_errors_do_not_end_a_chat_with_a_person(ring: NodeRing, chat: Chat) -> None:
    done = chat("/sing", "^C", "hello", "x" * (CONTEXT + 5), "and then", "/quit", "x", typed=True)
    assert done.code == 0
    assert done.out.splitlines() == answers(ring, "hello", "and then")
    for words in ("error: there is no command /sing", "Ctrl-D or /quit leaves", "shorten the"):
        assert words in done.err
    assert f"on a ring of 2 stage(s), context {CONTEXT} tokens" in done.err


def test_what_no_further_line_mends_does(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    for problem in AccessRefused("a key that counts no more"), OtherVersion("another version"):

        def refused(self: object, ask: object, problem: Exception = problem) -> object:
            raise problem

        with monkeypatch.context() as patched:
            patched.setattr(Client, "ask", refused)
            done = chat("hello", "hello", typed=True)
        assert done.err.count(f"edgespec: error: {problem}") == 1


def test_commands_change_what_the_model_is_given(ring: NodeRing, chat: Chat) -> None:
    done = chat("hello", "and then", "/undo", "why", "/new", "hello", "/help", "/stats", typed=True)
    one, two = answers(ring, "hello", "and then")
    assert done.out.splitlines() == [one, two, answers(ring, "hello", "why")[1], one]
    assert "taken back: and then (1 turn(s) left)" in done.err
    for words in (*WORDS, "tokens/s", "4 answer(s), 48 tokens", "1 turn(s), 0 of them left out"):
        assert words in done.err


def test_retry_asks_again_and_with_a_new_seed_where_that_matters(
    ring: NodeRing, chat: Chat
) -> None:
    done = chat("hello", "/retry", "/set temperature=0.7", "/retry", "/retry", typed=True)
    cold, again, warm, warmer = done.out.splitlines()
    assert cold == again
    assert "at temperature 0 the same text comes again" in done.err
    assert "with seed 1\n" in done.err
    assert "with seed 2\n" in done.err
    assert warm != warmer


def test_a_cut_answer_says_why(chat: Chat) -> None:
    done = chat("hello", "/set max-new-tokens 5", "hello", typed=True)
    assert "cut at 12 tokens: /set max_new_tokens allows more" in done.err
    assert "cut at 5 tokens" in done.err


def test_what_is_set_is_shown(chat: Chat) -> None:
    done = chat("/set temperature 0.25", "/set stop end", "/set", typed=True)
    assert done.out == ""
    for name, value in (("temperature", "0.25"), ("stop", "'end'"), ("seed", "0")):
        assert any(line.split()[-2:] == [name, value] for line in done.err.splitlines())
    assert "1, the model's own" in done.err


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("seed", "7", 7),
        ("top_p", "0.5", 0.5),
        ("temperature", "", None),
        ("repetition_penalty", "1.1", 1.1),
        ("stop", "", []),
        ("policy", "pruned", "pruned"),
    ],
)
def test_settings_are_spelt_as_a_person_does(name: str, value: str, result: object) -> None:
    assert getattr(changed(RequestSettings(), name, value), name) == result


# --- Ctrl-C and losses ----------------------------------------------------------------------------


def when(condition: Callable[[], object], *actions: Callable[[], None]) -> threading.Thread:
    """Does that in a thread, one action after the other, each as soon as the condition holds."""

    def act() -> None:
        for action in actions:
            until(condition)
            action()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def interrupt() -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_cancels_the_answer_and_not_the_chat(
    slow: NodeRing, chat: Chat, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    thread = when(lambda: _answered(slow) >= 5, interrupt)
    options = ("--max-new-tokens", "300", "--policy", "flowspec")
    lines = ("hello", "/set max_new_tokens 4", "go on", f"/save {file}")
    done = chat(*lines, typed=True, options=options)
    thread.join()
    assert done.code == 0
    partial, rest = done.out.splitlines()
    whole = slow.expected(submit(max_new_tokens=300)).text
    assert whole.startswith(partial)
    assert 5 <= len(partial) < 300
    assert "(cancelled; what there is of the answer stays)" in done.err
    saved = json.loads(file.read_text())["messages"]
    assert saved[1] == {"role": "assistant", "content": partial, "cut": "cancelled"}
    asked = submit(prompt="hello" + partial + "go on", max_new_tokens=4)
    assert rest == slow.expected(asked).text, "the partial answer is part of the conversation"


def _answered(ring: NodeRing) -> int:
    """Tokens of the running answer."""
    request = next(iter(ring.machine._requests.values()), None)
    return len(request.answer.token_ids) if request is not None else 0


def test_ctrl_c_of_a_pipe_ends_it_with_130(slow: NodeRing, chat: Chat) -> None:
    thread = when(lambda: _answered(slow) >= 3, interrupt)
    done = chat("hello", "never", options=("--max-new-tokens", "300"))
    thread.join()
    assert done.code == 130
    assert len(done.out.splitlines()) == 1


def test_an_answer_goes_on_when_the_ring_is_back(chat: Chat, slow: NodeRing) -> None:
    right = answers(slow, "hello", tokens=100)

    def lose() -> None:
        slow.threads[1].vanish()
        slow.start_stage(1)

    thread = when(lambda: _answered(slow) >= 5, lose)
    done = chat("hello", options=("--max-new-tokens", "100", "--policy", "flowspec"))
    thread.join()
    assert (done.code, done.out.splitlines()) == (0, right)
    assert "waiting for it" in done.err


def test_at_a_terminal_lines_can_be_edited_and_ctrl_c_and_ctrl_d_work(
    slow: NodeRing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    right = answers(slow, "hello", "hello")
    failures: list[BaseException] = []
    is_over = threading.Event()
    with Terminal() as terminal:

        def sees(text: str) -> None:
            until(lambda: text in terminal.text)
            terminal.forget()

        def act() -> None:
            try:
                sees("Ctrl-D leaves")
                terminal.type("hellx\x7fo\n")  # backspace
                sees(right[0])
                terminal.type("\033[A\n")  # arrow up
                sees(right[1])
                terminal.type("/set max_new_tokens 300\nhello\n")
                until(lambda: _answered(slow) >= 5)
                interrupt()
                sees("cancelled; what there is of the answer stays")
                time.sleep(0.2)  # the sign is there before Ctrl-C is pressed at it
                interrupt()
                sees("Ctrl-D or /quit leaves")
                while not is_over.wait(0.3):  # Ctrl-D counts where a line begins
                    terminal.type("\x04")
            except BaseException as problem:
                failures.append(problem)
                terminal.type("\n/quit\n")

        thread = threading.Thread(target=act)
        thread.start()
        monkeypatch.setattr(
            sys, "argv", ["edgespec", "chat", "--coordinator", str(slow.address), *SHORT]
        )
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            is_over.set()
            thread.join()
    assert not failures, failures
    assert not ended.value.code
    assert len(history_file().read_text().splitlines()) == 3


# --- conversations that are too long --------------------------------------------------------------


def test_the_oldest_turns_are_left_out_when_the_context_is_full(
    ring: NodeRing, chat: Chat, tmp_path: Path
) -> None:
    """120 tokens a turn of 400: at the fourth, of which a quarter is kept free, turns must go."""
    file = tmp_path / "talk.json"
    questions = [letter * 108 for letter in "abcd"]
    done = chat(*questions, f"/save {file}", typed=True)
    assert done.code == 0
    assert "its 3 oldest turn(s) were left out" in done.err
    said = questions[3]
    assert done.out.splitlines()[3] == answers(ring, said)[0]
    assert len(done.out.splitlines()) == 4
    assert len(json.loads(file.read_text())["messages"]) == 8, "what is left out is saved too"


def test_a_loaded_conversation_that_is_too_long_loses_its_older_half(
    ring: NodeRing, chat: Chat, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    Conversation("s", [Turn(str(n) * 50, "b" * 50) for n in range(8)]).save(file)
    done = chat(f"/load {file}", "hello")
    assert done.code == 0
    assert "its 6 oldest turn(s) were left out" in done.err
    said = "s" + "".join(str(n) * 50 + "b" * 50 for n in (6, 7)) + "hello"
    assert done.out.strip() == ring.expected(submit(prompt=said)).text


# --- the history ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [True, False])
def test_the_history_can_be_left_out(chat: Chat, keeps: bool) -> None:
    chat("hello", typed=True, options=(*SHORT, *(() if keeps else ("--no-history",))))
    assert history_file().exists() == keeps


def test_a_pipe_leaves_no_history(chat: Chat) -> None:
    chat("hello")
    assert not history_file().exists()
