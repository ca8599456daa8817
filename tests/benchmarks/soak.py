"""A household's day in minutes: many users at once on a ring of real processes; run by name.

    python tests/benchmarks/soak.py [--minutes 20] [--users 6] [--kinds 36] [--seed 1] [--faults]

A coordinator with its HTTP API and three stages on this machine. Every user asks one request after
the other, under any policy: whole, streamed, read slowly, cut off at some event or abandoned; with
several choices (`n`, several prompts), held to a schema, calling a tool; and chats of several turns
that share a preamble. With `--faults` stages are killed, stopped and joined twice meanwhile, and
the coordinator is stopped for up to 8 s. Every text must be that of plain decoding, which is asked
for before, without company. At the end every stage must hold the rows that the coordinator has as
kept, and no other. Prints a JSON object; ends with status 1 if a text differs, an answer fails, a
request, a row or a process is left, a log has a traceback, or (without faults, which make processes
anew) memory or descriptors grew in the second half.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.commands import Command
from support.nodes import until
from support.served import Body, Served, choices, events, path_of, served

from edgespec.policy.registry import POLICIES

STAGES = 3
TIMEOUT_S = 600.0
GROWTH_MIB = 40.0
"""What a process may take more at the end than at half time, beside KEPT_MIB for each row that is
kept in addition: of stages 6 KB in float64, of the coordinator and its draft 4, in steps of 64."""
KEPT_MIB = 1 / 64
GROWTH_DESCRIPTORS = 8
TEXTS = (
    "Once upon a time",
    "Question: A shop sells 12 boxes of 8 pens and takes 5 back. How many are sold?\nAnswer:",
    "tar\n\n> Archiving utility.\n\n- Create an archive",
    "def mean(values):\n",
    "What is 17 + 26?",
    "Naïve café, 今日は, мир: ",
)
PREAMBLE = (
    "You are the helper of a household. You know the week's meals, who has the car, and when the "
    "bins are put out. Answer in one sentence, and say so if you do not know."
)
FIELDS = {"name": {"type": "string", "maxLength": 9}, "count": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
HELD: Body = {"response_format": FORMAT, "max_tokens": 48}
TOOL = {"type": "function", "function": {"name": "store", "parameters": SCHEMA}}
CALLED: Body = {
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 64,
}
TURNS = ("When are the bins put out?", "And who has the car then?", "What is there to eat?")


@dataclass(frozen=True)
class Ask:
    """A request, and the texts of its choices by plain decoding, each alone."""

    body: Body
    right: tuple[str, ...]


def kinds(chance: random.Random, count: int) -> list[Body]:
    """Requests of every sort that the API knows, each with a seed of its own."""
    made = []
    for number in range(count):
        body: Body = {"max_tokens": chance.choice((1, 8, 24, 48, 80)), "seed": 100 * number}
        body["temperature"] = chance.choice((0, 0, 0.5, 0.8, 1.0, 1.4, 2.0))
        if chance.random() < 0.3:
            body["top_p"] = chance.choice((0.5, 0.9, 0.95))
        if chance.random() < 0.2:
            body["top_k"] = chance.choice((1, 5, 40))
        if chance.random() < 0.2:
            body["min_p"] = chance.choice((0.02, 0.1))
        if chance.random() < 0.3:
            body["stop"] = chance.choice(([" the"], ["\n\n", "é"], ["今", "."]))
        text = chance.choice(TEXTS)
        if number % 3 == 0:
            body["messages"] = [{"role": "user", "content": text}]
            held = chance.choice(({}, HELD, CALLED))
            body = {name: value for name, value in body.items() if not (held and name == "stop")}
            body |= held
        elif number % 3 == 1:
            body["prompt"] = text
        else:
            body["prompt"] = [text, chance.choice(TEXTS)][: chance.randint(1, 2)]
            body["n"] = chance.randint(2, 3)
        made.append(body)
    return made


def alone(body: Body) -> list[Body]:
    """The choices of a request, each as one of its own."""
    one = {name: value for name, value in body.items() if name not in ("n", "prompt")}
    n, prompts = body.get("n", 1), body.get("prompt", [""])
    asked = [prompts] if isinstance(prompts, str) else prompts
    texts = [{**one, "prompt": text} if "prompt" in body else one for text in asked]
    return [{**text, "seed": body["seed"] + choice} for text in texts for choice in range(n)]


def plain(client: httpx.Client, body: Body) -> Ask:
    """That request with what plain decoding answers."""
    right = []
    for one in alone(body):
        answered = client.post(path_of(one), json={**one, "policy": "autoregressive"})
        assert answered.status_code == 200, answered.text
        right += [text for _, text in choices(answered.json())]
    return Ask(body, tuple(right))


def conversation(client: httpx.Client, topic: str, seed: int) -> list[Ask]:
    """The turns of a chat, each with all that was said before. All chats have one preamble."""
    said = [{"role": "system", "content": PREAMBLE}]
    asks = []
    for turn in TURNS:
        said = [*said, {"role": "user", "content": f"{turn} ({topic})"}]
        temperature = 0.8 if seed % 2 else 0
        body = {"messages": said, "max_tokens": 24, "seed": seed, "temperature": temperature}
        asks.append(plain(client, body))
        said = [*said, {"role": "assistant", "content": asks[-1].right[0]}]
    return asks


class Users:
    """Everybody who asks, and what they saw."""

    def __init__(
        self, ring: Served, asks: Sequence[Ask], chats: Sequence[Sequence[Ask]], until: float
    ) -> None:
        self._ring, self._asks, self._chats, self._until = ring, asks, chats, until
        self._lock = threading.Lock()
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest = 0.0

    def use(self, chance: random.Random) -> None:
        """One user, until the time is up."""
        ways = (self.whole, self.whole, self.streamed, self.slowly, self.cut, self.abandoned)
        with httpx.Client(base_url=self._ring.url, timeout=TIMEOUT_S) as client:
            while time.monotonic() < self._until:
                if chance.random() < 0.2:  # a chat, turn by turn
                    for ask in chance.choice(self._chats):
                        self._ask(client, ask, "streamed", self.streamed, chance)
                    continue
                way = chance.choice(ways)
                self._ask(client, chance.choice(self._asks), way.__name__, way, chance)

    def _ask(
        self, client: httpx.Client, ask: Ask, name: str, way: Any, chance: random.Random
    ) -> None:
        body = {**ask.body, "policy": chance.choice(sorted(POLICIES))}
        began = time.monotonic()
        try:
            got = way(client, body, chance)
        except httpx.HTTPError as problem:
            self._note(f"failed: {type(problem).__name__}", began)
            return
        self._note(name, began)
        for index, right in enumerate(ask.right) if got is not None else ():
            text = got.get(index, "")
            if not right.startswith(text) if way == self.cut else text != right:
                self.wrong.append(f"{name}, choice {index} of {body}: {text!r} != {right!r}")

    def _note(self, what: str, began: float) -> None:
        with self._lock:
            self.seen[what] += 1
            self.slowest = max(self.slowest, time.monotonic() - began)

    def _is_refused(self, answered: httpx.Response) -> bool:
        """Whether the ring takes no more now, which is no fault."""
        if answered.status_code not in (429, 503):
            assert answered.status_code == 200, answered.read()
            return False
        self._note(f"refused: {answered.status_code}", time.monotonic())
        time.sleep(0.5)
        return True

    def whole(self, client: httpx.Client, body: Body, _: random.Random) -> dict[int, str] | None:
        """Wait for all of it."""
        answered = client.post(path_of(body), json=body)
        return None if self._is_refused(answered) else dict(choices(answered.json()))

    def streamed(
        self,
        client: httpx.Client,
        body: Body,
        _: random.Random,
        most: int = 1 << 30,
        pause: float = 0.0,
    ) -> dict[int, str] | None:
        """Read it as it comes, or slower, `most` events of it."""
        got: dict[int, str] = {}
        with client.stream("POST", path_of(body), json={**body, "stream": True}) as answered:
            if self._is_refused(answered):
                return None
            for number, event in enumerate(events(answered), 1):
                if "error" in event:
                    self._note(f"ended: {event['error']['code']}", time.monotonic())
                    return None
                for index, text in choices(event):
                    got[index] = got.get(index, "") + text
                if number >= most:
                    break
                time.sleep(pause)
        return got

    def slowly(
        self, client: httpx.Client, body: Body, chance: random.Random
    ) -> dict[int, str] | None:
        """Read it slower than it comes."""
        return self.streamed(client, body, chance, pause=chance.uniform(0.05, 0.3))

    def cut(self, client: httpx.Client, body: Body, chance: random.Random) -> dict[int, str] | None:
        """Leave at some event."""
        return self.streamed(client, body, chance, most=chance.randint(1, 20))

    def abandoned(self, client: httpx.Client, body: Body, chance: random.Random) -> None:
        """Lose patience within two seconds."""
        try:
            client.post(path_of(body), json=body, timeout=chance.uniform(0.01, 2.0))
        except httpx.TimeoutException:
            return


class Faults:
    """What goes wrong meanwhile."""

    def __init__(self, ring: Served) -> None:
        self._ring = ring
        self.done: Counter[str] = Counter()

    def cause(self, chance: random.Random, limit: float) -> None:
        """One after the other, each time after the ring is up again."""
        while time.monotonic() < limit:
            what = chance.choice(("kill", "kill", "hang", "hang", "flicker", "pause", "twice"))
            getattr(self, what)(chance, chance.randint(1, STAGES))
            self.done[what] += 1
            self._ring.until_up()
            time.sleep(chance.uniform(0.5, 5.0))

    def kill(self, _: random.Random, stage: int) -> None:
        """Power cut; it is switched on again."""
        self._ring.stages[stage].signal(signal.SIGKILL)
        self._ring.stages[stage].process.wait()
        self._ring.join(stage)

    def hang(self, chance: random.Random, stage: int) -> None:
        """A stage does nothing for a while."""
        self._stopped(self._ring.stages[stage], chance.uniform(0.3, 5.0))

    def flicker(self, _: random.Random, stage: int) -> None:
        """A stage stutters."""
        for _ in range(10):
            self._stopped(self._ring.stages[stage], 0.05)
            time.sleep(0.05)

    def pause(self, chance: random.Random, _: int) -> None:
        """The coordinator does nothing for a while."""
        self._stopped(self._ring.coordinator, chance.uniform(0.5, 8.0))

    def twice(self, _: random.Random, stage: int) -> None:
        """A second daemon joins as a stage that is there; it ends, or stands by, and is ended."""
        first = self._ring.stages[stage]
        second = self._ring.join(stage)
        time.sleep(10.0)
        # Who of them is the stage now is the coordinator's to say; the other one goes.
        kept = self._ring.stages[stage] = second if first.process.poll() is not None else first
        other = first if kept is second else second
        if other.process.poll() is None:
            other.signal(signal.SIGTERM)
            other.process.wait()

    @staticmethod
    def _stopped(command: Command, seconds: float) -> None:
        command.signal(signal.SIGSTOP)
        time.sleep(seconds)
        command.signal(signal.SIGCONT)


Sizes = dict[str, tuple[float, int]]


def sizes(ring: Served) -> Sizes:
    """MiB and descriptors of every process."""
    return {
        name: (round(process.memory_info().rss / 2**20, 1), process.num_fds())
        for name, process in ring.processes().items()
    }


def grown(before: Sizes, after: Sizes, kept: float) -> dict[str, Any]:
    """The processes that are larger than they were, with `kept` rows more."""
    most = GROWTH_MIB + KEPT_MIB * max(kept, 0)
    return {
        name: (before[name], size)
        for name, size in after.items()
        if name in before
        and (size[0] - before[name][0] > most or size[1] - before[name][1] > GROWTH_DESCRIPTORS)
    }


def rows_left(ring: Served) -> dict[str, float]:
    """With nothing to do: rows of live requests, and by stage those that it holds beyond the kept
    ones that the coordinator knows of."""
    kept = ring.figure("edgespec_cache_rows_kept")
    left = {f"stage {n}": ring.stage_figure(n, "edgespec_kv_rows") - kept for n in ring.stages}
    left["live"] = ring.figure("edgespec_cache_rows_live")
    return {name: rows for name, rows in left.items() if rows}


def soak(minutes: float, users: int, kind_count: int, seed: int, with_faults: bool) -> Body:
    """All of it; what was seen."""
    with served(STAGES) as ring, httpx.Client(base_url=ring.url, timeout=TIMEOUT_S) as client:
        asks = [plain(client, body) for body in kinds(random.Random(seed), kind_count)]
        chats = [conversation(client, topic, n) for n, topic in enumerate(("Monday", "holidays"))]
        began = sizes(ring)
        limit = time.monotonic() + 60.0 * minutes
        everybody = Users(ring, asks, chats, limit)
        faults = Faults(ring)
        threads = [
            threading.Thread(target=everybody.use, args=(random.Random(f"{seed} {n}"),))
            for n in range(users)
        ]
        for thread in threads:
            thread.start()
        if with_faults:
            faults.cause(random.Random(f"{seed} faults"), limit)
        time.sleep(max(limit - time.monotonic() - 30.0 * minutes, 0.0))
        half, kept = sizes(ring), ring.figure("edgespec_cache_rows_kept")
        for thread in threads:
            thread.join()
        until(ring.is_quiet, 10.0)
        after = sizes(ring)
        kept = ring.figure("edgespec_cache_rows_kept") - kept
        cached = ring.figure("edgespec_cached_tokens_total")
        rows = rows_left(ring)
        commands = (ring.coordinator, *ring.stages.values())
        ended = [c.process.pid for c in commands if c.process.poll() is not None]
        tracebacks = sum(c.err.count("Traceback") for c in commands)
        left = ring.end()
    return {
        "seed": seed,
        "minutes": minutes,
        "users": users,
        "kinds": kind_count,
        "seen": dict(everybody.seen),
        "slowest_seconds": round(everybody.slowest, 1),
        "cached_tokens": cached,
        "faults": dict(faults.done),
        "texts_that_differ": everybody.wrong,
        "mib_and_descriptors": {"before": began, "half": half, "after": after},
        "grown": {} if with_faults else grown(half, after, kept),
        "rows_left": rows,
        "processes_that_ended": ended,
        "processes_left": left,
        "tracebacks": tracebacks,
    }


def main() -> int:
    """The command."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its processes
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--kinds", type=int, default=36, help="different requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", action="store_true")
    chosen = parser.parse_args()
    found = soak(chosen.minutes, chosen.users, chosen.kinds, chosen.seed, chosen.faults)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    bad = ("texts_that_differ", "grown", "rows_left", "processes_that_ended", "processes_left")
    unanswered = [what for what in found["seen"] if what.startswith(("failed", "ended"))]
    return int(bool(unanswered) or any(found[name] for name in (*bad, "tracebacks")))


if __name__ == "__main__":
    sys.exit(main())
