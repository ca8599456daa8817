"""Torn files: each file that the program writes, as a loss of power may leave it.

What can be made again is made again. Of the others one message names the file and says what to do.
docs/files.md has the list.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.campaign import read_trace
from support.checkpoints import write_checkpoint, write_family, write_tokenizer
from support.damage import DAMAGES, LIKELIEST, damaged
from support.ggufs import all_as, tokenizer_values, write_gguf
from support.hub import Hub
from support.tiers import thorough

from edgespec.bench.recorded import read_recording
from edgespec.cli import reach
from edgespec.cli.conversation import Conversation, Turn
from edgespec.cli.line_input import History
from edgespec.config import Address, Quantisation
from edgespec.daemon.access_store import AccessStore
from edgespec.daemon.api_keys import ApiKeys
from edgespec.daemon.blocks import BlockKey, BlockLibrary
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings, own_key
from edgespec.daemon.profiles import profile_named
from edgespec.daemon.service import Systemd
from edgespec.errors import BlockDamaged, ConfigError
from edgespec.model.block_folder import CONFIG, HEAD, BlockFolder
from edgespec.model.gguf.files import GgufFiles
from edgespec.model.hub import TOKENIZER_FILES
from edgespec.model.loader import Checkpoint, fingerprint
from edgespec.model.manifest import MANIFEST
from edgespec.model.sharding import Sharding
from edgespec.model.sources import QuantisingSource
from edgespec.net.keys import KeyPair, Token
from edgespec.training.corpus import OwnAnswers

SETTINGS = ClusterSettings(model="m", stages=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "edgespec"


def said_of(file: Path, what_to_do: str, opening: Callable[[], object]) -> None:
    """Opening is refused with one sentence that names the file."""
    with pytest.raises(ConfigError) as refused:
        opening()
    message = str(refused.value)
    assert message.startswith(str(file))
    assert what_to_do in message
    assert "\n" not in message


# --- what cannot be made again --------------------------------------------------------------------


def test_of_a_clusters_files_it_is_said_what_is_lost_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "cluster"
    made = ClusterFolder.create(path, SETTINGS)
    made.keep_plan("{}")
    AccessStore(made).new_token("stage", 1, 60.0)
    ApiKeys(path).new("laptop")
    files: dict[str, tuple[str, Callable[[], object]]] = {
        "cluster.key": ("run `edgespec init` again, and", lambda: ClusterFolder.open(path)),
        "settings.json": ("`edgespec init`", lambda: ClusterFolder.open(path).settings),
        "access.json": ("join again with new tokens", lambda: AccessStore(made)),
        "api-keys.json": ("`edgespec key new`", ApiKeys(path).all),
    }
    assert {file.name for file in path.iterdir()} == {*files, "plan.json"}  # which is never read
    for name, (what_to_do, opening) in files.items():
        for _ in damaged(path / name):
            said_of(path / name, what_to_do, opening)
        opening()
        (path / name).unlink()
        if name == "cluster.key":
            assert ClusterFolder.create(path, SETTINGS).settings == SETTINGS
        elif name == "settings.json":
            said_of(path / name, "`edgespec init`", opening)
            ClusterFolder.create(path, SETTINGS)
        opening()


def test_a_device_with_a_torn_membership_joins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, coordinator = tmp_path / "device", KeyPair.new().public
    member = ClusterFolder.remember(path, own_key(path), coordinator, "one", "10.0.0.1:7430")
    for _ in damaged(path / "device.key"):
        said_of(
            path / "device.key", "join again with a new token", lambda: ClusterFolder.open(path)
        )
    monkeypatch.setattr(reach, "enrol", lambda address, token, own, *_: "one")
    found = SimpleNamespace(run=lambda *_: Address("10.0.0.1", 7430))
    monkeypatch.setattr(reach, "_search", lambda *_: found)
    tell: Any = SimpleNamespace(say=print, waiting=lambda text: nullcontext())
    for _ in damaged(path / "membership.json"):
        said_of(
            path / "membership.json", "join again with a token", lambda: ClusterFolder.open(path)
        )
        reach.admitted(path, Token.new(coordinator), "10.0.0.1:7430", 1.0, tell)
        again = ClusterFolder.open(path)
        assert (again.identity, again.name) == (member.identity, "one")


def test_of_what_users_keep_it_is_said_that_it_is_none(tmp_path: Path) -> None:
    conversation, history = tmp_path / "talk.json", tmp_path / "chat-history"
    Conversation(turns=[Turn("why", "so")]).save(conversation)
    for _ in damaged(conversation):
        said_of_it = pytest.raises(ConfigError, match=f"{conversation} is no saved conversation")
        with said_of_it:
            Conversation.load(conversation)
    for line in ("one", "two", "three"):
        History(history).add(line)
    for _ in damaged(history):
        History(history).add("four")  # what can be read is kept, and no more
    for name, content, read in (
        ("board.json", '{"name": "board"}', lambda file: profile_named(str(file))),
        ("seed-1.json", '{"seed": 1}', read_trace),
        ("requests.jsonl", '{"what": "request"}', read_recording),
    ):
        file = tmp_path / name
        file.write_text(content)
        for _ in damaged(file):
            with pytest.raises(ConfigError, match=name):
                read(file)
    unit = Systemd(tmp_path)
    unit.install("stage", "[Unit]\n")
    for _ in damaged(unit.path("stage")):
        with pytest.raises(ConfigError, match="is there and differs"):
            unit.install("stage", "[Unit]\n")
        unit.install("stage", "[Unit]\n", force=True)


# --- what can be made again -----------------------------------------------------------------------


@pytest.mark.parametrize("ways", [LIKELIEST, thorough(tuple(DAMAGES))])
def test_the_settings_of_a_gguf_file_are_made_again(
    tmp_path: Path, cache: Path, ways: tuple[str, ...]
) -> None:
    folder = write_family(tmp_path / "original", "llama", intermediate_size=64, num_hidden_layers=1)
    file = tmp_path / "m.gguf"
    template = {"tokenizer.chat_template": "{{ messages }}"}
    write_gguf(folder, file, all_as("Q8_0"), tokenizer_values(tmp_path) | template)

    def content() -> dict[str, bytes]:
        made = GgufFiles(file, lambda: file)
        found = map(made.optional, (CONFIG, *TOKENIZER_FILES))
        return {path.name: path.read_bytes() for path in found if path is not None}

    whole = content()
    assert {CONFIG, "tokenizer.json", "chat_template.jinja"} < set(whole)
    (kept,) = (cache / "gguf").iterdir()
    for path in kept.iterdir():
        for _ in damaged(path, ways):
            assert content() == whole
    written = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert content() == whole
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == written
    assert len(written) == len(whole) + 2
    assert kept.stat().st_mode & 0o777 == 0o700
    kept.chmod(0o770)
    with pytest.raises(ConfigError, match=f"others can write to {kept}.* remove that folder"):
        content()


KERNELS = """
import os, sys
from pathlib import Path
from edgespec.kernels import compiled
from support.damage import damaged

