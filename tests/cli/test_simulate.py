"""edgespec simulate and replay: tables, JSON, failures, and what they refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import Done, run, run_here

from edgespec.cli.simulate import SimulatedRing, charged_model, parse_link
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.profiles import profile_named
from edgespec.errors import ConfigError

Here = Callable[..., Done]
NANO = "jetson-orin-nano-8gb"
SMALL = ("--stages", "2", "--limit", "1", "--max-new-tokens", "6", "--jobs", "1")


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Runs `edgespec simulate` in this process."""
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: run_here(capfd, monkeypatch, "simulate", *arguments)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Runs `edgespec` in this process."""
    return lambda *arguments: run_here(capfd, monkeypatch, *arguments)


@pytest.mark.thorough
def test_the_same_command_prints_the_same_bytes(here: Here) -> None:
    command = (*SMALL, "--policy", "flowspec,naive_tree", "--json")
    one, other = here(*command), run("simulate", *command, "--jobs", "2")
    assert (one.code, other.code) == (0, 0), one.err + other.err
    assert one.out == other.out
    result = json.loads(one.out)
    assert [entry["policy"] for entry in result["runs"]] == ["flowspec", "naive_tree"]
    settings = result["settings"]
    assert (settings["model"], settings["draft"]) == ("bundled", "bundled")
    assert (settings["workload"], settings["prompts"]) == ("gsm8k-test-40", 1)
    assert settings["profiles"] == ["jetson-orin-nano-8gb"] * 3
    assert (settings["cost_model"], settings["link"]) == ("llama-2-13b", None)


def test_people_get_a_table_that_no_narrow_terminal_cuts(here: Here) -> None:
    how = ("--link", "5:100:1:0.01", "--draft", "hybrid:ngram+eagle")
    done = here(*SMALL, "--policy", "flowspec", *how)
    assert done.code == 0, done
    heading, _, flowspec, *rest = [line for line in done.out.splitlines() if line.strip()]
    assert heading.split()[:4] == ["policy", "tok/s", "vs", "AR"]
    assert heading.split()[-1] == "exact"
    assert flowspec.split()[0] == "flowspec"
    assert flowspec.split()[-1] == "yes"
    text = " ".join(rest)
    assert "llama-2-13b, drafts by ngram and llama-2-13b-eagle; D0 and 2 stage(s)" in text
    assert "links of 5 ms, 100 Mbit/s, 1 ms jitter, 0.01 loss" in text
    assert "all times are virtual" in text
    assert "jetson-orin-nano-8gb: no kernel of edgespec was timed on it" in text
    assert "by other engines' published steps; edgespec's own are predicted" in text
    assert "1/3 answers" in done.err


def test_a_row_price_and_a_free_d0_stand_in_for_the_profiles(here: Here) -> None:
    def played(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
        result = json.loads(here(*SMALL, "--policy", "autoregressive", "--json", *arguments).out)
        (entry,) = result["runs"]
        return result["settings"], entry

    settings, usual = played()
    assert (settings["row_price"], settings["d0_free"]) == (None, False)
    settings, dear = played("--row-price", "0.5")
    assert settings["row_price"] == 0.5
    # Then come segments of one; the prompt's chunks are no dearer than 64 rows are.
    assert dear["decode_tokens_per_second"] == pytest.approx(usual["decode_tokens_per_second"])
    first = "first_token_seconds"
    assert usual[first] < dear[first] < 1.3 * usual[first]
    settings, least = played("--row-price", "data-sheet")
    assert settings["row_price"] == "data-sheet"
    assert least[first] < usual[first]
    settings, free = played("--d0-free")
    assert settings["d0_free"] is True
    assert free["coordinator_busy"] == 0.0 < usual["coordinator_busy"]
    assert free["decode_tokens_per_second"] > usual["decode_tokens_per_second"]
    assert usual["loop_ms_per_token"] == free["loop_ms_per_token"] > 0
    settings, free = played("--loop-free")
    assert (settings["loop_free"], free["loop_ms_per_token"]) == (True, None)
    assert free["decode_tokens_per_second"] > usual["decode_tokens_per_second"]
    settings, late = played("--jitter", "5%x100ms", "--seed", "1")
    assert settings["jitter"] == {"share": 0.05, "seconds": 0.1}
    assert late["decode_tokens_per_second"] < usual["decode_tokens_per_second"]
    both = here(
        *SMALL, "--policy", "autoregressive", "--row-price", "0.5", "--d0-free", "--loop-free"
    ).out
    text = " ".join(both.split())
    assert (
        "a further row costs 0.5 of a step of one; D0's own work costs nothing; D0's loop" in text
    )
    assert "no kernel of edgespec was timed" not in text


def test_under_load_there_are_further_figures(here: Here) -> None:
    small = ("--stages", "2", "--limit", "3", "--max-new-tokens", "4", "--jobs", "1")
    small += ("--policy", "autoregressive", "--draft", "none")
    result = json.loads(here(*small, "--live", "2", "--json").out)
    (entry,), settings = result["runs"], result["settings"]
    assert (settings["live"], settings["arrivals"]) == (2, None)
    figures = {"live", "ttft_mean", "tbt_mean", "tbt_p99", "slowest_ratio"}
    assert figures < entry.keys()
    assert entry["live"] == 2
    assert entry["exact"]
    usual = json.loads(here(*small, "--json").out)
    assert figures.isdisjoint(usual["runs"][0])
    assert figures.isdisjoint(usual["settings"])
    table = here(*small, "--arrivals", "0.5")
    heading = next(line for line in table.out.splitlines() if line.strip())
    assert heading.split()[-6:] == ["live", "TTFT", "TBT", "TBT", "p99", "slowest"]
    assert "requests: 0.5 a second; tok/s: of all together" in table.out
    crowd = here(*small, "--live", "5")
    assert "there are 3 prompts: no more than that are live at once" in crowd.err
    assert "1/6 answers" in crowd.err  # each request alone, and under load


def test_devices_may_differ_and_prompts_come_from_a_file(here: Here, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("Question: What is 2 + 2?\nAnswer:\n")
    names = ("--profile", "jetson-orin-nano-8gb,raspberry-pi-5-8gb")
    names += ("--profile", "jetson-agx-orin-64gb")
    files = ("--prompts", str(tmp_path / "p.txt"))
    done = here(*SMALL, *names, *files, "--policy", "autoregressive", "--json")
    result = json.loads(done.out)
    (entry,) = result["runs"]
    assert entry["profile"] == "jetson-orin-nano-8gb,raspberry-pi-5-8gb,jetson-agx-orin-64gb"
    assert entry["stage_busy"][0] > 3 * entry["stage_busy"][1]
    assert result["settings"]["workload"] == str(tmp_path / "p.txt")


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "profile": (("--profile", "abacus"), "choose one of: jetson-agx-orin-64gb"),
    "profile file": (("--profile", "./abacus.json"), "cannot read the profile ./abacus.json"),
    "profiles": (("--profile", "a,b,c"), "3 profiles for a coordinator and 4 stage(s)"),
    "no profile": (("--profile", ","), "0 profiles"),
    "policy": (("--policy", "flowspec,magic"), "unknown policy 'magic'; choose one of"),
    "no policy": (("--policy", ""), "there is no policy; name some of: all"),
    "cost model": (("--cost-model", "gpt"), "choose one of: llama-2-7b,"),
    "memory": (("--cost-model", "llama-3.1-70b"), "stage 1 (jetson-orin-nano-8gb) needs"),
    "stages": (("--stages", "0"), "0 stages; a ring has 1 to 256"),
    "too many stages": (
        ("--stages", "9", "--dtype", "float32", "--limit", "1", "--jobs", "1"),
        "9 stages for a model of 8 layers",
    ),
    "with stage": (("--with-stage", "5"), "with-stage is 5; the ring has stages 1 to 4"),
    "other board": (
        ("--with-stage", "1", "--stages", "1", "--profile", f"{NANO},jetson-agx-orin-64gb"),
        f"stage 1 is on the coordinator's device, a {NANO}, and its profile is jetson-agx-",
    ),
    "prompts": (("--prompts", "/none"), "cannot read the prompts in /none"),
    "limit": (("--limit", "-1"), "limit is -1"),
    "tokens": (("--max-new-tokens", "0"), "max-new-tokens is 0"),
    "temperature": (("--temperature", "-1"), "temperature is -1.0"),
    "row price": (("--row-price", "-0.1"), "row-price is -0.1; it must be from 0 to 100"),
    "no row price": (("--row-price", "nan"), "row-price is nan"),
    "no price": (("--row-price", "dear"), "row-price is 'dear'; give a share of a step of one row"),
    "link": (("--link", "5"), "'5' is no link; give LATENCY_MS:MBIT"),
    "model": (("--model", "/none"), "there is no model folder /none"),
    "draft": (("--draft", "/none"), "there is no model folder /none"),
    "dtype": (("--dtype", "int3"), "unknown dtype 'int3'; choose one of: float32"),
    "jobs": (("--jobs", "-1"), "jobs is -1"),
    "live": (("--live", "0"), "live is 0; it must be at least 1 request"),
    "arrivals": (("--arrivals", "-1"), "arrivals is -1; it must be above 0"),
    "both loads": (("--live", "2", "--arrivals", "1"), "exclude each other"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_setting_is_one_clear_error(here: Here, what: str) -> None:
    arguments, words = WRONG[what]
    here(*arguments).assert_refused(words)


@pytest.mark.parametrize(
    "text", ["", "5", "5:1:2:0.1:3", "a:b", "-1:5", "1:-5", "nan:5", "inf:1", "1:1:1:1", "1::2"]
)
def test_a_link_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no link"):
        parse_link(text)


def test_links_are_given_in_milliseconds_and_megabits() -> None:
    link = parse_link("5:100:2:0.01")
    assert (link.latency, link.bytes_per_second, link.jitter, link.loss) == (
        *(0.005, 12_500_000.0, 0.002, 0.01),
    )
    assert parse_link("0:0").bytes_per_second == 0


def test_a_profile_may_choose_the_cost_model() -> None:
    paper, nano = profile_named("paper-flowspec-7b"), profile_named("jetson-orin-nano-8gb")
    assert charged_model("", [paper, paper]).name == "llama-2-7b-eagle"
    assert charged_model("", [nano, nano]).name == "llama-2-13b"
    assert charged_model("llama-2-7b", [paper]).name == "llama-2-7b"
    own = charged_model(bundled("base"), [nano], bundled("draft"))
    assert (own.name, own.layers, own.bits, own.draft.name) == ("base", 8, 16, "draft")
    assert charged_model(bundled("base"), [nano]).draft.layers == 0
    assert SimulatedRing(["paper-flowspec-7b"], stages=3).names == ("paper-flowspec-7b",) * 4


# --- replays ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (None, (), "cannot be read"),
        ("", (), "has no requests; give what `edgespec serve --record` wrote"),
        ('{"format": 1}', (), "line 1 of"),
        ("a prompt", (), "is no request that `edgespec serve --record` writes"),
        (None, ("--live", "0"), "live is 0; it must be at least 1 request"),
    ],
)
def test_what_no_replay_can_be_is_one_clear_error(
    command: Here, content: str | None, arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    if content is not None:
        path.write_text(content)
    command("replay", str(path), *arguments).assert_refused(words)


def test_recorded_requests_are_played_again(command: Here, tmp_path: Path) -> None:
    request = {
        "prompt": "def read(", "max_new_tokens": 5, "temperature": 0.0, "top_k": 0, "top_p": 1.0,
        "min_p": 0.0, "seed": 0, "stop": [], "policy": "autoregressive", "messages": "", "top": -1,
    }  # fmt: skip
    line = {"what": "request", "format": 1, "after": 3.0, "outcome": "client_left"}
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({**line, "request": request, "end": {}}) + "\n")
    told = json.loads(command("replay", str(path), "--stages", "2", "--json").out)
    (played,) = told["requests"]
    assert (played["policy"], played["new_tokens"]) == ("autoregressive", 5)
    assert (played["same"], played["recorded_seconds"]) == (None, None)
    end = {"token_ids": played["token_ids"], "seconds": 0.5}
    path.write_text(json.dumps({**line, "outcome": "length", "request": request, "end": end}))
    shown = command("replay", str(path), "--stages", "2", "--policy", "flowspec").out
    assert "1 request(s), 1 of 1 answers with the tokens that were recorded" in shown
    assert re.search(r"0\.00 s +flowspec +4 +5 +10\.00 +[\d.]+ +as recorded", shown)
