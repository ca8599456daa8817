"""Cost models: how many bytes the parts of models have, for charging devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from edgespec.config import QUANTISATIONS, Quantisation
from edgespec.errors import ConfigError
from edgespec.planning.architecture import Architecture
from edgespec.planning.catalogue import MODELS

GROUP = 64
"""Weights in 4 bits that share one scale of 16 bits."""

DEFAULT_COST_MODEL = "llama-2-13b"

EAGLE3_VOCAB = 32000
"""Tokens that published EAGLE-3 heads guess."""

ARCHITECTURES = {name: model.sizes for name, model in MODELS.items()}
"""From the models' published config.json files."""


def packed_bytes(weights: int, bits: int) -> int:
    """Bytes of `weights` weights at 4 or 16 bits.

    At 4 bits each GROUP of weights has a scale of 16 bits: 4 + 16 / 64 = 4.25 bits a weight.
    """
    assert bits in (4, 16)
    return 2 * weights if bits == 16 else weights // 2 + 2 * -(-weights // GROUP)


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """A draft model on D0: its layers at `bits` (4, 8 or 16), its head in 16.

    `layer_bytes` as held; `kv_bytes`: keys and values of one row in one layer, 16 bit.
    `ends_bytes`: what D0 holds of the draft's embedding and head, beside the base's head. `vocab`:
    of how many tokens it ranks guesses.
    """

    name: str
    layers: int
    layer_bytes: int
    bits: int
    head_bytes: int
    kv_bytes: int
    ends_bytes: int
    vocab: int

    @property
    def held_bytes(self) -> int:
        return self.layers * self.layer_bytes + self.ends_bytes


NO_DRAFT = DraftCosts("", 0, 0, 16, 0, 0, 0, 0)
"""A ring without a draft model."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """The model whose costs are charged, whatever model really runs.

    `layer_bytes`: one layer, held in `bits` (4, 8 or 16) a weight, scales included; `quantisation`:
    its name, "" where only the bits are known. `kv_bytes`: keys and values of one row in one
    layer, 16 bit. `head_bytes`: the output head in 16 bit; the input embedding has as many.
    `vocab`: tokens, of which one is chosen.
    `expert_bytes`: what the `experts` of a mixture have of `layer_bytes`; each row goes through
    `active` of them. `draft`: the whole model that guesses; `heads`: EAGLE heads by the names of
    their draft sources.
    """

    name: str
    layers: int
    hidden_size: int
    layer_bytes: int
    kv_bytes: int
    head_bytes: int
    vocab: int
    draft: DraftCosts
    bits: int = 4
    quantisation: str = ""
    expert_bytes: int = 0
    experts: int = 0
    active: int = 0
    heads: Mapping[str, DraftCosts] = field(default_factory=dict)

    def draft_of(self, source: str) -> DraftCosts:
        """What a pass and the ranking of that draft source are charged as."""
        if source == "ngram":  # it looks tokens up
            return NO_DRAFT
        if source == "ppd":  # its rows go round with the base's, and through the base's head
            return replace(NO_DRAFT, vocab=self.vocab)
        return self.heads.get(source, self.draft)

    @property
    def activation_bytes(self) -> int:
        """Bytes of one row's hidden state on the wire, 16 bit."""
        return 2 * self.hidden_size

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
    draft: DraftCosts = NO_DRAFT,
    file_bytes: int = 0,
) -> CostModel:
    """The costs of any model whose layers' matrices are held in this quantisation.

    `file_bytes`: of one layer, for the quantisation "file", of which sizes alone do not tell it.
    """
    if file_bytes:
        expert_bytes = file_bytes * of.mlp_weights // of.layer_weights
    else:
        expert_bytes = of.mlp_bytes(quantisation)
    return CostModel(
        name=name,
        layers=of.layers,
        hidden_size=of.hidden,
        layer_bytes=file_bytes or of.layer_bytes(quantisation),
        kv_bytes=of.kv_bytes,
        head_bytes=of.head_bytes,
        vocab=of.vocab,
        draft=draft,
        bits=_file_bits(of, file_bytes) if file_bytes else bits_of(quantisation),
        quantisation=quantisation.name,
        expert_bytes=expert_bytes if of.experts else 0,
        experts=of.experts,
        active=of.active,
    )


def _file_bits(of: Architecture, file_bytes: int) -> int:
    """4, 8 or 16: of a file that mixes them, what most of a layer has."""
    each = 8 * file_bytes / of.layer_weights
    return next((bits for bits, most in ((4, 6.5), (8, 12.5)) if each <= most), 16)


