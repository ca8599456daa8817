"""One-pass heads on disk in every published dialect, random, for a base of write_checkpoint, and
their arithmetic written out once more, row by row, in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from edgespec.drafting.dspark.head import Attend
from edgespec.drafting.eagle.head import attention
from edgespec.model.loader import Checkpoint

HIDDEN, VOCAB, HEADS, DIM, WIDE, LAYERS = 32, 96, 4, 8, 40, 8
TAPS = (1, 4, 7)
"""The base's layers whose incoming rows are read."""
Dialect = Literal["deepspec", "nested"]


@dataclass(frozen=True)
class Form:
    """How a head is published. `settings` go into config.json as they are, beside those of the
    dialect (`nested` into dflash_config)."""

    dialect: Dialect = "deepspec"
    layers: int = 2
    block: int = 6
    kv_heads: int = HEADS
    rank: int = 5
    confidence: bool = True
    ends: bool = True
    vocab: int = VOCAB
    draft_vocab: int = VOCAB
    narrow_markov: bool = False
    mask_embedding: bool = False
    offset: int = 1
    causal: bool = False
    windows: tuple[int | None, ...] = (None, None)
    theta: float = 1e4
    prefix: str = ""
    taps: tuple[int, ...] = TAPS
    base: int = LAYERS
    settings: dict[str, Any] = field(default_factory=dict)
    nested: dict[str, Any] = field(default_factory=dict)


FORMS = {
    "deepspec": Form(),
    "deepspec-dflash": Form(rank=0, confidence=False, kv_heads=2, settings={"model_type": "qwen3"}),
    "deepspec-theta": Form(theta=1e6),
    "specforge": Form(
        "nested",
        ends=False,
        offset=0,
        nested={"projector_type": "dspark", "attention_mode": "gqa"},
    ),
    "specforge-vocabulary": Form(
        "nested", ends=False, draft_vocab=40, offset=0, nested={"projector_type": "dspark"}
    ),
    "z-lab": Form("nested", ends=False, rank=0, confidence=False, offset=0, kv_heads=1),
    "z-lab-window": Form(
        "nested", ends=False, rank=0, confidence=False, offset=0, windows=(None, 4)
    ),
    "jetspec": Form(
        "nested",
        ends=False,
        rank=0,
        confidence=False,
        offset=0,
        causal=True,
        nested={"causal_head": True},
    ),
    "own": Form(
        ends=False,
        block=8,
        draft_vocab=40,
        narrow_markov=True,
        mask_embedding=True,
        settings={"sample_from_anchor": True, "causal_head": False, "revealed_tokens": 3},
    ),
    "own-shown": Form(
        ends=False,
        block=8,
        draft_vocab=40,
        narrow_markov=True,
        mask_embedding=True,
        causal=True,
        settings={"sample_from_anchor": True, "causal_head": True, "revealed_tokens": 3},
    ),
}


