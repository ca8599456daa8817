"""PPD: guesses by what the rows of prompt tokens below the last right token say of the next ones.

Its published files are a PEFT prompt-tuning adapter with more settings:
adapter_config.json says how many special tokens there are (one for every token ahead), and how many
vectors stand for each (ensemble prompt tokens, EPTs; PPD §3.3); adapter_model.safetensors or .bin
holds one vector a row, EPT j of token i at row i · copies + j. PEFT itself is not asked, as its
types do not know PPD's settings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgespec.drafting.base import Guesser, TokenPath
from edgespec.drafting.ranking import Ranking
from edgespec.drafting.steps import Steps, at_once, call
from edgespec.drafting.weight_file import read_tensors, write_tensors
from edgespec.errors import ModelError, RemoteProtocolError
from edgespec.files import write_whole
from edgespec.model.ends import OutputHead
from edgespec.model.hub import model_files
from edgespec.model.reading import read_object
from edgespec.model.tensors import compute_dtype, from_torch, to_torch
from edgespec.tree.drafted import Children
from edgespec.tree.ledger import IntArray
from edgespec.types.features import DraftNeeds, Features, PPDTable
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Sampling

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


@dataclass(slots=True)
class _ChainLogits:
    """One request: how many tokens are committed, and what its newest chain says: `logits` [k, V]
    of the tokens at positions `first`, `first` + 1, …"""

    length: int = 0
    first: int = 0
    logits: torch.Tensor = field(default_factory=lambda: torch.zeros((0, 0)))


class PPDGuesser(Guesser):
    """A Guesser without a model: PPD tokens ran on the ring, below a row whose next token is
    committed by now. Only the base's output matrix is left to be applied to them.

    What is guessed for a position is the same whatever guesses lie before it, so that a tree of
    them is the product of its levels (as Medusa's; PPD §4.1).
    """

    def __init__(self, trained: PPDTokens, head: OutputHead) -> None:
        """`trained`: for the base that `head` is of (see drafting.ppd)."""
        dtype = compute_dtype(str(head.dtype).removeprefix("torch."))
        table = from_torch(trained.table.to(dtype).contiguous())
        needs = DraftNeeds(ppd_tokens=PPDTable(trained.depth, trained.copies, table))
        super().__init__("ppd", needs)
        self._copies = trained.copies
        self._head = head
        self._ranking = Ranking(self.ranked, self.allowed)
        self._requests: dict[int, _ChainLogits] = {}

    def open(self, request: int, sampling: Sampling) -> None:
        self._requests[request] = _ChainLogits()
        self._ranking.open(request, sampling)

    def reading(self, request: int, context: Sequence[int], features: Features) -> Steps[bool]:
        """Take what the newest chain of PPD tokens became; False if none reaches beyond the
        context."""
        state = self._requests[request]
        if features.ppd_rows is not None:
            rows = self._checked(features.ppd_rows)
            state.logits = yield from call(self._logits, rows)
            state.first = features.anchor + 2
        if not state.first <= len(context) < state.first + len(state.logits):
            return False
        self._ranking.read(request, context[state.length :])
        state.length = len(context)
        return True

    @at_once
    def guessing(self, request: int, paths: Sequence[TokenPath], width: int) -> Children:
        """The best tokens for the position after each path; none where no PPD token reaches."""
        state = self._requests[request]
        shift = state.length - state.first
        depths = np.array([len(path) + shift for path in paths], np.int64)
        # The first path of a depth stands for all: they are asked about in falling score.
        levels = [d for d in np.unique(depths).tolist() if 0 <= d < len(state.logits)]
        if not levels:
            return Children.none()
        firsts = [paths[int(np.flatnonzero(depths == level)[0])] for level in levels]
        positions = np.array(levels) + state.first
        found = self._ranking.children(request, firsts, state.logits[levels], positions, width)
        return _for_all(found, levels, depths)

    def close(self, request: int) -> None:
        super().close(request)
        self._requests.pop(request, None)
        self._ranking.close(request)

    def _checked(self, rows: Tensor) -> torch.Tensor:
        """A chain's rows where the head is."""
        head = self._head
        if rows.shape[1:] != (head.hidden_size,) or f"torch.{rows.dtype}" != str(head.dtype):
            raise RemoteProtocolError(
                f"the head takes prompt rows of {head.dtype}[{head.hidden_size}], the last stage "
                f"sent {rows.dtype}{list(rows.shape)}; give all stages the same model and dtype"
            )
        return to_torch(rows, head.device)

    def _logits(self, every: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the rows of each request's chain say, [k, V], copies averaged."""
        logits = self._head.logits(torch.cat(list(every)) if len(every) > 1 else every[0])
        shares = logits.split([len(rows) for rows in every])
        return [own.reshape(-1, self._copies, own.shape[1]).mean(1) for own in shares]


def _for_all(found: Children, levels: Sequence[int], depths: IntArray) -> Children:
    """Children of every path, as found for the paths' depths `levels`."""
    ends = np.searchsorted(found.parents, np.arange(len(levels) + 1))
    parents: list[IntArray] = []
    index: list[IntArray] = []
    for path, depth in enumerate(depths.tolist()):
        if depth in levels:
            at = levels.index(depth)
            here = np.arange(ends[at], ends[at + 1])
            index.append(here)
            parents.append(np.full(len(here), path, np.int64))
    columns = np.concatenate(index)
    return Children(np.concatenate(parents), found.tokens[columns], found.scores[columns])
