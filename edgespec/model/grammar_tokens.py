"""Grammar tokens: a tokenizer as grammars see it, in which no text spells a control token.

llguidance encodes what a grammar forces as the tokenizer encodes text, and would find a control
token (`<|im_end|>`) where a schema or a tool's argument only spells one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable
from typing import Any


def control_tokens(tokenizer: str, ends: Collection[int]) -> tuple[str, frozenset[int]]:
    """That tokenizer.json with other names for its control tokens, and their ids, the ends' too.

    Nobody can guess the names. All other text is encoded as ever, and every token keeps its id.
    """
    told = json.loads(tokenizer)
    model, added = told["model"], told["added_tokens"]
    control = {token["id"] for token in added if token["special"]} | {*ends}
    names = {token["content"]: token["id"] for token in added if token["id"] in control}
    for name, index in _numbered(model["vocab"]):
        if index in control and name not in names:  # an end that is an ordinary token
            names[name] = index
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": index, "content": name, "special": True, **flags})
    secret = secrets.token_hex(8)
    news = {name: f"{secret}.{index}" for name, index in names.items()}
    for token in added:
        if token["id"] in control:
            token["content"], token["special"] = news[token["content"]], True
    _rename(model, news)
    return json.dumps(told), frozenset(control)


def _numbered(vocab: Any) -> Iterable[tuple[str, int]]:
    """Names and ids: some algorithms list names with a score, in the order of their ids."""
    if isinstance(vocab, dict):
        return vocab.items()
    return ((piece[0], index) for index, piece in enumerate(vocab))


def _rename(model: Any, news: dict[str, str]) -> None:
    """Give those tokens other names where the algorithm lists them; no merges make them."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {news.get(name, name): index for name, index in vocab.items()}
    else:
        model["vocab"] = [[news.get(name, name), score] for name, score in vocab]
    if "merges" in model:
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [
            [a, b] for a, b in pairs if a not in news and b not in news and a + b not in news
        ]
    if model.get("unk_token") in news:
        model["unk_token"] = news[model["unk_token"]]