def write_dspark(folder: Path, form: Form, seed: int = 0) -> dict[str, torch.Tensor]:
    """Save a random head of this form; returns its tensors by the plain official names."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    plain = {
        name: torch.randn(shape, generator=random) * (0.4 if len(shape) > 1 else 0.3)
        + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in _shapes(form).items()
    }
    if form.draft_vocab < form.vocab:
        chosen = torch.randperm(form.vocab, generator=random)[: form.draft_vocab].sort().values
        plain["d2t"] = chosen - torch.arange(form.draft_vocab)
        plain["t2d"] = torch.zeros(form.vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    stored = {form.prefix + name: tensor for name, tensor in plain.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_settings(form)))
    return plain


def _settings(form: Form) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "num_attention_heads": HEADS,
        "num_hidden_layers": form.layers,
        "rms_norm_eps": 1e-5,
        "vocab_size": form.vocab,
        "hidden_act": "silu",
        "rope_theta": form.theta,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in form.windows],
        "sliding_window": max((w for w in form.windows if w), default=None),
    }
    plain = {"block_size": form.block, "draft_vocab_size": form.draft_vocab, **form.settings}
    leaving = {
        "target_layer_ids": [layer - 1 for layer in form.taps],
        "mask_token_id": None if form.mask_embedding else form.vocab - 1,
    }
    if form.dialect == "nested":
        return {**layer, **plain, "dflash_config": {**leaving, **form.nested}}
    return {**layer, **leaving, **plain, "num_target_layers": form.base}


def _shapes(form: Form) -> dict[str, tuple[int, ...]]:
    queries, keys = HEADS * DIM, form.kv_heads * DIM
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(TAPS) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for number in range(form.layers):
        shapes |= {
            f"layers.{number}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (queries, HIDDEN),
                "self_attn.k_proj": (keys, HIDDEN),
                "self_attn.v_proj": (keys, HIDDEN),
                "self_attn.o_proj": (HIDDEN, queries),
                "self_attn.q_norm": (DIM,),
                "self_attn.k_norm": (DIM,),
                "mlp.gate_proj": (WIDE, HIDDEN),
                "mlp.up_proj": (WIDE, HIDDEN),
                "mlp.down_proj": (HIDDEN, WIDE),
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
            }.items()
        }
    if form.rank:
        rows = form.draft_vocab if form.narrow_markov else form.vocab
        shapes["markov_head.markov_w1.weight"] = (rows, form.rank)
        shapes["markov_head.markov_w2.weight"] = (form.draft_vocab, form.rank)
    if form.confidence:  # published, and not needed
        shapes["confidence_head.proj.weight"] = (1, HIDDEN + form.rank)
        shapes["confidence_head.proj.bias"] = (1,)
    if form.ends:
        shapes["embed_tokens.weight"] = (form.vocab, HIDDEN)
        shapes["lm_head.weight"] = (form.draft_vocab, HIDDEN)
    if form.mask_embedding:
        shapes["mask_embedding"] = (HIDDEN,)
    return shapes


def masked(masks: Sequence[torch.Tensor]) -> Attend:
    """Attention in which slots see what `masks` say: of each layer bool [B, 1, R, C + R]."""

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return attention(query, key, value, masks[layer])

    return attend


class Reference:
    """One block behind one context, slot after slot, by the formulas of DFlash and DSpark §3.1."""

    def __init__(self, form: Form, tensors: dict[str, torch.Tensor], base: Path) -> None:
        self.form = form
        self.t = {name: tensor.double() for name, tensor in tensors.items()}
        weights = Checkpoint(base)

        def lent(name: str) -> torch.Tensor:
            return weights.tensor(name).double()

        count = torch.arange(form.draft_vocab)
        self.token_of: torch.Tensor = count + tensors.get("d2t", torch.zeros_like(count))
        if form.ends:
            self.embedding, self.matrix = self.t["embed_tokens.weight"], self.t["lm_head.weight"]
        else:
            self.embedding = lent("model.embed_tokens.weight")
            self.matrix = lent("lm_head.weight")[self.token_of]
        self.mask = self.t.get("mask_embedding", self.embedding[form.vocab - 1])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-5) * self.t[f"{name}.weight"]

    def heads(self, layer: int, kind: str, x: torch.Tensor, position: int) -> list[torch.Tensor]:
        """Queries, keys ("q", "k": normed and turned) or values of a row, by head."""
        name = f"layers.{layer}.self_attn.{kind}"
        rows = list((self.t[f"{name}_proj.weight"] @ x).split(DIM))
        if kind == "v":
            return rows
        half, turned = DIM // 2, []
        for row in rows:
            row = self.norm(row, f"{name}_norm")
            steps = torch.arange(half, dtype=torch.float64) / half
            angle = position / self.form.theta**steps
            a, b = row[:half], row[half:]
            turned.append(
                torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])
            )
        return turned

    def block(self, given: torch.Tensor, tokens: list[int]) -> list[torch.Tensor]:
        """What each slot gives, normed: of a block that begins with `tokens`, the anchor's first.

        `given` [anchor's position, taps · HIDDEN].
        """
        form, anchor = self.form, len(given)
        context = [self.norm(self.t["fc.weight"] @ row, "hidden_norm") for row in given]
        x = [self.embedding[token] for token in tokens]
        x += [self.mask] * (form.block - len(tokens))
        for layer in range(form.layers):
            name = f"layers.{layer}"
            normed = [self.norm(row, f"{name}.input_layernorm") for row in x]
            every = [*context, *normed]
            keys = [self.heads(layer, "k", row, at) for at, row in enumerate(every)]
            values = [self.heads(layer, "v", row, at) for at, row in enumerate(every)]
            window = form.windows[layer]
            out = []
            for slot, row in enumerate(x):
                place = anchor + slot
                seen = [
                    at
                    for at in range(len(every))
                    if (not form.causal or at <= place) and (window is None or place - at < window)
                ]
                query, mixed = self.heads(layer, "q", normed[slot], place), []
                for head in range(HEADS):
                    shared = head // (HEADS // form.kv_heads)
                    weights = torch.stack([query[head] @ keys[at][shared] for at in seen])
                    weights = (weights / DIM**0.5).softmax(0)
                    mixed.append(
                        sum(w * values[at][shared] for w, at in zip(weights, seen, strict=True))
                    )
                row = row + self.t[f"{name}.self_attn.o_proj.weight"] @ torch.cat(mixed)
                n = self.norm(row, f"{name}.post_attention_layernorm")
                gate = self.t[f"{name}.mlp.gate_proj.weight"] @ n
                up = self.t[f"{name}.mlp.up_proj.weight"] @ n
                down = self.t[f"{name}.mlp.down_proj.weight"]
                out.append(row + down @ (gate * torch.sigmoid(gate) * up))
            x = out
        return [self.norm(row, "norm") for row in x]

    def log_probs(
        self, out: list[torch.Tensor], context: list[int], path: list[int]
    ) -> torch.Tensor:
        """Over the head's vocabulary, of what follows `path` behind `context`, by what the slots
        gave."""
        logits = self.matrix @ out[len(path) + 1 - self.form.offset]
        before = self.markov_row([*context, *path][-1])
        if before is not None:
            logits = logits + self.t["markov_head.markov_w2.weight"] @ before
        return logits.log_softmax(0)

    def markov_row(self, token: int) -> torch.Tensor | None:
        """The Markov head's row of the token before a guess; None if it has none."""
        table = self.t.get("markov_head.markov_w1.weight")
        if table is None or not self.form.narrow_markov:
            return None if table is None else table[token]
        known = self.token_of.tolist()
        return table[known.index(token)] if token in known else None
