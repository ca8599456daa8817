"""Cost models: how many bytes the parts of models have, for charging devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from edgespec.config import DRAFT_VOCABULARY, FILE, NAMED, QUANTISATIONS, Quantisation
from edgespec.errors import ConfigError
from edgespec.planning.architecture import Architecture, matrix_bytes
from edgespec.planning.catalogue import MODELS
from edgespec.planning.operations import DRAFT_HEAD_OPERATIONS, layer_operations
from edgespec.types.draft_pass import HeadForm

GROUP = 64
"""Weights in 4 bits that share one scale of 16 bits."""

DEFAULT_COST_MODEL = "llama-2-13b"

EAGLE3_VOCAB = 32000
"""Tokens that published EAGLE-3 heads guess."""

PLAIN, HEAD = QUANTISATIONS["none"], QUANTISATIONS["int8"]
"""How output heads are held: in 16 bit where the layers are, in 8 where these have 4 or 8."""

ARCHITECTURES = {name: model.sizes for name, model in MODELS.items()}
"""From the models' published config.json files."""


def packed_bytes(weights: int, bits: int) -> int:
    """Bytes of `weights` weights at 4 or 16 bits.

    At 4 bits each GROUP of weights has a scale of 16 bits: 4 + 16 / 64 = 4.25 bits a weight.
    """
    assert bits in (4, 16)
    return 2 * weights if bits == 16 else weights // 2 + 2 * -(-weights // GROUP)


class FileBytes(NamedTuple):
    """Bytes of one layer of a packed file as they are held: of the `layer`, and of what the
    `experts` of a mixture have of these, as files pack these closer. `unpacked`: as FP8, which GPUs
    unpack anew in each pass."""

    layer: int = 0
    experts: int = 0
    unpacked: bool = False


NO_FILE = FileBytes()
"""Of what is in no packed file."""


def draft_head(base: Quantisation) -> Quantisation:
    """How a draft's own output head is held: as the base's, or in 8 bits if that is in the codes
    of its file."""
    return HEAD if base == FILE else base


@dataclass(frozen=True, slots=True)
class HeadCosts:
    """An output head as it is held: in `bits` (4, 8 or 16) a weight, `bytes` with scales.

    `quantisation`: its name.
    """

    bytes: int
    bits: int = 16
    quantisation: str = "none"


def head_costs(
    vocab: int, hidden: int, quantisation: Quantisation, file_bytes: int = 0
) -> HeadCosts:
    """The head [vocab, hidden] in that quantisation. `file_bytes`: as held, for "file"."""
    if file_bytes:
        bits = _file_bits(file_bytes, vocab * hidden)
        return HeadCosts(file_bytes, bits, quantisation.name)
    nbytes = matrix_bytes(vocab, hidden, quantisation)
    return HeadCosts(nbytes, bits_of(quantisation), quantisation.name)


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """A draft model on D0: its layers at `bits` (4, 8 or 16), and its head.

    `layer_bytes` as held; `kv_bytes`: keys and values of one row in one layer, 16 bit;
    `request_bytes`: what a layer holds of a request however long it is. `ends_bytes`: what D0
    holds of the draft's embedding and head, beside the base's head. `vocab`: of how many tokens
    it ranks guesses. `operations`: of which a layer is made. `markov`: the matrix that each
    ranked row goes through beside the head, and `joining` that which rows of the base go
    through once, of sources that have them.
    """

    name: str
    layers: int
    layer_bytes: int
    bits: int
    head: HeadCosts
    kv_bytes: int
    ends_bytes: int
    vocab: int
    operations: float = DRAFT_HEAD_OPERATIONS
    markov: HeadCosts = HeadCosts(0)
    joining: HeadCosts = HeadCosts(0)
    request_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        return self.layers * self.layer_bytes + self.ends_bytes


