"""edgespec plan: its table, its JSON, the commands that it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import Done, run_here
from support.tiers import thorough
from support.unplayed import unplayed

from edgespec.config import DRAFT_VOCABULARY, HEADS
from edgespec.daemon import played_plans
from edgespec.daemon.bundled_models import bundled
from edgespec.planning.catalogue import MODELS
from edgespec.planning.cost_model import packed_bytes

Here = Callable[..., Done]
NANO = "jetson-orin-nano-8gb"
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Runs `edgespec plan` in this process, on a narrow terminal."""
    monkeypatch.setenv("COLUMNS", "60")
    return lambda *arguments: run_here(capfd, monkeypatch, "plan", *arguments)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with the config.json of a 13 B model, and nothing else."""
    model = tmp_path / "a model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    return str(model)


def test_a_table_that_no_narrow_terminal_cuts_and_the_commands(here: Here, folder: str) -> None:
    done = here("--model", folder, "--devices", f"4*{NANO}", "--quant", "nf4")
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if line.strip()]
    assert lines[0].split()[:6] == ["node", "device", "layers", "weights", "KV", "overhead"]
    assert [line.split()[0] for line in lines[2:5]] == ["D0", "V1", "V2"]
    assert "0-20" in done.out
    text = " ".join(done.out.split())
    assert f"left out: {NANO}#4 (no faster with it: +" in text
    assert "V2 is on the coordinator's board and shares its time" in text
    assert "with guesses: not predicted, as there is no draft; name one with --draft" in text
    assert f"figures of {NANO}: 0 of 13 measured on a device; the others are estimates" in text
    assert (
        f"{NANO}#1: edgespec init --model '{folder}' --quant nf4 --head-quant int8 --layers 21,19 "
        f"--with-stage 2 --context 4096 --dtype bfloat16 {NANO}#1: edgespec serve "
        f"{NANO}#2: edgespec join TOKEN --stage 1"
    ) in text


def test_layers_on_the_coordinators_board_need_no_join(here: Here, folder: str) -> None:
    """Two boards of 8 GB hold 13 billion weights and 3000 tokens, none of them alone."""
    done = here("--model", folder, "--devices", f"2*{NANO}", "--context", "3000", "--json")
    assert done.code == 0, done.err
    made = json.loads(done.out)
    assert made["with_stage"] == 2
    assert len(made["commands"]) == 3
    first, second = made["layers"]
    assert f"--layers {first},{second} --with-stage 2 --context 3000 " in made["commands"][0]
    assert made["commands"][2] == f"{NANO}#2: edgespec join TOKEN --stage 1"
    d0, _, own = made["nodes"]
    assert d0["device"] == own["device"] == f"{NANO}#1"
    assert d0["needed_bytes"] + own["needed_bytes"] <= d0["memory_bytes"]
    table = here("--model", folder, "--devices", f"2*{NANO}", "--context", "3000").out
    assert "V2 is on the coordinator's board and shares its time; both need " in table


def test_one_device_that_holds_it_all_is_a_ring(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(played_plans, "_play", unplayed)
    done = here("--model", "llama-3.2-1b", "--devices", NANO, "--json")
    assert done.code == 0, done.err
    made = json.loads(done.out)
    assert (made["layers"], made["with_stage"], len(made["commands"])) == ([16], 1, 2)
    assert made["commands"][1] == f"{NANO}: edgespec serve"
    assert [node["device"] for node in made["nodes"]] == [NANO, NANO]
    assert [one["devices"] for one in made["ways"]] == [[NANO, NANO]]


def test_the_others_stand_beside_it_in_figures(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain speeds, what guessing brings, and from when on the ring is the faster one."""
    monkeypatch.setattr(played_plans, "_play", unplayed)
    asked = ("--model", "qwen2.5-7b", "--devices", f"jetson-agx-orin-64gb,2*{NANO}")
    text = " ".join(here(*asked).out.split())
    assert "with guesses: 100.0 tokens/s in virtual time, 90% of the tokens guessed" in text
    told = re.findall(r"instead, (.*?): plain ([\d.]+) tokens/s, with guesses ([\d.]+)", text)
    alone = {name: (float(plain), float(speed)) for name, plain, speed in told}
    plain, _ = alone["jetson-agx-orin-64gb alone"]
    share = re.search(r"faster than jetson-agx-orin-64gb alone only if more than (\d+)%", text)
    assert share is not None
    made = json.loads(here(*asked, "--json").out)
    assert len(made["ways"]) == len(told) + 1
    assert all(made["ways"][0][key] == made[key] for key in ("layers", "with_stage", "draft"))
    ring = made["ways"][0]["plain_tokens_per_second"]
    assert ring == made["plain_tokens_per_second"] < plain
    # On lines from plain decoding to what was played: seconds a token, by the share that is right.
    at = int(share[1]) / 100 / 0.9
    seconds = [
        1 / one + at * (1 / two - 1 / one)
        for one, two in ((ring, 100.0), alone["jetson-agx-orin-64gb alone"])
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.03)


