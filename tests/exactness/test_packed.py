"""Promise 1 with a folder that another program packed: the text of plain decoding of its values.

The reference is transformers' own model of what the codes stand for, in one piece, in float64.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.packed_folders import gptq, write_packed
from support.tiers import thorough
from support.torch_rings import BASE, generated, prompts, request, torch_ring

NEW_TOKENS = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The bundled base as GPTQ rounds it with act-order, and the values of its codes."""
    folder = tmp_path_factory.mktemp("packed") / "base"
    return folder, write_packed(Path(BASE), folder, gptq(64, act_order=True, rounded=True))


@pytest.mark.parametrize(
    ("stages", "policy"),
    [(3, "flowspec"), thorough(1, "autoregressive"), thorough(5, "adaptive")],
)
def test_greedy_is_what_transformers_generates(
    folders: tuple[Path, Path], stages: int, policy: str
) -> None:
    folder, values = folders
    ring = torch_ring(stages, quant="file", base=folder)
    for tag, (name, prompt) in enumerate(list(prompts().items())[::9][:2]):
        ring.replies.clear()
        answer = ring.ask(request(prompt, policy, NEW_TOKENS, tag=tag))
        assert answer.token_ids == generated(prompt, NEW_TOKENS, base=values), name
