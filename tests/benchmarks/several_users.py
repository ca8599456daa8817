"""Several users at once: tokens a second and time between tokens over K; run by name.

    python tests/benchmarks/several_users.py [--live 1,2,4,8,16] [--row-price F] [--plot FILE.png]
        [--prompt-tokens N] [--late N]

`edgespec simulate --live K` for each K, on one ring of virtual time, in one go: what the models say
is computed once for all. Prints a table; --json FILE keeps all figures. Every text is compared with
that of plain decoding to the request alone. TBT is from each token to the next, 0 for those that
come together; "gap" from each delivery to the next.

--prompt-tokens N makes every prompt that long, of what several say. --late N measures instead how
long a prompt of N tokens waits for its first token that comes 2 s after K - 1 others: beside their
answers, and on an idle ring.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.load_plots import plot_load

from edgespec.bench.load import Load
from edgespec.bench.processes import News, map_in_processes
from edgespec.bench.report import ALONE, REFERENCE, Played, run_of
from edgespec.bench.setup import Setup
from edgespec.bench.together import play_together
from edgespec.bench.workloads import Prompt, default_prompts, read_prompts
from edgespec.cli.notes import Notes, TimeLeft
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.profiles import profile_named
from edgespec.planning.cost_model import cost_model_named
from edgespec.verify.sampling import Sampling

POLICIES = "adaptive,specpipe,autoregressive"
"""Ours, SpecPipe-DB, no draft."""


LATE_AT = 2.0
"""When the late prompt comes, in seconds: those before are read, and not answered."""


@dataclass(frozen=True, slots=True)
class OneLate(Load):
    """All prompts but the last at once, that one later."""

    def times(self, prompts: int, seed: int) -> list[float]:
        """See Load."""
        return [0.0] * (prompts - 1) + [LATE_AT]


def play(item: tuple[Setup, list[str]], news: News) -> list[dict[str, Any]]:
    """Each policy's figures under the load of that set-up."""
    setup, policies = item
    playing = list(dict.fromkeys([REFERENCE, *policies]))
    plays = [(replace(setup, load=None), REFERENCE), *((setup, policy) for policy in playing)]
    played = dict(zip([ALONE, *playing], play_together(plays, news), strict=True))
    names = [profile.name for profile in setup.profiles]
    runs = [run_of(policy, played, names, setup.cost_model.name).as_dict() for policy in policies]
    return [{**run, **gaps(played[policy])} for run, policy in zip(runs, policies, strict=True)]


def gaps(played: Played) -> dict[str, float]:
    """Seconds between deliveries, of one token or several."""
    found = sorted(gap for course in played.courses for gap in course.gaps if gap > 0)
    return {"gap_mean": sum(found) / len(found), "gap_p99": found[math.ceil(0.99 * len(found)) - 1]}


def late(item: tuple[Setup, list[str]], news: News) -> list[dict[str, Any]]:
    """How long the last prompt waits for its first token, in seconds: beside and alone."""
    setup, policies = item
    setup = replace(setup, load=OneLate(arrivals=1.0))
    alone = replace(setup, prompts=setup.prompts[-1:], load=Load(1))
    beside = play_together([(setup, policy) for policy in policies], news)
    idle = play_together([(alone, policy) for policy in policies], news)
    figures = []
    for policy, with_others, by_itself in zip(policies, beside, idle, strict=True):
        last, itself = with_others.courses[-1], by_itself.courses[-1]
        running = sum(one.asked < last.asked < one.ended for one in with_others.courses)
        times = {"beside": last.tokens[0] - last.asked, "idle": itself.tokens[0] - itself.asked}
        figures.append({"live": len(setup.prompts), "policy": policy, "running": running, **times})
    return figures


def late_table(figures: Sequence[dict[str, Any]]) -> str:
    """In Markdown; times in milliseconds."""
    lines = ["K | policy | answers running | TTFT | on an idle ring | ratio", "--- | " * 5 + "---"]
    for one in figures:
        cells = [str(one["live"]), f"`{one['policy']}`", str(one["running"])]
        cells += [f"{one[name] * 1e3:.0f}" for name in ("beside", "idle")]
        lines.append(" | ".join([*cells, f"{one['beside'] / one['idle']:.2f}"]))
    return "\n".join(f"| {line} |" for line in lines)