def bits_of(quantisation: Quantisation) -> int:
    """Bits of a weight, without its share of the scales."""
    return {"none": 16, "int8": 8}.get(quantisation.kind, 4)


def draft_costs_of(
    name: str, of: Architecture, quantisation: Quantisation, file_bytes: int = 0
) -> DraftCosts:
    """The costs of any model as the draft; `file_bytes` as for `cost_model_of`.

    A mixture is charged for the experts of one row only, as most passes have few rows.
    """
    whole = cost_model_of(name, of, quantisation, file_bytes=file_bytes)
    unused = whole.expert_bytes - whole.expert_bytes * of.active // max(1, of.experts)
    return DraftCosts(
        name=name,
        layers=of.layers,
        layer_bytes=whole.layer_bytes - unused,
        bits=whole.bits,
        head_bytes=of.head_bytes,
        kv_bytes=of.kv_bytes,
        ends_bytes=(1 if of.tied else 2) * of.head_bytes + of.layers * unused,
        vocab=of.vocab,
    )


def _independent(name: str) -> DraftCosts:
    """A whole small model as the draft: layers in 4 bits, head in 16."""
    of = ARCHITECTURES[name]
    costs = draft_costs_of(name, of, QUANTISATIONS["int4"])
    return replace(costs, layer_bytes=packed_bytes(of.layer_weights, 4))


def eagle_costs(base: str, of: Architecture, bits: int) -> DraftCosts:
    """EAGLE-2's head for a base: one layer like its, and the base's own output head, in 16 bit.

    In front of the layer a matrix of 2 hidden × hidden joins a token's embedding and the base's
    hidden state. The head is there anyway, the base's embedding is not.
    """
    weights = of.layer_weights + 2 * of.hidden * of.hidden
    return DraftCosts(
        name=f"{base}-eagle",
        layers=1,
        layer_bytes=packed_bytes(weights, bits),
        bits=bits,
        head_bytes=of.head_bytes,
        kv_bytes=of.kv_bytes,
        ends_bytes=of.head_bytes,
        vocab=of.vocab,
    )


def eagle3_costs(base: str, of: Architecture, bits: int) -> DraftCosts:
    """EAGLE-3's head for a base: one layer whose attention reads twice the width, and an output
    head of its own for up to EAGLE3_VOCAB tokens, in 16 bit.

    The matrix that joins three hidden states runs over committed rows only: it is held, and not
    charged. So is the base's embedding, which D0 needs too.
    """
    wider = of.hidden * (of.width + 2 * of.kv_width)
    head = packed_bytes(of.hidden * min(of.vocab, EAGLE3_VOCAB), 16)
    held = packed_bytes(3 * of.hidden * of.hidden, bits) + of.head_bytes
    return DraftCosts(
        name=f"{base}-eagle3",
        layers=1,
        layer_bytes=packed_bytes(of.layer_weights + wider, bits),
        bits=bits,
        head_bytes=head,
        kv_bytes=of.kv_bytes,
        ends_bytes=head + held,
        vocab=min(of.vocab, EAGLE3_VOCAB),
    )


def _cost_model(name: str, base: str, draft: DraftCosts) -> CostModel:
    of = ARCHITECTURES[base]
    return replace(
        cost_model_of(name, of, QUANTISATIONS["int4"], draft),
        layer_bytes=packed_bytes(of.layer_weights, 4),
        quantisation="",
        heads={"eagle": eagle_costs(base, of, 4), "eagle3": eagle3_costs(base, of, 4)},
    )


def _cost_models() -> Iterator[CostModel]:
    """A model of the catalogue can be charged if its draft can: a small model beside it."""
    for name, model in MODELS.items():
        if small := model.draft_of("independent"):
            yield _cost_model(name, name, _independent(small))
    base = "llama-2-7b"
    yield _cost_model(f"{base}-eagle", base, eagle_costs(base, ARCHITECTURES[base], 16))


COST_MODELS = {model.name: model for model in _cost_models()}
"""By the catalogue's names, and the one of FlowSpec's paper: an EAGLE head in 16 bit drafts."""


def cost_model_named(name: str) -> CostModel:
    """The cost model of this name; raises ConfigError, with all names, if there is none."""
    if name not in COST_MODELS:
        raise ConfigError(
            f"there is no cost model {name!r}; choose one of: {', '.join(COST_MODELS)}"
        )
    return COST_MODELS[name]
