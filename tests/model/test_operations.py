"""The operations of a layer are those that devices are charged (planning.operations).

What is charged is a launch on an accelerator, so layers compute as they do there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import case
from support.checkpoints import FAMILY_SETTINGS, write_family
from support.operations import operations

from edgespec.config import QUANTISATIONS
from edgespec.model import block as block_module
from edgespec.model import gemma4, latent, mixture, state_mixer
from edgespec.model.block import Block
from edgespec.model.families import FAMILIES
from edgespec.model.joint import CachedPart
from edgespec.model.loader import Checkpoint
from edgespec.model.mixture import sum_of_experts
from edgespec.model.row_math import BATCHED
from edgespec.model.sources import quantising
from edgespec.model.state_mixer import StateMath
from edgespec.model.tree_attention import tree_mask
from edgespec.planning.operations import (
    EXPERT_OPERATIONS,
    LAYER_OPERATIONS,
    USUAL_OPERATIONS,
    layer_operations,
)


@pytest.fixture(autouse=True)
def _as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_module, "row_math", lambda *_: BATCHED)


def layers_of(block: Block) -> list[Any]:
    return block._layers


def layer_of(block: Block, rows: int, requests: int = 1) -> Callable[[], object]:
    """Runs the block's layer over so many rows of each request, again and again."""
    caches = [block.new_cache(64) for _ in range(requests)]
    sees = tree_mask(0, np.tri(rows, dtype=np.bool_))
    parts = [CachedPart(number, cache, sees) for number, cache in enumerate(caches)]
    entering = torch.randn(rows * requests, block.hidden_size, dtype=block.dtype)
    tokens, places = torch.arange(rows * requests), torch.arange(rows).repeat(requests)
    layers = layers_of(block)
    layer, given = layers[0], list[Any]()

    def told(*all_that: Any) -> torch.Tensor:
        given.extend(all_that)
        raise StopIteration

    layers[0] = told
    with pytest.raises(StopIteration):
        block.forward_joint(entering, places, parts, tokens=tokens)
    layers[0] = layer

    def run() -> object:
        with torch.no_grad():
            return layer(*given)

    run()  # masks are made once a pass
    return run


def experts_used(run: Callable[[], object]) -> int:
    """Of a layer's experts, how many its rows go through."""
    used = set[int]()

    def told(experts: Any, chosen: torch.Tensor, *rest: Any) -> torch.Tensor:
        used.update(chosen.flatten().tolist())
        return sum_of_experts(experts, chosen, *rest)

    with pytest.MonkeyPatch.context() as patched:
        for module in (mixture, gemma4):
            patched.setattr(module, "sum_of_experts", told)
        run()
    return len(used)


def test_every_family_is_charged_what_its_layers_are_made_of(tmp_path: Path) -> None:
    assert set(LAYER_OPERATIONS) == set(FAMILIES)
    for name in FAMILY_SETTINGS:
        family = name.partition("-")[0]
        others = ("gemma4_text-experts", "nemotron_h-experts")
        if name.startswith(("granitemoehybrid-", "falcon_h1")) or name in others:
            continue  # its layers turn no keys, which is less than is charged; and see below
        if name in ("lfm2-biases", "deepseek_v2-groups", "glm4_moe_lite-dense"):
            continue  # variants that no published model, or no small one, is of
        source = Checkpoint(write_family(tmp_path / name, name))
        block = Block(source, 2, 3, "bfloat16")
        with case(name):
            run = layer_of(block, 2)
            used = experts_used(run) if family in EXPERT_OPERATIONS else 0
            found = operations(run)
            assert len(found) == layer_operations(family, used), found
            if name == "lfm2":
                attending = operations(layer_of(Block(source, 1, 2, "bfloat16"), 2))
                assert len(attending) == len(found), attending


def test_heads_of_latents_are_launched_one_by_one_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Checkpoint(write_family(tmp_path / "m", "glm4_moe_lite"))
    monkeypatch.setattr(latent, "RowProduct", int)  # as if none were compiled
    block = Block(source, 2, 3, "bfloat16")
    run = layer_of(block, 2)
    used = experts_used(run)
    found = operations(run)
    assert len(found) == layer_operations("glm4_moe_lite", used, heads=4), found


def test_layers_with_states_are_charged_what_a_gpu_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four kernels (tests/kernels/interpreted/check_states.py counts them) in the place of torch,
    which goes row by row."""
    zeros = torch.zeros(2, 1024, dtype=torch.bfloat16)

    def read(math: StateMath, layer: int, rows: object, projected: Any, seen: object) -> Any:
        return zeros.flatten()[: 2 * math.form.inner].view(2, -1)

    monkeypatch.setattr(state_mixer, "read_states", read)
    for name, index in (
        *(("granitemoehybrid-mamba", 2), ("falcon_h1", 2), ("nemotron_h", 0)),
        *(("qwen3_5_text", 1), ("qwen3_5_moe_text", 1), ("qwen3_next", 1)),
    ):
        source = Checkpoint(write_family(tmp_path / name, name))
        block = Block(source, index, index + 1, "bfloat16")
        with case(name):
            run, family = layer_of(block, 2), name.partition("-")[0]
            used = experts_used(run) if block.has_experts else 0
            found = operations(run)
            assert len(found) + 4 == layer_operations(family, used, 1.0), found


BESIDE = {
    "gemma4_text-experts": 1.0,
    "granitemoehybrid-experts": 1.0,
    "nemotron_h-experts": 23 / 52,
}
"""Which share of a published one's layers have experts."""


@pytest.mark.parametrize("name", BESIDE)
def test_a_mixture_beside_an_mlp_is_charged_nearly_what_it_is_made_of(
    tmp_path: Path, name: str
) -> None:
    source = Checkpoint(write_family(tmp_path / "m", name))
    block = Block(source, 1, 2, "bfloat16")
    used = experts_used(run := layer_of(block, 2))
    assert used
    # Of each published one's layers some 8 experts are used by a row.
    family, share = name.partition("-")[0], BESIDE[name]
    found = share * len(operations(run)) + (1 - share) * layer_operations(family)
    assert abs(found - layer_operations(family, used)) < 10


@pytest.mark.parametrize("name", ["none", "int4", "int8"])
def test_a_packed_layer_has_as_many_operations_as_a_plain_one(tmp_path: Path, name: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 64}
    source = quantising(
        Checkpoint(write_family(tmp_path / "m", "llama", **sizes)), QUANTISATIONS[name]
    )
    block = Block(source, 2, 3, "bfloat16")
    for rows, less in ((1, 2), (2, 0), (16, 0)):
        with case(rows):
            found = operations(layer_of(block, rows))
            assert len(found) == USUAL_OPERATIONS - less, found


def test_a_further_request_launches_a_share_of_a_layer(tmp_path: Path) -> None:
    """What planning.costs charges for it: at most 0.4 of a layer."""
    block = Block(Checkpoint(write_family(tmp_path / "m", "llama")), 2, 3, "bfloat16")
    one, two, three = (len(operations(layer_of(block, 2, requests))) for requests in (1, 2, 3))
    assert two - one <= 0.4 * one
    assert three - two <= two - one
