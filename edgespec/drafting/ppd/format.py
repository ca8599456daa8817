"""Prompt-token folders: PPD's published files, a PEFT prompt-tuning adapter with more settings.

adapter_config.json says how many special tokens there are (one for every token ahead), and how many
vectors stand for each (ensemble prompt tokens, EPTs; PPD §3.3); adapter_model.safetensors or .bin
holds one vector a row, EPT j of token i at row i · copies + j. PEFT itself is not asked, as its
types do not know PPD's settings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgespec.drafting.weight_file import read_tensors, write_tensors
from edgespec.errors import ModelError
from edgespec.files import write_whole
from edgespec.model.hub import model_files
from edgespec.model.reading import read_object

CONFIG, SAFE, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
TENSOR = "prompt_embeddings"

MOST_ROWS = 64
"""Vectors of one file: they travel with segments, and a chain of so many would fill one alone."""

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PLAIN = {"use_prefix_tuning": False, "use_custom_lm_head": False, "num_exits": 1}
"""Settings of PPD that change the arithmetic, and what they must be."""


@dataclass(frozen=True)
class PPDTokens:
    """Trained prompt tokens: `depth` tokens ahead, `copies` vectors for each.

    `table` [depth · copies, H]: the vectors of the first token ahead, of the second, …
    """

    depth: int
    copies: int
    table: torch.Tensor


def read_ppd_tokens(path: str | Path, base_hidden: int) -> PPDTokens:
    """Read prompt tokens, a folder or a hub id, for a base of this width.

    Raises ModelError if they cannot be read, ask for what edgespec does not compute, or do not fit
    the base.
    """
    files = model_files(path)
    config = files.file(CONFIG)
    settings = read_object(config, "name a folder of PPD prompt tokens")
    if settings.get("peft_type") != "PROMPT_TUNING":
        raise ModelError(
            f"{config} is no PROMPT_TUNING adapter; name a folder of PPD prompt tokens"
        )
    depth = _whole(settings, "num_special_tokens", config)
    copies = _whole(settings, "virtual_tokens_per_special_token", config)
    _check_kind(settings, copies, config)
    stored, file = read_tensors(files, SAFE, PICKLED, mapped=False)
    table = stored.pop(TENSOR, None)
    if table is None or stored:
        strange = ", ".join(sorted(stored)) or "nothing"
        raise ModelError(
            f"{file} should hold one tensor {TENSOR!r}, beside it or in its place there is "
            f"{strange}; name a folder of PPD prompt tokens"
        )
    wanted = (depth * copies, base_hidden)
    if tuple(table.shape) != wanted or table.dtype not in _FLOATS or depth * copies > MOST_ROWS:
        raise ModelError(
            f"{TENSOR!r} in {file} is {table.dtype}{list(table.shape)}; its settings and this base "
            f"need floats {list(wanted)}, of at most {MOST_ROWS} rows: use the prompt tokens that "
            "were trained for this base"
        )
    if not bool(torch.isfinite(table).all()):
        raise ModelError(
            f"{TENSOR!r} in {file} holds values that are no numbers; download it again"
        )
    return PPDTokens(depth, copies, table)


def write_ppd_tokens(folder: Path, trained: PPDTokens, base: str) -> None:
    """Write prompt tokens in the published format, float32. Raises OSError as writing does."""
    settings = {
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "num_virtual_tokens": trained.depth * trained.copies,
        "token_dim": trained.table.shape[1],
        "num_special_tokens": trained.depth,
        "virtual_tokens_per_special_token": trained.copies,
        "vt_attention_type": "ensemble",
        "aggregation_type": "mean",
        **_PLAIN,
    }
    write_tensors({TENSOR: trained.table.detach().float().cpu()}, folder / SAFE)
    write_whole(folder / CONFIG, json.dumps(settings, indent=2) + "\n")


def _whole(settings: dict[str, Any], name: str, file: Path) -> int:
    value = settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_ROWS:
        raise ModelError(
            f"{name} in {file} is {value!r}, not a number from 1 to {MOST_ROWS}: this is a plain "
            "prompt-tuning adapter, or damaged; name a folder of PPD prompt tokens"
        )
    return value


def _check_kind(settings: dict[str, Any], copies: int, file: Path) -> None:
    """Refuse what computes something else than a chain of each copy, their logits averaged."""
    for name, plain in _PLAIN.items():
        if settings.get(name, plain) != plain:
            raise ModelError(
                f"{file} sets {name} to {settings[name]!r}, which edgespec does not compute; use "
                "prompt tokens without it"
            )
    # With one copy, all kinds are the same chain, unless weights are learnt.
    attention = _last_word(settings.get("vt_attention_type", "decoder"))
    if copies > 1 and attention != "ensemble":
        raise ModelError(
            f"{file} says vt_attention_type {attention!r} for {copies} vectors a token, edgespec "
            "computes 'ensemble'; use other prompt tokens"
        )
    merging = _last_word(settings.get("aggregation_type", "mean"))
    if merging != "mean":
        raise ModelError(
            f"{file} says aggregation_type {merging!r}, edgespec computes 'mean'; use other prompt "
            "tokens"
        )


def _last_word(value: object) -> str:
    """The name of an enumeration's member, as its text or with its type in front."""
    return str(value).rpartition(".")[2].lower()
