"""Costs: published sizes, what nodes and links charge, and what fits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.segments import changed, one_part

from edgespec.config import DRAFT_VOCABULARY, FILE, QUANTISATIONS
from edgespec.daemon.profiles import profile_named, profile_names
from edgespec.errors import CapacityError, ConfigError
from edgespec.planning.cost_model import (
    ARCHITECTURES,
    COST_MODELS,
    DEFAULT_COST_MODEL,
    EAGLE3_VOCAB,
    HeadCosts,
    cost_model_named,
    cost_model_of,
    eagle3_costs,
    eagle_costs,
    head_costs,
    mtp_costs,
    one_pass_costs,
    packed_bytes,
)
from edgespec.planning.costs import LinkCosts, NodeCosts, RingCosts, ring_costs
from edgespec.planning.operations import EXPERT_OPERATIONS, LAYER_OPERATIONS, USUAL_OPERATIONS
from edgespec.planning.profile import DATA_SHEET, Figure
from edgespec.types.draft_pass import DraftPass, HeadForm
from edgespec.types.tensor import Tensor
from edgespec.wire.codec import encode
from edgespec.wire.segment import Header, Part, Segment, StageTime, Verdict

NANO = profile_named("jetson-orin-nano-8gb")
MODEL = cost_model_named("llama-2-13b")


def nano_ring(stages: int) -> RingCosts:
    return ring_costs([NANO] * (stages + 1), MODEL)


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "embeddings"),
    [
        ("llama-2-7b", 6.738e9, 2),
        ("llama-2-13b", 13.016e9, 2),
        ("llama-3.1-8b", 8.030e9, 2),
        ("llama-3.1-70b", 70.554e9, 2),
        ("llama-3.2-1b", 1.236e9, 1),  # tied: one matrix is both embedding and head
        ("qwen2.5-0.5b", 0.494e9, 1),
        ("qwen2.5-32b", 32.764e9, 2),
        ("tinyllama-1.1b", 1.100e9, 2),
    ],
)
def test_the_weights_add_up_to_the_published_count(
    name: str, parameters: float, embeddings: int
) -> None:
    of = ARCHITECTURES[name]
    weights = of.layers * of.layer_weights + embeddings * of.head_bytes // 2
    assert weights == pytest.approx(parameters, rel=1e-3)


def test_a_weight_takes_four_and_a_quarter_bits_or_sixteen() -> None:
    assert packed_bytes(6400, 4) == 6400 * 4.25 / 8
    assert packed_bytes(6400, 16) == 12800


def test_the_default_model() -> None:
    assert DEFAULT_COST_MODEL == "llama-2-13b"
    assert (MODEL.layers, MODEL.hidden_size, MODEL.activation_bytes) == (40, 5120, 10240)
    assert MODEL.kv_bytes == 2 * 40 * 128 * 2
    assert MODEL.head == HeadCosts(32000 * 5120 + 32000 * 2, 8, "int8")  # a scale for each row
    assert MODEL.layers * MODEL.layer_bytes == pytest.approx(12.69e9 * 4.25 / 8, rel=1e-3)
    draft = MODEL.draft
    assert (draft.name, draft.layers, draft.bits) == ("tinyllama-1.1b", 22, 4)
    assert draft.head == HeadCosts(32000 * 2048 + 32000 * 2, 8, "int8")
    assert draft.kv_bytes == 2 * 4 * 64 * 2


def test_eagle_is_one_layer_and_the_base_s_head() -> None:
    model = cost_model_named("llama-2-7b-eagle")
    weights = ARCHITECTURES["llama-2-7b"].layer_weights + 2 * 4096 * 4096
    assert (model.draft.layers, model.draft.bits) == (1, 16)
    assert model.draft.layer_bytes == 2 * weights
    assert model.draft.head == model.head == HeadCosts(32000 * 4096 * 2, 16, "none")
    assert model.layer_bytes == cost_model_named("llama-2-7b").layer_bytes


def test_every_model_has_an_eagle_head_of_each_kind() -> None:
    """In 4 bits, as the whole draft model is; sizes are those of the published heads."""
    model = cost_model_named("llama-3.1-8b")
    eagle, eagle3 = model.draft_of("eagle"), model.draft_of("eagle3")
    assert (eagle.layers, eagle.bits, eagle3.layers, eagle3.bits) == (1, 4, 1, 4)
    # yuhuili/EAGLE-LLaMA3-Instruct-8B: a layer and fc 2h -> h. EAGLE3-LLaMA3.1-Instruct-8B: q, k
    # and v read 2h, and 32000 tokens of its own.
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    assert eagle.layer_bytes == packed_bytes(layer + 2 * 4096 * 4096, 4)
    assert eagle3.layer_bytes == packed_bytes(layer + 4096 * (4096 + 2 * 1024), 4)
    assert eagle.head == HeadCosts((4096 + 2) * DRAFT_VOCABULARY, 8, "int8"), "rows of the base's"
    assert eagle3.head == HeadCosts((4096 + 2) * 32000, 8, "int8")
    assert model.draft_of("independent") == model.draft_of("easyspec") == model.draft


def test_a_head_over_a_hybrid_base_attends_and_keeps_no_state() -> None:
    """Its layer's keys are those of one layer that attends, not the mean of the base's."""
    of, head = ARCHITECTURES["qwen3.5-4b"], HeadCosts(1, 8, "int8")
    keys, inner = 2 * 2 * of.kv_heads * of.head_dim, 3 * of.hidden * of.intermediate
    attention = of.hidden * (3 * of.heads + 2 * of.kv_heads) * of.head_dim
    assert of.kv_bytes * 4 == keys, "every fourth attends"
    form = HeadForm(layers=1, taps=0)
    for made in (eagle_costs, eagle3_costs, mtp_costs):
        assert made("m", of, 4, head).kv_bytes == keys, made
    joined = attention + inner + 2 * of.hidden * of.hidden
    assert eagle_costs("m", of, 4, head).layer_bytes == packed_bytes(joined, 4)
    one = one_pass_costs("m", of, 4, head, form)
    assert (one.kv_bytes, one.layer_bytes) == (keys, packed_bytes(attention + inner, 4))


def test_a_one_pass_head_is_charged_by_the_pass_and_by_the_rows_that_are_ranked() -> None:
    model = cost_model_named("llama-3.1-8b")
    head, node = model.draft_of("dspark"), NodeCosts(NANO, model, 0)
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    assert head.layers == 2
    assert head.layer_bytes == packed_bytes(layer, 4)
    assert head.head == HeadCosts(DRAFT_VOCABULARY * 4096 * 9 // 16, 4, "int4")
    ranking = NANO.ranking.greedy.call + NANO.ranking.greedy.million * 3 * DRAFT_VOCABULARY / 1e6
    block = head.head.bytes / 1e9 * NANO.four_bit.at(16)
    assert node.rank_seconds(3, "greedy", "dspark", 16) == pytest.approx(block + ranking)
    assert node.rank_seconds(3, "greedy", "dspark", 0) == pytest.approx(ranking)
    # What its layers take grows with the slots of a block by much less than these.
    one, many = (sum(node.draft_parts(rows, 500, "dspark")) for rows in (1, 16))
    assert one < many < 1.6 * one


def test_a_one_pass_head_is_charged_by_what_it_is_made_of() -> None:
    """Its own shares of the base's sizes, whatever base is charged."""
    model = cost_model_named("llama-3.1-8b")
    form = HeadForm(3, 2, attention=0.5, mlp=0.25, keys=0.5, vocab=0.5, markov_rank=16)
    head, node = model.draft_of("dspark", form), NodeCosts(NANO, model, 0)
    layer = 4096 * (2 * 4096 + 2 * 1024) // 2 + 3 * 4096 * 14336 // 4
    assert (head.layers, head.layer_bytes) == (3, packed_bytes(layer, 4))
    assert head.kv_bytes == 2 * 1024
    assert head.head == replace(model.head, bytes=model.head.bytes // 2), "of the base's rows"
    # Rows of the base are joined once.
    rest, joined, alone = (DraftPass(16, "dspark", (1,), rows, form) for rows in (0, 5, 16))
    layers = sum(node.draft_parts(16, 500, "dspark", form=form))
    join = packed_bytes(2 * 4096 * 4096, 4) / 1e9
    for one, wanted in (
        (rest, layers),
        (joined, layers + join * NANO.four_bit.at(5)),
        (alone, layers + join * NANO.four_bit.at(16)),
    ):
        assert sum(node.pass_parts(one, 500)) == pytest.approx(wanted)
    # Each row that is ranked goes through the Markov head.
    rank = node.rank_seconds(3, "greedy", "dspark", 0, form)
    plain = node.rank_seconds(3, "greedy", "dspark", 0, form._replace(markov_rank=0))
    markov = packed_bytes(128256 // 2 * 16, 4) / 1e9 * NANO.four_bit.at(3)
    assert rank == pytest.approx(plain + markov)
    narrow = model.draft_of("dspark", HeadForm(2, 3, width=0.5, own_matrix=True))
    assert narrow.head == HeadCosts(DRAFT_VOCABULARY * 2048 * 9 // 16, 4, "int4")
    assert narrow.joining.bytes == packed_bytes(3 * 4096 * 2048, 4)


def test_heads_are_charged_as_they_are_held() -> None:
    """The same model with its heads, and those of its drafts, in more bits and in fewer."""
    many, few = (cost_model_named("llama-3.1-8b", QUANTISATIONS[name]) for name in ("none", "int4"))
    weights, own = 128256 * 4096, 128256 * 2048  # its own, and that of its draft
    assert many.head == HeadCosts(2 * weights, 16, "none")
    assert few.head == HeadCosts(weights * 9 // 16, 4, "int4")  # a scale and a zero for each 64
    assert few.draft.head.bytes == own * 9 // 16
    assert few.draft_of("eagle").head.bytes == DRAFT_VOCABULARY * 4096 * 9 // 16
    assert few.draft_of("eagle3").head.bytes == 32000 * 4096 * 9 // 16
    # A tied embedding stays in 16 bit beside a head in fewer.
    assert few.draft.ends_bytes - many.draft.ends_bytes == few.draft.head.bytes
    assert few.draft.layer_bytes == many.draft.layer_bytes
    seconds = [NodeCosts(NANO, model, 0).head_seconds(16) for model in (few, many)]
    assert seconds[1] == pytest.approx(2 * weights / 1e9 * NANO.sixteen_bit.at(16))
    assert seconds[0] == pytest.approx(weights * 9 / 16 / 1e9 * NANO.four_bit.at(16))
    nodes = [NodeCosts(NANO, model, 0) for model in (few, many)]
    assert nodes[0].draft_seconds(16, 0) == nodes[1].draft_seconds(16, 0)
    fewer, more = (node.rank_seconds(16, "greedy") for node in nodes)
    ranked = more - 2 * own / 1e9 * NANO.sixteen_bit.at(16)
    assert fewer == pytest.approx(ranked + own * 9 / 16 / 1e9 * NANO.four_bit.at(16))


def test_a_head_as_its_file_has_it() -> None:
    """Codes of 6 bits are held in 8; bits are told from the bytes."""
    weights = 32000 * 4096
    assert head_costs(32000, 4096, FILE, weights * 17 // 16) == HeadCosts(
        weights * 17 // 16, 8, "file"
    )
    assert head_costs(32000, 4096, FILE, weights * 5 // 8).bits == 4
    with pytest.raises(ConfigError, match="the heads of llama-2-7b are in no file here; choose"):
        cost_model_named("llama-2-7b", FILE)


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no cost model 'gpt'; choose one of: llama-2-7b, "):
        cost_model_named("gpt")
    assert [cost_model_named(name).name for name in COST_MODELS] == list(COST_MODELS)


# --- nodes --------------------------------------------------------------------------------------


def test_a_block_takes_its_share_of_the_memory_bandwidth() -> None:
    stage = nano_ring(4).stages[0]
    assert stage.layers == 10
    assert 0.029 < stage.block_seconds(1, 0) < stage.block_seconds(1, 256) < 0.032
    layers = 10 * stage.layer_seconds(3, 70)
    assert stage.block_seconds(3, 70) == pytest.approx(layers)
    eager = NodeCosts(NANO, MODEL, 10)
    assert eager.block_seconds(3, 70) == pytest.approx(10 * eager.layer_seconds(3, 70))


def test_what_a_layer_is_charged() -> None:
    node = NodeCosts(NANO, MODEL, 1)
    weights = MODEL.layer_bytes / 1e9 * NANO.four_bit.at(5)
    cache = 100 * MODEL.kv_bytes / NANO.copy_bandwidth.value
    expected = NANO.layer_seconds.value + weights + cache
    assert expected > NANO.launch_seconds.value
    assert node.layer_seconds(5, 100) == pytest.approx(expected)
    assert node.gather_seconds(7) == pytest.approx(
        7 * 2 * MODEL.kv_bytes / NANO.copy_bandwidth.value
    )
    assert node.head_seconds(5) == pytest.approx(MODEL.head.bytes / 1e9 * NANO.sixteen_bit.at(10))


def test_what_a_draft_pass_is_charged() -> None:
    draft = MODEL.draft
    layer = NANO.layer_seconds.value + draft.layer_bytes / 1e9 * NANO.four_bit.at(4)
    layer += 50 * draft.kv_bytes / NANO.copy_bandwidth.value
    d0 = ring_costs([NANO] * 5, MODEL).coordinator
    assert layer < NANO.launch_seconds.value, "the host is slower, and the GPU waits for it"
    assert d0.draft_seconds(4, 50) == pytest.approx(22 * NANO.launch_seconds.value)
    head = draft.head.bytes / 1e9 * NANO.sixteen_bit.at(8)
    ranked = NANO.ranking.filtered.call + NANO.ranking.filtered.million * 4 * 32000 / 1e6
    assert d0.rank_seconds(4, "filtered") == pytest.approx(head + ranked)

    eagle = cost_model_named("llama-2-7b-eagle").draft
    node = NodeCosts(NANO, cost_model_named("llama-2-7b-eagle"), 0)
    held = eagle.layer_bytes / 1e9 * NANO.sixteen_bit.at(1)
    assert node.draft_seconds(1, 0) == pytest.approx(NANO.layer_seconds.value + held)


def test_launching_goes_by_the_operations_of_a_layer() -> None:
    """Of the model's family, of the experts in use, of the draft that runs."""
    tiny = replace(MODEL, layer_bytes=1, kv_bytes=0)
    launch = NANO.launch_seconds.value / USUAL_OPERATIONS

    def seconds(rows: int = 4, requests: int = 1, **fields: Any) -> float:
        return NodeCosts(NANO, replace(tiny, **fields), 1).layer_seconds(rows, 0, requests)

    assert seconds() == pytest.approx(USUAL_OPERATIONS * launch)
    olmo = LAYER_OPERATIONS["olmo2"]
    assert seconds(family="olmo2") == pytest.approx(olmo * launch)
    assert seconds(2, 2, family="olmo2") == pytest.approx((olmo + 0.4 * 17) * launch)
    mixture: dict[str, Any] = {"family": "qwen3_moe", "experts": 8, "active": 2, "expert_bytes": 1}
    qwen, each = LAYER_OPERATIONS["qwen3_moe"], EXPERT_OPERATIONS["qwen3_moe"]
    assert seconds(1, **mixture) == pytest.approx((qwen + 2 * each) * launch)
    assert seconds(64, **mixture) == pytest.approx((qwen + 8 * each) * launch, rel=1e-6)
    d0 = NodeCosts(NANO, replace(tiny, draft=replace(MODEL.draft, layer_bytes=1, kv_bytes=0)), 0)
    assert d0.draft_parts(4, 0) == pytest.approx([17 * launch] * 22)
    assert d0.draft_parts(4, 0, "easyspec") == pytest.approx([40 * launch] * 22)
    assert d0.draft_parts(4, 0, "eagle")[0] >= 40 * launch
    of = ARCHITECTURES["gemma-2-2b"]
    gemma = cost_model_of("g", of, QUANTISATIONS["int4"], MODEL.head)
    assert gemma.operations(4) == LAYER_OPERATIONS["gemma2"]
    assert COST_MODELS["qwen3-8b"].operations(4) == LAYER_OPERATIONS["qwen3"]
    assert COST_MODELS["qwen3-8b"].draft.operations == LAYER_OPERATIONS["qwen3"]
    of = ARCHITECTURES["glm-4.7-flash"]
    latents = replace(cost_model_of("m", of, QUANTISATIONS["int4"], MODEL.head), experts=0)
    latents = replace(latents, layer_bytes=1, expert_bytes=0, kv_bytes=0)
    one, each = (
        NodeCosts(structs.replace(NANO, launches_ahead=gpu), latents, 1).layer_seconds(1, 0)
        for gpu in (False, True)
    )
    assert each == pytest.approx((43 + 2 * 20 - 1) * launch), "head by head"
    assert one == pytest.approx(43 * launch + NANO.layer_seconds.value)


def test_a_processor_launches_and_then_computes() -> None:
    pi = profile_named("raspberry-pi-5-8gb")
    ahead = structs.replace(pi, launches_ahead=True)
    device = NodeCosts(ahead, MODEL, 1).layer_seconds(5, 100)
    assert device > pi.launch_seconds.value
    both = NodeCosts(pi, MODEL, 1).layer_seconds(5, 100)
    assert both == pytest.approx(device + pi.launch_seconds.value)
    joint = NodeCosts(pi, MODEL, 1).layer_seconds(5, 100, requests=6)
    assert joint == pytest.approx(device + 3 * pi.launch_seconds.value), "two fifths for each"
    assert NodeCosts(ahead, MODEL, 1).layer_seconds(5, 100, requests=6) == device


def test_work_on_logits_goes_by_the_way_and_the_vocabulary() -> None:
    model = cost_model_named("llama-3.1-8b")
    node, wide = NodeCosts(NANO, model, 0), 128256 / 1e6
    for way in ("greedy", "sampled", "filtered"):
        time = NANO.choosing.of(way)
        expected = 3 * (time.call + time.million * wide)
        assert node.choose_seconds(3, way) == pytest.approx(expected)
    assert node.noise_seconds(2) == pytest.approx(2 * NANO.noise.value * wide)
    eagle3 = NANO.ranking.greedy.call + NANO.ranking.greedy.million * 4 * EAGLE3_VOCAB / 1e6
    head = model.draft_of("eagle3").head.bytes / 1e9 * NANO.sixteen_bit.at(8)
    assert node.rank_seconds(4, "greedy", "eagle3") == pytest.approx(eagle3 + head)
    ppd = NANO.ranking.sampled.call + NANO.ranking.sampled.million * 4 * wide
    assert node.rank_seconds(4, "sampled", "ppd") == pytest.approx(ppd), "its head is the base's"
    assert node.rank_seconds(4, "greedy", "ngram") == 4 * NANO.choosing.greedy.call
    assert node.rank_seconds(4, "sampled", "ngram") == 4 * NANO.choosing.filtered.call


def test_a_row_price_stands_in_for_every_table() -> None:
    plain, priced = (ring_costs([NANO] * 5, MODEL, row_price=price) for price in (None, 0.24))
    stage, own = plain.stages[0], priced.stages[0]
    one = MODEL.layer_bytes / 1e9 * NANO.four_bit.at(1)
    assert own.layer_seconds(1, 70) == stage.layer_seconds(1, 70)
    assert own.layer_seconds(9, 70) == pytest.approx(own.layer_seconds(1, 70) + 8 * 0.24 * one)
    head = priced.coordinator.head_seconds
    assert head(1) == plain.coordinator.head_seconds(1)
    assert head(3) == pytest.approx((1 + 2 * 0.24) * head(1))
    eight = replace(MODEL, bits=8)
    d0 = ring_costs([NANO] * 5, eight, row_price=0.24).stages[0]
    fixed = d0.layer_seconds(1, 0) - (d0.layer_seconds(3, 0) - d0.layer_seconds(1, 0)) / 0.48
    assert fixed == pytest.approx(NANO.layer_seconds.value)


def test_a_prompt_s_rows_have_a_price_of_their_own() -> None:
    """What is published of chunks and of longer prompts holds whatever a row of a guess costs."""
    usual, dear = (NodeCosts(NANO, MODEL, 10, row_price=price) for price in (None, 0.24))
    for rows in (64, 65, 300, 2048):
        assert dear.block_seconds(rows, 0) == usual.block_seconds(rows, 0)
    for rows in range(1, 64):
        assert usual.block_seconds(rows, 0) <= dear.block_seconds(rows, 0)
        assert dear.block_seconds(rows, 0) <= dear.block_seconds(rows + 1, 0)


def test_the_data_sheet_is_a_lower_bound() -> None:
    """Of boards whose tables stand on what was published; others' tables are the data sheet's."""
    for name in profile_names():
        profile = profile_named(name)
        usual, least = (NodeCosts(profile, MODEL, 10, price) for price in (None, DATA_SHEET))
        for rows in (2, 4, 16, 64):
            ratio = least.block_seconds(rows, 0) / usual.block_seconds(rows, 0)
            assert ratio < 1 if profile.least_row_seconds else ratio == 1
            assert least.head_seconds(rows) <= usual.head_seconds(rows)
    # The roofline of one, of 2 × 1.88e9 flop a row, at half of 10.24 TFLOPS.
    nano = NodeCosts(NANO, MODEL, 1, DATA_SHEET)
    arithmetic = 16 * 2 * (8 / 4.25) * MODEL.layer_bytes / (0.5 * 10.24e12)
    reading = MODEL.layer_bytes / (0.85 * 68e9)
    assert nano.layer_seconds(16, 0) - NANO.layer_seconds.value == pytest.approx(
        math.hypot(reading, arithmetic), rel=1e-3
    )


def test_no_rows_cost_nothing() -> None:
    node = NodeCosts(NANO, MODEL, 10)
    assert node.block_seconds(0, 500) == 0
    assert node.layer_seconds(0, 500) == 0
    assert node.gather_seconds(0) == 0
    assert node.head_seconds(0) == 0
    assert node.draft_seconds(0, 500) == 0
    assert node.rank_seconds(0, "greedy") == node.choose_seconds(0, "sampled") == 0


@given(
    st.sampled_from(profile_names()),
    st.sampled_from(list(COST_MODELS)),
    st.integers(1, 200),
    st.integers(0, 4000),
)
def test_more_rows_and_more_context_never_cost_less(
    profile: str, model: str, rows: int, seen: int
) -> None:
    node = NodeCosts(profile_named(profile), cost_model_named(model), 3)
    assert 0 < node.block_seconds(rows, seen) <= node.block_seconds(rows + 1, seen)
    assert node.block_seconds(rows, seen) <= node.block_seconds(rows, seen + 1)
    assert 0 < node.draft_seconds(rows, seen) <= node.draft_seconds(rows + 1, seen)
    assert 0 < node.head_seconds(rows) <= node.head_seconds(rows + 1)


# --- rings --------------------------------------------------------------------------------------


def test_the_layers_are_split_and_fit() -> None:
    assert [stage.layers for stage in nano_ring(3).stages] == [14, 13, 13]
    assert nano_ring(4).coordinator.layers == 0
    assert len(nano_ring(4).links) == 5


def test_a_link_is_as_bad_as_its_worse_end() -> None:
    far = structs.replace(NANO, link_latency=Figure(0.02, "made up"))
    thin = structs.replace(NANO, link_bandwidth=Figure(1e6, "made up"))
    latency, bandwidth = NANO.link_latency.value, NANO.link_bandwidth.value
    assert ring_costs([NANO, NANO, far, thin], MODEL).links == (
        LinkCosts(latency, bandwidth),
        LinkCosts(0.02, bandwidth),
        LinkCosts(0.02, 1e6),
        LinkCosts(latency, 1e6),  # back to D0
    )
    assert LinkCosts(0.5, 1e6).seconds(2_000_000) == 2.0


def test_a_block_that_does_not_fit_is_refused_by_stage() -> None:
    model = cost_model_named("llama-3.1-70b")
    orin = profile_named("jetson-agx-orin-64gb")
    with pytest.raises(
        CapacityError,
        match=r"stage 2 \(jetson-orin-nano-8gb\) needs 18\.18 GB for layers 40 to 79 of "
        r"llama-3\.1-70b and has 6\.98 GB; use more stages or a device with more memory",
    ):
        ring_costs([NANO, orin, NANO], model)
    assert len(ring_costs([NANO, orin, orin], model).stages) == 2


def test_a_stage_holds_its_block_and_no_embedding() -> None:
    """That stays in its file (model.block)."""
    block = 40 * MODEL.layer_bytes
    roomy = structs.replace(NANO, memory_bytes=Figure(block, "made up"))
    tight = structs.replace(NANO, memory_bytes=Figure(block - 1, "made up"))
    ring_costs([NANO, roomy], MODEL)
    with pytest.raises(CapacityError, match="stage 1 "):
        ring_costs([NANO, tight], MODEL)


def test_a_ring_needs_a_stage_and_a_layer_for_each() -> None:
    with pytest.raises(ConfigError, match="1 devices make no ring"):
        ring_costs([NANO], MODEL)
    with pytest.raises(ConfigError, match="41 stages for a model of 40 layers"):
        nano_ring(41)


def on_the_wire(frame: bytes) -> int:
    """Bytes of a frame as ZeroMQ sends it: a MESSAGE command of CurveZMQ (RFC 26) has a name and a
    nonce of 8 bytes each, an authenticator of 16 and a flag; ZMTP's header has 2 or 9 (RFC 23)."""
    body = 33 + len(frame)
    return body + (2 if body < 256 else 9)


@pytest.mark.parametrize("rows", [0, 1, 8, 16, 80])
@pytest.mark.parametrize("ran", [0, 1, 2, 8])
def test_a_segment_is_charged_what_is_sent(rows: int, ran: int) -> None:
    """Within the few bytes by which a header's numbers differ."""
    column, time = np.arange(rows), StageTime(max(rows, 1), 0.5)
    width = MODEL.hidden_size
    hidden = Tensor("float16", (rows, width), bytes(2 * rows * width))
    tokens, what = (column[:0], hidden) if ran else (column, None)
    parts = (column, column, column, tokens, what, (time,) * ran)
    charged = nano_ring(8).segment_bytes(rows, ran)
    for seq, epoch in ((9, 9), (3000, 300)):
        frame = encode(one_part(1, seq, epoch, False, 0, rows, *parts))
        sent = on_the_wire(frame)
        assert abs(charged - sent) <= 4


@pytest.mark.parametrize("rows", [0, 1, 16])
@pytest.mark.parametrize("likeliest", [-1, 0, 5])
def test_a_verdict_is_charged_what_is_sent(rows: int, likeliest: int) -> None:
    column, chosen = np.arange(rows), rows // 2
    columns = 1 if likeliest < 0 else 2 + likeliest
    figures = Tensor("float64", (chosen, columns), bytes(8 * chosen * columns))
    top = np.arange(chosen * max(likeliest, 0))
    times = (StageTime(max(rows, 1), 0.5),) * 4
    segment = one_part(1, 9, 9, False, 0, rows, column, column, column, column, None, times)
    verdict = Verdict(column[:chosen], column[:chosen], top, figures)
    frame = encode(changed(segment, verdict=verdict))
    sent = on_the_wire(frame)
    charged = nano_ring(4).verdict_bytes(rows, 4, chosen, chosen * (columns - 1) + len(top))
    assert abs(charged - sent) <= 16  # a frame of integers is longer than 255 bytes, or not


def test_the_last_stage_needs_room_for_the_head_that_it_holds() -> None:
    nbytes = 20 * MODEL.layer_bytes + MODEL.head.bytes
    exact = structs.replace(NANO, memory_bytes=Figure(nbytes, "made up"))
    ring_costs([NANO, NANO, exact], MODEL, head_last=True)
    tight = structs.replace(NANO, memory_bytes=Figure(nbytes - 1, "made up"))
    ring_costs([NANO, NANO, tight], MODEL)
    with pytest.raises(CapacityError, match="stage 2"):
        ring_costs([NANO, NANO, tight], MODEL, head_last=True)


@pytest.mark.parametrize("requests", [2, 8, 64])
@pytest.mark.parametrize("ran", [0, 2])
def test_a_segment_of_several_requests_is_charged_what_is_sent(requests: int, ran: int) -> None:
    column, rows = np.arange(2), 2 * requests
    hidden = Tensor("float16", (rows, MODEL.hidden_size), bytes(2 * rows * MODEL.hidden_size))
    tokens, time = (column[:0] if ran else column), StageTime(rows, 0.5)
    parts = tuple(
        Part(number, 40, False, 0, 2, column, column, column, tokens)
        for number in range(300, 300 + requests)
    )
    segment = Segment(Header(3000), parts, (time,) * ran, hidden if ran else None)
    sent = on_the_wire(encode(segment))
    assert abs(nano_ring(8).segment_bytes(rows, ran, requests=requests) - sent) <= 4 + requests


@pytest.mark.parametrize("requests", [2, 8, 64])
def test_verdicts_of_several_requests_are_charged_what_is_sent(requests: int) -> None:
    column, rows = np.arange(4), 4 * requests
    verdict = Verdict(column[:2], column[:2], column[:0], Tensor("float64", (2, 1), bytes(16)))
    parts = tuple(
        Part(number, 40, False, 0, 4, *[column] * 4, verdict=verdict)
        for number in range(300, 300 + requests)
    )
    segment = Segment(Header(3000), parts, (StageTime(rows, 0.5),) * 4)
    sent = on_the_wire(encode(segment))
    charged = nano_ring(4).verdict_bytes(rows, 4, 2 * requests, requests=requests)
    assert abs(charged - sent) <= 16 + 3 * requests