source = Path(sys.argv[1])

def answers():  # a process of its own, as the loader knows a library by its name
    child = os.fork()
    if child == 0:
        os._exit(0 if compiled.built(source).answer() == 42 else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, code

answers()
files = sorted((compiled.cache_folder() / "kernels").iterdir())
for file in files:
    whole = file.read_bytes()
    for name in damaged(file, sys.argv[2:]):
        answers()
        assert file.read_bytes() == whole
assert len(files) == 2
"""


@pytest.mark.parametrize("ways", [LIKELIEST, thorough(tuple(DAMAGES))])
def test_a_torn_kernel_is_compiled_again(tmp_path: Path, ways: tuple[str, ...]) -> None:
    source = tmp_path / "some.c"
    source.write_text("int answer(void) { return 42; }\n")
    command = [sys.executable, "-c", KERNELS, str(source), *ways]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ways", [LIKELIEST, thorough(tuple(DAMAGES))])
def test_blocks_are_made_again_and_none_is_computed_with(
    tmp_path: Path, ways: tuple[str, ...]
) -> None:
    model = write_tokenizer(write_checkpoint(tmp_path / "tiny", num_hidden_layers=2))
    library, int8 = BlockLibrary(tmp_path / "blocks"), Quantisation("int8")
    key, head = (BlockKey(fingerprint(model), 0, end, int8) for end in (2, 0))
    for one in (key, head):
        source = QuantisingSource(Checkpoint(model), int8)
        home = library.make(source, one).path
        whole = {file.name: file.read_bytes() for file in home.iterdir()}
        assert len(whole) == 3
        for name in whole:
            for _ in damaged(home / name, ways):
                assert library.find(one) is None
                library.make(source, one)
                assert {file.name: file.read_bytes() for file in home.iterdir()} == whole
    folder = tmp_path / "shards"
    Sharding(str(model), int8, int8).into(folder, ((0, 2),), lambda *_: None)
    for file in folder.iterdir():

        def opening() -> None:
            opened = BlockFolder(folder)
            opened.block(0, 2)
            opened.head()

        for _ in damaged(file, ways):
            with pytest.raises(BlockDamaged, match=f"{file}.* make the folder again"):
                opening()
        opening()
    assert {MANIFEST, CONFIG, HEAD, "stage-1.safetensors"} < {f.name for f in folder.iterdir()}


def test_own_answers_are_made_again_or_named(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    line = {"start": 1, "sampled": False, "tokens": [1, 2, 3]}
    file.write_text("".join(json.dumps(line | {"tokens": [n, 2, 3]}) + "\n" for n in range(9)))
    for name in damaged(file):
        if name == "noise":
            said = pytest.raises(ConfigError, match=f"of {file} is no answer .* delete the file")
            with said:
                OwnAnswers(file, None, 3, 0, 0)  # type: ignore[arg-type]
        else:
            OwnAnswers(file, None, 3, 0, 0)  # type: ignore[arg-type]


HUB = """
from pathlib import Path
from edgespec.model import hub_download
from edgespec.model.hub import HubFiles
from edgespec.model.hub_cache import download
from support.damage import damaged

def get():
    hub_download._seen.clear()
    return download("org/tiny", False, lambda said: None)

def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}

folder = get()
whole = content(folder)
newest = folder.parents[1] / "refs" / "main"
for file in (newest, *sorted(file.resolve() for file in folder.iterdir())):
    for name in damaged(file):
        assert content(get()) == whole
for name in ("config.json", "tokenizer.json"):
    for _ in damaged((folder / name).resolve()):  # small ones are looked at wherever they are used
        hub_download._seen.clear()
        assert HubFiles("org/tiny").optional(name).read_bytes() == whole[name]
print(len(whole))
"""


@pytest.mark.thorough
def test_what_came_from_the_hub_is_downloaded_again(tmp_path: Path) -> None:
    model = write_tokenizer(write_checkpoint(tmp_path / "tiny", num_hidden_layers=1))
    with Hub({"org/tiny": model}) as hub:
        path = f"import sys; sys.path.append({str(Path(__file__).parents[1])!r})\n"
        assert hub.run(tmp_path / "home", path + HUB) >= 4


def test_every_damage_is_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"some content")
    assert list(damaged(file)) == list(DAMAGES)
    assert file.read_bytes() == b"some content"
    assert len({damage(b"some content") for damage in DAMAGES.values()}) == len(DAMAGES)
