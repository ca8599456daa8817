"""A real ring: `serve` and two `join`s as processes with the bundled models, from start to end."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.commands import Command, Done, run, to_prompt
from tokenizers import Tokenizer

from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.cluster import VARIABLE, ClusterFolder, ClusterSettings

PROMPT = "Question: Anna has 4 bags with 6 apples each. How many apples does she have?\nAnswer:"


@dataclass
class Processes:
    """The ring's processes."""

    address: str
    coordinator: Command
    stages: dict[int, Command]

    def ask(self, *arguments: str) -> Done:
        """One prompt, continued as it is."""
        return run(*to_prompt(self.address, "--raw", *arguments))


@pytest.fixture(scope="module")
def ring() -> Iterator[Processes]:
    """The stages start before the coordinator."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = str(reserved.getsockname()[1])
    address = f"127.0.0.1:{port}"
    with ExitStack() as stack:
        stages = {
            stage: stack.enter_context(
                Command("join", "--stage", str(stage), "--coordinator", address)
            )
            for stage in (1, 2)
        }
        coordinator = stack.enter_context(Command("serve", "--stages", "2", "--port", port))
        yield Processes(address, coordinator, stages)


@pytest.mark.thorough
def test_an_answer_in_json(ring: Processes) -> None:
    """Asked before the ring is up: the prompt waits, and says for what."""
    ring.coordinator.until_out(f"coordinator at {ring.address}\n")
    done = ring.ask(PROMPT, "--max-new-tokens", "24", "--json", "--wait", "60")
    assert done.code == 0, done.err
    assert "waiting for" in done.err
    answer = json.loads(done.out)
    tokenizer = Tokenizer.from_file(str(Path(bundled("base")) / "tokenizer.json"))
    assert answer["text"] == tokenizer.decode(answer["token_ids"])
    assert answer["new_tokens"] == len(answer["token_ids"]) <= 24
    assert (answer["stages"], answer["policy"]) == (2, "adaptive")
    for stage in ring.stages.values():
        assert "the ring is up" in stage.err
    again = ring.ask(PROMPT, "--max-new-tokens", "24")
    assert again.out == answer["text"] + "\n"


@pytest.mark.thorough
def test_a_prompt_beyond_the_context(ring: Processes) -> None:
    for options in ([], ["--json"]):
        done = ring.ask("word " * 2000, *options)
        done.assert_refused("the model's context is 1024", "shorten the prompt", code=1)


@pytest.mark.thorough
def test_a_second_daemon_for_a_stage_is_refused(ring: Processes) -> None:
    done = run("join", "--stage", "1", "--coordinator", ring.address)
    pid = ring.stages[1].process.pid
    done.assert_refused(
        f"error: the coordinator refused: stage 1 is taken by process {pid}", code=1
    )
    assert ring.ask("x", "--max-new-tokens", "2").code == 0, "the ring goes on"


@pytest.mark.thorough
def test_the_death_of_a_stage_costs_no_token(ring: Processes) -> None:
    pid = ring.stages[2].process.pid
    long = ["--max-new-tokens", "150", "--policy", "autoregressive", "--wait", "60"]
    with ExitStack() as stack:
        ask = to_prompt(ring.address, "--raw", "Once upon a time", *long)
        first = stack.enter_context(Command(*ask))
        first.until_out(" ")
        second = stack.enter_context(Command(*ask, "--json"))
        ring.stages[2].signal(signal.SIGKILL)
        for one in (first, second):
            one.until_err(f"process {pid}) has been silent")
        assert ring.stages[2].done().code == -signal.SIGKILL
        stack.enter_context(Command("join", "--coordinator", ring.address))
        ends = [first.done(), second.done()]
        again = ring.ask("Once upon a time", *long)
    assert [end.code for end in ends] == [0, 0], ends
    assert ends[0].out == again.out
    answer = json.loads(ends[1].out)
    assert answer["text"] + "\n" == again.out
    assert answer["recoveries"] == 1, "it was live too"
    assert "loaded already" in ring.stages[1].err


@pytest.fixture
def own_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For commands beside `ring`, which has that of all tests."""
    ClusterFolder.create(tmp_path, ClusterSettings())
    monkeypatch.setenv(VARIABLE, str(tmp_path))


