"""Loads a block as a stage does, in a process of its own, and prints what it took as JSON.

`python load_big.py MODEL CACHE QUANT FIRST END`
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import torch

from edgespec.config import LOOPBACK, Address, Quantisation
from edgespec.daemon.block_fetch import Wanted, obtain
from edgespec.model.block import Block
from edgespec.model.inventory import block_parts
from edgespec.model.loader import fingerprint
from edgespec.model.tree_attention import tree_mask
from edgespec.net.keys import Identity, KeyPair
from edgespec.wire.messages import Assign


def peak_bytes() -> int:
    """The most memory that this process had at a time, mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(model: str, cache: str, quant: str, first: int, end: int) -> None:
    """Obtain, build, run one row."""
    torch.set_num_threads(1)
    began = peak_bytes()
    assign = Assign(1, 1, first, end, model, fingerprint(model), "bfloat16", quant, 64, 1, "")
    here = Address(LOOPBACK, 1)
    own = Identity.of_coordinator(KeyPair.from_words("a test"))
    wanted = Wanted(assign, here, own, lambda _: None, lambda: False)
    started = time.monotonic()
    source = obtain(wanted, "", cache)
    block = Block(source, first, end, "bfloat16")
    seconds = time.monotonic() - started
    rows = torch.zeros(1, dtype=torch.int64) if first == 0 else torch.zeros(1, block.hidden_size)
    rows = rows if first == 0 else rows.bfloat16()
    hidden = block.forward(rows, torch.zeros(1, dtype=torch.int64), block.new_cache(8), ONE_ROW)
    assert hidden is not None
    assert hidden.isfinite().all()
    size = sum(f.stat().st_size for f in Path(cache).glob("*/*.safetensors"))
    size = size or block_parts(source, first, end).held_bytes(torch.bfloat16)  # nothing was written
    print(
        json.dumps(
            {
                "quantisation": Quantisation.parse(quant).name,
                "seconds": seconds,
                "start": began,
                "peak": peak_bytes(),
                "block": size,
            }
        )
    )


ONE_ROW = tree_mask(0, torch.ones((1, 1), dtype=torch.bool).numpy())

if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:6]))  # type: ignore[call-arg]