def lengthened(prompts: Sequence[Prompt], tokens: int, model: str) -> list[Prompt]:
    """The prompts with as many tokens each, about: each with what the next ones say, cut."""
    from edgespec.model.tokenizer import Tokenizer

    tokenizer, texts = Tokenizer(model), [prompt.text for prompt in prompts]
    found = []
    for number, prompt in enumerate(prompts):
        text = prompt.text
        for after in range(1, 10000):
            if len(tokenizer.encode(text)) >= tokens:
                break
            text += " " + texts[(number + after) % len(texts)]
        while len(tokenizer.encode(text)) > tokens:
            text = text[:-1]
        found.append(replace(prompt, turns=(text,)))
    return found


def table(figures: Sequence[dict[str, Any]]) -> str:
    """In Markdown; times in milliseconds."""
    titles = ["K", "policy", "tok/s", "TTFT", "TBT", "TBT p99", "p99 / mean", "gap", "gap p99"]
    titles += ["slowest", "D0 busy", "stages busy"]
    lines = [" | ".join(titles), " | ".join("---" for _ in titles)]
    for one in figures:
        busy = one["stage_busy"]
        cells = [str(one["live"]), f"`{one['policy']}`", f"{one['tokens_per_second']:.2f}"]
        cells += [f"{one[name] * 1e3:.0f}" for name in ("ttft_mean", "tbt_mean", "tbt_p99")]
        cells += [f"{one['tbt_p99'] / one['tbt_mean']:.2f}"]
        cells += [f"{one[name] * 1e3:.0f}" for name in ("gap_mean", "gap_p99")]
        cells += [f"{one['slowest_ratio']:.2f}", f"{one['coordinator_busy']:.0%}"]
        cells += [f"{min(busy):.0%} to {max(busy):.0%}" + ("" if one["exact"] else ", NOT EXACT")]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--live", default="1,2,4,8,16")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--profile", default="jetson-orin-nano-8gb")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--cost-model", default="llama-2-13b")
    parser.add_argument("--row-price", type=float)
    parser.add_argument("--prompts", default="")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=0)
    parser.add_argument("--late", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--json", default="")
    parser.add_argument("--plot", default="")
    given = parser.parse_args()
    read = (
        read_prompts(given.prompts, given.limit) if given.prompts else default_prompts(given.limit)
    )
    if given.prompt_tokens:
        read = lengthened(read, given.prompt_tokens, bundled("base"))
    setup = Setup(
        model=bundled("base"),
        draft=bundled("draft"),
        dtype="float64",
        profiles=(profile_named(given.profile),) * (given.stages + 1),
        cost_model=cost_model_named(given.cost_model),
        link=None,
        prompts=tuple(read),
        max_new_tokens=given.new_tokens,
        sampling=Sampling(),
        row_price=given.row_price,
    )
    policies = given.policies.split(",")
    loads = [int(live) for live in given.live.split(",")]
    items = [(replace(setup, load=Load(live)), policies) for live in loads]
    if given.late:
        last = lengthened(read, given.late, bundled("base"))[-1]
        asked = [(*setup.prompts[: live - 1], last) for live in loads]
        items = [(replace(setup, prompts=one), policies) for one in asked]
    done, left, notes = [0] * len(items), TimeLeft(), Notes()
    of = len(items) * len(read) * (1 + len({REFERENCE, *policies}))
    with notes.waiting("loading the models") as waiting:

        def heard(index: int, answers: int) -> None:
            done[index] = answers
            waiting(f"{sum(done)}/{of} answers{left(sum(done), of)}")

        runs = map_in_processes(late if given.late else play, items, given.jobs, heard)
    figures = [run for group in runs for run in group]
    if given.json:
        Path(given.json).write_text(json.dumps({"runs": figures, "settings": setup.settings()}))
    if given.plot:
        lines = {policy: [one for one in figures if one["policy"] == policy] for policy in policies}
        price = "" if given.row_price is None else f", a further row {given.row_price:g} of a step"
        devices = f"{given.stages + 1} × {given.profile}"
        plot_load(Path(given.plot), lines, f"{given.cost_model} on {devices}{price}; virtual time")
    print(late_table(figures) if given.late else table(figures))


if __name__ == "__main__":
    main()
