"""What else may happen to a cluster in mid-answer: several at once, removals, and no way back.

Every answer that is given must be, to the character, the one that transformers gives.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from support.boards import Boards, boards
from support.commands import Command, Done
from support.torch_rings import BASE, generated, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from edgespec.kernels.compiled import cache_folder

BOARDS = ("v1", "v2", "v3")
PROMPT, NEW_TOKENS = "Once upon a time", 120
PROMPTS = (PROMPT, "def mean(values):\n", "What is 17 + 26?", "tar\n\n> Archiving")
ENDED_S = 5.0
"""Within which a client is told that its coordinator has gone."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def right(prompt: str = PROMPT) -> str:
    """What `edgespec prompt` shows."""
    return str(tokenizer().decode(list(generated(prompt, NEW_TOKENS)))) + "\n"


@contextmanager
def asking(ring: Boards, part: float = 0.2) -> Iterator[Command]:
    """An answer of which that part is there."""
    with ring.asking("d0", PROMPT, NEW_TOKENS) as running:
        ring.until(lambda: len(running.out) > part * len(right()), "the moment")
        assert running.process.poll() is None, "it was over before anything happened"
        yield running


def assert_right(running: Command) -> None:
    """It ends well, with the whole text."""
    assert running.process.wait(120) == 0, running.err
    assert running.done().out == right()


def answer(ring: Boards) -> Done:
    """How a whole question ends."""
    with ring.asking("d0", PROMPT, NEW_TOKENS) as running:
        running.process.wait(120)
        return running.done()


def with_spare(ring: Boards) -> None:
    """Three stages and a spare."""
    ring.init("--stages", "3")
    ring.start(*BOARDS)
    ring.join("spare", ring.token)
    ring.until(lambda: ring.count("stands by") > 0, "a spare")


def until_standing_by(ring: Boards, before: int) -> None:
    """One more spare than there were."""
    ring.until(lambda: ring.count("stands by") > before, "another spare")


def test_spares_die_stages_die_together_and_while_they_load(tmp_path: Path) -> None:
    with boards(tmp_path, *BOARDS, "spare") as ring:
        with_spare(ring)

        with asking(ring) as running:  # a spare that dies disturbs nobody
            pid, ups = ring.daemons["spare"].process.pid, ring.count("the ring is up")
            ring.cut_power("spare")
            ring.until(lambda: ring.losses(pid) > 0, "the spare is missed")
            assert_right(running)
        assert ring.count("the ring is up") == ups

        before = ring.count("stands by")
        ring.join("spare")
        until_standing_by(ring, before)
        with asking(ring) as running:  # two at once: one place for the spare, one for who is back
            first, second = ring.holder(1), ring.holder(3)
            for name in (first, second):
                ring.daemons[name].signal(signal.SIGKILL)
            for name in (first, second):
                ring.daemons[name].process.wait()
                ring.join(name)
            assert_right(running)

        until_standing_by(ring, before + 1)
        with asking(ring) as running:  # the spare dies in turn, as soon as it has the place
            old, joins = ring.holder(2), ring.count("stage 2 (")
            ring.cut_power(old)
            ring.until(lambda: ring.holder(2) != old, f"more than {joins} lines")
            new = ring.holder(2)
            ring.cut_power(new)
            assert not ring.is_up, "the spare was faster than the test"
            ring.join(old)
            assert_right(running)


def test_four_live_answers_survive_a_dead_board_a_hanging_one_and_a_pulled_cable(
    tmp_path: Path,
) -> None:
    with boards(tmp_path, *BOARDS, "spare") as ring:
        with_spare(ring)
        for stage, what in enumerate(("kill", "stop", "unplug"), start=1):
            before, begun = ring.count("stands by"), time.monotonic()
            with ExitStack() as stack:
                asked = {
                    prompt: stack.enter_context(ring.asking("d0", prompt, NEW_TOKENS))
                    for prompt in PROMPTS
                }
                ring.until(lambda asked=asked: all(a.out for a in asked.values()), "all have begun")
                for running in asked.values():
                    assert running.process.poll() is None, "it was over before anything happened"
                getattr(ring, what)(ring.holder(stage))
                for prompt, running in asked.items():
                    assert running.process.wait(120) == 0, running.err
                    assert running.done().out == right(prompt)
            assert time.monotonic() - begun < 300.0
            until_standing_by(ring, before)


