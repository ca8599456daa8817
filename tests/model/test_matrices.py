"""Matrices of one input as one: the same products, without a copy of what stays mapped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.cases import case
from support.checkpoints import write_checkpoint

from edgespec.config import QUANTISATIONS, Quantisation
from edgespec.kernels.products import RowProduct
from edgespec.model.block_file import BlockFile, write_block
from edgespec.model.matrices import MatrixReader, SideBySide
from edgespec.model.quantised.linear import dequantised, joined, linear_from
from edgespec.model.quantised.selftest import made_up
from edgespec.model.sources import open_source
from edgespec.model.tensors import one_view

NAMES = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
SHAPES = [torch.Size((out, 128)) for out in (128, 64, 64)]
CPU = torch.device("cpu")
FORMS = {
    **{name: form for name, form in QUANTISATIONS.items() if name != "none"},
    "low": Quantisation("int4", 32, zeros="low", scales="float16"),
    "points": Quantisation("int4", 64, zeros="points", scales="float16"),
    "groups": Quantisation("int8", 32, zeros="low", scales="float16"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_checkpoint(tmp_path_factory.mktemp("m") / "m", intermediate_size=64, **sizes)


def test_a_joined_form_is_that_of_the_weights_below_each_other() -> None:
    for name, form in FORMS.items():
        with case(name):
            parts = [made_up(form, shape) for shape in SHAPES]
            whole = joined(parts, form, SHAPES, copied=True)
            if form.double:
                assert whole is None, "scales that share numbers"
                continue
            assert whole is not None
            weight = dequantised(whole, torch.Size((256, 128)), form, torch.float64)
            each = zip(parts, SHAPES, strict=True)
            apart = [dequantised(part, shape, form, torch.float64) for part, shape in each]
            assert torch.equal(weight, torch.cat(apart))
            assert joined(parts, form, SHAPES, copied=False) is None


def test_tiles_of_rows_of_two_weights_are_not_joined() -> None:
    form, shapes = QUANTISATIONS["int4"], [torch.Size((96, 128)), torch.Size((96, 128))]
    parts = [made_up(form, shape) for shape in shapes]
    assert joined(parts, form, shapes, copied=True) is None


def test_columns_in_two_orders_are_not_joined() -> None:
    form = Quantisation("int4", 64, zeros="points", scales="float16", ordered=True)
    parts = [made_up(form, shape) for shape in SHAPES]
    parts = [part | {"order": torch.arange(128, dtype=torch.int32)} for part in parts]
    rows = torch.randn(3, 128, dtype=torch.float64)
    whole = joined(parts, form, SHAPES, copied=True)
    assert whole is not None
    multiply = linear_from(whole, None, torch.Size((256, 128)), form, torch.float64, "cpu")
    each = zip(parts, SHAPES, strict=True)
    apart = [linear_from(part, None, shape, form, torch.float64, "cpu") for part, shape in each]
    assert torch.equal(multiply(rows), torch.cat([one(rows) for one in apart], 1))
    parts[1]["order"] = parts[1]["order"].flip(0)
    assert joined(parts, form, SHAPES, copied=True) is None


@pytest.mark.parametrize("name", ["none", "int4", "int8", "nf4", "nf4-dq"])
def test_matrices_of_a_mapped_file_are_one_where_they_lie(
    folder: Path, tmp_path: Path, name: str
) -> None:
    """And they give what each gives by itself."""
    form = QUANTISATIONS[name]
    source = open_source(folder, form)
    path = tmp_path / "block.safetensors"
    write_block(source, 1, 3, path)
    mapped = BlockFile(path, source.config, form)
    rows = torch.randn(5, 128)
    reader = MatrixReader(mapped, torch.float32, CPU)
    one_by_one = [reader.product([n], [s]) for n, s in zip(NAMES, SHAPES, strict=True)]
    apart = torch.cat([product(rows) for product in one_by_one], 1)
    together = reader.product(NAMES, SHAPES)
    assert torch.equal(together(rows), apart)
    plain = MatrixReader(source, torch.float32, CPU).product(NAMES, SHAPES)
    assert torch.equal(plain(rows), apart)
    part = {"none": "", "int4": ".tiles"}.get(name, ".codes")
    codes = [mapped.tensor(f"{n}.weight{part}") for n in NAMES]
    view = one_view(codes)
    assert view is not None
    assert torch.equal(view, torch.cat(codes))
    assert view.data_ptr() == codes[0].data_ptr()
    assert one_view(codes[::-1]) is None
    apart_still = isinstance(together, SideBySide)
    assert apart_still == (name == "nf4-dq")
    if name == "none":
        assert isinstance(together, RowProduct)
        assert together.held["weight"].data_ptr() == codes[0].data_ptr(), "nothing is copied"
