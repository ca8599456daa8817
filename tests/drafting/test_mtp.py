"""MTP heads: what they guess, against vLLM's arithmetic written out once more in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_checkpoint, write_family
from support.mtp_heads import FILE, write_mtp

from edgespec.config import Quantisation
from edgespec.drafting.choice import parse_draft
from edgespec.drafting.mtp import MtpGuesser
from edgespec.drafting.registry import BaseParts, build_draft
from edgespec.errors import ConfigError, ModelError
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.tensors import from_torch
from edgespec.model.tree_attention import tree_mask
from edgespec.types.features import Features
from edgespec.verify.sampling import Sampling

HIDDEN, HEADS, KV_HEADS, DIM, TURNED = 32, 4, 2, 16, 8
CONTEXT = [5, 9, 90, 33, 7, 61, 2]
PATHS = [[], [4], [8], [4, 77], [8, 8, 50], [4, 77, 3]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_mtp(folder)
    return folder


class Reference:
    """One chain of pairs, row after row: of a base's row and the token behind it the token's vector
    is normed, then the row, and they are joined in this order."""

    def __init__(self, folder: Path) -> None:
        self.t = {name: tensor.double() for name, tensor in load_file(folder / FILE).items()}
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + self.t[name])

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        half, position = TURNED // 2, len(self.keys)
        for i in range(half):
            angle = torch.tensor(position / 1e4 ** (2 * i / TURNED), dtype=torch.float64)
            a, b = x[:, i].clone(), x[:, i + half].clone()
            x[:, i] = a * angle.cos() - b * angle.sin()
            x[:, i + half] = b * angle.cos() + a * angle.sin()
        return x

    def row(self, features: torch.Tensor, token: int) -> torch.Tensor:
        e = self.norm(
            self.t["model.embed_tokens.weight"][token], "mtp.pre_fc_norm_embedding.weight"
        )
        h = self.norm(features, "mtp.pre_fc_norm_hidden.weight")
        x = self.t["mtp.fc.weight"] @ torch.cat([e, h])
        own = "mtp.layers.0."
        a = self.norm(x, f"{own}input_layernorm.weight")
        q, k, v, o = (self.t[f"{own}self_attn.{n}_proj.weight"] for n in "qkvo")
        query, gate = (q @ a).view(HEADS, 2 * DIM).chunk(2, 1)
        query = self.turn(self.norm(query, f"{own}self_attn.q_norm.weight"))
        key = self.norm((k @ a).view(KV_HEADS, DIM), f"{own}self_attn.k_norm.weight")
        self.values.append((v @ a).view(KV_HEADS, DIM))
        self.keys.append(self.turn(key))
        heads = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            weights = torch.stack([query[head] @ k[shared] for k in self.keys]) / DIM**0.5
            weights = weights.softmax(0)
            heads.append(sum(w * v[shared] for w, v in zip(weights, self.values, strict=True)))
        x = x + o @ (torch.cat(heads) * gate.flatten().sigmoid())
        n = self.norm(x, f"{own}post_attention_layernorm.weight")
        inner = torch.nn.functional.silu(self.t[f"{own}mlp.gate_proj.weight"] @ n)
        inner = inner * (self.t[f"{own}mlp.up_proj.weight"] @ n)
        return self.norm(x + self.t[f"{own}mlp.down_proj.weight"] @ inner, "mtp.norm.weight")

    def log_probs(self, given: torch.Tensor, context: list[int], path: list[int]) -> torch.Tensor:
        """Of what follows `path` behind `context`: below the base's rows its own stand for them."""
        self.keys, self.values = [], []
        known, out = list(given), given[0]
        for token in [*context[1:], *path]:
            out = self.row(known.pop(0) if known else out, token)
        return (self.t["lm_head.weight"] @ out).log_softmax(0)


def guesser(folder: Path, dtype: str = "float64", **held: Any) -> MtpGuesser:
    source = Checkpoint(folder)
    return MtpGuesser(source, source, OutputHead(source, dtype), dtype, **held)


def rows(count: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1)
    return torch.randn((count, HIDDEN), generator=dice, dtype=torch.float64)


def test_guesses_are_those_of_the_formula(base: Path) -> None:
    given, draft = rows(len(CONTEXT) - 1), guesser(base)
    draft.open(1, Sampling())
    assert draft.read(1, CONTEXT, Features(from_torch(given)))
    children = draft.guess(1, PATHS, 5)
    for index, path in enumerate(PATHS):
        wanted = Reference(base).log_probs(given, CONTEXT, path)
        best, mine = wanted.argsort(descending=True)[:5], children.parents == index
        assert children.tokens[mine].tolist() == best.tolist()
        np.testing.assert_allclose(children.scores[mine], wanted[best], rtol=0, atol=1e-5)


