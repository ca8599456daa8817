"""Quantised stages as processes: `demo --quant`, and a ring whose stages are sent their blocks."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.commands import Command, run, to_prompt
from support.torch_rings import BASE, DRAFT, generated, prompts

PROMPT = prompts()["gsm8k-test-3"]
NEW_TOKENS = 24

ELSEWHERE = """
from edgespec.cli.main import main
from edgespec.daemon.ring_model import RingModel

begin = RingModel.__init__
def begin_elsewhere(self, config):
    begin(self, config)
    self.name = "/a/folder/of/another/machine"
RingModel.__init__ = begin_elsewhere
main()
"""
"""A coordinator whose folders its stages cannot see, as if they ran on other machines."""


@pytest.mark.thorough
@pytest.mark.parametrize("quant", ["nf4", "int4"])
def test_the_demo_gives_what_one_process_generates_with_the_same_weights(quant: str) -> None:
    done = run(
        *("demo", "--model", BASE, "--quant", quant, "--dtype", "float64"),
        *("--prompt", PROMPT, "--raw", "--json", "--max-new-tokens", str(NEW_TOKENS)),
    )
    assert done.code == 0, done.err
    assert tuple(json.loads(done.out)["token_ids"]) == generated(PROMPT, NEW_TOKENS, quant)


@pytest.mark.slow
def test_stages_without_the_model_are_sent_their_blocks(tmp_path: Path) -> None:
    made = tmp_path / "made"
    sharded = run("shard", BASE, "--layers", "5,3", "--quant", "nf4-dq", "--out", str(made))
    assert sharded.code == 0, sharded.err
    serve = ["serve", "--model", str(made), "--draft", DRAFT, "--dtype", "float64", "--port", "0"]
    with ExitStack() as stack:
        program = [sys.executable, "-c", ELSEWHERE]
        coordinator = stack.enter_context(Command(*serve, command=program))
        coordinator.until_out("\n")
        address = coordinator.out.split()[-1]
        stages = [
            stack.enter_context(
                Command(
                    *("join", "--stage", str(stage), "--coordinator", address),
                    *("--cache", str(tmp_path / f"stage-{stage}")),
                )
            )
            for stage in (1, 2)
        ]
        done = run(
            *to_prompt(
                address, PROMPT, "--raw", "--max-new-tokens", str(NEW_TOKENS), "--json", "--raw"
            ),
            *("--wait", "60"),
        )
        assert done.code == 0, done.err
        assert tuple(json.loads(done.out)["token_ids"]) == generated(PROMPT, NEW_TOKENS, "nf4-dq")
        assert json.loads(done.out)["stages"] == 2
        for number, stage in enumerate(stages, start=1):
            assert "the ring is up" in stage.err
            (block,) = (tmp_path / f"stage-{number}").glob("*/*.safetensors")
            assert block.name == f"stage-{number}.safetensors"
