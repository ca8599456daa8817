"""Tokenizers: ends, streamed text, and what counts as the same tokenizer."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import write_tokenizer
from support.tiers import examples
from transformers import AutoTokenizer

import edgespec
from edgespec.errors import ConfigError, ModelError
from edgespec.model.tokenizer import IncrementalDetokenizer, Tokenizer, require_same_tokenizer


@pytest.fixture(scope="module", params=["bytes", "fallback"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer(write_tokenizer(folder, style=request.param))


def vocabulary(tokenizer: Tokenizer) -> int:
    return len(tokenizer.inner.get_vocab())


def test_a_prompt_gets_the_tokenizers_own_bos(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick brown fox")
    bos = tokenizer.inner.bos_token_id
    assert ids[0] == bos
    assert ids.count(bos) == 1
    assert tokenizer.decode(ids) == "The quick brown fox"


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "phi3", "unheard_of"])
@pytest.mark.parametrize(
    "named", ["LlamaTokenizerFast", "PreTrainedTokenizerFast", "Unheard", None]
)
def test_the_class_is_the_one_that_transformers_takes(
    tmp_path: Path, model_type: str, named: str | None
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("tokenizer_class", None)
    settings |= {"tokenizer_class": named} if named else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    ours = Tokenizer(tmp_path)
    assert type(ours.inner) is type(theirs)
    assert ours.encode("Ada, naïve  don't") == theirs("Ada, naïve  don't")["input_ids"]


def test_a_tokenizer_that_names_its_class_imports_no_modelling_code() -> None:
    folder = Path(edgespec.__file__).parent / "models" / "base"
    code = (
        "import sys; from edgespec.model.tokenizer import Tokenizer; "
        f"Tokenizer({str(folder)!r}); print('torch._dynamo' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.strip() == "False"


def test_without_a_bos_rule_none_is_added(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"] = None
    file.write_text(json.dumps(content))
    assert Tokenizer(folder).encode("The")[:1] != Tokenizer(folder).encode("")
    assert Tokenizer(folder).encode("") == []


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, {1}),
        ([5, 7], 9, {1, 5, 7, 9}),
        (5, None, {1, 5}),
        (None, [6], {1, 6}),
    ],
)
def test_every_end_that_the_folder_names_is_one(
    tmp_path: Path, generation: Any, config: Any, expected: set[int]
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": config})
    )
    assert Tokenizer(tmp_path).eos_ids == expected


@pytest.mark.parametrize("what", ["folder", "files", "damaged"])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, what: str) -> None:
    if what == "damaged":
        (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer") as failure:
        Tokenizer(tmp_path / "nowhere" if what == "folder" else tmp_path)
    assert str(tmp_path) in str(failure.value)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer)
    return [*(stream.push(token) for token in ids), stream.flush()]


@given(data=st.data())
@examples(300)
def test_streamed_pieces_join_to_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    size = vocabulary(tokenizer)
    anything = st.integers(0, size - 1)
    # Bytes and special tokens are where decoders treat neighbours together.
    tricky = st.sampled_from(
        [i for i in range(size) if i < 3 or tokenizer.leaves_text_open(i)]
        + tokenizer.inner.encode("é€👩 ▁ \ufffd  x", add_special_tokens=False)
    )
    ids = data.draw(st.lists(st.one_of(tricky, anything), max_size=40))
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])


@given(text=st.text(max_size=60))
@examples(200)
def test_real_text_streams_without_half_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_plain_words_appear_at_once(tokenizer: Tokenizer) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("The quick brown fox jumps")[1:]
    silent = [token for token in ids if not stream.push(token)]
    assert [tokenizer.decode([token]) for token in silent] in ([], [""])  # a leading "▁" at most
    assert stream.flush() == ""


def test_a_long_answer_costs_no_more_a_token(tokenizer: Tokenizer) -> None:
    decoded = 0
    original: Callable[[Any], str] = tokenizer.decode

    class Counting:
        leaves_text_open = staticmethod(tokenizer.leaves_text_open)

        @staticmethod
        def decode(ids: list[int]) -> str:
            nonlocal decoded
            decoded += len(ids)
            return original(ids)

    stream = IncrementalDetokenizer(Counting())  # type: ignore[arg-type]
    ids = tokenizer.encode("The quick brown fox, 12 more times. " * 100)
    for token in ids:
        stream.push(token)
    assert decoded < 6 * len(ids)


class TestSameTokenizer:
    """What require_same_tokenizer lets pass, and how it names the first difference."""

    @pytest.fixture
    def base(self, tmp_path: Path) -> Path:
        return write_tokenizer(tmp_path / "base")

    @pytest.fixture
    def draft(self, tmp_path: Path, base: Path) -> Path:
        return Path(shutil.copytree(base, tmp_path / "draft"))

    @staticmethod
    def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    def test_the_same_files_pass(self, base: Path, draft: Path) -> None:
        require_same_tokenizer(base, draft)

    def test_another_layout_of_the_same_tokenizer_passes(self, base: Path, draft: Path) -> None:
        self.edit(draft, lambda content: None)  # other white space and other name
        config = json.loads((draft / "tokenizer_config.json").read_text())
        config["model_max_length"] = 17
        (draft / "tokenizer_config.json").write_text(json.dumps(config))
        require_same_tokenizer(base, draft)

    def test_a_padded_embedding_passes(self, base: Path, draft: Path) -> None:
        settings = {"model_type": "llama", "vocab_size": 1024}
        (draft / "config.json").write_text(json.dumps(settings))
        require_same_tokenizer(base, draft)

    def test_two_swapped_tokens_are_named(self, base: Path, draft: Path) -> None:
        def swap(content: dict[str, Any]) -> None:
            vocab = content["model"]["vocab"]
            vocab["x"], vocab["y"] = vocab["y"], vocab["x"]

        at = min(Tokenizer(base).encode("x")[1], Tokenizer(base).encode("y")[1])
        self.edit(draft, swap)
        with pytest.raises(
            ModelError, match=rf"token {at} is 'x' in the base and 'y' in the draft"
        ):
            require_same_tokenizer(base, draft)

    def test_a_missing_token_is_named(self, base: Path, draft: Path) -> None:
        self.edit(draft, lambda content: content["added_tokens"].pop())
        with pytest.raises(ModelError, match=r"'<\|tool\|>' in the base and missing in the draft"):
            require_same_tokenizer(base, draft)

    def test_another_kind_of_added_token_is_named(self, base: Path, draft: Path) -> None:
        self.edit(draft, lambda content: content["added_tokens"][-1].update(lstrip=True))
        with pytest.raises(ModelError, match=r"added token \d+ is .*lstrip=False.*lstrip=True"):
            require_same_tokenizer(base, draft)

    def test_another_end_is_named(self, base: Path, draft: Path) -> None:
        write_tokenizer(draft, eos_token="<|tool|>")
        with pytest.raises(ModelError, match=r"eos_token is '</s>' in the base and '<\|tool\|>'"):
            require_same_tokenizer(base, draft)

    def test_another_bos_rule_is_named(self, base: Path, draft: Path) -> None:
        self.edit(draft, lambda content: content.update(post_processor=None))
        with pytest.raises(ModelError, match="around an empty text"):
            require_same_tokenizer(base, draft)

    def test_another_merge_is_named(self, base: Path, draft: Path) -> None:
        def swap(content: dict[str, Any]) -> None:
            merges = content["model"]["merges"]
            merges[3], merges[4] = merges[4], merges[3]

        self.edit(draft, swap)
        with pytest.raises(ModelError, match="merge 3 is"):
            require_same_tokenizer(base, draft)

    def test_another_way_to_read_text_is_named(self, base: Path, draft: Path) -> None:
        self.edit(draft, lambda content: content.update(normalizer={"type": "Lowercase"}))
        with pytest.raises(ModelError, match="normalizer differs"):
            require_same_tokenizer(base, draft)

    def test_the_message_names_both_folders_and_what_to_do(
        self, base: Path, tmp_path: Path
    ) -> None:
        other = write_tokenizer(tmp_path / "other", style="fallback")
        with pytest.raises(ModelError, match=r"draft model of the base model's own family") as fail:
            require_same_tokenizer(base, other)
        assert str(base) in str(fail.value)
        assert str(other) in str(fail.value)

    def test_it_takes_well_under_a_second(self, base: Path, draft: Path) -> None:
        start = time.process_time()
        require_same_tokenizer(base, draft)
        assert time.process_time() - start < 2


# --- single tokens, and conversations -------------------------------------------------------------


TEXTS = ["plain words", "naïve café", "今日は, мир", "👩‍👩‍👧 fun", "tab\tand\nline", "  blanks "]


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_single_tokens_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    special = {tokenizer.inner.bos_token_id}
    told = [tokenizer.token(t) for t in tokenizer.encode(text) if t not in special]
    pieces = [raw for _, raw in told]
    assert None not in pieces
    joined = b"".join(raw for raw in pieces if raw is not None)
    assert joined.decode().strip() == text.strip()
    for shown, raw in told:
        assert raw is not None
        if "\ufffd" not in shown:
            assert shown.encode() == raw


def test_a_special_token_is_told_by_its_name(tokenizer: Tokenizer) -> None:
    bos = tokenizer.inner.bos_token
    assert tokenizer.token(tokenizer.inner.bos_token_id) == (bos, bos.encode())


def test_every_token_of_the_vocabulary_can_be_told(tokenizer: Tokenizer) -> None:
    for index in sorted(tokenizer.inner.get_vocab().values()):
        text, raw = tokenizer.token(index)
        assert raw is None or raw.decode("utf-8", "replace") == text


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system speaks first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chatting(tmp_path: Path) -> Tokenizer:
    """A tokenizer with a chat template."""
    folder = write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


def test_a_conversation_is_written_as_the_template_has_it(chatting: Tokenizer) -> None:
    ids = chatting.encode_chat(
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    )
    bos = chatting.inner.bos_token_id
    assert ids[0] == bos
    assert ids.count(bos) == 1, "the template writes it, and nobody else"
    assert chatting.decode(ids) == "<system>Be kind.<user>Hello<assistant>"


def test_what_the_template_does_not_take_is_refused_in_its_words(chatting: Tokenizer) -> None:
    wrong = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    with pytest.raises(ConfigError, match="the system speaks first"):
        chatting.encode_chat(wrong)


def test_a_model_without_a_template_says_what_it_can_do(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
