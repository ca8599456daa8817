"""A household's day in minutes: many users at once on a ring of real processes; run by name.

    python tests/benchmarks/soak.py [--minutes 20] [--users 6] [--seed 1] [--faults]

A coordinator with its HTTP API and three stages on this machine. Every user asks one request after
the other, whole, streamed, cut off at some event or abandoned, under any policy; with `--faults`
stages are killed, stopped and joined twice meanwhile, and the coordinator is stopped. Every text
must be that of plain decoding, which is asked for before, without company. Prints a JSON object;
ends with status 1 if a text differs, an answer fails, a request is left, a log has a traceback, or
(without faults, which make processes anew) memory or descriptors grew.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.commands import Command, run
from support.nodes import until

from edgespec.policy.registry import POLICIES

STAGES = 3
KINDS = 36
TIMEOUT_S = 600.0
PATIENCE_S = 300.0
GROWTH_MIB = 40.0
"""What a process may take more at the end than after a first round of all kinds of request."""
GROWTH_DESCRIPTORS = 8
TEXTS = (
    "Once upon a time",
    "Question: A shop sells 12 boxes of 8 pens and takes 5 back. How many are sold?\nAnswer:",
    "tar\n\n> Archiving utility.\n\n- Create an archive",
    "def mean(values):\n",
    "What is 17 + 26?",
    "Naïve café, 今日は, мир: ",
)
Body = dict[str, Any]


class Ring:
    """The processes, each a command as a person types it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._cluster = ("--cluster", str(folder / "cluster"), "--cache", str(folder / "cache"))
        made = run(
            *("init", "--stages", str(STAGES), "--dtype", "float64", "--host", "127.0.0.1"),
            *("--port", "0", *self._cluster[:2]),
        )
        assert made.code == 0, made
        self.stages: dict[int, Command] = {}
        self.coordinator = self._start("serve", "--http", "127.0.0.1:0")
        until(lambda: " at http://" in self.coordinator.err, PATIENCE_S)
        until(lambda: "coordinator at " in self.coordinator.err, PATIENCE_S)
        self._address = _word_behind("coordinator at ", self.coordinator.err)
        self.url = "http://" + _word_behind(" at http://", self.coordinator.err)
        for number in range(1, STAGES + 1):
            self.join(number)
        until(self.is_up, PATIENCE_S)

    def _start(self, *arguments: str) -> Command:
        return self._stack.enter_context(Command(*arguments, *self._cluster))

    def join(self, number: int) -> Command:
        """Start the daemon of a stage."""
        known = "--coordinator", self._address.rstrip(",;")
        self.stages[number] = self._start("join", "--stage", str(number), *known)
        return self.stages[number]

    def is_up(self) -> bool:
        """Whether the API says that requests are answered."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=10.0).status_code == 200
        except httpx.HTTPError:
            return False

    def figure(self, name: str) -> float:
        """One of the coordinator's metrics."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60.0).text.splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(f"{name} ")))

    def is_quiet(self) -> bool:
        """Whether nothing runs and nothing waits."""
        names = ("edgespec_requests_running", "edgespec_requests_waiting", "edgespec_http_answers")
        return not any(self.figure(name) for name in names)

    def sizes(self) -> dict[str, tuple[float, int]]:
        """MiB and descriptors of every process."""
        found = {"coordinator": psutil.Process(self.coordinator.process.pid)}
        found |= {f"stage {n}": psutil.Process(c.process.pid) for n, c in self.stages.items()}
        for child in found["coordinator"].children():
            found[f"child {' '.join(child.cmdline()[1:4])}"] = child
        return {
            name: (round(process.memory_info().rss / 2**20, 1), process.num_fds())
            for name, process in found.items()
        }


def _word_behind(mark: str, text: str) -> str:
    return text.split(mark, 1)[1].split()[0].rstrip(",;")