def big_model(folder: Path) -> Path:
    """Random layers, of which half are 500 MB, with the bundled tokenizer."""
    settings = json.loads((Path(BASE) / "config.json").read_text(encoding="utf-8"))
    size = {"hidden_size": 2048, "intermediate_size": 8704, "num_attention_heads": 32}
    config = AutoConfig.for_model(**{**settings, **size, "num_key_value_heads": 4})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for file in Path(BASE).glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def test_a_spare_with_empty_caches_takes_over_a_large_block(tmp_path: Path) -> None:
    """While it stands by it compiles its kernels, and is sent the layers of every place."""
    model = big_model(tmp_path / "model")
    question = ("d0", PROMPT, NEW_TOKENS, "autoregressive")
    with boards(tmp_path, "v1", "v2", "spare") as ring:
        ring.hosts["d0"].limit_speed(880)
        for name in ("v1", "v2", "spare"):
            # The others have the kernels of this machine: they are not what is looked at.
            cache = tmp_path / "spare" if name == "spare" else cache_folder().parent
            ring.hosts[name] = ring.hosts[name].without(model, cache)
        asked = ("--model", str(model), "--dtype", "bfloat16", "--quant", "none", "--stages", "2")
        ring.token = ring.said("d0", "init", "--host", "0.0.0.0", *asked).split()[-1]
        ring.start("v1", "v2")
        with ring.asking(*question) as running:
            expected = running.done()
        assert expected.code == 0, expected
        ring.join("spare", ring.token)
        until_standing_by(ring, 0)
        spare = ring.daemons["spare"]
        ring.until(lambda: spare.err.count("are on the disk") == 2, "it is prepared")
        with ring.asking(*question) as running:
            ring.until(lambda: len(running.out) > 0.2 * len(expected.out), "the moment")
            assert running.process.poll() is None, "it was over before anything happened"
            ring.cut_power(ring.holder(2))
            running.process.wait(600)
            assert (running.done().code, running.out) == (0, expected.out), running.err
        before, after = spare.err.split("joined as stage 2 of 2")
        for word in ("compiling", "receiving"):
            assert word in before
            assert word not in after


def test_who_is_removed_or_leaves_in_mid_answer_is_replaced(tmp_path: Path) -> None:
    with boards(tmp_path, *BOARDS, "spare") as ring:
        with_spare(ring)
        with asking(ring) as running:
            gone = ring.holder(2)
            ring.said("d0", "device remove", ring.device(gone))
            assert_right(running)
        done = ring.daemons[gone].done()
        assert done.code == 2, done
        # Told by the ring that it is put out of, or by the door that it is shut.
        told = "the coordinator refused: this (device was|key counts no more: it was) removed"
        assert re.search(told, done.err), done.err
        assert ring.holder(2) != gone
        assert ring.count("was removed from the cluster") == 1

        before = ring.count("stands by")
        ring.join(gone, ring.token)  # whoever has a token may come again
        until_standing_by(ring, before)
        with asking(ring) as running:
            gone = ring.holder(1)
            ring.said(gone, "leave")
            assert_right(running)
        done = ring.daemons[gone].done()
        assert done.code == 2, done
        assert ring.holder(1) != gone


