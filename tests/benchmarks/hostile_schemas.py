"""How much schemas that are made to do harm slow others down; run by name.

    python tests/benchmarks/hostile_schemas.py [--rounds 6] [--stages 3] [--attackers 2]
        [--profile jetson-orin-nano-8gb] [--max-new-tokens 64] [--json FILE]

`edgespec serve` and its stages as processes on this machine, each held to the time of the
profile's device. One user streams an answer while another one's clients each send a request with a
schema or grammar a second, none of them twice, and leave if it is not answered by then: harmless
ones, or hostile ones of a kind. Each round has all kinds, in an order of its own, so that whatever
else the machine does meets all of them. Requests that are compiled wait while one answer at a time
is given; a grammar whose every mask is costly is answered beside (`--live 2`), with as many tokens
as a harmless one. Prints the medians of the user's tokens a second and time to first token, and how
they differ from those beside harmless requests; ends with status 1 if an answer was more than 10 %
slower in the median.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.served import Served, bearer, choices, events, served

LIMIT = 0.10
LEAVES_S = 1.0
"""How long an attacker waits for an answer, and how often it asks."""
PROMPT = "Question: A baker has 3 trays of 24 rolls and sells 50. How many are left?\nAnswer:"
Body = dict[str, Any]
Kind = Callable[[int], Body]
"""The request of that number."""


def by_schema(schema: object) -> Body:
    return {
        "messages": [{"role": "user", "content": "Name something."}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": schema},
        },
    }


def by_lark(grammar: str) -> Body:
    return {"messages": [{"role": "user", "content": "Name something."}], "grammar": grammar}


def harmless(number: int) -> Body:
    return by_schema({"type": "string", "minLength": 40, "maxLength": 1000 + number})


def nested(number: int) -> Body:
    """Objects in one another: as deep as is taken, and deeper than that."""
    schema: dict[str, Any] = {"const": number}
    for _ in range(300 if number % 2 else 30):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return by_schema(schema)


def alternatives(number: int) -> Body:
    """10,000 of them, as one list and as schemas."""
    words = [f"word {number} {other}" for other in range(10_000)]
    return by_schema(
        {"anyOf": [{"const": word} for word in words]} if number % 2 else {"enum": words}
    )


def exponential(number: int) -> Body:
    """Patterns whose automata explode: one that is never made whole, and one that has to be."""
    patterns = [f"^(a|b)*a(a|b){{{200 + number}}}$"]
    if number % 2:
        patterns = [f".*a{{{length}}}.*" for length in range(1, 60)] + [f"b{{{number}}}"]
    return by_schema({"allOf": [{"type": "string", "pattern": one} for one in patterns]})


def costly(number: int) -> Body:
    """A grammar of many terminals at once, near the most that the mask of a token may take."""
    chance = random.Random(number)
    names = [f"T{place}" for place in range(20)]
    ends = [f"/[a-z ]*{chance.choice('abcdef')}[a-z ]{{{place}}}/" for place in range(20)]
    lines = [f"{name}: {end}" for name, end in zip(names, ends, strict=True)]
    return by_lark("\n".join([f"start: ({' | '.join(names)})*", *lines]))


class Attacker(threading.Thread):
    """Sends a request of a kind each second until it is told to stop."""

    def __init__(self, ring: Served, body: Kind, numbers: Iterator[int], tokens: int) -> None:
        super().__init__(daemon=True)
        self._ring, self._body, self._numbers, self._tokens = ring, body, numbers, tokens
        self.over = threading.Event()
        self.ends: Counter[str] = Counter()

    def run(self) -> None:
        with httpx.Client(
            base_url=self._ring.url, headers=bearer(self._ring.keys["other"]), timeout=LEAVES_S
        ) as client:
            while not self.over.is_set():
                body = {**self._body(next(self._numbers)), "max_tokens": self._tokens}
                began = time.monotonic()
                try:
                    told = client.post("/v1/chat/completions", json=body)
                    self.ends[str(told.status_code)] += 1
                except httpx.TimeoutException:
                    self.ends["left"] += 1
                self.over.wait(began + LEAVES_S - time.monotonic())


@contextmanager
def attacked(
    ring: Served, body: Kind | None, numbers: Iterator[int], how_many: int, tokens: int
) -> Iterator[Counter[str]]:
    """While so many clients send requests of that kind; how these ended."""
    clients = [Attacker(ring, body, numbers, tokens) for _ in range(how_many)] if body else []
    ends: Counter[str] = Counter()
    for one in clients:
        one.start()
    time.sleep(LEAVES_S)
    yield ends
    for one in clients:
        one.over.set()
    for one in clients:
        one.join()
        ends.update(one.ends)


def answer(ring: Served, new_tokens: int) -> tuple[float, float]:
    """Tokens a second behind the first one, and seconds to that."""
    body = {
        "prompt": PROMPT,
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked, came, tokens = time.monotonic(), [], 0
    path, headers = f"{ring.url}/v1/completions", bearer(ring.keys["user"])
    with httpx.stream("POST", path, json=body, headers=headers, timeout=300.0) as told:
        assert told.status_code == 200, told.read()
        for event in events(told):
            assert "error" not in event, event
            came += [time.monotonic()] * any(text for _, text in choices(event))
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return (tokens - 1) / (came[-1] - came[0]), came[0] - asked


def measure(asked: argparse.Namespace, live: int, kinds: dict[str, Kind | None]) -> list[Body]:
    """All figures of each kind; the first one is what the others are compared with."""
    emulate = ("--emulate", asked.profile)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    ends: dict[str, Counter[str]] = {name: Counter() for name in kinds}
    numbers, tokens = count(), asked.max_new_tokens if live > 1 else 1
    with served(
        asked.stages,
        init=("--dtype", "float32"),
        serve=(*emulate, "--live", str(live)),
        join=lambda number: emulate,
        users=("user", "other"),
    ) as ring:
        for _ in range(2):
            answer(ring, asked.max_new_tokens)  # learns what the ring costs
        for number in range(asked.rounds):
            for name in random.Random(number).sample(list(kinds), len(kinds)):
                with attacked(ring, kinds[name], numbers, asked.attackers, tokens) as came:
                    found[name].append(answer(ring, asked.max_new_tokens))
                ends[name] += came
                speed, first = found[name][-1]
                print(f"{name}: {speed:.2f} tok/s, {first:.2f} s", file=sys.stderr, flush=True)
    figures = []
    for name, pairs in found.items():
        speeds, firsts = zip(*pairs, strict=True)
        figures.append(
            {
                "live": live,
                "kind": name,
                "tokens_per_second": statistics.median(speeds),
                "first_token_seconds": statistics.median(firsts),
                "speeds": speeds,
                "firsts": firsts,
                "ends": dict(ends[name]),
            }
        )
    return figures


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--attackers", type=int, default=2)
    parser.add_argument("--profile", default="jetson-orin-nano-8gb")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--json", default="", help="file for all figures")
    asked = parser.parse_args()
    compiled: dict[str, Kind | None] = {
        "harmless": harmless,
        "nobody beside": None,
        "deep nesting": nested,
        "10,000 alternatives": alternatives,
        "exponential patterns": exponential,
    }
    groups = [measure(asked, 1, compiled)]
    groups.append(measure(asked, 2, {"harmless": harmless, "costly masks": costly}))
    worst = 0.0
    for group in groups:
        base = group[0]
        for one in group:
            speed = one["tokens_per_second"] / base["tokens_per_second"]
            later = one["first_token_seconds"] - base["first_token_seconds"]
            print(
                f"--live {one['live']}, {one['kind']:21} {one['tokens_per_second']:6.2f} tok/s "
                f"({speed - 1:+.1%}), first token {one['first_token_seconds']:.2f} s "
                f"({later:+.2f} s); requests beside: {one['ends']}"
            )
            worst = max(worst, 1 - speed)
    if asked.json:
        Path(asked.json).write_text(json.dumps(groups, indent=1) + "\n", encoding="utf-8")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
