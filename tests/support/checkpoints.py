"""Tiny random checkpoints and tokenizers on disk, and transformers' own answers to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, then 12 more times.",
    "def add(one, two):\n    return one + two\n",
    "naïve café, Grüße aus Köln — 今日は世界, привет мир 👩‍👩‍👧",
] * 4


def write_checkpoint(
    folder: Path,
    *,
    kind: str = "llama",
    seed: int = 0,
    shard_size: int | None = None,
    **settings: Any,
) -> Path:
    """Save a random model of 4 small layers with grouped-query attention; returns `folder`.

    `settings` override the configuration; `shard_size` (bytes) splits the weights over files.
    """
    chosen = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.4,  # random models need large weights to tell contexts apart
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    } | settings
    if kind == "mistral":
        chosen.setdefault("sliding_window", None)
    config = AutoConfig.for_model(kind, **chosen)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size=shard_size or "5GB")
    return folder


def reference(folder: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The whole model as transformers itself runs it."""
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    ).eval()


@torch.inference_mode()
def plain_hidden(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Hidden rows [n, H] behind the final norm, of `tokens` as one plain sequence."""
    return model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits [V] behind the last of `tokens`."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def write_tokenizer(folder: Path, *, style: str = "bytes", vocab: int = 400, **names: Any) -> Path:
    """Save a small tokenizer: byte-level BPE ("bytes") or Llama 2's kind ("fallback")."""
    tokenizer = _byte_level(vocab) if style == "bytes" else _byte_fallback(vocab)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **({"bos_token": "<s>", "eos_token": "</s>"} | names)
    )
    wrapped.save_pretrained(folder)
    return folder


def _with_bos(tokenizer: Tokenizer) -> Tokenizer:
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return tokenizer


def _byte_level(vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<|tool|>", special=False)])
    return _with_bos(tokenizer)


def _byte_fallback(vocab: int) -> Tokenizer:
    """Spaces as ▁, and one token a byte for characters outside the vocabulary."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=vocab - 256, show_progress=False)
    trained.train_from_iterator(CORPUS[:2], trainer)
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    names += [name for name, _ in learned]
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            {name: index for index, name in enumerate(names)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _with_bos(tokenizer)
