"""Trips a token of every policy and stage count on the bundled pair, as a table.

    python tests/benchmarks/trips.py [--new-tokens 48] [--temperature 0]

A trip is `stages` steps of a segment from stage to stage (decoding.flights.RingClock), so that the
figures are the same on every machine. The twenty prompts of tests/data/prompts.jsonl; float32; the
lock-step ring of support.local_ring.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.torch_rings import prompts, request, torch_ring

from edgespec.policy.registry import POLICIES


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    options = parser.parse_args()
    print(
        f"{'stages':>6} {'policy':<15} {'trips/token':>11} {'tokens/trip':>11} {'wasted rows':>11}"
    )
    for stages in options.stages:
        for policy in options.policies:
            tokens = sent = wasted = 0
            trips = 0.0
            for tag, prompt in enumerate(prompts().values()):
                ring = torch_ring(stages, "float32")
                ring.replies.clear()
                answer = ring.ask(
                    request(
                        prompt, policy, options.new_tokens, tag=tag, temperature=options.temperature
                    )
                )
                tokens += answer.new_tokens
                trips += answer.trips
                sent += answer.rows_sent
                wasted += answer.rows_wasted
            share = wasted / sent if sent else 0.0
            line = f"{trips / tokens:>11.3f} {tokens / trips:>11.2f} {share:>11.0%}"
            print(f"{stages:>6} {policy:<15} {line}", flush=True)


if __name__ == "__main__":
    main()
