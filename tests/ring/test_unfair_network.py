"""Whatever becomes of messages, a ring that is up has the layers of all its stages."""

from __future__ import annotations

import pytest
from support.tiers import tiered
from support.unfair_network import live


@pytest.mark.parametrize("histories", tiered([150, 4000], [150]))
def test_a_ring_is_up_only_with_all_its_layers_and_comes_up_in_the_end(histories: int) -> None:
    for seed in range(histories):
        try:
            live(seed)
        except AssertionError as problem:
            pytest.fail(f"history {seed} (support.unfair_network.live({seed})): {problem!r}")