NO_DRAFT = DraftCosts("", 0, 0, 16, HeadCosts(0), 0, 0, 0)
"""A ring without a draft model."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """The model whose costs are charged, whatever model really runs.

    `layer_bytes`: one layer, held in `bits` (4, 8 or 16) a weight, scales included; `quantisation`:
    its name, "" where only the bits are known. `unpacked`: see FileBytes. `kv_bytes`: what is held
    of one row in one layer, keys and values, 16 bit or `of.coded`; attention reads `of.seen_share`
    of it. `head`: the output head.
    `vocab`: tokens, of which one is chosen.
    `expert_bytes`: what the `experts` of a mixture have of `layer_bytes`, in `expert_bits`; each
    row goes through `active` of them. `family`: its `model_type`. `draft`: the whole model that
    guesses; `heads`: those that read its rows, by the names of their draft sources. `of`: its
    sizes.
    """

    name: str
    layers: int
    hidden_size: int
    layer_bytes: int
    kv_bytes: int
    head: HeadCosts
    vocab: int
    draft: DraftCosts
    of: Architecture
    bits: int = 4
    quantisation: str = ""
    unpacked: bool = False
    expert_bytes: int = 0
    expert_bits: int = 4
    experts: int = 0
    active: int = 0
    family: str = "llama"
    heads: Mapping[str, DraftCosts] = field(default_factory=dict)

    def draft_of(self, source: str, form: HeadForm | None = None) -> DraftCosts:
        """What a pass and the ranking of that draft source are charged as, one of that form."""
        if source == "ngram":  # it looks tokens up
            return NO_DRAFT
        if source == "ppd":  # its rows go round with the base's, and through the base's head
            return replace(NO_DRAFT, vocab=self.vocab)
        usual = self.heads.get(source, self.draft)
        if form is None:
            return usual
        return one_pass_costs(self.name, self.of, usual.bits, self.head, form)

    @property
    def activation_bytes(self) -> int:
        """Bytes of one row's hidden state on the wire, 16 bit."""
        return 2 * self.hidden_size

    def operations(self, rows: int, by_head: bool = False) -> float:
        """Of which a layer is made that `rows` rows go through; `by_head`: products by matrices of
        single heads are launched one by one."""
        experts = self.experts_of(rows) if self.experts else 0.0
        heads = self.of.heads if by_head and self.of.latent else 0
        return layer_operations(self.family, experts, self.of.states / self.of.layers, heads)

    def experts_of(self, rows: int) -> float:
        """How many experts of a layer `rows` rows go through, if each chooses by chance.

        One is missed by a row with probability 1 - active / experts, so E (1 - (1 - A / E)^R).
        Rows that follow each other choose alike more often, so this is rather too many.
        """
        return self.experts * (1.0 - (1.0 - self.active / self.experts) ** rows)


def cost_model_of(
    name: str,
    of: Architecture,
    quantisation: Quantisation,
    head: HeadCosts,
    draft: DraftCosts = NO_DRAFT,
    file: FileBytes = NO_FILE,
) -> CostModel:
    """The costs of any model whose layers' matrices are held in this quantisation.

    `file`: for the quantisation "file", of which sizes alone do not tell it.
    """
    if file.layer:
        layer_bytes, expert_bytes, _ = file
        expert_weights = of.mlp_weights if expert_bytes else 0
        bits = _file_bits(layer_bytes - expert_bytes, of.layer_weights - expert_weights)
        expert_bits = _file_bits(expert_bytes, of.mlp_weights)
    else:
        layer_bytes = of.layer_bytes(quantisation)
        expert_bytes = of.mlp_bytes(quantisation) if of.experts else 0
        bits = expert_bits = bits_of(quantisation)
    return CostModel(
        name=name,
        layers=of.layers,
        hidden_size=of.hidden,
        layer_bytes=layer_bytes,
        kv_bytes=of.kv_bytes,
        head=head,
        vocab=of.vocab,
        draft=draft,
        of=of,
        bits=bits,
        quantisation=quantisation.name,
        unpacked=file.unpacked,
        expert_bytes=expert_bytes,
        expert_bits=expert_bits,
        experts=of.experts,
        active=of.active,
        family=of.family,
    )


def _file_bits(file_bytes: int, weights: int) -> int:
    """4, 8 or 16: of a file that mixes them, what most of these weights have."""
    each = 8 * file_bytes / weights
    return next((bits for bits, most in ((4, 6.5), (8, 12.5)) if each <= most), 16)


def bits_of(quantisation: Quantisation) -> int:
    """Bits of a weight, without its share of the scales."""
    return {"none": 16, "int8": 8}.get(quantisation.kind, 4)