def test_a_place_by_number_that_a_spare_took_stays_the_spares(tmp_path: Path) -> None:
    with boards(tmp_path, *BOARDS, "spare") as ring:
        ring.init("--stages", "3")
        ring.serve()
        for number, name in enumerate(BOARDS, start=1):
            ring.join(name, ring.token, "--stage", str(number))
        ring.join("spare", ring.token)
        ring.until(lambda: ring.count("stands by") > 0 and ring.is_up, "all are there")
        with asking(ring) as running:
            ring.cut_power("v2")
            ring.until(lambda: ring.holder(2) == "spare", "the spare has the place")
            ring.join("v2", "--stage", "2")
            assert_right(running)
        ring.until(lambda: "stage 2 was given to another" in ring.daemons["v2"].err, "it is told")
        assert ring.holder(2) == "spare"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stages_outlive_their_coordinator_and_its_clients_are_told(
    number: signal.Signals, tmp_path: Path
) -> None:
    with boards(tmp_path, *BOARDS) as ring:
        ring.init("--stages", "3")
        ring.start(*BOARDS)
        places = [ring.holder(stage) for stage in (1, 2, 3)]
        with asking(ring) as running:
            begun = time.monotonic()
            ring.coordinator.signal(number)
            running.process.wait(60)
            assert time.monotonic() - begun < ENDED_S
            done = running.done()
        assert done.code == 1, done
        assert right().startswith(done.out.rstrip("\n")), "what was there stays"
        (error,) = [line for line in done.err.splitlines() if "error" in line]
        assert "the ring ended" in error if number == signal.SIGTERM else "silent for" in error
        ring.coordinator.process.wait()
        ring.serve()
        done = answer(ring)
        assert (done.code, done.out) == (0, right()), done
        assert [ring.holder(stage) for stage in (1, 2, 3)] == places, "each has its layers"
        for name in BOARDS:
            assert ring.daemons[name].process.poll() is None


def test_a_pulled_cable_of_the_coordinator_interrupts_an_answer_and_no_more(
    tmp_path: Path,
) -> None:
    with boards(tmp_path, *BOARDS, "spare") as ring:
        with_spare(ring)
        with asking(ring) as running:
            ring.unplug("d0")
            assert_right(running)


def test_without_a_spare_those_who_are_left_share_the_model_until_it_is_back(
    tmp_path: Path,
) -> None:
    with boards(tmp_path, *BOARDS) as ring:
        ring.init("--stages", "3")
        ring.start(*BOARDS, options=["--recovery", "40"])
        with asking(ring) as running:
            gone = ring.holder(2)
            ring.cut_power(gone)
            assert_right(running)
        assert ring.count("the model is shared out anew, over 2 device(s)") == 1
        ups = ring.count("the ring is up")
        ring.join(gone)
        with asking(ring) as running:
            assert_right(running)
        ring.until(lambda: ring.count("the ring is up") > ups, "it has grown")
        assert ring.count("the model is shared out again, over 3 device(s)") == 1
        assert ring.holder(2) == gone
        done = answer(ring)
        assert (done.code, done.out) == (0, right()), done


def test_a_ring_that_cannot_be_shared_out_says_so_in_time(tmp_path: Path) -> None:
    recovery = 6.0
    folder = str(tmp_path / "blocks")
    with boards(tmp_path, *BOARDS) as ring:
        shard = ("shard", BASE, "--stages", "3", "--quant", "none", "--out", folder)
        with ring.hosts["d0"].command(*shard) as making:
            assert making.done().code == 0, making.err
        ring.init(model=("--model", folder))
        ring.start(*BOARDS, options=["--recovery", str(recovery)])
        with asking(ring) as running:
            gone = ring.holder(2)
            begun = time.monotonic()
            ring.cut_power(gone)
            running.process.wait(60)
            assert time.monotonic() - begun < recovery + 3.0
            assert_one_error(running.done(), recovery)
        begun = time.monotonic()
        assert_one_error(answer(ring), recovery)  # as long as it is away
        assert time.monotonic() - begun < recovery + 8.0, "a command takes a while to start"
        ring.join(gone)
        ring.until(lambda: ring.is_up, "it is back")
        done = answer(ring)
        assert (done.code, done.out) == (0, right()), done


def assert_one_error(done: Done, recovery: float) -> None:
    """It names the stage and the cause."""
    assert done.code == 1, done
    assert right().startswith(done.out.rstrip("\n")), done
    (error,) = [line for line in done.err.splitlines() if "error" in line]
    assert "stage 2 (" in error, done
    assert "has been silent for" in error, done
    assert f"did not come back within {recovery:g} s" in error, done