def test_how_the_rows_came_makes_no_difference(base: Path) -> None:
    """One by one with guesses in between, or all at once."""
    whole, draft = from_torch(rows(len(CONTEXT) - 1)), guesser(base)
    for request in (1, 2):
        draft.open(request, Sampling())
    draft.read(1, CONTEXT, Features(whole))
    assert not draft.read(2, CONTEXT[:1], Features())
    for end in range(2, len(CONTEXT) + 1):
        assert draft.read(2, CONTEXT[:end], Features(whole.take(np.array([end - 2]))))
        draft.guess(2, PATHS, 4)
    found = [draft.guess(request, PATHS, 4).scores for request in (1, 2)]
    np.testing.assert_allclose(*found, rtol=0, atol=1e-9)


def test_of_many_tokens_some_are_guessed(base: Path) -> None:
    few = [*range(32), *range(88, 96)]
    given, draft = rows(len(CONTEXT) - 1), guesser(base, guessed=torch.tensor(few))
    draft.open(1, Sampling())
    draft.read(1, CONTEXT, Features(from_torch(given)))
    children = draft.guess(1, [[]], 96)
    wanted = Reference(base).log_probs(given, CONTEXT, [])[few].log_softmax(0)
    best = wanted.argsort(descending=True)
    assert children.tokens.tolist() == [few[at] for at in best]
    np.testing.assert_allclose(children.scores, wanted[best], rtol=0, atol=1e-5)
    form = Quantisation.parse("int8")
    held = guesser(base, guessed=torch.tensor(few), head_quantisation=form)
    held.open(1, Sampling())
    held.read(1, CONTEXT, Features(from_torch(given)))
    assert set(held.guess(1, [[]], 96).tokens.tolist()) == set(few)


def built(folder: Path) -> None:
    source = Checkpoint(folder)
    parts = BaseParts(folder, source, OutputHead(source), "float32", "cpu")
    assert build_draft(parse_draft("hybrid:ngram+mtp"), parts) is not None


def test_bases_without_such_a_head_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    built(base)
    plain = write_checkpoint(tmp_path / "plain")
    with pytest.raises(ModelError, match=r"plain has no MTP head .* another --draft"):
        built(plain)
    with pytest.raises(ConfigError, match="mtp has no weights of its own; leave :folder out"):
        parse_draft("mtp:folder")
    for name, problem in {
        "mtp.layers.1.mlp.up_proj.weight": "a form that edgespec does not compute .*layers.1",
        "mtp.embed_tokens.weight": "a form that edgespec does not compute .*embed_tokens",
        "mtp.layers.0.mlp.gate.weight": "holds .*mlp.gate.weight",
    }.items():
        folder = tmp_path / name
        tensors = write_mtp(folder)
        save_file(tensors | {name: torch.ones(4, 4)}, folder / FILE, {"format": "pt"})
        with pytest.raises(ModelError, match=problem):
            built(folder)


def test_heads_of_other_families_are_refused_by_name(tmp_path: Path) -> None:
    """As DeepSeek's files have them: a layer behind the last one."""
    folder = write_checkpoint(tmp_path / "other")
    tensors = load_file(folder / FILE)
    more = {f"model.layers.4.{name}.weight": torch.ones(4) for name in ("enorm", "eh_proj")}
    save_file(tensors | more, folder / FILE, {"format": "pt"})
    with pytest.raises(ModelError, match=r"does not compute .type 'llama'.; choose another"):
        built(folder)


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_heads_of_mixtures_are_layers_of_theirs(tmp_path: Path, family: str) -> None:
    """One whose layer is a copy of the base's gives what that does."""
    write_family(tmp_path, family)
    tensors, config = load_file(tmp_path / FILE), Checkpoint(tmp_path).config
    layer = config.layer_types.index("full_attention")
    prefix = next(name for name in tensors if f"layers.{layer}." in name).partition("layers.")[0]
    own = f"{prefix}layers.{layer}."
    copies = {n.replace(own, "mtp.layers.0."): t.clone() for n, t in tensors.items() if own in n}
    dice = torch.Generator().manual_seed(4)
    fc = torch.randn((HIDDEN, 2 * HIDDEN), generator=dice)
    norms = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    copies |= {f"{name}.weight": torch.randn(HIDDEN, generator=dice) * 0.1 for name in norms}
    save_file(tensors | copies | {"mtp.fc.weight": fc}, tmp_path / FILE, {"format": "pt"})
    given, draft = rows(len(CONTEXT) - 1), guesser(tmp_path)
    draft.open(1, Sampling())
    assert draft.read(1, CONTEXT, Features(from_torch(given)))
    children = draft.guess(1, [[]], 96)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + copies[f"{name}.weight"])

    source = Checkpoint(tmp_path)
    words = source.tensor("model.embed_tokens.weight").double()[CONTEXT[1:]]
    joined = [norm(words, norms[1]), norm(given, norms[2])]
    block = Block(source, layer, layer + 1, "float64")
    mask = tree_mask(0, np.tri(len(given), dtype=np.bool_))
    places = torch.arange(len(given))
    entering = torch.cat(joined, 1) @ fc.T.double()
    out = block.forward(entering, places, block.new_cache(8), mask)
    assert out is not None
    wanted = source.tensor("lm_head.weight").double() @ norm(out[-1], norms[0])
    np.testing.assert_allclose(
        children.scores, wanted.log_softmax(0)[children.tokens], rtol=0, atol=1e-5
    )
