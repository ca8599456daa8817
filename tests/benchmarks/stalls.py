"""Processes that stand still in the middle of answers: every answer comes, and is the same text.

    python tests/benchmarks/stalls.py [--coordinator 200] [--stage 100] [--all 50] [--seed 1]

SmolLM2 on two stages, real processes on this machine. Time and again two requests are under way (a
chat, a long prompt, an answer held to a schema), and the coordinator, one of the stages or every
process is stopped for 0.5 to 8 s at a random moment, `--stage` times each stage. An answer must be
that of the undisturbed ring, and no request may be open 60 s after its ring is up again. Prints a
JSON object; ends with status 1 if a text differs, an answer fails or one does not come.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.served import Body, Served, choices, events, path_of, served

MODEL = ("--model", "smollm2-135m", "--draft", "ngram")
OPEN_S = 60.0
"""How long a request may be open after its ring is up again."""
SHORTEST_S, LONGEST_S = 0.5, 8.0
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LONG = " ".join(f"Box {n} holds {n * 7 % 31} pens." for n in range(60))


def bodies() -> list[Body]:
    """What is asked."""
    said = ("Name three rivers.", "What is a prime number?", f"{LONG} How many pens has box 7?")
    made: list[Body] = [
        {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": heat}
        for text in said
        for heat in (0, 0.8)
    ]
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    held = {**made[0], "response_format": form, "max_tokens": 40}
    return [{**body, "seed": 7, "stream": True} for body in (*made, held)]


def answer(url: str, body: Body) -> str:
    """The text of one answer; raises what went wrong."""
    text = ""
    with httpx.stream("POST", url + path_of(body), json=body, timeout=None) as answered:
        if answered.status_code != 200:
            raise RuntimeError(f"{answered.status_code}: {answered.read().decode()[:300]}")
        for event in events(answered):
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            text += "".join(said for _, said in choices(event))
    return text


class Stalls:
    """A ring that is disturbed, and what came of it."""

    def __init__(self, ring: Served, chance: random.Random) -> None:
        self._ring, self._chance = ring, chance
        self._pool = ThreadPoolExecutor(4)
        self.bodies = bodies()
        began = time.monotonic()
        self.right = [answer(ring.url, body) for body in self.bodies]
        self._usual_s = (time.monotonic() - began) / len(self.bodies)
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest_s = 0.0

    def stall(self, what: str, stopped: list[psutil.Process]) -> None:
        """One of them: two requests, and these processes stand still meanwhile."""
        chance = self._chance
        asked = [chance.randrange(len(self.bodies)) for _ in range(2)]
        answers = [self._pool.submit(answer, self._ring.url, self.bodies[i]) for i in asked]
        time.sleep(chance.uniform(0.0, 1.5 * self._usual_s))
        seconds = chance.uniform(SHORTEST_S, LONGEST_S)
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        for process in stopped:
            process.send_signal(signal.SIGCONT)
        self._ring.until_up()
        began = time.monotonic()
        for index, coming in zip(asked, answers, strict=True):
            try:
                text = coming.result(max(OPEN_S - (time.monotonic() - began), 0.1))
            except Exception as problem:  # whatever it is, it is reported
                self._note(what, seconds, index, f"{type(problem).__name__}: {problem}")
                continue
            if text != self.right[index]:
                self._note(what, seconds, index, f"{text!r} instead of {self.right[index]!r}")
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.done[what] += 1

    def _note(self, what: str, seconds: float, index: int, problem: str) -> None:
        self.wrong.append(f"{what} for {seconds:.1f} s, request {index}: {problem}")
        print(self.wrong[-1], file=sys.stderr, flush=True)


def run(seed: int, coordinator: int, stage: int, everything: int) -> dict[str, Any]:
    """All of it; what was seen."""
    chance = random.Random(seed)
    with served(2, init=MODEL) as ring:
        stalls = Stalls(ring, chance)
        plan = ["coordinator"] * coordinator + ["all"] * everything
        plan += ["stage 1"] * stage + ["stage 2"] * stage
        chance.shuffle(plan)
        for what in plan:
            there = ring.processes()
            stalls.stall(what, [*there.values()] if what == "all" else [there[what]])
        commands = (ring.coordinator, *ring.stages.values())
        tracebacks = sum(command.err.count("Traceback") for command in commands)
        left = ring.end()
    return {
        "seed": seed,
        "stalls": dict(stalls.done),
        "wrong": stalls.wrong,
        "slowest_seconds_after_the_ring_was_up": round(stalls.slowest_s, 1),
        "tracebacks": tracebacks,
        "processes_left": left,
    }


def main() -> int:
    """The command."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its processes
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--coordinator", type=int, default=200)
    parser.add_argument("--stage", type=int, default=100)
    parser.add_argument("--all", type=int, default=50, dest="everything")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    found = run(chosen.seed, chosen.coordinator, chosen.stage, chosen.everything)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    return int(any(found[name] for name in ("wrong", "tracebacks", "processes_left")))


if __name__ == "__main__":
    sys.exit(main())
