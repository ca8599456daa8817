"""edgespec models and pull: what they list, where models come from, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import huggingface_hub.constants
import pytest
from support.checkpoints import write_checkpoint, write_tokenizer
from support.commands import Done, run_here
from support.hub import COMMIT, Hub

from edgespec.model import hub_download
from edgespec.model.hub_cache import is_here
from edgespec.planning.catalogue import MODELS, REFUSED
from edgespec.planning.plan import Plan, candidates
from edgespec.planning.problem import Problem

Here = Callable[..., Done]


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Runs a command in this process."""
    return lambda *arguments: run_here(capfd, monkeypatch, *arguments)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache of this process, empty."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def downloaded(cache: Path, hub_id: str, *names: str) -> Path:
    """A revision in the hub's cache with these files."""
    root = cache / f"models--{hub_id.replace('/', '--')}"
    folder = root / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_the_list_fits_a_narrow_terminal(
    here: Here, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloaded(cache, MODELS["qwen3-4b"].hub, "config.json", "model.safetensors")
    downloaded(cache, "org/other", "config.json")
    for columns in (60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        done = here("models")
        assert done.code == 0, done.err
        lines = done.out.splitlines()
        rows = {line.split()[0]: line.split() for line in lines[1 : len(MODELS) + 1]}
        assert set(rows) == set(MODELS)
        assert max(map(len, lines[: len(MODELS) + 1])) <= columns
        assert ("licence" in lines[0]) == (columns == 80)
        here_now = [name for name, cells in rows.items() if cells[-1] == "yes"]
        assert here_now in (["qwen3-4b"], ["smollm2-135m", "qwen3-4b"])  # if a package has it
        assert "here too: org/other, 0.0 MiB" in done.out


def test_one_model_and_the_json(here: Here, cache: Path) -> None:
    done = here("models", "qwen3-8b")
    assert "Qwen/Qwen3-8B" in done.out
    assert "--draft eagle3" in done.out
    assert "edgespec pull qwen3-8b --draft eagle3" in done.out
    (one,) = json.loads(here("models", "qwen3-8b", "--json", "--stages", "2").out)["models"]
    assert (one["name"], one["here"], one["tried"], one["stages"]) == ("qwen3-8b", False, False, 2)
    # 18 layers of 8.2 billion parameters in 4.5 bits, their cache, 0.6 GiB.
    assert 2.5 < one["stage_bytes"] / 2**30 < 4
    assert {draft["source"] for draft in one["drafts"]} == {"independent", "eagle3", "dspark"}
    every = json.loads(here("models", "--json").out)
    assert [model["name"] for model in every["models"]] == list(MODELS)
    assert every["others_here"] == []
    assert set(every["refused"]) == set(REFUSED)
    here("models", "qwen-3:8").assert_refused("did you mean qwen3-8b or ")
    here("models", "org/name").assert_refused("org/name is not in the list")
    here("models", "toy-hybrid").assert_refused("error: toy-hybrid is not in the list")
    here("models", "--stages", "0").assert_refused("a ring has 1 to")


@pytest.mark.parametrize(
    "command",
    [
        ("models",),
        ("pull",),
        ("init", "--stages", "2", "--model"),
        ("plan", "--devices", "jetson-orin-nano-8gb", "--model"),
        ("demo", "--model"),
    ],
)
def test_a_model_that_does_not_run_is_refused_everywhere(
    here: Here, cache: Path, command: tuple[str, ...]
) -> None:
    here(*command, "gemma3n").assert_refused(
        "gemma3n does not run: its layers exchange rows of several widths", "use gemma-4-e4b"
    )


def test_what_fits_some_boards_is_listed_with_its_speed(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = "3*jetson-orin-nano-8gb"
    planned: dict[str, tuple[Plan, ...]] = {}

    def once(problem: Problem, heads: Sequence[str], needs_draft: bool) -> tuple[Plan, ...]:
        """Every way to show a plan shows the same, and to plan all models takes seconds."""
        name = problem.model.name
        if name not in planned:
            planned[name] = candidates(problem, heads, needs_draft=needs_draft)
        return planned[name]

    monkeypatch.setattr("edgespec.cli.models.candidates", once)
    listed = {
        m["name"]: m for m in json.loads(here("models", "--fits", boards, "--json").out)["models"]
    }
    assert {"qwen3-14b", "gpt-oss-20b", "smollm3-3b"} <= set(listed)
    assert not {"qwen3-32b", "llama-3.3-70b"} & set(listed)
    one = listed["qwen3-14b"]
    assert sum(one["layers"]) == MODELS["qwen3-14b"].sizes.layers
    assert len(one["needed_bytes"]) == len(one["layers"])
    assert 4 < one["plain_tokens_per_second"] < listed["qwen3-8b"]["plain_tokens_per_second"]
    table = here("models", "--fits", boards).out.split()
    assert table.index("gpt-oss-20b") < table.index("qwen3-14b") < table.index("qwen3-8b")
    (alone,) = json.loads(here("models", "qwen3:8b", "--fits", boards, "--json").out)["models"]
    assert alone["name"] == "qwen3-8b"
    here("models", "llama-3.3-70b", "--fits", boards).assert_refused("no model", code=1)


def test_the_words_of_others_lead_to_ours(here: Here) -> None:
    for word, ours in {"run": "edgespec chat", "list": "edgespec models", "ps": "status"}.items():
        here(word, "x").assert_refused(f"there is no command {word} here; use ", ours)


def test_a_model_is_here_once_all_its_weights_are(cache: Path) -> None:
    folder = downloaded(cache, "org/many", "config.json")
    assert not is_here("org/many")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("one", "two"):
        assert not is_here("org/many"), name
        (folder / f"{name}.safetensors").touch()
    assert is_here("org/many")
    assert not is_here("org/many/four.gguf")
    (folder / "four.gguf").touch()
    assert is_here("org/many/four.gguf")
    assert is_here(str(folder))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("models")
    models = {
        "org/many": write_tokenizer(write_checkpoint(root / "many", shard_size=12_000)),
        "org/head": write_checkpoint(root / "head"),
        "org/other": write_checkpoint(root / "other"),
    }
    (root / "head" / "model.safetensors").rename(root / "head" / "pytorch_model.bin")
    (root / "other" / "config.json").write_text('{"model_type": "mamba"}')
    with Hub(models, gated=("org/gated",)) as running:
        yield running


PULL = """
import contextlib, io
from edgespec.cli.main import main

def pull(*arguments):
    sys.argv = ["edgespec", "pull", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return [int(code or 0), out.getvalue(), " ".join(err.getvalue().split())]

print(json.dumps([pull(*one.split()) for one in sys.argv[1:]]))
"""


@pytest.mark.thorough
def test_pull_downloads_what_is_missing_and_says_where(hub: Hub, tmp_path: Path) -> None:
    ((code, out, err),) = hub.run(tmp_path, PULL, "org/many --draft eagle3:org/head")
    assert code == 0, err
    weights = {file.name for file in hub.models["org/many"].glob("*.safetensors")}
    assert weights | {"config.json", "tokenizer.json", "pytorch_model.bin"} <= set(hub.fetched())
    place = tmp_path / "hub" / "models--org--many" / "snapshots" / COMMIT
    assert f"org/many: {place}" in out
    assert "next: edgespec init --model org/many --draft eagle3:org/head --stages N" in out
    # Again, with two files cut off, one of them damaged: that one is refused, and fetched anew.
    cut = {}
    for name in sorted(weights)[:2]:
        blob = (place / name).resolve()
        cut[place / name] = blob.read_bytes()
        part = blob.with_name(f"{blob.name}.edgespec-part")
        part.write_bytes(cut[place / name][:1000] if len(cut) == 2 else bytes(1000))
        blob.unlink()
        (place / name).unlink()
    damaged, done = hub.run(tmp_path, PULL, "org/many", "org/many")
    first, second = (path.name for path in cut)
    assert (damaged[0], f"{first} did not arrive as it is" in damaged[2]) == (2, True), damaged
    assert (done[0], hub.fetched()) == (0, [first, first, second]), done
    assert hub.ranges == ["bytes=1000-", "bytes=1000-"]
    assert all(path.read_bytes() == content for path, content in cut.items())


@pytest.mark.thorough
def test_pull_refuses_before_it_downloads(hub: Hub, tmp_path: Path) -> None:
    said = hub.run(tmp_path, PULL, "org/none", "org/gated", "org/other", "org/head", "nothing")
    words = ("check the spelling", "accept it at https://huggingface.co/org/gated", "type 'mamba'",
             "no weights that edgespec reads", "no model is called so")  # fmt: skip
    for (code, out, err), word in zip(said, words, strict=True):
        assert (code, out) == (2, ""), word
        assert word in err
    assert "pytorch_model.bin" not in hub.fetched()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("pull", "qwen3-8b"), 2),
        (("demo", "--model", "qwen3-8b"), 2),
        (("plan", "--devices", "2*jetson-orin-nano-8gb", "--model", "org/unknown"), 2),
        (("init", "--stages", "4", "--model", "qwen3-8b"), 0),
        (("init", "--stages", "4", "--model", "org/unknown"), 0),
    ],
)
def test_without_a_network_one_try_is_made_and_one_sentence_said(
    here: Here,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    code: int,
) -> None:
    tried = []

    def refuse(address: tuple[str, int], *_: object) -> None:
        tried.append(address)
        raise OSError("Network is unreachable")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("edgespec.model.hub_download.socket.create_connection", refuse)
    hub_download._is_reachable.cache_clear()
    monkeypatch.setenv("EDGESPEC_CLUSTER", str(cache / "cluster"))
    done = here(*command)
    hub_download._is_reachable.cache_clear()
    assert (done.code, len(tried)) == (code, 1), done
    assert "Traceback" not in done.err
    said = [line for line in done.err.splitlines() if "the hub cannot be reached" in line]
    assert len(said) == 1
    assert hub_download._CONNECT_S <= 3
