"""CPU time of the coordinator's own loop for a token, by policy and draft source; run by name.

    python tests/benchmarks/coordinator_overhead.py [--policy all] [--draft independent,dspark]
        [--stages 4] [--live 40] [--json]

The bundled pair answers on a ring of virtual time, as `edgespec simulate` has it; timed is all that
the coordinator's machine does with each event: look up live rows, record and walk, prune, make the
retained set and the client's tokens, merge guesses, choose what leaves and what is guessed. The
models, messages as bytes, and sockets are not in it. Counted are the nodes that are expanded or
sent, and the rows that leave. Ends with status 1 if a loop takes more than --limit-ms a token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from support.plays import play_all

from edgespec.bench.load import Load
from edgespec.bench.setup import Setup
from edgespec.bench.simulated import chosen_policies
from edgespec.bench.workloads import default_prompts, read_prompts
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.profiles import profile_named
from edgespec.daemon.settings import chosen_draft
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.planning.cost_model import cost_model_named
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.ledger import Rows
from edgespec.verify.sampling import Sampling


@dataclass(slots=True)
class Meter:
    """What the coordinator's machines of this process have spent."""

    seconds: float = 0.0
    events: int = 0
    nodes: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts meanwhile."""
        handle = CoordinatorMachine.handle

        def timed(machine: CoordinatorMachine, *event: Any) -> Any:
            began = time.thread_time()
            effects = handle(machine, *event)
            self.seconds += time.thread_time() - began
            self.events += 1
            return effects

        expand, send = DraftTree.expand, DraftTree.send

        def expanded(tree: DraftTree, ids: Sequence[int]) -> None:
            self.nodes += sum(not (tree.is_sent(one) or tree.is_expanded(one)) for one in ids)
            expand(tree, ids)

        def sent(tree: DraftTree, ids: Sequence[int]) -> Rows:
            self.nodes += sum(not tree.is_expanded(one) for one in ids)
            return send(tree, ids)

        with (
            patch.object(CoordinatorMachine, "handle", timed),
            patch.object(DraftTree, "expand", expanded),
            patch.object(DraftTree, "send", sent),
        ):
            yield


def measure(setup: Setup, policy: str) -> dict[str, float]:
    """The figures of one policy."""
    meter = Meter()
    with meter.running():
        played = play_all(setup, [policy])[policy]
    tokens = sum(answer.new_tokens for answer in played.answers)
    return {
        "loop_cpu_ms_per_token": 1e3 * meter.seconds / tokens,
        "events_per_token": meter.events / tokens,
        "nodes_added_per_token": meter.nodes / tokens,
        "rows_sent_per_token": sum(answer.rows_sent for answer in played.answers) / tokens,
        "tokens_per_second": tokens / played.seconds,
    }


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--policy", default="all", help="names, or all")
    parser.add_argument("--draft", default="independent,dspark", help="sources by name")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--live", type=int, help="requests at once; left out: each on an idle ring")
    parser.add_argument("--prompts", default="", help="a file; left out: the bundled ones")
    parser.add_argument("--limit", type=int, default=0, help="prompts; left out: 4, or --live")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--limit-ms", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args()
    limit = given.limit or given.live or 4
    base = Setup(
        model=bundled("base"),
        draft="",
        dtype="float64",
        profiles=(profile_named("jetson-orin-nano-8gb"),) * (given.stages + 1),
        cost_model=cost_model_named("llama-2-13b"),
        link=None,
        prompts=tuple(
            read_prompts(given.prompts, limit) if given.prompts else default_prompts(limit)
        ),
        max_new_tokens=given.new_tokens,
        sampling=Sampling(),
        load=Load(given.live) if given.live else None,
    )
    runs: list[dict[str, Any]] = []
    for draft in given.draft.split(","):
        setup = replace(base, draft=str(chosen_draft(draft, "")))
        for policy in chosen_policies(given.policy.split(","), draft):
            runs.append({"policy": policy, "draft": draft, **measure(setup, policy)})
            if not given.json:
                show(runs[-1], title=len(runs) == 1)
    good = all(run["loop_cpu_ms_per_token"] <= given.limit_ms for run in runs)
    if given.json:
        settings = {"stages": given.stages, "live": given.live, "prompts": len(base.prompts)}
        print(json.dumps({"settings": settings, "good": good, "runs": runs}))
    return 0 if good else 1


def show(run: dict[str, Any], *, title: bool) -> None:
    """One line of the table."""
    if title:
        print(" ".join(f"{name.replace('_per_token', ''):>17}" for name in run))
    cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in run.values()]
    print(" ".join(f"{cell:>17}" for cell in cells), flush=True)


if __name__ == "__main__":
    sys.exit(main())