def draft_costs_of(
    name: str,
    of: Architecture,
    quantisation: Quantisation,
    head: Quantisation,
    file: FileBytes = NO_FILE,
) -> DraftCosts:
    """The costs of any model as the draft; `file` as for `cost_model_of`.

    A mixture is charged for the experts of one row only, as most passes have few rows. A tied head
    is the embedding only where both are in 16 bit.
    """
    own = head_costs(of.vocab, of.hidden, head)
    whole = cost_model_of(name, of, quantisation, own, file=file)
    unused = whole.expert_bytes - whole.expert_bytes * of.active // max(1, of.experts)
    shared = of.tied and head == PLAIN
    return DraftCosts(
        name=name,
        layers=of.layers,
        layer_bytes=whole.layer_bytes - unused,
        bits=whole.bits,
        head=own,
        kv_bytes=of.kv_bytes,
        ends_bytes=of.head_bytes + (0 if shared else own.bytes) + of.layers * unused,
        vocab=of.vocab,
        operations=layer_operations(of.family, of.active, of.states / of.layers),
        request_bytes=of.request_bytes,
    )


def _independent(name: str, head: Quantisation) -> DraftCosts:
    """A whole small model as the draft, its layers in 4 bits."""
    of = ARCHITECTURES[name]
    costs = draft_costs_of(name, of, QUANTISATIONS["int4"], head)
    return replace(costs, layer_bytes=packed_bytes(of.layer_weights, 4))


def eagle_costs(base: str, of: Architecture, bits: int, head: HeadCosts) -> DraftCosts:
    """EAGLE-2's head for a base: one layer like its, and the base's own output head, or rows of it.

    In front of the layer a matrix of 2 hidden × hidden joins a token's embedding and the base's
    hidden state. The head is there anyway, the base's embedding and rows of the head are not.
    """
    of = of.attentive
    weights = of.layer_weights + 2 * of.hidden * of.hidden
    vocab, rows = min(of.vocab, DRAFT_VOCABULARY), HeadCosts(0)
    if vocab < of.vocab:
        head = rows = head_costs(vocab, of.hidden, draft_head(NAMED[head.quantisation]))
    return DraftCosts(
        name=f"{base}-eagle",
        layers=1,
        layer_bytes=packed_bytes(weights, bits),
        bits=bits,
        head=head,
        kv_bytes=of.kv_bytes,
        ends_bytes=of.head_bytes + rows.bytes,
        vocab=vocab,
    )


def eagle3_costs(base: str, of: Architecture, bits: int, head: HeadCosts) -> DraftCosts:
    """EAGLE-3's head for a base: one layer whose attention reads twice the width, and an output
    head of its own for up to EAGLE3_VOCAB tokens.

    The matrix that joins three hidden states runs over committed rows only: it is held, and not
    charged. The base's embedding, which D0 needs too, stays in its file.
    """
    of = of.attentive
    wider = of.hidden * (of.width + 2 * of.kv_width)
    form = draft_head(NAMED[head.quantisation])
    own = head_costs(min(of.vocab, EAGLE3_VOCAB), of.hidden, form)
    held = packed_bytes(3 * of.hidden * of.hidden, bits)
    return DraftCosts(
        name=f"{base}-eagle3",
        layers=1,
        layer_bytes=packed_bytes(of.layer_weights + wider, bits),
        bits=bits,
        head=own,
        kv_bytes=of.kv_bytes,
        ends_bytes=own.bytes + held,
        vocab=min(of.vocab, EAGLE3_VOCAB),
    )


def mtp_costs(base: str, of: Architecture, bits: int, head: HeadCosts) -> DraftCosts:
    """The MTP head that a base ships: as EAGLE-2's; of mixtures the experts of one row are
    charged. The base's embedding stays in its file."""
    costs = eagle_costs(base, of, bits, head)
    idle = of.mlp_weights * (of.experts - of.active) // max(1, of.experts)
    unread = packed_bytes(idle, bits)
    return replace(
        costs,
        name=f"{base}-mtp",
        layer_bytes=costs.layer_bytes - unread,
        ends_bytes=costs.ends_bytes - of.head_bytes + unread,
        operations=layer_operations(of.family, of.active),
    )


