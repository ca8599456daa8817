"""Kept tokenizers: the same tokens as transformers' own, without importing it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import write_tokenizer
from support.own_cache import own_cache
from support.smollm2 import smollm2_file

from edgespec.daemon.bundled_models import bundled
from edgespec.model import kept_tokenizer
from edgespec.model.hub import local_folder
from edgespec.model.kept_tokenizer import KeptTokenizer
from edgespec.model.tokenizer import Tokenizer, require_same_tokenizer

TEXTS = (
    "",
    "The quick brown fox",
    " Ada,  naïve\n\n\tdon't (x==1); 12345",
    "今日は, мир 👩‍👩‍👧 \u00a0 ﬁ e\u0301 <s></s> <|im_start|>user\nhi<|im_end|>",
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(tmp_path / "cache", monkeypatch)


def twice(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """What transformers makes, and what is kept of it."""
    first, again = Tokenizer(folder, is_kept=True), Tokenizer(folder, is_kept=True)
    assert not isinstance(first.inner, KeptTokenizer)
    assert isinstance(again.inner, KeptTokenizer)
    return first, again


@pytest.mark.parametrize("which", ["bytes", "fallback", "bundled", "smollm2"])
def test_what_is_kept_does_the_same(tmp_path: Path, which: str) -> None:
    if which == "bundled":
        folder = Path(bundled("base"))
    elif which == "smollm2":
        folder = local_folder(smollm2_file())
    else:
        folder = write_tokenizer(tmp_path, style=which)
    theirs, ours = twice(folder)
    assert ours.bound == theirs.bound
    assert ours.eos_ids == theirs.eos_ids
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens == theirs.special_tokens
    assert ours.vocabulary == theirs.vocabulary
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        if ours.chat_template:
            talk = [{"role": "user", "content": text}]
            assert ours.encode_chat(talk) == theirs.encode_chat(talk)
    require_same_tokenizer(folder, folder)
    for token in range(len(theirs.inner.get_vocab())):
        assert ours.token(token) == theirs.token(token)
        assert ours.leaves_text_open(token) == theirs.leaves_text_open(token)


def test_changed_files_are_read_anew(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    twice(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages[0].content }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    first, again = twice(folder)
    assert first.chat_template == again.chat_template == settings["chat_template"]


def test_weights_of_any_kind_are_not_read(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    twice(folder)
    (folder / "tf_model.h5").write_bytes(b"weights")
    assert isinstance(Tokenizer(folder, is_kept=True).inner, KeptTokenizer)


def test_only_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tokenizer, "MOST_KEPT", 2)
    for number in range(3):
        folder = write_tokenizer(tmp_path / str(number))
        (folder / "more.json").write_text(json.dumps(number))
        twice(folder)
    assert len([*(tmp_path / "cache").rglob("settings.json")]) == 2


def test_a_cache_that_cannot_be_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(kept_tokenizer, "cache_folder", nowhere)
    tokenizer = Tokenizer(write_tokenizer(tmp_path), is_kept=True)
    assert not isinstance(tokenizer.inner, KeptTokenizer)


def test_what_was_torn_is_made_again(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    twice(folder)
    (file,) = (tmp_path / "cache").rglob("tokenizer.json")
    file.write_bytes(file.read_bytes()[:100])
    twice(folder)


def test_a_class_with_ways_of_its_own_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tokenizer(tmp_path)
    kind = type(Tokenizer(folder).inner)
    own = type("Own", (kind,), {"decode": lambda *_, **__: "its own"})

    def made(self: Tokenizer) -> object:
        inner = kind.from_pretrained(str(folder))
        inner.__class__ = own
        return inner

    monkeypatch.setattr(Tokenizer, "_of_library", made)
    for _ in range(2):
        assert not isinstance(Tokenizer(folder, is_kept=True).inner, KeptTokenizer)


def test_no_transformers_is_imported_for_what_is_kept(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    code = (
        "import sys; from edgespec.model.tokenizer import Tokenizer; "
        f"Tokenizer({str(folder)!r}, is_kept=True).bound; print('transformers' in sys.modules)"
    )
    twice(folder)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.strip() == "False"
