"""Draft sources side by side on the bundled base, in virtual time; run by name.

    python tests/benchmarks/drafts.py [--new-tokens 64] [--jobs 0] [--sources NAME,...] [--json F]

For the bundled prompts of GSM8K's test split, of command help and of code, at temperatures 0 and 1,
under `adaptive` and `flowspec`: tokens a trip and a second of four stages and a coordinator, as
`edgespec simulate` charges them, and whether the tokens are those of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from edgespec.bench.processes import map_in_processes
from edgespec.bench.setup import Setup
from edgespec.bench.simulated import play
from edgespec.bench.workloads import read_prompts
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.profiles import profile_named
from edgespec.drafting.choice import parse_draft
from edgespec.planning.cost_model import cost_model_named
from edgespec.verify.sampling import Sampling

WORKLOADS = {"GSM8K": "gsm8k-test-40", "command help": "help-20", "code": "code-20"}
TEMPERATURES = (0.0, 1.0)
POLICIES = ("adaptive", "flowspec")
SOURCES = (
    *("ngram", "ppd", "eagle", "eagle3", "easyspec", "independent", "dspark", "hybrid"),
    "hybrid:ngram+dspark",
)
PLAIN = "none"


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    workload: str
    temperature: float
    source: str
    policy: str


def setup_of(case: Case, new_tokens: int) -> Setup:
    """Its ring: five Jetson Orin Nano, llama-2-13b."""
    prompts = (
        resources.files("edgespec") / "bench" / "prompts" / f"{WORKLOADS[case.workload]}.jsonl"
    )
    return Setup(
        model=bundled("base"),
        draft=str(parse_draft(case.source, bundled)),
        dtype="float64",
        profiles=(profile_named("jetson-orin-nano-8gb"),) * 5,
        cost_model=cost_model_named("llama-2-13b"),
        link=None,
        prompts=tuple(read_prompts(str(prompts))),
        max_new_tokens=new_tokens,
        sampling=Sampling(case.temperature, seed=7),
    )


def run(item: tuple[Case, int], news: Callable[[int], None]) -> dict[str, object]:
    """What came of one case."""
    case, new_tokens = item
    played = play(setup_of(case, new_tokens), case.policy, news)
    answers = played.answers
    return {
        "workload": case.workload,
        "temperature": case.temperature,
        "source": case.source,
        "policy": case.policy,
        "tokens": sum(answer.new_tokens for answer in answers),
        "trips": sum(answer.trips for answer in answers),
        "seconds": sum(answer.seconds for answer in answers),
        "token_ids": [list(answer.token_ids) for answer in answers],
    }


def cases(sources: Sequence[str], policies: Sequence[str]) -> list[Case]:
    """Plain decoding of everything first."""
    return [
        Case(workload, temperature, source, policy)
        for source in (PLAIN, *sources)
        for workload in WORKLOADS
        for temperature in TEMPERATURES
        for policy in (policies if source != PLAIN else ("autoregressive",))
    ]


def table(results: Sequence[dict[str, object]]) -> str:
    """Tokens a second (tokens a trip) of each source, in Markdown."""
    columns = [(w, t) for t in TEMPERATURES for w in (*WORKLOADS, "all 80")]
    lines = [
        "| source | policy | " + " | ".join(f"T={t:g} {w}" for w, t in columns) + " | exact |",
        "| --- " * (len(columns) + 3) + "|",
    ]
    rows = dict.fromkeys((str(r["source"]), str(r["policy"])) for r in results)
    plain = {(r["workload"], r["temperature"]): r for r in results if r["source"] == PLAIN}
    for source, policy in rows:
        own = [r for r in results if (r["source"], r["policy"]) == (source, policy)]
        cells = []
        for workload, temperature in columns:
            of = [
                r
                for r in own
                if r["temperature"] == temperature and workload in (r["workload"], "all 80")
            ]
            tokens, trips, seconds = (
                sum(float(str(r[key])) for r in of) for key in ("tokens", "trips", "seconds")
            )
            cells.append(f"{tokens / seconds:.1f} ({tokens / trips:.2f})")
        exact = all(
            r["token_ids"] == plain[r["workload"], r["temperature"]]["token_ids"] for r in own
        )
        cells.append("yes" if exact else "NO")
        lines.append(f"| `{source}` | `{policy}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--sources", default=",".join(SOURCES))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--json", default="")
    chosen = parser.parse_args()
    todo = cases(chosen.sources.split(","), chosen.policies.split(","))
    done: set[int] = set()

    def news(index: int, answered: int) -> None:
        if index not in done:
            done.add(index)
            print(f"{len(done)} of {len(todo)}: {todo[index]}", file=sys.stderr, flush=True)

    results = map_in_processes(run, [(case, chosen.new_tokens) for case in todo], chosen.jobs, news)
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump(results, file)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
