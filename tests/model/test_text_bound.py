"""The bound of characters: it never refuses what fits, and refuses what is far too long at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiers import examples
from support.torch_rings import tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from edgespec.errors import CapacityError
from edgespec.model.text_bound import bound_of
from edgespec.model.tokenizer import Tokenizer

TEXTS = [
    "the same the same the same          and again again again",
    "x" * 40,
    "é ὰ \u0301\u0300 한국 가각간",
    "12345 12345 12345 <|im_start|>user\n hi <|im_end|>\n\n\n\n",
] * 20

PIECES = st.sampled_from(
    [
        " ",
        "\n",
        "\t",
        "x" * 40,
        "the same ",
        "again",
        "\u03b1\u0313\u0300\u0345",
        "e\u0301",
        "\u1112\u1161\u11ab",
        "``",
        "👩‍👧",
        "<|sep|>",
        "9",
        "\u3000",
        "\u200b",
        "ﬃ",
    ]
)
WRITTEN = st.one_of(st.text(max_size=30), st.lists(PIECES, max_size=30).map("".join))

CUTS = {
    "byte level": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "words": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel()]),
    "blanks dropped": pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(use_regex=False)]
    ),
}
NORMAL = {
    "none": None,
    "NFC": normalizers.NFC(),
    "NFKC": normalizers.NFKC(),
    "many": normalizers.Sequence(
        [
            normalizers.Strip(),
            normalizers.NFD(),
            normalizers.NFC(),
            normalizers.Lowercase(),
            normalizers.Replace("``", '"'),
            normalizers.Prepend("_"),
        ]
    ),
}


def made(folder: Path, cut: str, normal: str, **swallows: bool) -> Tokenizer:
    """A byte-level tokenizer with long tokens; its control token may swallow blanks."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = CUTS[cut]
    if NORMAL[normal] is not None:
        backend.normalizer = NORMAL[normal]
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens([AddedToken("<|sep|>", **swallows)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    """One of each kind, and the bundled one."""
    kinds = [(cut, normal, {}) for cut in CUTS for normal in NORMAL]
    kinds += [("byte level", "none", {side: True}) for side in ("lstrip", "rstrip")]
    return [
        tokenizer(),
        *(made(tmp_path_factory.mktemp("t"), a, b, **more) for a, b, more in kinds),
    ]


@examples(150)
@given(text=WRITTEN)
def test_it_never_refuses_what_fits(several: list[Tokenizer], text: str) -> None:
    for one in several:
        assert one.bound is not None
        one.check_length(text, len(one.encode(text)))


@pytest.mark.parametrize("what", ["9", "a", "hello ", "é"])
def test_a_prompt_of_a_mebibyte_cannot_fit_a_small_context(
    several: list[Tokenizer], what: str
) -> None:
    for one in several:
        with pytest.raises(CapacityError, match=r"1048.* characters; into the 1023 tokens"):
            one.check_length(what * ((1 << 20) // len(what)), 1023)


def test_blanks_that_may_be_dropped_are_not_counted(several: list[Tokenizer]) -> None:
    drop = [one for one in several if one.bound is not None and not one.bound.blanks]
    assert len(drop) == 4 + 2 + 2  # those of "blanks dropped", with Strip, and with swallowers
    for one in drop:
        one.check_length("a" + " \t\n" * 1000, 10)


BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
METASPACE = {"type": "Metaspace"}


def spelt(**changes: object) -> dict[str, object]:
    """A tokenizer as SentencePiece's are written."""
    model = {"type": "BPE", "vocab": {**BYTES, "▁hello": 256}, "byte_fallback": True}
    return {"model": {**model, "fuse_unk": True, "unk_token": "<unk>"}, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Precompiled"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "x"}, "content": ""}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "StripAccents"}]}},
        {"pre_tokenizer": {"type": "Split", "behavior": "Removed"}},
        {"pre_tokenizer": {"type": "BertPreTokenizer"}},
        {"model": {"type": "WordPiece", "vocab": {"a": 1}, "unk_token": "[UNK]"}},
        {"model": {"type": "WordLevel", "vocab": {"a": 1}, "unk_token": "[UNK]"}},
        {"model": {"type": "BPE", "vocab": {"a": 1}}},
        {"model": {"type": "BPE", "vocab": {"a": 1}, "unk_token": "a", "fuse_unk": True}},
        {"model": {"type": "BPE", "vocab": {"a": 1}, "byte_fallback": True}},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}},
        {"model": {}},
    ],
)
def test_of_what_may_drop_characters_nothing_is_said(changes: dict[str, object]) -> None:
    assert bound_of(spelt(**changes)) is None


def test_it_is_the_longest_token() -> None:
    assert bound_of(spelt(pre_tokenizer=METASPACE)) is not None
    bound = bound_of(spelt(added_tokens=[{"content": "<|endoftext|>"}]))
    assert bound is not None
    assert (bound.chars, bound.blanks) == (len("<|endoftext|>"), True)
