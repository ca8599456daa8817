"""Files of models as untrusted input: whatever they say, one message comes of it, and soon."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.cases import case
from support.gguf_parts import ARRAY, STRING, Entry, Parts
from support.memory_limits import memory_limit_holds
from support.model_fuzz import MORE_BYTES, Models, outcome, outcomes, remove, size_of, tried
from support.model_mutations import mutated
from support.own_cache import own_cache
from support.tiers import thorough, tiered

from edgespec.errors import MOST_CHARS, ConfigError, ModelError


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """All of them work, and so all is imported and compiled that children need."""
    made = Models(tmp_path_factory.mktemp("models") / "seeds", every=False)
    for seed in made.seeds:
        made.use(seed.kind, seed.path)
    return made


@pytest.fixture(autouse=True)
def cache(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(tmp_path / "cache", monkeypatch)


@pytest.mark.parametrize("count", tiered((60, 1000), {60}))
def test_whatever_a_file_says_one_message_comes_of_it(
    models: Models, tmp_path: Path, count: int
) -> None:
    """Some of what tests/benchmarks/fuzz_models.py does, in this process."""
    for number in range(count):
        chance = random.Random(f"quick {number}")
        seed = chance.choice(models.seeds)
        target = tmp_path / f"{number}{seed.path.suffix}"
        with case(number, seed.name, mutated(seed.path, target, chance)):
            found = tried(lambda: models.use(seed.kind, target))  # noqa: B023
            assert found.is_fine, found
        remove(target)


def test_what_the_fuzzer_finds(tmp_path: Path) -> None:
    """Each kind of finding is one."""

    def refuse(message: str) -> Callable[[], None]:
        def work() -> None:
            error = ModelError("")
            error.args = (message,)
            raise error

        return work

    def take() -> None:
        try:
            _ = bytes(2 * MORE_BYTES)
        except MemoryError as error:
            raise ModelError("too large") from error

    kinds: dict[str, Callable[[], object]] = {
        "ok": lambda: None,
        "refused": refuse("there is no such file"),
        "long message": refuse("a" * 5_000_000),
        "raw characters": refuse("\x1b[2J"),
        "traceback": lambda: {}["x"],
        "signal": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hang": lambda: os.kill(os.getpid(), signal.SIGXCPU),
    }
    if memory_limit_holds():
        kinds["memory"] = take
    for kind, work in kinds.items():
        with case(kind):
            found = outcome(work, 0)  # type: ignore[arg-type]
            assert found.kind == kind
            assert found.is_fine == (kind in ("ok", "refused"))


def test_messages_are_bounded_and_show_what_would_steer_a_terminal() -> None:
    long = str(ConfigError(f"{'a' * 5_000_000}; download it again"))
    assert len(long) == MOST_CHARS
    assert long.endswith("a; download it again")
    assert len(str(ConfigError("\U000e0001" * 5_000_000))) == MOST_CHARS
    shown = str(ModelError("a\x1b[2J\r\u202e\ud800é\nb"))
    assert shown == "a\\x1b[2J\\r\\u202e\\ud800é\\nb"
    assert str(ConfigError("a\nb")) == "a\nb"


@dataclass(frozen=True)
class Harm:
    """A model that was made to do harm, and what is said of it; "" if it can be used."""

    what: object
    kind: str
    path: Path
    message: str


def check(models: Models, harms: Sequence[Harm]) -> None:
    works = [(partial(models.use, one.kind, one.path), size_of(one.path)) for one in harms]
    for one, found in zip(harms, outcomes(works), strict=True):
        with case(one.what):
            assert found.kind == ("refused" if one.message else "ok"), found
            assert one.message in found.detail, found


# --- GGUF files that took minutes, or crashed ---------------------------------------------------


def _factors(parts: Parts) -> None:
    count = 3000
    values = struct.pack(f"<{count}f", *(1 + 7 * n / count for n in range(count)))
    parts.tensors.append(Entry(b"rope_freqs.weight", [count], 0, len(parts.data)))
    parts.data += values


def _factors_that_fit_a_head(parts: Parts) -> None:
    parts.set(b"llama.attention.key_length", 4, 6000)
    _factors(parts)


def _waves_of_one_length(parts: Parts) -> None:
    parts.set(b"llama.rope.freq_base", 6, 1.0)
    parts.tensors.append(Entry(b"rope_freqs.weight", [4], 0, len(parts.data)))
    parts.data += struct.pack("<4f", 1, 2, 3, 8)


def _long_token(parts: Parts) -> None:
    tokens = parts.key(b"tokenizer.ggml.tokens").value[1]
    tokens[-1] = b"a" * 3_000_000


def _layers_in_one_place(parts: Parts) -> None:
    layer = [tensor for tensor in parts.tensors if tensor.name.startswith(b"blk.0.")]
    for number in range(2, 100):
        for tensor in layer:
            name = tensor.name.replace(b"blk.0.", b"blk.%d." % number)
            parts.tensors.append(Entry(name, tensor.sizes, tensor.kind, tensor.place))
    parts.key(b"llama.block_count").value = 100


def _control_tokens(parts: Parts) -> None:
    count = 70_000
    parts.set(b"tokenizer.ggml.tokens", ARRAY, (STRING, [b"<|%d|>" % n for n in range(count)]))
    parts.set(b"tokenizer.ggml.token_type", ARRAY, (5, [3] * count))
    parts.set(b"tokenizer.ggml.scores", ARRAY, (6, [0.0] * count))


def _two_million_tokens(parts: Parts) -> None:
    parts.set(b"tokenizer.ggml.tokens", ARRAY, (STRING, [b"x"] * 2_000_000))


def _many_merges(parts: Parts) -> None:
    words = [f"{n:017b}".encode().replace(b"0", b"a") for n in range(1 << 17)]
    every = list(dict.fromkeys(word[:end] for word in words for end in range(1, 18)))
    parts.set(b"tokenizer.ggml.tokens", ARRAY, (STRING, every))
    parts.set(b"tokenizer.ggml.token_type", ARRAY, (5, [1] * len(every)))
    parts.set(b"tokenizer.ggml.scores", ARRAY, (6, [0.0] * len(every)))


def _kinds_without_end(parts: Parts) -> None:
    count = len(parts.key(b"tokenizer.ggml.tokens").value[1])
    parts.set(b"tokenizer.ggml.token_type", ARRAY, (6, [float("inf")] * count))


def _long_architecture(parts: Parts) -> None:
    parts.key(b"general.architecture").value = b"A" * 5_000_000


def _part_of_text(parts: Parts) -> None:
    parts.set(b"split.no", STRING, b"\x1b[2J")


GGUFS: dict[Callable[[Parts], None], str] = {
    _factors: "'rope_freqs.weight' in a form that is not known",
    _factors_that_fit_a_head: "llama.attention.key_length is 6000",
    _waves_of_one_length: "ZeroDivisionError",
    _long_token: "",
    _layers_in_one_place: "lie in the same bytes",
    _control_tokens: "with more than 65536 control tokens",
    _kinds_without_end: "OverflowError",
    _long_architecture: "is of architecture 'AAA",
    _part_of_text: r"\x1b[2J",
}
LARGE_GGUFS: dict[Callable[[Parts], None], str] = {
    _two_million_tokens: "counts 2000000 where 1048576 is the most",
    _many_merges: "more than 1048576 merges",
}


@pytest.mark.parametrize("changes", [GGUFS, thorough(LARGE_GGUFS)], ids=["small", "large"])
def test_gguf_files_that_do_harm(
    models: Models, tmp_path: Path, changes: dict[Callable[[Parts], None], str]
) -> None:
    """Refused for what they are, in 20 s of CPU time at the most."""
    seed = next(seed for seed in models.seeds if seed.name == "llama-rope.gguf")
    harms = []
    for change, message in changes.items():
        parts = Parts.of(seed.path.read_bytes())
        parts.tensors = [one for one in parts.tensors if one.name != b"rope_freqs.weight"]
        change(parts)
        file = tmp_path / f"{change.__name__}.gguf"
        file.write_bytes(parts.file())
        harms.append(Harm(file.stem, "model", file, message))
    check(models, harms)


# --- folders ------------------------------------------------------------------------------------


Change = Callable[[Any], object]


def _put(**fields: Any) -> Change:
    return lambda content: content.update(fields)


DEEP = "[" * 100_000
FOLDERS: dict[tuple[str, str, str], tuple[str | Change, str]] = {
    ("plain", "config.json", "deep"): (DEEP, "RecursionError"),
    ("plain", "generation_config.json", "deep"): (DEEP, "RecursionError"),
    ("plain", "tokenizer_config.json", "deep"): (DEEP, "cannot read the tokenizer"),
    ("plain", "config.json", "layers"): (_put(num_hidden_layers=10**30), "up to 1024"),
    ("plain", "config.json", "infinite"): (_put(num_hidden_layers=float("inf")), "up to 1024"),
    ("plain", "generation_config.json", "text"): (_put(eos_token_id="a"), "cannot read"),
    ("plain", "generation_config.json", "no end"): (_put(eos_token_id=float("inf")), "Overflow"),
    ("plain", "generation_config.json", "object"): (_put(eos_token_id={}), "TypeError"),
    ("plain", "tokenizer_config.json", "length"): (_put(model_max_length="a"), "TypeError"),
    ("plain", "tokenizer.json", "id"): (
        lambda content: content["model"]["vocab"].update(x=1 << 31),
        "a token has the number 2147483648",
    ),
    ("plain", "tokenizer.json", "panic"): (
        lambda content: content["model"].update(continuing_subword_prefix="longer than any"),
        "PanicException",
    ),
    ("plain", "config.json", "heads"): (_put(num_attention_heads=1 << 30), "numbers of a row"),
    ("plain", "config.json", "key heads"): (_put(num_key_value_heads=1 << 30), "numbers of a row"),
    ("plain", "config.json", "odd heads"): (_put(head_dim=15), "turns 15 numbers of a head's 15"),
    ("plain", "config.json", "turned"): (
        _put(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 8.0}),
        "turns 128 numbers of a head's 16",
    ),
    ("eagle3-official", "config.json", "odd heads"): (
        _put(num_attention_heads=32),
        "says 32 attention heads",
    ),
    ("compressed", "config.json", "weights"): (
        lambda content: content["quantization_config"]["config_groups"]["group_0"].update(
            weights=5
        ),
        "AttributeError",
    ),
    ("deepspec", "config.json", "layers"): (
        _put(num_hidden_layers=10**30),
        "no whole number 'num_hidden_layers' from 1 to 1024",
    ),
    ("deepspec", "config.json", "window"): (
        _put(layer_types=["sliding_attention"] * 2, sliding_window=10**30),
        "layer_types and sliding_window",
    ),
    ("deepspec", "config.json", "deep"): (DEEP, "RecursionError"),
}


def test_folders_that_do_harm(models: Models, tmp_path: Path) -> None:
    seeds = {seed.name: seed for seed in models.seeds}
    harms = []
    for number, ((name, file, what), (change, message)) in enumerate(FOLDERS.items()):
        folder = Path(shutil.copytree(seeds[name].path, tmp_path / str(number)))
        place = folder / file
        if isinstance(change, str):
            place.write_text(change)
        else:
            content = json.loads(place.read_text()) if place.exists() else {}
            change(content)
            place.write_text(json.dumps(content))
        harms.append(Harm((name, file, what), seeds[name].kind, folder, message))
    check(models, harms)


HEADERS: dict[str, Change] = {
    "no shape": lambda entry: entry.pop("shape"),
    "no dtype": lambda entry: entry.pop("dtype"),
    "no place": lambda entry: entry.update(data_offsets=[]),
    "a text": lambda entry: entry.update(data_offsets="ab"),
    "ends before it begins": lambda entry: entry.update(data_offsets=[4096, 0]),
    "another kind": lambda entry: entry.update(shape={}),
}


def test_headers_that_do_harm(models: Models, tmp_path: Path) -> None:
    plain = next(seed for seed in models.seeds if seed.name == "plain")
    content = (plain.path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")

    def damaged() -> Iterator[tuple[str, bytes]]:
        yield "deep", b"[" * length
        for what, change in HEADERS.items():
            header = json.loads(content[8 : 8 + length])
            change(header["model.norm.weight"])
            yield what, json.dumps(header).encode()

    harms = []
    for what, header in damaged():
        folder = Path(shutil.copytree(plain.path, tmp_path / what))
        whole = len(header).to_bytes(8, "little") + header + content[8 + length :]
        (folder / "model.safetensors").write_bytes(whole)
        message = f"cannot read {folder / 'model.safetensors'} ("
        harms.append(Harm(what, "model", folder, message))
    check(models, harms)