@pytest.mark.thorough
def test_the_head_on_the_last_stage_gives_the_same_text(own_cluster: None, tmp_path: Path) -> None:
    """Plainly and sampled, and after the loss of that stage, while its answer is on its way."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "integer"}, "minItems": 3}')
    sampled = ["--temperature", "0.8", "--seed", "7"]
    asks = [["--temperature", "0"], sampled, [*sampled, "--schema", str(schema)]]
    long = ["Once upon a time", "--raw", "--max-new-tokens", "150", "--policy", "autoregressive"]
    texts = []
    for head in ("coordinator", "last-stage"):
        with ExitStack() as stack:
            serve = ["serve", "--stages", "2", "--port", "0", "--head", head]
            coordinator = stack.enter_context(Command(*serve))
            coordinator.until_out("\n")
            address = coordinator.out.split()[-1]

            def stage(number: int, stack: ExitStack = stack, address: str = address) -> Command:
                join = ["join", "--stage", str(number), "--coordinator", address]
                return stack.enter_context(Command(*join, "--cache", str(tmp_path / "cache")))

            _, last = stage(1), stage(2)
            ask = to_prompt(address, PROMPT, "--raw", "--max-new-tokens", "24", "--wait", "60")
            ends = [run(*ask, *one, "--json") for one in asks]
            assert [end.code for end in ends] == [0, 0, 0], ends
            if head == "last-stage":
                cut = stack.enter_context(Command(*to_prompt(address, *long)))
                cut.until_out(" ")
                last.signal(signal.SIGKILL)
                stage(2)
                ends.append(cut.done())
            else:
                ends.append(run(*to_prompt(address, *long)))
            assert ends[-1].code == 0, ends[-1].err
            texts.append([*(json.loads(end.out)["token_ids"] for end in ends[:3]), ends[3].out])
            told = "loading the output head" in coordinator.err
            assert told == (head == "coordinator"), coordinator.err
    assert texts[0] == texts[1]


@pytest.mark.thorough
def test_a_coordinator_that_is_started_again_finds_its_stages(own_cluster: None) -> None:
    with ExitStack() as stack:
        coordinator = stack.enter_context(Command("serve", "--stages", "1", "--port", "0"))
        coordinator.until_out("\n")
        address = coordinator.out.split()[-1]
        stage = stack.enter_context(Command("join", "--stage", "1", "--coordinator", address))
        prompt = stack.enter_context(
            Command(*to_prompt(address, "Once", "--raw", "--max-new-tokens", "900", "--wait", "60"))
        )
        prompt.until_out(" ")
        coordinator.signal(signal.SIGKILL)
        end = prompt.done()
        assert coordinator.done().code == -signal.SIGKILL
        assert end.code == 1
        assert f"error: the connection to the coordinator at {address} broke" in end.err
        assert "Traceback" not in end.err
        port = address.rpartition(":")[2]
        stack.enter_context(Command("serve", "--stages", "1", "--port", port))
        done = run(*to_prompt(address, "Once", "--max-new-tokens", "2", "--wait", "60"))
        assert done.code == 0, done.err
        assert "layers 0 to" in stage.err
        assert "are loaded already" in stage.err


@pytest.mark.thorough
def test_a_stage_with_another_model_ends_and_who_waits_for_it_hears_why(
    own_cluster: None,
) -> None:
    with (
        Command("serve", "--stages", "1", "--port", "0", "--recovery", "0.5") as coordinator,
        ExitStack() as stack,
    ):
        coordinator.until_out("\n")
        address = coordinator.out.split()[-1]
        coordinator.until_err("waiting for 1 stage")
        prompt = stack.enter_context(Command(*to_prompt(address, "x", "--wait", "60")))
        prompt.until_err("waiting for the ring's stages")
        other = ["--model", bundled("draft")]
        stage = stack.enter_context(
            Command("join", "--stage", "1", "--coordinator", address, *other)
        )
        ends = [stage.done(), prompt.done()]
        assert coordinator.process.poll() is None, "it waits for a better one"
    for end in ends:
        assert end.code == 1
        assert "is not the one that the coordinator runs" in end.err
        assert bundled("draft") in end.err
        assert "Traceback" not in end.err
    assert "stage 1 (" in ends[1].err
    assert "did not come back within 0.5 s" in ends[1].err
