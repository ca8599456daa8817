"""Shared rows: requests that hold rows together compute what each would with rows of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import FAMILY_SETTINGS, FOLDING, write_checkpoint, write_family
from support.joint import Asker, Twice
from support.packed_forms import MixedSource
from support.tiers import tiered

from edgespec.config import QUANTISATIONS
from edgespec.machines.effects import BlockPart
from edgespec.model.kv_cache import STEP
from edgespec.model.loader import Checkpoint
from edgespec.model.sources import QuantisingSource
from edgespec.tree.ledger import RowLedger, Rows
from edgespec.tree.stems import Stems

NAMES = sorted(set(FAMILY_SETTINGS) - set(FOLDING))  # which share none
QUICK = ["gemma2", "gpt_oss"] if "gpt_oss" in NAMES else ["gemma2", "llama"]
PREAMBLE = 90
VISIBLE = 1e-3  # what rows in a wrong place differ by, at least
DTYPES = ("bfloat16", "float16", "float32", "float64")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("shared")


class Sharing:
    """The joint side shares what requests begin with; on the other side each reads it itself."""

    def __init__(self, twice: Twice) -> None:
        self.twice, self.stems, self.found = twice, Stems(), [0.0]
        self.askers: dict[int, Asker] = {}

    def open(self, request: int) -> Asker:
        self.twice.open(request)
        self.stems.open(request)
        self.askers[request] = Asker(request, seed=request)
        return self.askers[request]

    def run(self, *parts: BlockPart) -> None:
        joint, apart, _, _ = self.twice.run(parts)
        self.found.append(float((joint - apart).abs().max()))

    def fork(self, request: int, base: int, tokens: np.ndarray) -> Asker:
        """A request begins with these tokens, which are the base's first ones."""
        rows, held = len(tokens), len(self.askers[base].ledger)
        how = self.stems.fork(request, base, rows, self.stems.shareable(base, rows), held)
        for stage in self.twice.joint.stages:
            stage.fork(request, base, how)
        ids = np.arange(rows)
        whole = BlockPart(request, Rows(ids, ids - 1, tokens, ids), 0, np.tri(rows, dtype=np.bool_))
        for stage in self.twice.apart.stages:
            stage.open(request, rows)
        self.twice.apart.run(self.twice.job((whole,)))
        asker = self.askers[request] = Asker(request, seed=request, ledger=RowLedger(rows))
        asker.next_id = rows
        return asker

    def close(self, request: int) -> None:
        self.twice.close(request)
        self.stems.close(request)
        del self.askers[request]

    def prune(self) -> None:
        """Of each request some rows are accepted, others dropped."""
        for asker in self.askers.values():
            start = asker.ledger.committed
            self.twice.gather(asker.request, start, asker.prune(1))

    def check(self) -> None:
        """Rows and bytes are those of the books; nothing differs."""
        own = sum(len(asker.ledger) for asker in self.askers.values())
        for shared, apart in zip(self.twice.joint.stages, self.twice.apart.stages, strict=True):
            assert shared.held[0] == own - self.stems.saved
            assert apart.held[0] == own
            row = apart.held[1] / sum(apart._caches[r].capacity for r in self.askers)
            spare = len(self.askers) * (2 * STEP) + own / 8
            assert shared.held[1] <= row * (own - self.stems.saved + spare)
        assert max(self.found, default=0.0) == 0
        for request in self.askers:
            assert self.twice.off(request) == 0


def live(twice: Twice) -> None:
    """Three requests with one preamble, two of them with more in common, in joint passes."""
    sharing = Sharing(twice)
    one = sharing.open(1)
    prompt = one.prompt(PREAMBLE + 40)
    sharing.run(prompt)
    tokens = prompt.rows.tokens
    sharing.run(one.guess(4))
    two = sharing.fork(2, 1, tokens[:PREAMBLE])
    sharing.check()
    assert sharing.stems.saved == PREAMBLE
    sharing.run(two.prompt(7), one.guess(3))
    three = sharing.fork(3, 1, tokens[: PREAMBLE + 35])
    sharing.run(three.prompt(2))
    sharing.run(three.guess(5), one.guess(2), two.guess(6))
    sharing.prune()
    sharing.run(two.guess(3), three.guess(3))
    four = sharing.fork(4, 2, tokens[:50])
    sharing.run(four.prompt(1), one.guess(3), three.guess(1), two.guess(1))
    sharing.prune()
    sharing.check()
    assert sharing.stems.saved == 3 * 50 + 2 * 40 + 35
    sharing.close(1)
    sharing.run(two.guess(4), three.guess(4), four.guess(4))
    sharing.check()
    for request in (2, 3, 4):
        sharing.close(request)
    assert [stage.held for stage in twice.joint.stages] == [(0, 0)] * len(twice.joint.stages)


@pytest.mark.parametrize("dtype", tiered(DTYPES, ["bfloat16"]))
@pytest.mark.parametrize("name", tiered(NAMES, QUICK))
def test_every_family(root: Path, name: str, dtype: str) -> None:
    """Sliding windows, soft caps, sinks, grouped heads, mixtures."""
    folder = root / f"{name}-{dtype}"
    live(Twice(Checkpoint(write_family(folder, name)), [0, 1, 4], dtype))


@pytest.mark.parametrize("quant", tiered(["int4-g32", "int8", "nf4", "mixed"], ["int4-g32"]))
def test_every_quantisation(root: Path, quant: str) -> None:
    if quant == "nf4":
        pytest.importorskip("bitsandbytes")
    folder = root / f"wide-{quant}"
    write_checkpoint(folder, hidden_size=64, intermediate_size=128)
    plain = Checkpoint(folder)
    packed = quant == "mixed"
    source = MixedSource(plain) if packed else QuantisingSource(plain, QUANTISATIONS[quant])
    live(Twice(source, [0, 2, 4]))


def test_the_bound_would_notice_one_other_row(root: Path) -> None:
    twice = Twice(Checkpoint(write_family(root / "wrong", "llama")), [0, 4])
    sharing = Sharing(twice)
    prompt = sharing.open(1).prompt(PREAMBLE)
    sharing.run(prompt)
    wrong = prompt.rows.tokens[:60].copy()
    wrong[20] += 1
    two = sharing.fork(2, 1, wrong)
    sharing.run(two.prompt(3))
    assert sharing.found[-1] > VISIBLE
