"""What it costs a ring to be watched by an open page; run by name.

    python tests/benchmarks/watching.py [--pairs 12] [--watchers 1] [--profile NAME] [--json]

A coordinator and three stages, each held to the times of a board (`--emulate`), and `edgespec api`
beside them; the same prompt is answered with and without readers of the page's events stream, turn
by turn, so that whatever else the machine does meets both. The figure is the ratio of the median
speeds. Ends with status 1 if watching costs more than the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx

from edgespec.config import Address, CoordinatorConfig, Emulation
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.cluster import VARIABLE
from edgespec.daemon.local_ring import LocalRing
from edgespec.runtime.client import Client
from edgespec.wire.client_messages import Finished, Submit

LIMIT = 0.02
PROMPT = "Question: A baker has 3 trays of 24 rolls and sells 50. How many are left?\nAnswer:"
ASK = Submit(1, PROMPT, 96, 0.0, 0, 1.0, 0.0, 0, (), "adaptive")


@contextmanager
def api(ring: LocalRing) -> Iterator[str]:
    """The base URL of an API process of that ring."""
    command = [sys.executable, "-m", "edgespec.cli.main", "api", "--http", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--coordinator", str(ring.address)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, VARIABLE: str(ring._cluster.path)},
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


class Watcher:
    """Reads the events stream as a page does. Use as a context manager."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self.scenes = 0
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        while not self.scenes:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5.0)

    def _read(self) -> None:
        with httpx.stream("GET", f"{self._url}/events", timeout=10.0) as events:
            for line in events.iter_lines():
                self.scenes += line.startswith("data:")
                if self._over.is_set():
                    return


def answer(ring: LocalRing) -> float:
    """Tokens a second behind the first one."""
    with Client(ring.address, ring.identity, 60.0) as client:
        *_, end = client.ask(ASK)
    assert isinstance(end, Finished)
    return (end.new_tokens - 1) / (end.seconds - end.first_token_seconds)


def measure(pairs: int, watchers: int, profile: str) -> dict[str, object]:
    """Speeds with and without watchers, turn by turn."""
    config = CoordinatorConfig(
        *(bundled("base"), bundled("draft"), 3, "float32", Address("127.0.0.1", 0)),
        emulation=Emulation((profile,), ""),
    )
    plain: list[float] = []
    watched: list[float] = []
    with LocalRing(config) as ring, api(ring) as url:
        for _ in range(2):
            answer(ring)  # learns what the ring costs
        for pair in range(pairs):
            for is_watched in (pair % 2 == 0, pair % 2 != 0):
                with ExitStack() as stack:
                    seen = [stack.enter_context(Watcher(url)) for _ in range(watchers * is_watched)]
                    (watched if is_watched else plain).append(answer(ring))
                    assert all(watcher.scenes > 3 for watcher in seen), "nothing was seen"
                    print(
                        f"{'watched' if is_watched else 'alone'}: "
                        f"{(watched if is_watched else plain)[-1]:.2f} tok/s",
                        file=sys.stderr,
                    )
    costs = 1.0 - statistics.median(watched) / statistics.median(plain)
    return {
        "profile": profile,
        "pairs": pairs,
        "watchers": watchers,
        "alone_tokens_per_second": statistics.median(plain),
        "watched_tokens_per_second": statistics.median(watched),
        "costs": costs,
        "spread_alone": (max(plain) - min(plain)) / statistics.median(plain),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--watchers", type=int, default=1)
    parser.add_argument("--profile", default="jetson-orin-nano-8gb")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    found = measure(chosen.pairs, chosen.watchers, chosen.profile)
    if chosen.json:
        print(json.dumps(found))
    else:
        print(
            f"{found['alone_tokens_per_second']:.2f} tok/s alone, "
            f"{found['watched_tokens_per_second']:.2f} watched by {chosen.watchers}: watching "
            f"costs {found['costs']:.1%} (single answers differ by {found['spread_alone']:.1%})"
        )
    return int(float(str(found["costs"])) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