def test_a_board_that_is_faster_alone_is_the_plan(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever the coordinator was to be; without a draft that is exact."""
    slow, fast = "raspberry-pi-5-8gb", "jetson-agx-orin-64gb"
    done = here("--model", "qwen2.5-1.5b", "--devices", f"{slow},{fast}", "--draft", "none")
    text = " ".join(done.out.split())
    assert f"left out: {slow} (slower with it)" in text
    assert f"{fast} alone is the fastest" in text
    assert f"{fast}: edgespec serve" in text
    assert "join TOKEN" not in text
    monkeypatch.setattr(played_plans, "_play", lambda setups, news: [(9.0, 0.9), (20.0, 0.5)])
    asked = ("--model", "qwen2.5-7b", "--devices", f"2*{NANO}", "--context", "512")
    made = json.loads(here(*asked, "--draft", "ngram", "--json").out)
    assert (made["with_stage"], made["layers"]) == (1, [28])
    assert made["speculative_tokens_per_second"] == 20.0


def test_drafts_that_are_known_are_named(here: Here) -> None:
    text = here("--model", "gpt-oss-20b", "--devices", "jetson-agx-orin-64gb").out
    assert "there is no draft; known for this model: --draft dspark (z-lab/" in text
    assert "--draft eagle3 (" in text


def test_a_draft_without_room_is_left_out_unless_it_was_asked_for(here: Here) -> None:
    """An 8 B model fits a board of 8 GB, its draft does not."""
    asked = ("--model", "llama-3.1-8b", "--devices", NANO)
    made = json.loads(here(*asked, "--json").out)
    assert (made["draft"], made["layers"], made["context"]) == ("", [32], 4096)
    here(*asked, "--draft", "independent").assert_refused("does not fit", code=1)


@pytest.mark.parametrize(
    ("draft", "charged"),
    [
        ("none", ""),
        ("ngram", "ngram"),
        thorough("eagle3:{}", "a model-eagle3"),
        thorough("hybrid:ngram+eagle3:{}", "a model-eagle3"),
        thorough("dspark:{}", "a model-dspark"),
        ("independent:{}", "draft"),
    ],
)
def test_every_source_that_takes_room_is_planned(
    here: Here, folder: str, monkeypatch: pytest.MonkeyPatch, draft: str, charged: str
) -> None:
    monkeypatch.setattr(played_plans, "QUESTIONS", played_plans.QUESTIONS[:1])
    weights = bundled("eagle3" if "eagle3" in draft else "draft")
    draft = draft.format(weights)
    done = here("--model", folder, "--devices", f"4*{NANO}", "--draft", draft, "--json")
    assert done.code == 0, done.err
    made = json.loads(done.out)
    assert made["draft"] == charged
    assert f"--draft {draft}" in made["commands"][0]
    assert (made["speculative_tokens_per_second"] is None) == (not charged)
    # Wherever the head is with this draft.
    where = ("--head", made["head"], "--json")
    plain = json.loads(here("--model", folder, "--devices", f"4*{NANO}", *where).out)
    more = made["nodes"][0]["weight_bytes"] - plain["nodes"][0]["weight_bytes"]
    assert (more > 0) == (charged not in ("", "ngram"))


def test_the_output_head_is_where_it_pays(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played_plans, "_play", unplayed)
    asked = ("--model", "llama-3.1-8b", "--devices", f"5*{NANO}")
    made = {head: json.loads(here(*asked, "--json", "--head", head).out) for head in HEADS}
    chosen = json.loads(here(*asked, "--json").out)
    assert chosen == made["last-stage"]
    assert made["coordinator"]["layers"] == [8, 8, 8, 8]
    assert chosen["layers"][-1] < 8 == sum(chosen["layers"]) / 4
    assert "--head last-stage" in chosen["commands"][0]
    assert "--head last-stage" not in made["coordinator"]["commands"][0]
    text = here(*asked).out
    assert ", head " in text
    here(*asked, "--head", "V4").assert_refused("unknown head 'V4'; choose one of: auto, ")


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("ppd:{}", "plan does not reckon with ppd"),
        ("hybrid:eagle:{}+eagle3:{}", "a hybrid asks one model, and eagle and eagle3 are 2"),
        ("eagle3:nothing", "there is no model folder or file nothing"),
        ("eagle3", "Give eagle3:FOLDER"),
        ("hybrid:ngram+mtp", "model ships no MTP head that edgespec reads; plan another --draft"),
    ],
)
def test_a_source_that_cannot_be_planned_says_why(
    here: Here, folder: str, draft: str, words: str
) -> None:
    draft = draft.format(*2 * [bundled("eagle")])
    here("--model", folder, "--devices", NANO, "--draft", draft).assert_refused(words)


@pytest.mark.thorough
def test_a_head_that_the_model_ships_is_planned(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(played_plans, "QUESTIONS", played_plans.QUESTIONS[:1])
    asked = (
        "--model",
        "qwen3.5-4b",
        "--devices",
        f"3*{NANO}",
        "--json",
        "--head",
        HEADS[0],
        "--draft",
    )
    made = {draft: json.loads(here(*asked, draft).out) for draft in ("none", "mtp")}
    assert made["mtp"]["draft"] == "qwen3.5-4b-mtp"
    held, plain = (made[draft]["nodes"][0]["weight_bytes"] for draft in ("mtp", "none"))
    of = MODELS["qwen3.5-4b"].sizes
    layer = replace(of, states=0).layer_weights + 2 * of.hidden * of.hidden
    scored = (of.hidden + 2) * DRAFT_VOCABULARY
    assert held - plain == packed_bytes(layer, 4) + scored, "the embedding stays in its file"
    assert made["mtp"]["speculative_tokens_per_second"] > 0, "it was played"


def test_of_two_wrong_paths_the_model_is_named_first(here: Here) -> None:
    done = here("--model", "no/model", "--devices", f"2*{NANO}", "--draft", "no/draft")
    done.assert_refused("there is no folder no/model")


@pytest.mark.thorough
def test_json_has_the_same_figures(
    here: Here, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(played_plans, "QUESTIONS", played_plans.QUESTIONS[:1])
    done = here("--model", folder, "--devices", f"5*{NANO}", "--draft", bundled("draft"), "--json")
    assert done.code == 0, done.err
    made = json.loads(done.out)
    assert made["layers"] == [10, 10, 10, 10]
    assert [node["stage"] for node in made["nodes"]] == [0, 1, 2, 3, 4]
    for node in made["nodes"]:
        parts = ("weight_bytes", "cache_bytes", "overhead_bytes")
        assert sum(node[part] for part in parts) == node["needed_bytes"] <= node["memory_bytes"]
    assert made["quantisation"] == "int4"
    assert made["speculative_tokens_per_second"] > made["plain_tokens_per_second"]
    assert made["plain_tokens_per_second"] > made["plain_tokens_per_second_full"]
    assert made["figures_measured"] == {NANO: [0, 13]}
    assert "--draft " in made["commands"][0]
    assert len(made["commands"]) == 6


def test_a_known_model_is_planned_by_its_name(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played_plans, "_play", unplayed)
    done = here("--model", "llama-2-13b", "--devices", f"3*{NANO}", "--context", "512")
    assert done.code == 0, done.err
    assert (
        "--model llama-2-13b --draft tinyllama-1.1b --quant int4 --head-quant int8 --layers"
        in done.out
    )
    assert "charged as tinyllama-1.1b, but the guesses are those of the bundled pair" in done.out


def test_caches_of_8_bits_are_charged_and_in_the_commands(
    here: Here, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(played_plans, "_play", unplayed)
    asked = ("--model", folder, "--devices", f"3*{NANO}", "--json", "--cache-dtype")
    wide, narrow = (json.loads(here(*asked, held).out) for held in ("auto", "int8"))
    a_layer = [made["nodes"][1]["cache_bytes"] / made["layers"][0] for made in (wide, narrow)]
    assert a_layer[1] == a_layer[0] * 132 / 256, "heads of 128"
    assert "--cache-dtype int8" in narrow["commands"][0]
    assert "--cache-dtype" not in wide["commands"][0]
    here(*asked, "float16").assert_refused("caches in 'float16' of a ring in bfloat16, which may")


def test_what_does_not_fit_is_refused_in_numbers(here: Here, folder: str) -> None:
    asked = ("--model", folder, "--devices", f"2*{NANO}", "--requests", "2")
    here(*asked, "--head", "coordinator").assert_refused(
        f"stage 1 ({NANO}#2) needs 8.19 GiB for 21 layer(s), has 6.50 GiB; drop --context to 2048, "
        "or drop --requests to 1",
        code=1,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--model", "nothing", "--devices", NANO),
            "there is no model folder or file nothing, and no model is called so",
        ),
        (("--model", "llama-2-7b", "--devices", f"18*{NANO}"), "18 devices; a plan has at most"),
        (
            ("--model", "llama-2-7b", "--devices", f"2*{NANO}", "--context", "-1"),
            "context is -1; it must be at least 1",
        ),
        (
            ("--model", "llama-2-7b", "--devices", f"2*{NANO}", "--requests", "0"),
            "requests is 0",
        ),
    ],
)
def test_wrong_settings(here: Here, arguments: tuple[str, ...], words: str) -> None:
    here(*arguments).assert_refused(words)
