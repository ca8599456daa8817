"""Tokenizers made from GGUF files against those that the files were made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from support.cases import case
from support.checkpoints import CORPUS, write_checkpoint, write_tokenizer
from support.ggufs import all_as, tokenizer_values, write_gguf
from support.own_cache import own_cache
from support.smollm2 import smollm2_file, tokenizer

from edgespec.errors import ModelError
from edgespec.model.gguf.reader import open_gguf
from edgespec.model.gguf.vocabulary import tokenizer_files
from edgespec.model.hub import local_folder
from edgespec.model.tokenizer import Tokenizer

TEXTS = [*CORPUS[:3], "", "  two  blanks ", "a<s>b</s>", "<|tool|> 12345\n\n\tx", "don't WE'LL"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(tmp_path / "cache", monkeypatch)


def file_with(tmp_path: Path, **more: object) -> Path:
    """A GGUF file with a tokenizer, of a model that is as small as can be."""
    style = str(more.pop("style", "bytes"))
    folder = write_checkpoint(tmp_path / "model", num_hidden_layers=1)
    file = tmp_path / f"{style}.gguf"
    values = {f"tokenizer.{key.replace('__', '.')}": value for key, value in more.items()}
    write_gguf(folder, file, all_as("F16"), tokenizer_values(tmp_path, style) | values)
    return file


@pytest.mark.parametrize("style", ["bytes", "fallback"])
def test_it_reads_and_writes_as_the_original_does(tmp_path: Path, style: str) -> None:
    ours = Tokenizer(local_folder(file_with(tmp_path, style=style)))
    theirs = Tokenizer(tmp_path / f"tokenizer-{style}")
    for text in TEXTS:
        with case(text):
            assert ours.encode(text) == theirs.encode(text)
            assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.eos_ids == theirs.eos_ids


def test_a_vocabulary_of_gemma_4_lists_the_merges_of_pieces(tmp_path: Path) -> None:
    """Their scores are no ranks; text begins with a token whatever the file says, as llama.cpp has
    it, and without a space in front."""
    original = write_tokenizer(tmp_path / "t", style="fallback") / "tokenizer.json"
    merges = [" ".join(pair) for pair in json.loads(original.read_text())["model"]["merges"]]
    more = {"ggml__model": "gemma4", "ggml__merges": merges, "ggml__add_space_prefix": False}
    values = tokenizer_values(tmp_path, "fallback")
    more["ggml__scores"] = [0.0] * len(values["tokenizer.ggml.tokens"])
    shutil.rmtree(tmp_path / "tokenizer-fallback")
    ours = Tokenizer(local_folder(file_with(tmp_path, style="fallback", **more)))
    theirs = tokenizers.Tokenizer.from_file(str(original))
    theirs.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    for text in TEXTS:
        with case(text):
            assert ours.encode(text) == theirs.encode(text).ids


def test_deepseek_cuts_its_own_way(tmp_path: Path) -> None:
    """Cased letters but for some alphabets, then punctuation, in which it counts those of ASCII."""
    files = tokenizer_files(open_gguf(file_with(tmp_path, ggml__pre="deepseek-llm")))
    cut = tokenizers.Tokenizer.from_str(files["tokenizer.json"]).pre_tokenizer
    text = "Grüße, Ω \u0561x=12\n\n  今日 3 "
    pieces = [text[first:end] for _, (first, end) in cut.pre_tokenize_str(text)]
    expected = ["Gr", "üß", "e", ",", " Ω", " \u0561", "x", "=", "1", "2", "\n", "\n"]
    assert pieces == [*expected, "  ", "今日", " ", "3", " "]


def test_templates_ends_and_opening_tokens_are_the_files_own(tmp_path: Path) -> None:
    template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    file = file_with(
        tmp_path, chat_template=template, ggml__eot_token_id=7, ggml__add_bos_token=False
    )
    folder = local_folder(file)
    made = Tokenizer(folder)
    assert made.eos_ids == {1, 7}
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [1, 7]}
    assert made.encode("") == []
    chat = made.encode_chat([{"role": "user", "content": "fox"}])
    assert (chat[0], chat[-1]) == (0, 1)
    assert made.decode(chat) == "fox"


def test_what_is_not_known_is_named(tmp_path: Path) -> None:
    changes = {
        "of kind 'bert'": {"model": "bert"},
        "cuts text as 'martian'": {"pre": "martian"},
        "merge that is no pair": {"merges": ["a b c"]},
        "eos_token_id is 99999": {"eos_token_id": 99999},
        "lists no tokens": {"tokens": ["", 3][:0] or [0]},
        "type for some tokens": {"token_type": [1, 1]},
        "cannot read the tokenizer": {"merges": ["zz~ yy~"]},
    }
    folder = write_checkpoint(tmp_path / "model", num_hidden_layers=1)
    for number, (message, change) in enumerate(changes.items()):
        with case(message):
            file = tmp_path / f"{number}.gguf"
            write_gguf(folder, file, all_as("F16"), tokenizer_values(tmp_path, **change))
            with pytest.raises(ModelError, match=message):
                tokenizer_files(open_gguf(file))


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        ((), ["it", "'", "s", " ", "123", "45", ",", " ok"]),
        (("<|begin_of_text|>",), ["it", "'s", " ", "123", "45", ",", " ok"]),
    ],
)
def test_a_file_that_does_not_say_how_it_cuts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tokens: tuple[str, ...], pieces: list[str]
) -> None:
    """As llama.cpp cuts by default, but Llama 3's as they are; with a warning."""
    values = tokenizer_values(tmp_path, pre="")
    values["tokenizer.ggml.tokens"] += tokens
    values["tokenizer.ggml.token_type"] += [3 for _ in tokens]
    folder = write_checkpoint(tmp_path / "model", num_hidden_layers=1)
    write_gguf(folder, tmp_path / "m.gguf", all_as("F16"), values)
    made = tokenizers.Tokenizer.from_file(str(local_folder(tmp_path / "m.gguf") / "tokenizer.json"))
    cut = made.pre_tokenizer.pre_tokenize_str("it's 12345, ok")
    assert [piece.replace("Ġ", " ") for piece, _ in cut] == pieces
    assert "does not say how its tokenizer cuts text" in caplog.text


def test_marks_stay_with_their_letters_as_qwen_35_cuts(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", num_hidden_layers=1)
    write_gguf(folder, tmp_path / "m.gguf", all_as("F16"), tokenizer_values(tmp_path, pre="qwen35"))
    made = tokenizers.Tokenizer.from_file(str(local_folder(tmp_path / "m.gguf") / "tokenizer.json"))
    text = "हिन्दी, it's 12"
    cut = made.pre_tokenizer.pre_tokenize_str(text)
    assert [text[slice(*where)] for _, where in cut] == ["हिन्दी", ",", " it", "'s", " ", "1", "2"]


def test_smollm2_is_read_as_its_own_tokenizer_reads() -> None:
    """The ids are those that are published of the model's own tokenizer.json for these texts."""
    smollm2_file()
    published = {
        "Hello, we can use": [19556, 28, 392, 416, 722],
        "The capital of France is": [504, 3575, 282, 4649, 314],
        "\n": [198],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
    }
    for text, ids in published.items():
        assert tokenizer().encode(text) == ids
        assert tokenizer().decode(ids) == text
    assert tokenizer().eos_ids == {2}
    chat = tokenizer().encode_chat([{"role": "user", "content": "Hi"}])
    text = tokenizer().decode(chat)
    assert (chat[0], chat[-1]) == (1, 198)
    assert "named SmolLM, trained by Hugging Face" in text
    assert text.endswith("user\nHi\nassistant\n")
