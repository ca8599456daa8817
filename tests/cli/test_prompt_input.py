"""What `edgespec prompt` asks: its argument, files, what is piped in, and system messages."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.commands import Done, run_here, to_prompt
from support.keys import OWN
from support.nodes import NodeRing
from support.rings import submit

from edgespec.net.keys import Token
from edgespec.runtime.access_policy import TOKEN

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
) -> Here:
    """Runs a prompt at the ring in this process."""
    return lambda *arguments: run_here(capfd, monkeypatch, *to_prompt(ring.address, *arguments))


class Piped:
    """Standard input that is no terminal, or says it is one."""

    def __init__(self, text: str, is_terminal: bool = False) -> None:
        self.buffer = io.BytesIO(text.encode())
        self.isatty = lambda: is_terminal


def test_what_is_piped_in_is_the_prompt_where_there_is_none(
    ring: NodeRing, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in ((), ("-",)):
        monkeypatch.setattr(sys, "stdin", Piped("hello"))
        done = here(*arguments, "--max-new-tokens", "9")
        assert done.out == ring.expected(submit(max_new_tokens=9)).text + "\n"
    monkeypatch.setattr(sys, "stdin", Piped("not this"))
    assert here("hello", "--max-new-tokens", "9").out == done.out


def test_a_token_is_piped_in_before_the_prompt(
    ring: NodeRing, here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = Token.new(OWN.public)
    ring.keys.roles[token.pair.public] = TOKEN
    monkeypatch.setattr(sys, "stdin", Piped(f"{token.text}\nhello"))
    done = here("--token", "-", "--cluster", str(tmp_path / "client"), "--max-new-tokens", "9")
    assert done.out == ring.expected(submit(max_new_tokens=9)).text + "\n", done.err


def test_nothing_to_ask_is_said_and_not_waited_for(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Piped("hello", is_terminal=True))
    here().assert_refused("there is nothing to ask", "--file")
    monkeypatch.setattr(sys, "stdin", Piped(""))
    here().assert_refused("the prompt is empty")


def test_files_come_before_the_prompt(
    ring: NodeRing, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").write_text("first file\n")
    (tmp_path / "two").write_text("second file\n\n")
    files = [word for name in ("one", "two") for word in ("--file", str(tmp_path / name))]
    monkeypatch.setattr(sys, "stdin", Piped("piped"))
    for more, last in (([], "second file\n\n"), (["hello"], "second file\n\nhello")):
        done = here(*more, *files, "--max-new-tokens", "9")
        ask = submit(prompt=f"first file\n\n{last}", max_new_tokens=9)
        assert done.out == ring.expected(ask).text + "\n"
    piped = here("-", *files[:2], "--max-new-tokens", "9")
    ask = submit(prompt="first file\n\npiped", max_new_tokens=9)
    assert piped.out == ring.expected(ask).text + "\n"


def test_a_system_message_makes_it_a_conversation(
    ring: NodeRing, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    encode = ring.codec.encode_chat

    def encode_chat(_: object, messages: object, most: int, *more: object) -> Sequence[int]:
        asked.append(messages)
        return encode(messages, most)

    monkeypatch.setattr(type(ring.codec), "encode_chat", encode_chat)
    user = {"role": "user", "content": "hello"}
    for system, opening in (("be brief", [{"role": "system", "content": "be brief"}]), ("", [])):
        done = here("hello", "--system", system, "--max-new-tokens", "9")
        ask = submit(prompt=f"{system}hello", max_new_tokens=9)
        assert done.out == ring.expected(ask).text + "\n"
        assert asked.pop() == [*opening, user]
    here("hello")
    assert asked == [], "this model has no template: it completes the prompt"
    monkeypatch.setattr(ring.codec, "chat_template", "{{ messages }}")
    here("hello")
    assert asked.pop() == [user]
    here("hello", "--raw")
    assert asked == []
