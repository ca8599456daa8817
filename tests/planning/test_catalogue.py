"""The catalogue: its figures agree with each other, and every name in it leads somewhere."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from importlib import resources

import pytest

from edgespec.drafting.choice import SOURCES
from edgespec.planning.architecture import FAMILIES, Architecture
from edgespec.planning.catalogue import MODELS
from edgespec.planning.cost_model import COST_MODELS

ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def test_sizes_add_up_to_the_published_number_of_parameters() -> None:
    for name, model in MODELS.items():
        of = model.sizes
        weights = of.layers * of.layer_weights + (1 if of.tied else 2) * of.head_bytes // 2
        assert weights == pytest.approx(model.parameters, rel=1e-3), name
        assert model.family in FAMILIES, name


def test_every_entry_leads_somewhere() -> None:
    for name, model in MODELS.items():
        assert name == name.lower(), "typed in any case, found in lower case"
        assert ON_HUB.fullmatch(model.hub), name
        assert not model.gguf or model.gguf.count("/") == 2, name
        assert not model.gguf or model.gguf.endswith(".gguf"), name
        for draft in model.drafts:
            assert draft.source in SOURCES, name
            assert draft.weights in MODELS or ON_HUB.fullmatch(draft.weights), name
            assert draft.page.startswith("https://"), name
            small = MODELS.get(draft.weights)
            # A draft with the base's own tokens; rows that pad the vocabulary may differ.
            assert small is None or abs(small.sizes.vocab - model.sizes.vocab) < 1000, name
    named = [known for model in MODELS.values() for known in (model.hub, model.gguf) if known]
    assert len(set(named)) == len(named)
    assert {name.removesuffix("-eagle") for name in COST_MODELS} <= set(MODELS)


def test_sizes_have_no_unknown_key() -> None:
    content = json.loads((resources.files("edgespec.planning") / "catalogue.json").read_bytes())
    known = {field.name for field in fields(Architecture)}
    for name, model in content["models"].items():
        assert set(model["sizes"]) <= known, name
