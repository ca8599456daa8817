"""Vocabulary: the tokenizer's files that a model folder would have, made from a GGUF file.

How each kind of vocabulary cuts text is what llama.cpp does (src/llama-vocab.cpp, ggml-org/
llama.cpp), in the form in which the models' own tokenizer.json have it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from edgespec.errors import ModelError
from edgespec.model.gguf.configs import shortest
from edgespec.model.gguf.reader import GgufFile
from edgespec.model.reading import reading

_CONTROL, _USER, _UNUSED = 3, 4, 5  # of tokenizer.ggml.token_type
_SPACE = "▁"
_GEMMA4 = "gemma4"
"""A vocabulary like "llama", in which merges are listed."""
_MOST_ADDED = 1 << 16  # control and user's tokens; models that write sound have 28,682
_MOST_MERGES = 1 << 20  # the largest known vocabulary has some 580,000
_LONGEST = 128  # characters of a token that is merged of others; SentencePiece learns up to 16

_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_LLAMA3 = rf"{_CASELESS}|{_LETTERS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN35 = rf"{_CASELESS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}|{_TAIL}".replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_QWEN2 = rf"{_CASELESS}|{_LETTERS}|\p{{N}}|{_TAIL}"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_PATH_TAIL}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CASELESS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CASELESS}?"
    rf"|\p{{N}}{{1,3}}|{_PATH_TAIL}"
)
_GPT2 = ""  # the cut that tokenizers' ByteLevel has built in
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DIGIT = r"\p{N}"
_CASED = (  # with exceptions that llama.cpp, and the model's own file, have by listing all others
    r"\s?(?:(?![\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}"
    r"\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF1E}])[\p{Lu}\p{Ll}\p{Lt}])+"
)
_DEEPSEEK = (
    *(r"[\r\n]", _CASED),
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    *(r"\s+$", r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+", _DIGIT),
)

_CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *(
                "llama-bpe",
                "llama3",
                "llama-v3",
                "dbrx",
                "smaug-bpe",
                "falcon3",
                "falcon-h1",
                "pixtral",
            ),
            *("glm4", "chatglm-bpe", "lfm2"),
        ),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "tekken": (_TEKKEN,),
    "deepseek-llm": _DEEPSEEK,
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r", "codeshell"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4"), (_GPT2,)),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""How text is cut before pairs are merged, one cut after the other, by tokenizer.ggml.pre."""
_WHOLE_FIRST = {
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "tekken",
    "lfm2",
}
"""A piece that is a token is one, whatever the merges make of it; and BOS is usual."""
_COMPOSED = {"qwen2", "qwen35", "deepseek-r1-qwen"}
"""Text is brought into Unicode's composed form first."""

_BY_TOKEN = {"<|begin_of_text|>": "llama-bpe", "<|return|>": "gpt-4o"}
"""How a vocabulary with this token cuts, where its file does not say so."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Settings of sampling, by their names behind general.sampling."""
_MOST_SAMPLING = 1e6

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<turn|>")
"""Control tokens that end a turn, by whatever model: files often state one end alone."""


def tokenizer_files(file: GgufFile) -> dict[str, str]:
    """The text of each file by its name, tokenizer.json the last.

    Raises ModelError for a vocabulary that is damaged, or of a kind that is not known.
    """
    with reading(f"the tokenizer in {file.path}", "take another file of the model"):
        vocabulary = _Vocabulary(file)
        tokenizer = vocabulary.tokenizer()
    named = vocabulary.named_tokens()
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **named,
    }
    generation = {"eos_token_id": vocabulary.ends(), **_sampling(file)}
    files = {"generation_config.json": json.dumps(generation)}
    files["tokenizer_config.json"] = json.dumps(settings, ensure_ascii=False, indent=2)
    template = file.values.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        files["chat_template.jinja"] = template
    files["tokenizer.json"] = tokenizer.to_str()
    return files


