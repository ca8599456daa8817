"""The catalogue: its figures agree with each other, and every name in it leads somewhere."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from importlib import resources
from pathlib import Path

import pytest

from edgespec.daemon.planning import Quants, model_to_plan
from edgespec.drafting.choice import NONE, SOURCES
from edgespec.model.gguf.architectures import ARCHITECTURES
from edgespec.model.gguf.block_types import BLOCK_TYPES
from edgespec.planning import architecture
from edgespec.planning.architecture import FAMILIES, Architecture, gguf_bytes
from edgespec.planning.catalogue import MODELS, NAMES, REFUSED, squeezed
from edgespec.planning.cost_model import COST_MODELS
from edgespec.planning.refused import REASONS, refusal_of
from edgespec.planning.text_part import WRAPPERS

PUBLISHED = json.loads((Path(__file__).parent / "published_sizes.json").read_bytes())
"""Published figures by the catalogue's names, and where they are from."""
ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def test_sizes_add_up_to_the_published_number_of_parameters() -> None:
    for name, model in MODELS.items():
        of = model.sizes
        weights = of.layers * of.layer_weights + (1 if of.tied else 2) * of.head_bytes // 2
        weights += of.table_weights
        assert weights == pytest.approx(model.parameters, rel=1e-3), name
        assert model.family in FAMILIES, name


def test_plans_have_the_sizes_of_the_published_files() -> None:
    counted = PUBLISHED["parameters"] | PUBLISHED["text_parameters"]
    assert len(counted) >= 60
    for name, parameters in counted.items():
        asked = model_to_plan(MODELS[name].hub, Quants("none", "none"), NONE).model
        ends = asked.of.head_bytes * (1 if asked.of.tied else 2)  # read by plan, or left in a file
        ends += 2 * asked.of.table_weights  # left there too
        planned = asked.of.layers * asked.costs.layer_bytes + ends
        assert planned == pytest.approx(2 * parameters, rel=0.03), name
        assert MODELS[name].file_bytes(MODELS[name].hub) == pytest.approx(2 * parameters, rel=1e-5)


def test_the_size_of_a_gguf_file_follows_from_the_config() -> None:
    files = PUBLISHED["q4_k_m_bytes"]
    assert len(files) >= 30
    for name, size in files.items():
        # The file has a header with the vocabulary, which counts beside a model of 1B.
        model = MODELS[name]
        found = gguf_bytes(model.sizes, "x-Q4_K_M.gguf", fused=model.family == "phi3")
        assert found == pytest.approx(size, rel=0.011), name
    oss = MODELS["gpt-oss-20b"]
    assert gguf_bytes(oss.sizes, oss.gguf) == pytest.approx(12109566624, rel=0.01)
    of = MODELS["gemma-3-270m"].sizes  # as llama.cpp's server tells of it
    assert gguf_bytes(of, "x-Q8_0.gguf") == pytest.approx(285018624, rel=0.01)


def test_a_weight_takes_the_bits_of_its_block_type() -> None:
    blocks = {kind.name: 8 * kind.bytes / kind.columns for kind in BLOCK_TYPES.values()}
    for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4"):
        assert getattr(architecture, name) == blocks[name], name


def test_no_two_models_have_one_name_and_refusals_name_one_that_runs() -> None:
    every = {**MODELS, **REFUSED}
    names = [
        (squeezed(one), name)
        for name, known in every.items()
        for one in dict.fromkeys((name, known.hub.partition("/")[2], *known.also))
    ]
    assert {NAMES[squeezed_name] for squeezed_name, _ in names} == set(every)
    for squeezed_name, name in names:
        assert NAMES[squeezed_name] == name
    assert len(REFUSED) >= 25
    for name, refused in REFUSED.items():
        assert refused.instead in MODELS, name
        assert refused.refusal.why in REASONS, name
        assert ON_HUB.fullmatch(refused.hub), name
        runs = refused.family in FAMILIES
        assert runs == bool(refused.why), name
        assert runs or refusal_of({"model_type": refused.family}, FAMILIES), name


def test_no_refusal_is_of_what_runs() -> None:
    from_gguf = {*ARCHITECTURES, *FAMILIES}
    elsewhere = ("hunyuan-dense", "seed_oss")  # from safetensors, which are called otherwise
    for kind in (*from_gguf, *elsewhere, "gpt2", ""):
        assert refusal_of({"model_type": kind}, from_gguf) is None, kind
    for kind in (*FAMILIES, *WRAPPERS, *WRAPPERS.values(), "gpt2", ""):
        assert refusal_of({"model_type": kind}, FAMILIES) is None, kind
    for name, model in MODELS.items():
        assert refusal_of({"model_type": model.family}, FAMILIES) is None, name


def test_families_that_are_refused_name_one_that_runs() -> None:
    for kind in ("gemma3n_text", "rwkv7", "deepseek2", "llama4", "jamba"):
        refusal = refusal_of({"model_type": kind}, FAMILIES)
        assert refusal is not None
        assert refusal.instead in MODELS, kind


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