@contextmanager
def ring() -> Iterator[Ring]:
    """All processes, which end with this."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        made = Ring(stack, Path(folder))
        yield made
        for command in [made.coordinator, *made.stages.values()]:
            command.signal(signal.SIGTERM)


def kinds(chance: random.Random) -> list[Body]:
    """Requests of every sort that the API knows, each with a seed of its own."""
    made = []
    for number in range(KINDS):
        body: Body = {"max_tokens": chance.choice((1, 8, 24, 48, 80)), "seed": number}
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
        if number % 3:
            body["prompt"] = text
        else:
            body["messages"] = [{"role": "user", "content": text}]
        made.append(body)
    return made


def path_of(body: Body) -> str:
    """Where such a request is sent."""
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def piece(answer: Body) -> str:
    """The text of an answer, or of an event of it."""
    choice = (answer.get("choices") or [{}])[0]
    said = choice.get("message") or choice.get("delta") or choice
    return said.get("text") or said.get("content") or ""


class Users:
    """Everybody who asks, and what they saw."""

    def __init__(self, ring: Ring, asked: list[Body], right: list[str], until: float) -> None:
        self._ring, self._asked, self._right, self._until = ring, asked, right, until
        self._lock = threading.Lock()
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest = 0.0

    def use(self, chance: random.Random) -> None:
        """One user, until the time is up."""
        with httpx.Client(base_url=self._ring.url, timeout=TIMEOUT_S) as client:
            while time.monotonic() < self._until:
                number = chance.randrange(len(self._asked))
                policy = chance.choice(sorted(POLICIES))
                how = chance.choice(("whole", "whole", "streamed", "cut", "abandoned"))
                began = time.monotonic()
                try:
                    got = getattr(self, how)(
                        client, {**self._asked[number], "policy": policy}, chance
                    )
                except httpx.HTTPError as problem:
                    self._note(f"failed: {type(problem).__name__}", began)
                    continue
                right = self._right[number]
                good = got is None or (right.startswith(got) if how == "cut" else got == right)
                self._note(how, began)
                if not good:
                    self.wrong.append(f"{how} {policy} {self._asked[number]}: {got!r} != {right!r}")

    def _note(self, what: str, began: float) -> None:
        with self._lock:
            self.seen[what] += 1
            self.slowest = max(self.slowest, time.monotonic() - began)

    def whole(self, client: httpx.Client, body: Body, _: random.Random) -> str | None:
        """Wait for all of it."""
        answered = client.post(path_of(body), json=body)
        if answered.status_code in (429, 503):
            self._note(f"refused: {answered.json()['error']['code']}", time.monotonic())
            time.sleep(0.5)
            return None
        assert answered.status_code == 200, answered.text
        return piece(answered.json())

    def streamed(
        self, client: httpx.Client, body: Body, _: random.Random, most: int = 1 << 30
    ) -> str | None:
        """Read it as it comes, `most` events of it."""
        got = []
        with client.stream("POST", path_of(body), json={**body, "stream": True}) as answered:
            if answered.status_code in (429, 503):
                self._note(f"refused: {answered.status_code}", time.monotonic())
                return None
            for line in answered.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self._note(f"ended: {event['error']['code']}", time.monotonic())
                    return None
                got.append(piece(event))
                if len(got) >= most:
                    break
        return "".join(got)

    def cut(self, client: httpx.Client, body: Body, chance: random.Random) -> str | None:
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

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.done: Counter[str] = Counter()

    def cause(self, chance: random.Random, limit: float) -> None:
        """One after the other, each time after the ring is up again."""
        while time.monotonic() < limit:
            what = chance.choice(("kill", "kill", "hang", "hang", "flicker", "pause", "twice"))
            getattr(self, what)(chance, chance.randint(1, STAGES))
            self.done[what] += 1
            until(self._ring.is_up, PATIENCE_S)
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
        """The coordinator does nothing for a moment."""
        self._stopped(self._ring.coordinator, chance.choice((0.5, 1.2)))

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


def soak(minutes: float, users: int, seed: int, with_faults: bool) -> dict[str, Any]:
    """All of it; what was seen."""
    asked = kinds(random.Random(seed))
    with ring() as made, httpx.Client(base_url=made.url, timeout=TIMEOUT_S) as client:
        right = []
        for body in asked:
            plain = client.post(path_of(body), json={**body, "policy": "autoregressive"})
            assert plain.status_code == 200, plain.text
            right.append(piece(plain.json()))
        warm = made.sizes()
        limit = time.monotonic() + 60.0 * minutes
        everybody = Users(made, asked, right, limit)
        faults = Faults(made)
        threads = [
            threading.Thread(target=everybody.use, args=(random.Random(f"{seed} {n}"),))
            for n in range(users)
        ]
        for thread in threads:
            thread.start()
        if with_faults:
            faults.cause(random.Random(f"{seed} faults"), limit)
        for thread in threads:
            thread.join()
        until(made.is_quiet, 10.0)
        sizes = made.sizes()
        ended = [c.process.pid for c in made.stages.values() if c.process.poll() is not None]
        tracebacks = sum(
            c.err.count("Traceback") for c in (made.coordinator, *made.stages.values())
        )
    grown = {
        name: (warm[name], size)
        for name, size in sizes.items()
        if name in warm
        and not with_faults
        and (size[0] - warm[name][0] > GROWTH_MIB or size[1] - warm[name][1] > GROWTH_DESCRIPTORS)
    }
    return {
        "seed": seed,
        "minutes": minutes,
        "users": users,
        "seen": dict(everybody.seen),
        "slowest_seconds": round(everybody.slowest, 1),
        "faults": dict(faults.done),
        "texts_that_differ": everybody.wrong,
        "mib_and_descriptors_before": warm,
        "mib_and_descriptors_after": sizes,
        "grown": grown,
        "processes_that_ended": ended,
        "tracebacks": tracebacks,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", action="store_true")
    chosen = parser.parse_args()
    found = soak(chosen.minutes, chosen.users, chosen.seed, chosen.faults)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    bad = ("texts_that_differ", "grown", "processes_that_ended", "tracebacks")
    unanswered = [what for what in found["seen"] if what.startswith(("failed", "ended"))]
    return int(bool(unanswered) or any(found[name] for name in bad))


if __name__ == "__main__":
    sys.exit(main())
