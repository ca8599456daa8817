"""Planning from files: models, devices, and the plan's speed in virtual time."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from support.checkpoints import write_checkpoint, write_family
from support.ggufs import all_as, tokenizer_values, write_gguf
from support.packed_folders import fp8, write_mxfp4, write_packed

from edgespec.config import FILE, QUANTISATIONS
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.model_names import resolved
from edgespec.daemon.planning import (
    Quants,
    chosen_context,
    devices_of,
    measured_share,
    model_to_plan,
)
from edgespec.daemon.profiles import profile_named
from edgespec.errors import ConfigError
from edgespec.model.hub import ModelFiles, model_files
from edgespec.model.inventory import block_parts
from edgespec.model.manifest import MANIFEST, BlockEntry, Manifest
from edgespec.model.sharding import Sharding
from edgespec.model.sources import open_source
from edgespec.planning.catalogue import MODELS
from edgespec.planning.cost_model import COST_MODELS
from edgespec.planning.costs import NodeCosts

NANO, NX = "jetson-orin-nano-8gb", "jetson-orin-nx-16gb"


def written(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


# --- models -------------------------------------------------------------------------------------


def test_a_model_folder_needs_no_weights(tmp_path: Path) -> None:
    config = json.loads((Path(bundled("base")) / "config.json").read_text())
    written(tmp_path / "config.json", config)
    asked = model_to_plan(str(tmp_path), Quants("nf4", draft="none"), bundled("draft"))
    assert (asked.model.of.layers, asked.model.quantisation.name) == (8, "nf4")
    assert asked.model.draft.name == "draft"
    assert asked.model.draft.bits == 16
    assert (asked.context, asked.split) == (1024, ())
    assert chosen_context(asked, 0) == 1024
    assert chosen_context(asked, 300) == 300
    with pytest.raises(ConfigError, match=r"context is 2000 and .* takes 1024 tokens"):
        chosen_context(asked, 2000)


def test_a_cost_model_has_its_published_draft() -> None:
    asked = model_to_plan("llama-2-7b", Quants(draft="none"), "")
    assert asked.model.quantisation.name == "int4"
    assert asked.model.draft == COST_MODELS["llama-2-7b"].draft
    assert chosen_context(asked, 0) == 4096
    quantised = model_to_plan("llama-2-7b", Quants(draft="int4"), bundled("draft")).model.draft
    assert (quantised.name, quantised.bits) == ("draft", 4)


def test_a_packed_file_that_is_not_here_is_planned_as_packed() -> None:
    packed = model_to_plan(MODELS["qwen3-8b"].gguf, Quants(draft="none"), "none").model
    usual = model_to_plan(MODELS["qwen3-8b"].hub, Quants(draft="none"), "none").model
    assert (packed.name, packed.quantisation.name) == ("qwen3-8b", "file")
    assert usual.quantisation.name == "int4"
    assert usual.costs.layer_bytes < packed.costs.layer_bytes < 2 * usual.costs.layer_bytes


def test_known_models_are_planned_without_asking_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(model: str) -> ModelFiles:
        assert Path(model).exists(), f"{model} was asked for"
        return model_files(model)

    for room in ("daemon.planning", "daemon.precision"):
        monkeypatch.setattr(f"edgespec.{room}.model_files", asked)
    for name, known in MODELS.items():
        drafts = ["none", *{"independent", "eagle3"} & {one.source for one in known.drafts}]
        for model, draft in product(filter(None, (name, known.hub, known.gguf)), drafts):
            asked = model_to_plan(resolved(model), Quants(), draft).model
            assert (asked.name, asked.costs.family) == (name, known.family), model


def test_block_files_say_how_they_are_quantised_and_cut(tmp_path: Path) -> None:
    shutil.copy(Path(bundled("base")) / "config.json", tmp_path)
    mark = "0" * 64
    blocks = (BlockEntry("stage-1.safetensors", 9, mark, 0, 5),)
    blocks += (BlockEntry("stage-2.safetensors", 9, mark, 5, 8),)
    made = Manifest("base", mark, QUANTISATIONS["nf4"], "bfloat16", 8, blocks, None, (), "1")
    written(tmp_path / MANIFEST, made.to_dict())
    for quant in ("auto", "nf4"):
        asked = model_to_plan(str(tmp_path), Quants(quant, draft="none"), "")
        assert (asked.model.quantisation.name, asked.split) == ("nf4", (5, 3))
    with pytest.raises(ConfigError, match="holds block files in nf4, not int4"):
        model_to_plan(str(tmp_path), Quants("int4", draft="none"), "")


def test_layers_of_a_packed_file_count_as_the_largest_is_held(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    folder = write_checkpoint(tmp_path / "plain", num_hidden_layers=2, **sizes)
    weights, norms = 4 * 64 * 64 + 3 * 64 * 128, 2 * 64 * 2
    wide = 64 * 128
    four, eight = 4 + 32 / 32, 8 + 32 / 32  # bits, a scale and a zero for each 32 columns

    def types(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) < 2:
            return "F32"
        return "Q8_0" if name == "model.layers.1.mlp.down_proj.weight" else "Q4_0"

    file = tmp_path / "mixed.gguf"
    write_gguf(folder, file, types, tokenizer_values(tmp_path))
    asked = model_to_plan(str(file), Quants(draft="none"), "").model
    assert asked.quantisation == FILE
    assert asked.file.layer == norms + ((weights - wide) * four + wide * eight) / 8
    costs = asked.costs
    assert (costs.layer_bytes, costs.bits, costs.quantisation) == (asked.file.layer, 4, "file")
    rounded = model_to_plan(str(file), Quants("int4-g32", draft="none"), "").model.costs
    assert rounded.layer_bytes == weights * four / 8
    sharded = tmp_path / "sharded"
    Sharding(str(file), FILE, FILE).into(sharded, ((0, 1), (1, 2)), lambda what, done, layers: None)
    again = model_to_plan(str(sharded), Quants(draft="none"), "")
    assert (again.model.file, again.split) == (asked.file, (1, 1))


def test_what_latents_need_as_values_is_counted_in_what_a_ring_computes_in(tmp_path: Path) -> None:
    """An older file has what makes keys turned, so its values are taken: loading counts them, too,
    and in a ring of CPUs they take 32 bits."""
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 32, "hidden_size": 64}
    sizes |= {"intermediate_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 32}
    file = tmp_path / "m.gguf"
    types = all_as("Q8_0")
    write_gguf(
        write_family(tmp_path / "plain", "glm4_moe_lite", **sizes), file, types, heads_apart=False
    )
    parts, planned = block_parts(open_source(file, FILE), 1, 2), []
    for dtype in ("bfloat16", "float32"):
        asked = model_to_plan(str(file), Quants(draft="file", dtype=dtype), str(file)).model
        assert asked.file.layer == parts.held_bytes(getattr(torch, dtype))
        planned.append((asked.file.layer, asked.draft.layer_bytes))
    more, of_draft = (wide - narrow for narrow, wide in zip(*planned, strict=True))
    # A draft reads the experts of one row.
    assert more > of_draft > 2 * 4 * 64 * 64, "of four heads"


def test_experts_that_are_packed_closer_are_charged_apart(tmp_path: Path) -> None:
    """As in gpt-oss's own files, of which a row reads all of attention and few of the experts."""
    plain = write_family(tmp_path / "plain", "gpt_oss", hidden_size=128, intermediate_size=128)
    write_mxfp4(plain, tmp_path / "own")
    asked = model_to_plan(str(tmp_path / "own"), Quants(draft="none"), "").model
    of, costs = asked.of, asked.costs
    experts = sum(r * -(-c // 32) * 18 for r, c in of.mlp_matrices) * of.experts
    assert asked.file.experts == pytest.approx(experts, rel=0.2)  # tables beside small matrices
    attention = 2 * (of.layer_weights - of.mlp_weights)
    assert asked.file.layer - asked.file.experts == pytest.approx(attention, rel=0.2)
    assert (costs.bits, costs.expert_bits, costs.expert_bytes) == (16, 4, asked.file.experts)
    known = model_to_plan(MODELS["gpt-oss-20b"].gguf, Quants(draft="none"), "").model  # not here
    others = known.of.layer_weights - known.of.mlp_weights
    assert known.file == (
        others * 9 // 8 + known.of.mlp_weights * 5 // 8, known.of.mlp_weights * 5 // 8, False
    )  # fmt: skip


def test_a_gpu_is_charged_for_unpacking_fp8(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", hidden_size=128, intermediate_size=128)
    write_packed(plain, tmp_path / "own", fp8(64))
    asked = model_to_plan(str(tmp_path / "own"), Quants(draft="none"), "").model
    assert asked.file.unpacked
    model = asked.costs
    for name, gpu in (("jetson-orin-nano-8gb", True), ("raspberry-pi-5-8gb", False)):
        costs = NodeCosts(profile_named(name), model, 1)
        matrices = costs._matrices(4, 1e6, 8)
        weights = costs._weights
        by_codes = weights(4, 1e6, 8)
        unpacked = weights(4, 2e6, 16) + 3e6 / costs.profile.copy_bandwidth.value
        assert matrices == (unpacked if gpu else by_codes), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing", Quants(), ""), "there is no model folder nothing"),
        (("llama-2-7b", Quants("int5"), ""), "unknown quantisation 'int5'"),
        (("llama-2-7b", Quants(head="int5"), ""), "unknown quantisation 'int5'"),
        (
            ("llama-2-7b", Quants(), "nothing"),
            "no model folder or file nothing, .*or name a draft source",
        ),
        (("llama-2-7b", Quants(draft="int5"), bundled("draft")), "unknown quantisation 'int5'"),
    ],
)
def test_models_that_cannot_be_planned(arguments: tuple[str, Quants, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_to_plan(*arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "does not hold a JSON object"),
        ("{", "is not JSON in UTF-8"),
        ('{"model_type": "mamba"}', "model_type is 'mamba'"),
        ('{"model_type": "llama"}', "num_attention_heads is missing"),
    ],
)
def test_a_config_that_says_nothing(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"config.json.*{message}"):
        model_to_plan(str(tmp_path), Quants(draft="none"), "")


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config.json"):
        model_to_plan(str(tmp_path), Quants(draft="none"), "")


# --- devices ------------------------------------------------------------------------------------


def test_names_of_profiles_with_a_count() -> None:
    coordinator, others = devices_of(f"{NX}, 2*{NANO},raspberry-pi-5-8gb")
    assert (coordinator.name, coordinator.profile) == (NX, profile_named(NX))
    assert [device.name for device in others] == [f"{NANO}#1", f"{NANO}#2", "raspberry-pi-5-8gb"]


def test_a_devices_file(tmp_path: Path) -> None:
    file = written(
        tmp_path / "devices.json",
        [
            {"name": "a", "profile": NANO, "memory_bytes": 3_000_000_000},
            {"name": "b", "profile": NX, "coordinator": True},
            {"name": "c", "profile": NX},
        ],
    )
    coordinator, others = devices_of(file)
    assert coordinator.name == "b"
    assert [(device.name, device.memory) for device in others] == [
        ("a", 3_000_000_000),
        ("c", int(profile_named(NX).memory_bytes.value)),
    ]


def test_a_path_may_be_a_profile_too(tmp_path: Path) -> None:
    file = written(tmp_path / "mine.json", profile_named(NANO).to_dict())
    coordinator, others = devices_of(f"{file},{NX}")
    assert coordinator.profile == profile_named(NANO)
    assert [device.name for device in others] == [NX]
    assert [device.name for device in devices_of(f"2*{file}")[1]] == [f"{NANO}#2"]


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([], "0 devices"),
        ([3], "device 1: it is 3; it must be an object"),
        ([{"name": "a"}], "device 1: the key 'profile' is missing"),
        ([{"name": " ", "profile": NANO}], "device 1: name is ' '"),
        ([{"name": "a", "profile": NANO, "speed": 1}], "unknown key 'speed'; known: name"),
        ([{"name": "a", "profile": "no-such"}], "no profile 'no-such'"),
        ([{"name": "a", "profile": NANO}] * 2, "device 2: the name 'a' is taken"),
        ([{"name": "a", "profile": NANO, "memory_bytes": 1.5}], "memory_bytes is 1.5"),
        ([{"name": "a", "profile": NANO, "coordinator": 1}], "coordinator is 1"),
        (
            [{"name": name, "profile": NANO, "coordinator": True} for name in "ab"],
            "2 of them the coordinator",
        ),
    ],
)
def test_a_wrong_devices_file(tmp_path: Path, listed: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        devices_of(written(tmp_path / "devices.json", listed))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-such", "no profile 'no-such'"),
        (f"x*{NANO}", "names no devices"),
        (f"0*{NANO}", "names no devices"),
        (f"99999999*{NANO}", "names no devices"),
        ("missing/devices.json", "cannot read missing/devices.json"),
    ],
)
def test_devices_that_nobody_knows(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        devices_of(text)


def test_measured_figures_are_counted() -> None:
    profile = profile_named(NANO)
    measured, figures = measured_share(profile)
    assert (measured, figures) == (0, 13)