PUBLISHED = HeadForm(layers=5, taps=5, markov_rank=256)
"""A one-pass head of which nothing is known: as DSpark and DFlash publish them."""
TRAINED = HeadForm(layers=2, taps=3, own_matrix=True)
"""One as `edgespec train dspark` makes it of a small model."""


@lru_cache(maxsize=64)
def one_pass_costs(
    base: str, of: Architecture, bits: int, head: HeadCosts, form: HeadForm
) -> DraftCosts:
    """A one-pass head of that form for a base, its matrices in `bits`, and an output matrix: its
    own, held so too, or the rows of the base's that it scores.

    A committed row is charged as one that goes through whole layers, which is too much, as only its
    keys and values are made.
    """
    of = of.attentive
    attention = of.layer_weights - of.mlp_weights
    weights = round(form.attention * attention + form.mlp * of.mlp_weights)
    scored = form.vocab if form.vocab < 1 else min(1.0, DRAFT_VOCABULARY / of.vocab)
    hidden, vocab = round(form.width * of.hidden), round(scored * of.vocab)

    def held(weights: int) -> HeadCosts:
        return HeadCosts(packed_bytes(weights, bits), bits) if weights else HeadCosts(0)

    scoring, is_more = head, form.own_matrix or vocab < of.vocab
    if form.own_matrix:
        scoring = head_costs(vocab, hidden, QUANTISATIONS[{4: "int4", 8: "int8", 16: "none"}[bits]])
    elif is_more:
        scoring = head_costs(vocab, of.hidden, draft_head(NAMED[head.quantisation]))
    markov, joining = held(form.markov_rank * vocab), held(form.taps * of.hidden * hidden)
    embeddings = of.head_bytes + 2 * of.vocab * form.markov_rank
    return DraftCosts(
        name=f"{base}-dspark",
        layers=form.layers,
        layer_bytes=packed_bytes(weights, bits),
        bits=bits,
        head=scoring,
        kv_bytes=round(form.keys * of.kv_bytes),
        ends_bytes=embeddings + markov.bytes + joining.bytes + (scoring.bytes if is_more else 0),
        vocab=vocab,
        markov=markov,
        joining=joining,
    )


_EAGLE = "-eagle"


def _cost_model(name: str, head: Quantisation) -> CostModel:
    """One of COST_MODELS, with output heads held so."""
    base = name.removesuffix(_EAGLE)
    of = ARCHITECTURES[base]
    own = head_costs(of.vocab, of.hidden, head)
    if name.endswith(_EAGLE):
        draft = eagle_costs(base, of, 16, own)
    else:
        draft = _independent(MODELS[name].draft_of("independent"), head)
    return replace(
        cost_model_of(name, of, QUANTISATIONS["int4"], own, draft),
        layer_bytes=packed_bytes(of.layer_weights, 4),
        quantisation="",
        heads={
            "eagle": eagle_costs(base, of, 4, own),
            "eagle3": eagle3_costs(base, of, 4, own),
            "mtp": mtp_costs(base, of, 4, own),
            "dspark": one_pass_costs(base, of, 4, own, TRAINED),
        },
    )


COST_MODELS = {
    name: _cost_model(name, HEAD) for name, model in MODELS.items() if model.draft_of("independent")
} | {"llama-2-7b-eagle": _cost_model("llama-2-7b-eagle", PLAIN)}
"""By the catalogue's names: a model can be charged if a small one drafts for it. Layers are in 4
bits, heads in 8; in the one of FlowSpec's paper heads and the EAGLE layer that drafts are in 16."""


def cost_model_named(name: str, head: Quantisation | None = None) -> CostModel:
    """The cost model of this name, with output heads held so (None: as in COST_MODELS).

    Raises ConfigError, with all names, if there is none, and for heads as in a file.
    """
    if head == FILE:
        raise ConfigError(
            f"the heads of {name} are in no file here; choose one of: {', '.join(QUANTISATIONS)}"
        )
    if name not in COST_MODELS:
        raise ConfigError(
            f"there is no cost model {name!r}; choose one of: {', '.join(COST_MODELS)}"
        )
    return COST_MODELS[name] if head is None else _cost_model(name, head)