def _sampling(file: GgufFile) -> dict[str, float]:
    """What the file says of sampling, by the names of generation_config.json."""
    found: dict[str, float] = {}
    for key, name in _SAMPLING.items():
        value = file.values.get(f"general.sampling.{key}")
        if isinstance(value, float) and abs(value) < _MOST_SAMPLING:
            found[name] = shortest(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found[name] = value
    return found


class _Vocabulary:
    """A file's tokens, and the tokenizer that they make."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._kind = self._value("model")
        tokens = file.array("tokenizer.ggml.tokens")
        if tokens is None or not all(isinstance(token, str) for token in tokens) or not tokens:
            raise self.refusal("that lists no tokens")
        self.tokens = [str(token) for token in tokens]
        kinds = file.array("tokenizer.ggml.token_type")
        self._kinds = [int(kind) for kind in kinds] if kinds else [1] * len(self.tokens)
        if len(self._kinds) != len(self.tokens):
            raise self.refusal("with a type for some tokens only")

    def refusal(self, what: str) -> ModelError:
        return ModelError(
            f"{self._file.path} has a tokenizer {what}; take another file of the model"
        )

    def tokenizer(self) -> Tokenizer:
        makers = {"gpt2": self._byte_level, "llama": self._sentencepiece}
        makers[_GEMMA4] = self._sentencepiece
        if self._kind not in makers:
            raise self.refusal(
                f"of kind {self._kind!r} (tokenizer.ggml.model), edgespec knows {', '.join(makers)}"
            )
        if sum(kind in (_CONTROL, _USER) for kind in self._kinds) > _MOST_ADDED:
            raise self.refusal(f"with more than {_MOST_ADDED} control tokens")
        tokenizer = makers[str(self._kind)]()
        tokenizer.add_special_tokens(self._added(_CONTROL, special=True))
        tokenizer.add_tokens(self._added(_USER, special=False))
        self._surround(tokenizer)
        return tokenizer

    def named_tokens(self) -> dict[str, str]:
        """bos_token and the like, where there are such."""
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token"}
        names["padding"] = "pad_token"
        found = {ours: self._id(f"{theirs}_token_id") for theirs, ours in names.items()}
        return {name: self.tokens[index] for name, index in found.items() if index is not None}

    def ends(self) -> list[int]:
        """Every token that ends an answer."""
        stated = [self._id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        ends = {index for index in stated if index is not None}
        ends |= {
            index
            for index, (token, kind) in enumerate(zip(self.tokens, self._kinds, strict=True))
            if kind == _CONTROL and token in _TURN_ENDS
        }
        return sorted(ends)

    def _value(self, name: str) -> object:
        return self._file.values.get(f"tokenizer.ggml.{name}")

    def _id(self, name: str) -> int | None:
        index = self._value(name)
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise self.refusal(f"whose {name} is {index!r}, with {len(self.tokens)} tokens")
        return index

    def _vocab(self) -> dict[str, int]:
        """Ids by token, without those that only fill the embedding up."""
        return {
            token: index
            for index, (token, kind) in enumerate(zip(self.tokens, self._kinds, strict=True))
            if not (kind == _UNUSED and token.startswith("[PAD"))
        }

    def _added(self, kind: int, special: bool) -> list[AddedToken]:
        return [
            AddedToken(token, normalized=False, special=special)
            for token, one in zip(self.tokens, self._kinds, strict=True)
            if one == kind and token
        ]

    @cached_property
    def _pre(self) -> str:
        """How text is cut: as the file says, or else the model's kind; by default as llama.cpp."""
        if stated := self._value("pre"):
            return str(stated)
        if str(self._file.values.get("general.architecture")).startswith("qwen"):
            return "qwen2"
        found = (pre for token, pre in _BY_TOKEN.items() if token in self.tokens)
        return next(found, "default")

    def _byte_level(self) -> Tokenizer:
        pre = self._pre
        if pre not in _CUTS:
            raise self.refusal(
                f"that cuts text as {pre!r} (tokenizer.ggml.pre), edgespec knows {', '.join(_CUTS)}"
            )
        whole_first = pre in _WHOLE_FIRST
        tokenizer = Tokenizer(models.BPE(self._vocab(), self._pairs(), ignore_merges=whole_first))
        if pre in _COMPOSED:
            tokenizer.normalizer = normalizers.NFC()
        cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _CUTS[pre] if cut]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_GPT2 in _CUTS[pre])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _pairs(self) -> list[tuple[str, str]]:
        """The merges that the file lists."""
        merges = self._file.array("tokenizer.ggml.merges")
        if merges is None:
            raise self.refusal("that lists no merges")
        split = [str(merge).split(" ") for merge in merges]
        if any(len(pair) != 2 for pair in split):
            raise self.refusal("with a merge that is no pair of tokens")
        return [(left, right) for left, right in split]

    def _sentencepiece(self) -> Tokenizer:
        scores = self._file.array("tokenizer.ggml.scores") or []
        if len(scores) != len(self.tokens):
            raise self.refusal("without a score for each token")
        vocab = self._vocab()
        unknown = self._id("unknown_token_id")
        gemma = str(self._file.values.get("general.architecture")).startswith("gemma")
        # Gemma's scores are no ranks: its tokens are in the order in which they were learnt.
        ranks = [-float(i) for i in range(len(scores))] if gemma else [float(s) for s in scores]
        tokenizer = Tokenizer(
            models.BPE(
                vocab,
                self._pairs() if self._kind == _GEMMA4 else _merges(vocab, ranks),
                unk_token=None if unknown is None else self.tokens[unknown],
                byte_fallback=True,
                fuse_unk=True,
            )
        )
        prefix = self._value("add_space_prefix")
        replace = normalizers.Replace(" ", _SPACE)
        decoded = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if prefix is None or prefix:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
            decoded.append(decoders.Strip(" ", 1, 0))
        else:
            tokenizer.normalizer = replace
        tokenizer.decoder = decoders.Sequence(decoded)
        return tokenizer

    def _surround(self, tokenizer: Tokenizer) -> None:
        """Tokens that the tokenizer itself puts in front of a text and behind it."""
        usual = self._kind in ("llama", _GEMMA4) or self._pre in _WHOLE_FIRST
        flags = {"bos": self._value("add_bos_token"), "eos": self._value("add_eos_token")}
        flags["bos"] = usual if flags["bos"] is None else flags["bos"]
        ids = {name: self._id(f"{name}_token_id") for name, flag in flags.items() if flag}
        used = {name: self.tokens[index] for name, index in ids.items() if index is not None}
        if used:
            parts = [used.get("bos"), "$A", used.get("eos")]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[part for part in parts if part],
                special_tokens=[(token, ids[name]) for name, token in used.items()],
            )


def _merges(vocab: dict[str, int], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, those of the best one first.

    Raises ValueError for a vocabulary that has far more of them than any that was learnt.
    """
    found = (
        (ranks[index], cut, token)
        for token, index in vocab.items()
        if len(token) <= _LONGEST
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    )
    pairs = list(itertools.islice(found, _MOST_MERGES + 1))
    if len(pairs) > _MOST_MERGES:
        raise ValueError(f"it has more than {_MOST_MERGES} merges")
    pairs.sort(key=lambda pair: pair[:2], reverse=True)
    return [(token[:cut], token[cut:]) for _, cut, token in pairs]
