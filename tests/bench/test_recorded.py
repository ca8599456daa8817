"""Recorded: what a coordinator wrote down is read back, and played again to the same tokens."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.nodes import NodeRing
from support.rings import submit

from edgespec.bench.load import Load
from edgespec.bench.recorded import (
    Recorded,
    prompts_of,
    read_recording,
    replay_recording,
)
from edgespec.bench.setup import Setup
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.profiles import profile_named
from edgespec.errors import ConfigError, RequestFailed
from edgespec.planning.cost_model import cost_model_named
from edgespec.runtime.request_log import RequestLog
from edgespec.types.tool_forms import Tool
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import ChatMessage, Finished, ToolCall


def setup(recording: list[Recorded]) -> Setup:
    return Setup(
        model=bundled("base"),
        draft=bundled("draft"),
        dtype="float64",
        profiles=(profile_named("jetson-orin-nano-8gb"),) * 3,
        cost_model=cost_model_named("llama-2-13b"),
        link=None,
        prompts=tuple(prompts_of(recording)),
        max_new_tokens=1,
        sampling=Sampling(),
    )


def line(after: float, prompt: str, **changes: Any) -> dict[str, Any]:
    """As RequestLog writes it, of a request that nobody waited for."""
    request = {
        "prompt": prompt, "max_new_tokens": 12, "temperature": 0.0, "top_k": 0, "top_p": 1.0,
        "min_p": 0.0, "seed": 0, "stop": [], "policy": "flowspec", "messages": "", "top": -1,
    }  # fmt: skip
    request |= changes
    return {
        "what": "request", "format": 1, "after": after, "outcome": "client_left",
        "request": request, "end": {},
    }  # fmt: skip


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path


def test_a_coordinator_writes_every_request_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("of another run")
    path.chmod(0o644)
    ends: list[Finished] = []
    told: list[Finished] = []
    with closing(RequestLog(str(path))) as log, NodeRing(2) as ring, ring.client() as client:
        ring.threads[0].node.requests = log
        ring.threads[0].node.answered = told.append
        ring.await_up()
        for ask in (submit(max_new_tokens=20), submit(max_new_tokens=7, policy="flowspec")):
            *_, end = client.ask(ask)
            assert isinstance(end, Finished)
            ends.append(end)
        with pytest.raises(RequestFailed):
            list(client.ask(submit(policy="no such")))
    assert told == ends
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it holds prompts and answers"
    recording = read_recording(path)
    assert [r.token_ids for r in recording] == [*(end.token_ids for end in ends), None]
    assert [r.seconds for r in recording] == [*(end.seconds for end in ends), None]
    assert [r.outcome for r in recording] == [*(end.finish_reason for end in ends), "failed"]
    assert [r.submit.max_new_tokens for r in recording[:2]] == [20, 7]
    assert [r.submit.policy for r in recording[1:]] == ["flowspec", "no such"]
    assert recording[0].after == 0 < recording[1].after < recording[2].after


@pytest.mark.thorough
def test_what_was_written_is_played_again(tmp_path: Path) -> None:
    asked = [
        line(5.0, "def read("),
        line(5.1, "Question: 2 + 2?", policy="adaptive", temperature=0.9, seed=7),
        line(9.0, "def read(", grammar="no: such {"),
    ]
    path = written(tmp_path / "requests.jsonl", *asked)
    first = replay_recording(setup(read_recording(path)), read_recording(path))
    assert [type(p.end).__name__ for p in first] == ["Finished", "Finished", "Failed"]
    assert [p.same for p in first] == [None, None, None]

    for entry, played in zip(asked, first[:2], strict=False):
        assert isinstance(played.end, Finished)
        entry |= {
            "outcome": played.end.finish_reason,
            "end": {"token_ids": played.end.token_ids, "seconds": played.end.seconds},
        }
    recording = read_recording(written(path, *asked))
    for policy in ("", "autoregressive"):
        again = replay_recording(setup(recording), recording, policy)
        assert [p.same for p in again] == [True, True, None]
    # The second came while the first one was answered: it had to wait, and is told so.
    earlier, later = (played.end for played in first[:2])
    assert isinstance(earlier, Finished)
    assert isinstance(later, Finished)
    assert earlier.seconds > 0.1
    assert later.first_token_seconds > earlier.first_token_seconds

    at_once = replay_recording(replace(setup(recording), load=Load(live=2)), recording)
    assert [p.same for p in at_once] == [True, True, None]
    end = at_once[1].end
    assert isinstance(end, Finished)
    assert end.first_token_seconds < later.first_token_seconds, "it need not wait"

    asked[0]["end"]["token_ids"] = [5, 6]
    wrong = read_recording(written(path, *asked))
    assert [p.same for p in replay_recording(setup(wrong), wrong)][:2] == [False, True]


def test_of_a_cancelled_answer_what_there_was_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    asked = line(0.0, "def read(")
    [whole] = replay_recording(setup(read_recording(written(path, asked))), read_recording(path))
    assert isinstance(whole.end, Finished)
    asked |= {
        "outcome": "cancelled",
        "end": {"token_ids": whole.end.token_ids[:4], "seconds": 1.0},
    }
    recording = read_recording(written(path, asked))
    [cut] = replay_recording(setup(recording), recording)
    assert isinstance(cut.end, Finished)
    assert (cut.same, cut.end.new_tokens) == (True, 4)


def test_a_client_that_leaves_is_written(tmp_path: Path) -> None:
    with closing(RequestLog(str(tmp_path / "requests.jsonl"))) as log:
        log.asked(b"one", submit(tag=1))
        log.asked(b"two", submit(tag=1))
        log.left(b"one")
        log.left(b"one")
    [only] = read_recording(tmp_path / "requests.jsonl")
    assert (only.outcome, only.token_ids) == ("client_left", None)


def test_who_asked_is_written_so_that_a_replay_tells_askers_apart(tmp_path: Path) -> None:
    with closing(RequestLog(str(tmp_path / "requests.jsonl"))) as log:
        log.asked(b"one", structs.replace(submit(), scope="anna"))
        log.left(b"one")
    [only] = read_recording(tmp_path / "requests.jsonl")
    assert only.submit.scope == "anna"


def test_a_conversation_is_written_and_read_again(tmp_path: Path) -> None:
    talk = (
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "", (ToolCall("f", "{}", "1"),)),
        ChatMessage("tool", "é", tool_call_id="1"),
    )
    tools = (Tool("f", "d", {"type": "object"}),)
    asked = structs.replace(submit(prompt=""), messages=talk, tools=tools)
    with closing(RequestLog(str(tmp_path / "requests.jsonl"))) as log:
        log.asked(b"one", asked)
        log.left(b"one")
    [only] = read_recording(tmp_path / "requests.jsonl")
    assert structs.replace(only.submit, tag=asked.tag) == asked
    as_text = json.dumps([{"role": "user", "content": "hi"}])
    [old] = read_recording(written(tmp_path / "old.jsonl", line(0.0, "", messages=as_text)))
    assert old.submit.messages == (ChatMessage("user", "hi"),), "as release 0.2.0 wrote it"


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda entry: entry["request"].pop(key)


@pytest.mark.parametrize(
    "spoil",
    [
        without("seed"),
        lambda entry: entry.update(format=2),
        lambda entry: entry["request"].update(top_k="all"),
        lambda entry: entry["request"].update(max_new_tokens=True),
        lambda entry: entry.update(end=None),
        lambda entry: entry.update(end={"token_ids": ["x"], "seconds": 1}),
        lambda entry: entry.update(after="soon"),
    ],
)
def test_a_line_that_is_none_is_named(
    spoil: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    bad = line(1.0, "b")
    spoil(bad)
    path = written(tmp_path / "requests.jsonl", line(0.0, "a"), bad)
    with pytest.raises(ConfigError, match=r"line 2 of .*requests.jsonl is no request"):
        read_recording(path)


def test_other_files_are_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a prompt")
    for path in (written(tmp_path / "trace.json", {"format": 1}), tmp_path / "text"):
        with pytest.raises(ConfigError, match=r"line 1 of"):
            read_recording(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recording(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"cannot write the requests to .*none"):
        RequestLog(str(tmp_path / "none" / "x"))
