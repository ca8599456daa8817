"""edgespec init: what it writes, what it says, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Done, run_here
from support.unplayed import unplayed

from edgespec.daemon import played_plans
from edgespec.daemon.access_store import AccessStore
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings
from edgespec.daemon.shelf import models_of
from edgespec.errors import ConfigError
from edgespec.net.keys import KeyPair, Token

Here = Callable[..., Done]
NANO = "jetson-orin-nano-8gb"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cluster folder of the commands."""
    monkeypatch.setenv("EDGESPEC_CLUSTER", str(tmp_path / "state" / "cluster"))
    return tmp_path / "state" / "cluster"


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Here:
    """Runs `edgespec init` in this process."""
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: run_here(capfd, monkeypatch, "init", *arguments)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are not played."""
    monkeypatch.setattr(played_plans, "_play", unplayed)


@pytest.mark.parametrize(
    ("words", "number"),
    [((), 0), (("--with-stage",), 3), (("--with-stage", "2"), 2), (("--with-stage=1",), 1)],
)
def test_a_stage_on_the_coordinator_s_own_machine(
    here: Here, folder: Path, words: tuple[str, ...], number: int
) -> None:
    done = here(*words, "--stages", "3")
    assert done.code == 0, done.err
    assert ClusterFolder.open(folder).settings.with_stage == number
    assert (f"stage {number} runs on this machine" in done.err) == bool(number)


def devices_file(path: Path, *names: str, profile: str = NANO) -> str:
    """A devices file of boards with these names, the first one the coordinator."""
    listed = [{"name": name, "profile": profile} for name in names]
    path.write_text(json.dumps(listed))
    return str(path)


def test_the_one_line_to_run_on_each_device(here: Here, folder: Path) -> None:
    done = here("--stages", "3")
    assert done.code == 0, done.err
    assert done.out.startswith("edgespec join edge-")
    assert done.out.count("\n") == 1
    token = Token.parse(done.out.split()[2])
    made = ClusterFolder.open(folder)
    assert token.coordinator == made.identity.own.public
    assert made.settings == ClusterSettings(stages=3)
    known = AccessStore(made)
    entry = known.tokens()[0]
    assert (entry.role, entry.uses_left, entry.expires - entry.made) == ("stage", None, 3600.0)
    assert known.enrol(token.pair.public, KeyPair.new().public, "board") == "board"
    assert f"made the cluster {made.cluster_id} in {folder}" in done.err
    assert "start the coordinator:        edgespec serve\n" in done.err
    assert "another token, when needed:   edgespec token new\n" in done.err
    for text in (done.err, *(file.read_text() for file in folder.iterdir())):
        assert token.text not in text


def test_run_again_it_keeps_the_cluster_and_changes_its_settings(here: Here, folder: Path) -> None:
    first = here("--stages", "3")
    identity = ClusterFolder.open(folder).identity
    again = here("--layers", "2,6", "--port", "7431", "--context", "64", "--dtype", "bfloat16")
    assert again.code == 0, again.err
    assert "keeps its key, devices and tokens; its settings are changed" in again.err
    made = ClusterFolder.open(folder)
    assert made.identity == identity
    assert made.settings == ClusterSettings(
        stages=2, layers="2,6", port=7431, context=64, dtype="bfloat16"
    )
    known = AccessStore(made)
    for done in (first, again):
        assert known.role_of(Token.parse(done.out.split()[2]).pair.public) == "token"


def test_a_model_is_added_to_those_that_the_cluster_has(here: Here, folder: Path) -> None:
    here("--stages", "3", "--port", "7100", "--host", "127.0.0.1")
    before = ClusterFolder.open(folder).settings
    done = here("--add", "small", "--stages", "2", "--quant", "int4")
    assert (done.code, done.out) == (0, ""), "devices need no other token"
    made = ClusterFolder.open(folder)
    assert f"the cluster {made.cluster_id} has small too: restart the coordinator" in done.err
    assert made.settings == before
    small = made.added()["small"]
    assert (small.stages, small.quant) == (2, "int4")
    assert (small.host, small.port) == ("127.0.0.1", 7100), "there is one address for all"
    assert list(models_of(made)) == ["base", "small"]


def test_what_cannot_be_added_is_refused(here: Here, folder: Path) -> None:
    here("--add", "small", "--stages", "2").assert_refused("there is no cluster in")
    here("--stages", "2")
    here("--add", "../x", "--stages", "2").assert_refused("'../x' is no name for a model")
    here("--add", "base", "--stages", "2").assert_refused("the cluster's own model is called base")
    made = ClusterFolder.open(folder)
    assert made.added() == {}
    made.add("base", made.settings)
    with pytest.raises(ConfigError, match="two models of the cluster are called base"):
        models_of(made)


def test_packed_blocks_in_float32_have_narrow_caches(here: Here, folder: Path) -> None:
    for asked, held in ((), "float16"), (("float32",), ""), (("int8",), "int8"):
        options = ("--quant", "int8", "--dtype", "float32", *(f"--cache-dtype={o}" for o in asked))
        assert here("--stages", "2", *options).code == 0
        assert ClusterFolder.open(folder).settings.cache_dtype == held


def test_another_folder_is_named_in_what_is_to_be_run(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = here("--stages", "1", "--cluster", "a cluster")
    assert f"edgespec serve --cluster '{tmp_path}/a cluster'\n" in done.err
    assert f"edgespec token new --cluster '{tmp_path}/a cluster'\n" in done.err
    assert ClusterFolder.open(tmp_path / "a cluster").settings.stages == 1


def test_folders_are_kept_as_seen_from_anywhere(
    here: Here, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "draft"):
        os.symlink(bundled(name), tmp_path / name)
    done = here("--model", "base", "--draft", "./draft", "--stages", "2", "--draft-quant", "int8")
    assert done.code == 0, done.err
    settings = ClusterFolder.open(folder).settings
    assert (settings.model, settings.draft) == (f"{tmp_path}/base", f"{tmp_path}/draft")
    assert settings.draft_quant == "int8"
    assert here("--model", "org/name", "--stages", "2").code == 0
    assert ClusterFolder.open(folder).settings.model == "org/name"


def test_json(here: Here, folder: Path) -> None:
    done = here("--stages", "2", "--json")
    made = json.loads(done.out)
    assert made["cluster"] == ClusterFolder.open(folder).cluster_id
    assert made["join"] == f"edgespec join {made['token']}"
    assert made["settings"]["stages"] == 2
    assert (made["folder"], made["kept"], made["valid_seconds"]) == (str(folder), False, 3600.0)
    assert Token.parse(made["token"])
    assert json.loads(here("--stages", "2", "--json").out)["kept"] is True
    assert done.err == ""


def test_a_plan_gives_the_ring_and_the_places(
    here: Here, folder: Path, tmp_path: Path, quick: None
) -> None:
    names = devices_file(tmp_path / "boards.json", "desk", "nano a", "nano-b", "nano-c")
    done = here("--devices", names)
    assert done.code == 0, done.err
    assert ClusterFolder.open(folder).settings.head == "last-stage"
    done = here("--devices", names, "--head", "coordinator")
    assert done.code == 0, done.err
    settings = ClusterFolder.open(folder).settings
    assert settings.head == "coordinator"
    plan = json.loads((folder / "plan.json").read_text())
    assert settings.layers == ",".join(map(str, plan["layers"]))
    assert settings.stages == len(plan["layers"]) == len(settings.places)
    ring = [node["device"].replace(" ", "-") for node in plan["nodes"][1:]]
    assert list(settings.places) == ring
    assert (settings.quant, settings.context) == (plan["quantisation"], plan["context"])
    assert settings.dtype == "bfloat16"
    assert plan["speculative_tokens_per_second"] == max(one[0] for one in unplayed([None] * 9))
    assert plan["commands"][0].startswith("desk: edgespec init --model ")
    assert "D0 desk: coordinator, needs " in done.err
    assert "V1 nano a: layers 0 to " in done.err
    for left_out in plan["left_out"]:
        assert f"left out: {left_out['device']} (" in done.err
    assert f"the devices with these host names: {' '.join(settings.places)}\n" in done.err
    assert done.out.count("\n") == 1
    assert here("--stages", "2").code == 0
    assert not (folder / "plan.json").exists()  # of other settings


def test_kinds_of_devices_are_no_names(here: Here, folder: Path, quick: None) -> None:
    done = here("--devices", f"3*{NANO}", "--dtype", "float32", "--quant", "none")
    assert done.code == 0, done.err
    settings = ClusterFolder.open(folder).settings
    assert (settings.places, settings.dtype, settings.quant) == ((), "float32", "none")
    assert "host names" not in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "how many stages has the ring?"),
        (("--stages", "9"), "9 stages for a model of 8 layers"),
        (("--stages", "2", "--layers", "4,5"), "no split of 8 layers"),
        (("--stages", "2", "--model", "/none"), "there is no model folder /none"),
        (("--stages", "2", "--draft", "nowhere"), "there is no model folder or file nowhere"),
        (("--stages", "2", "--draft", "hybrid:ngram"), "two or more different members"),
        (("--stages", "2", "--quant", "int3"), "unknown quantisation 'int3'"),
        (("--stages", "2", "--dtype", "int8"), "unknown dtype 'int8'"),
        (("--stages", "2", "--context", "99999"), "a context of 99999 tokens is more than"),
        (("--stages", "2", "--port", "70000"), "70000 is no port"),
        (("--stages", "2", "--host", "a b"), "is no host name or address"),
        (("--stages", "2", "--devices", f"3*{NANO}"), "leave --stages, --layers and"),
        (("--with-stage", "2", "--devices", f"3*{NANO}"), "leave --stages, --layers and"),
        (("--with-stage", "3", "--stages", "2"), "the ring has the stages 1 to 2"),
        (("--devices", "nothing"), "nothing"),
        (("--devices", f"3*{NANO}", "--model", "llama2:12b"), "did you mean llama-2-13b or "),
    ],
)
def test_what_is_refused_makes_no_cluster(
    here: Here, folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    here(*arguments).assert_refused(words)
    assert not folder.exists()


def test_names_that_become_one_are_refused(
    here: Here, folder: Path, tmp_path: Path, quick: None
) -> None:
    names = devices_file(tmp_path / "boards.json", "desk", "nano a", "nano-a")
    here("--devices", names).assert_refused("would be called the same")
    assert not folder.exists()


def test_a_folder_that_others_can_write_to_is_refused(here: Here, folder: Path) -> None:
    assert here("--stages", "2").code == 0
    folder.chmod(0o777)
    here("--stages", "2").assert_refused(f"chmod go-w {folder}")
    folder.chmod(0o700)
    (folder / "cluster.key").chmod(0o644)
    here("--stages", "2").assert_refused(f"chmod 600 {folder}/cluster.key")


def test_a_devices_folder_makes_no_cluster(here: Here, folder: Path) -> None:
    ClusterFolder.remember(folder, KeyPair.new(), KeyPair.new().public, "board", "10.0.0.1:7430")
    here("--stages", "2").assert_refused("a device of another cluster", "edgespec leave")
