"""Every kernel compiles for an Orin, 16-bit rows are multiplied by its tensor cores, a product by
codes takes few instructions a weight, and all that states are read by fits into registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from support.gpu_code import (
    FORMS,
    TOOL,
    Form,
    code_of,
    each_weight,
    empty,
    launch_states,
    usage_of,
)
from support.state_forms import GRANITE, PUBLISHED, QWEN
from support.triton_device import Device

from edgespec.kernels.gpu import rows as rows_kernels
from edgespec.kernels.gpu.attention import attention
from edgespec.kernels.gpu.convolutions import convolved
from edgespec.kernels.gpu.places import Places
from edgespec.kernels.gpu.plain_product import plain_product
from edgespec.model.row_codes import CODED, as_held

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
MOST = {
    **{"int4-g128": (1.7, 2.0), "int4": (1.9, 2.4), "int4-g32": (2.2, 3.3)},
    **{"GPTQ, AWQ": (1.6, 1.9), "Q4_0": (1.7, 2.3), "Q4_1": (2.1, 3.2), "Q4_K": (2.2, 3.3)},
    **{"nf4": (1.9, 2.5), "int8": (2.9, 3.5), "Q8_0": (3.0, 4.3), "Q6_K": (4.3, 6.0)},
}
"""Instructions a weight and thread, with up to 8 rows and with 9 to 16: little more than there are,
and of 4 bits at most 2.2 with up to 8, which reading leaves time for on every board."""

HEADS = (
    # query, heads, of keys, their width, pieces, softcap, window
    (BRAIN, 32, 8, 128, 1, None, None),
    (HALF, 9, 3, 64, 2, None, None),
    (BRAIN, 8, 4, 256, 1, 30.0, 4096),
    (FLOAT, 8, 1, 256, 1, None, None),
)

NARROW_HEADS = ((HEADS[0], CODED), (HEADS[1], CODED), (HEADS[3], HALF))
"""Some whose keys are tried as caches may hold them, too."""


def check_products(compiled: list[Any]) -> None:
    for form in (*FORMS.values(), Form(FLOAT, 32)):
        columns = max(1024, form.group)
        empty(form, 190, columns)(torch.zeros(5, columns, dtype=form.rows))
    plain_product(torch.zeros(5, 512, dtype=BRAIN), torch.zeros(190, 512, dtype=BRAIN))
    assert len(compiled) == len(FORMS) + 2
    for one in compiled:
        assert ("mma.sync" in one.asm["ptx"]) == (one is not compiled[-2])


@pytest.mark.skipif(not TOOL.exists(), reason=f"{TOOL.name} is not beside Triton here")
@pytest.mark.parametrize(
    ("name", "capability"), [*((name, 87) for name in MOST), ("int4", 90), ("int4", 110)]
)
def check_instructions_of_products(compiled: list[Any], name: str, capability: int) -> None:
    """Where sections are shared out and where they are not; registers, shared memory and how many
    programs a multiprocessor holds beside instructions."""
    triton.runtime.driver.set_active(Device(capability))
    form, two = FORMS[name], FORMS[name].planes == 2
    for rows, most in zip((1, 16), MOST[name], strict=True):
        for apart in (False, True) if name == "int4" and capability == 87 else (False,):
            product = empty(form, 256, enough=512 * apart)
            product(torch.zeros(rows, 4096, dtype=form.rows))
            found = code_of(compiled[-1], capability)
            each = each_weight(product, rows, found)
            assert each <= most, (rows, apart, each)
            assert found.programs >= (2 if two else 3 + (rows == 1)), (rows, found)
            assert found.registers <= 255, rows
            assert found.shared <= (64 if two else 48) << 10, (rows, found.shared)
            # All that is read in the loop was asked for some turns before.
            late = [one for one in found.loop if one.startswith("LDG.")]
            assert not late or name == "GPTQ, AWQ" or two, late


def check_attention(compiled: list[Any]) -> None:
    for form, held_as in (*((form, form[0]) for form in HEADS), *NARROW_HEADS):
        dtype, heads, kv_heads, dim, pieces, softcap, window = form
        rows = torch.zeros(kv_heads, 256, dim, dtype=dtype)
        key = [as_held(rows, held_as) if held_as == CODED else rows.to(held_as)] * pieces
        slots = torch.zeros(5, 256 * pieces, dtype=torch.int32)
        places = Places(slots, slots[0], slots[0, :1], torch.zeros(5, dtype=torch.int64))
        query = torch.zeros(5, heads, dim, dtype=dtype)
        attention(query, key, key, places, 0.1, softcap, window)
    assert len(compiled) == 2 * (len(HEADS) + len(NARROW_HEADS))


@pytest.mark.skipif(not TOOL.exists(), reason=f"{TOOL.name} is not beside Triton here")
@pytest.mark.parametrize("capability", [87, 90, 110])
def check_states(compiled: list[Any], capability: int) -> None:
    triton.runtime.driver.set_active(Device(capability))
    for name, form in PUBLISHED.items() if capability == 87 else [("", QWEN)]:
        launch_states(form, BRAIN)
        found = [usage_of(one, capability) for one in compiled[-4:]]
        assert not any(one.spilled for one in found), (name, found)
        assert found[2].programs >= 12, (name, found)  # of one warp, which waits for memory
    launch_states(GRANITE, FLOAT, began=False)
    held, slots = torch.zeros(1, 64, 2048, dtype=HALF), torch.zeros(5, 3, dtype=torch.int64)
    gains, mixed = torch.zeros(3, 2048), torch.zeros(5, 3 * 2048, dtype=HALF)
    absent = torch.zeros(5, 3, 1, dtype=torch.bool)
    for pieces in (1, 2):
        convolved([held] * pieces, slots, absent, gains, gains[0] if pieces > 1 else None, mixed)
    assert len({one.metadata.name for one in compiled}) == 5


def check_rows(compiled: list[Any]) -> None:
    rows, gain = torch.zeros(5, 4096, dtype=BRAIN), torch.zeros(4096)
    rows_kernels.add(rows, rows, 1.0, gain, gain, 1e-5)
    angles = (torch.zeros(5, 1, 128, dtype=BRAIN),) * 2
    rows_kernels.rotate(rows.view(5, 32, 128), 24, 4, angles, (gain[:128],) * 2, 1e-5)
    for activation in ("silu", "gelu", "gelu_pytorch_tanh"):
        rows_kernels.gated(rows, activation)
    kv = rows.view(5, 1, 32, 128).transpose(0, 2)
    rows_kernels.code(kv, torch.empty(32, 1, 5, 132, dtype=CODED), 128, 1e-30)
    assert len(compiled) == 6
