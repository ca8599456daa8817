"""Users of the API at once on emulated boards, against the simulator; run by name.

    python tests/benchmarks/api_users.py [--users 4] [--rounds 3] [--limit 24] [--max-new-tokens 48]
        [--policy adaptive] [--stages 4] [--profile jetson-orin-nano-8gb] [--json FILE]

`edgespec serve` and its stages as processes on this machine, each held to the time of the profile's
device, and so many clients of its HTTP API, each of which streams one answer after the other until
the prompts are through: what `edgespec simulate --live` plays in virtual time. Every round has a
ring of its own, which knows nothing, as the simulator's does. Prints a table: tokens a second of
all together and of the simulator, time to first token, the share of its time in which each node was
busy (D0 first), how late the emulation was (the seconds by which jobs of a node ended after their
charged time, over its time, of the node where that is most), and how many CPUs all processes took.
A round that is late, or in which a stage was silent for so long that it counted as lost, says
nothing and is played again, up to three times as many rounds in all: run this when nothing else
runs. Ends with status 1 if the median of the rounds is more than 5 % from the simulator or a text
is not that of plain decoding, and 2 if no round was good.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.commands import COMMAND
from support.served import Body, choices, events, served
from support.torch_rings import generated, tokenizer

from edgespec.bench.load import Course, Load, load_figures, span
from edgespec.bench.timeline import read_traces
from edgespec.bench.workloads import Prompt, default_prompts

LIMIT = 0.05
"""How far the emulated speed may be from the simulated one."""
LATE = 0.5
"""Lateness of a node's jobs, over its time: a job that ends late delays no other, unless many do.
Rounds with 0.13 to 0.26 were 0.1 to 2.7 % slower than the simulator, one with 52 was 66 %."""
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Round:
    """What one ring did; times in seconds."""

    tokens: int
    seconds: float
    ttft_mean: float
    tbt_mean: float
    late: float
    lost: int
    cores: float
    busy: tuple[float, ...]
    load: float
    wrong: tuple[str, ...]

    @property
    def speed(self) -> float:
        """Tokens a second of all together."""
        return self.tokens / self.seconds

    @property
    def is_good(self) -> bool:
        """Whether this machine was fast enough for it."""
        return not self.lost and self.late <= LATE


class Users:
    """So many clients of the API at `url`, which share the prompts; `body`: what all of them say
    with each."""

    def __init__(self, url: str, count: int, prompts: list[Prompt], body: Body) -> None:
        self._url, self._count, self._body = url, count, body
        self._lock = threading.Lock()
        self._prompts: Iterator[Prompt] = iter(prompts)
        self.courses: list[Course] = []
        self.tokens = 0
        self.texts: dict[str, str] = {}

    def play(self) -> None:
        """Until the prompts are through."""
        users = [threading.Thread(target=self._use) for _ in range(self._count)]
        for user in users:
            user.start()
        for user in users:
            user.join()

    def _use(self) -> None:
        with httpx.Client(base_url=self._url, timeout=TIMEOUT_S) as client:
            client.get("/healthz")  # the connection is there before the clock starts
            while True:
                with self._lock:
                    prompt = next(self._prompts, None)
                if prompt is None:
                    return
                self._ask(client, prompt)

    def _ask(self, client: httpx.Client, prompt: Prompt) -> None:
        body = {
            **self._body,
            "prompt": prompt.text,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked, came, text, tokens = time.monotonic(), [], "", 0
        with client.stream("POST", "/v1/completions", json=body) as answered:
            assert answered.status_code == 200, answered.read()
            for event in events(answered):
                assert "error" not in event, event
                for _, piece in choices(event):
                    text += piece
                    came += [time.monotonic()] * bool(piece)
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        with self._lock:
            self.courses.append(Course(asked, tuple(came), time.monotonic()))
            self.texts[prompt.id] = text
            self.tokens += tokens


def round_of(asked: argparse.Namespace, prompts: list[Prompt], right: dict[str, str]) -> Round:
    """One ring, from its start to its end."""
    emulate = ("--emulate", asked.profile)
    with tempfile.TemporaryDirectory() as traces:

        def traced(name: str) -> tuple[str, ...]:
            return (*emulate, "--trace", str(Path(traces) / f"{name}.jsonl"))

        with served(
            asked.stages,
            init=("--dtype", "float32"),
            serve=(*traced("coordinator"), "--live", str(asked.users)),
            join=lambda number: traced(f"stage-{number}"),
        ) as ring:
            body = {"max_tokens": asked.max_new_tokens, "policy": asked.policy}
            users = Users(ring.url, asked.users, prompts, body)
            began, before = cpu_seconds(ring.processes().values()), time.monotonic()
            users.play()
            seconds = time.monotonic() - before
            cores = (cpu_seconds(ring.processes().values()) - began) / seconds
            lost = int(ring.figure("edgespec_ring_number")) - 1
            left = ring.end()
            assert not left, left
        entries = read_traces(sorted(Path(traces).glob("*.jsonl"))).values()
    late, busy = [0.0] * (asked.stages + 1), [0.0] * (asked.stages + 1)
    spans = (line for lines in entries for line in lines if line["what"] == "span")
    # What was one job for several requests is in the trace of each.
    for node, start, end, behind in {(s["node"], s["start"], s["end"], s["late"]) for s in spans}:
        late[node] += behind / seconds
        busy[node] += (end - start) / seconds
    figures = load_figures(Load(asked.users), users.courses)
    wrong = [name for name, text in users.texts.items() if text != right[name]]
    return Round(
        *(users.tokens, span(users.courses), figures.ttft_mean, figures.tbt_mean),
        *(max(late), lost, cores, tuple(busy), os.getloadavg()[0], tuple(wrong)),
    )


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """What they have computed so far."""
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def simulated(asked: argparse.Namespace) -> dict[str, Any]:
    """What the simulator says of the same."""
    command = [
        *("simulate", "--stages", str(asked.stages), "--profile", asked.profile, "--json"),
        *("--policy", asked.policy, "--live", str(asked.users), "--limit", str(asked.limit)),
        *("--max-new-tokens", str(asked.max_new_tokens), "--dtype", "float32"),
    ]
    done = subprocess.run([*COMMAND, *command], capture_output=True, text=True, check=True)
    (run,) = (run for run in json.loads(done.stdout)["runs"] if run["policy"] == asked.policy)
    found: dict[str, Any] = run
    return found


def main() -> int:
    """The command."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its processes
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=24, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--profile", default="jetson-orin-nano-8gb")
    parser.add_argument("--json", default="", help="file for all figures")
    asked = parser.parse_args()
    prompts = default_prompts(asked.limit)
    right = {p.id: tokenizer().decode(_plain(p, asked.max_new_tokens)) for p in prompts}
    model = simulated(asked)
    busy = [model["coordinator_busy"], *model["stage_busy"]]
    print(
        f"simulated: {model['tokens_per_second']:.2f} tok/s, TTFT {model['ttft_mean']:.3f} s, "
        f"busy {' '.join(f'{part:.0%}' for part in busy)}",
        flush=True,
    )
    rounds: list[Round] = []
    for number in range(3 * asked.rounds):
        if sum(one.is_good for one in rounds) == asked.rounds:
            break
        rounds.append(one := round_of(asked, prompts, right))
        print(
            f"round {number + 1}{'' if one.is_good else ', not counted'}: {one.speed:.2f} tok/s "
            f"({one.speed / model['tokens_per_second'] - 1:+.1%}), TTFT {one.ttft_mean:.3f} s, "
            f"late {one.late:.1%}, busy {' '.join(f'{part:.0%}' for part in one.busy)}, "
            f"lost stages {one.lost}, CPUs {one.cores:.1f}, load {one.load:.1f}"
            + (f", NOT EXACT: {', '.join(one.wrong)}" if one.wrong else ""),
            flush=True,
        )
    good = [one.speed for one in rounds if one.is_good]
    ratio = statistics.median(good) / model["tokens_per_second"] if good else 0.0
    print(f"median of {len(good)}: {ratio - 1:+.1%}" if good else "no round was good")
    if asked.json:
        content = {"simulated": model, "rounds": [asdict(one) for one in rounds], "ratio": ratio}
        Path(asked.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if any(one.wrong for one in rounds):
        return 1
    return int(abs(ratio - 1) > LIMIT) if good else 2


def _plain(prompt: Prompt, new_tokens: int) -> list[int]:
    return list(generated(prompt.text, new_tokens))


if __name__ == "__main__":
    sys.exit(main())
