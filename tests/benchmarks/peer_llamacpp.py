"""What a token costs, beside llama.cpp on the same file: answers that are served, or stages alone.

    python tests/benchmarks/peer_llamacpp.py --model FILE.gguf --peer NAME=PATH/llama-server
        [--peer …] [--server NAME=URL …] [--rpc PATH/rpc-server] [--stages 1 3] [--users 1 2 4 8 16]
        [--prompts 128 512 2048] [--tokens 32] [--rounds 5] [--json]
    python tests/benchmarks/peer_llamacpp.py --model FILE.gguf --peer NAME=PYTHON

A peer is a llama.cpp that is here already; nothing is built or fetched. NAME is what tables call
it. Its command may have words of its own, which say what is compared: with AMX and without are two
peers, --peer "AMX=llama-server" --peer "no AMX=llama-server --no-repack".

Of a llama-server, which this starts, or one that runs (`--server`): served answers. Rings of real
processes and all peers are up at once, one thread a process, and asked by turns, round by round,
over their HTTP APIs: so many users at once stream an answer each to a prompt of about so many
tokens that nobody asked before, at temperature 0, and an end before `--tokens` is ignored. With
`--rpc` each llama-server runs once more for every ring of several stages, with its layers on so
many rpc-servers. Medians of tokens a second of all users together, prompts included, seconds to the
first token and from one to the next, and CPU milliseconds a token of all processes of a side (not
of a `--server`, whose processes are not known); and each ring's over each peer's.

Of the python of an environment in which llama-cpp-python is installed, or a llama-bench: the token
ids of one prompt of 16 tokens, then one token after the other: by turns, round by round,
edgespec's stages, loaded from block files, with the output head, and the peers, one thread each.
Milliseconds of CPU time for a token, the least of the rounds' means; and for so many rows in one
pass over the same context. llama-bench tells time, not CPU time, and is to have a core to itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from api_users import Users, cpu_seconds
from stage import PROMPT, block_files, steps
from support.commands import Command
from support.served import free_port, served

from edgespec.bench.load import Load, load_figures, span
from edgespec.bench.workloads import Prompt, default_prompts
from edgespec.config import Quantisation
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.hub import local_folder
from edgespec.model.sources import open_source
from edgespec.model.tokenizer import Tokenizer

ROWS = (1, 4, 16)
PATIENCE_S = 600.0
"""Within which a peer must have loaded its model."""
FIGURES = {
    "tokens_per_second": ("tok/s", ".1f"),
    "ttft_seconds": ("s to first token", ".3f"),
    "tbt_seconds": ("s between tokens", ".4f"),
    "cpu_ms_per_token": ("CPU ms a token", ".1f"),
}
"""Of served answers: title and form in the table."""
CASE = ("prompt", "users", "system")
Figures = dict[str, float | None]

# What the peer's interpreter runs: a round for each line on its input, answered in JSON.
_BINDING = """
import json, sys, time
import llama_cpp
path, tokens, rows = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
model = llama_cpp.Llama(path, n_threads=1, n_threads_batch=1, n_ctx=512, verbose=False)
def taken(work):
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)
def chain():
    for token in range(tokens):
        model.eval([100 + token])
for line in sys.stdin:
    prompt = json.loads(line)
    model.reset()
    model.eval(prompt)
    found = {"1": taken(chain) / tokens}
    for count in rows:
        if count > 1:
            model.reset()
            model.eval(prompt)
            found[str(count)] = taken(lambda: model.eval([7] * count))
    print(json.dumps(found), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument(
        "--peer",
        type=named,
        action="append",
        default=[],
        metavar="[NAME=]COMMAND",
        help="a llama-server, a python with llama_cpp, or a llama-bench; may be repeated",
    )
    parser.add_argument(
        "--server", type=named, action="append", default=[], metavar="[NAME=]URL", help="running"
    )
    parser.add_argument("--rpc", type=shlex.split, metavar="COMMAND", help="an rpc-server")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--dtype", help="default: bfloat16; served: what edgespec init takes")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    names = [name for name, _ in (*asked.peer, *asked.server)]
    kinds = {is_server(command) for _, command in asked.peer} | ({True} if asked.server else set())
    if len(set(names)) < len(names):
        parser.error(f"peers need names of their own (NAME=...); these are {', '.join(names)}")
    if len(kinds) > 1:
        parser.error("a llama-server serves, python and llama-bench only compute: name one kind")
    if asked.rpc and True not in kinds:
        parser.error("--rpc is for a --peer that is a llama-server")
    for word in [command[0] for _, command in asked.peer] + (asked.rpc or [])[:1]:
        if shutil.which(word) is None:
            parser.error(f"{word} is no program here; nothing is built or fetched")
    torch.set_num_threads(1)
    found: Any
    if True in kinds:
        found = compare_served(asked)
        text = served_table(found)
    else:
        asked.dtype = asked.dtype or "bfloat16"
        with tempfile.TemporaryDirectory() as folder:
            found = measure(asked, Path(folder))
        text = "\n".join(
            f"{name} " + "  ".join(f"{rows} rows {value:.2f} ms" for rows, value in times.items())
            for name, times in found.items()
        )
    print(json.dumps(found) if asked.json else text)


def named(text: str) -> tuple[str, list[str]]:
    """The name and the words of `[NAME=]COMMAND`."""
    name, separator, command = text.partition("=")
    if not separator or "/" in name:
        name, command = "llama.cpp", text
    if not (words := shlex.split(command)):
        raise argparse.ArgumentTypeError(f"{text!r} has no command")
    return name, words


def is_server(command: Sequence[str]) -> bool:
    """Whether that is a llama-server, be it by way of taskset or the like."""
    return any("llama-server" in os.path.basename(word) for word in command)


# --- served answers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """An API that answers; `processes`: all of its, () if it was not started here."""

    name: str
    url: str
    processes: Callable[[], Iterable[psutil.Process]] = tuple


def compare_served(asked: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """`figures` of every prompt's length, number of users and side, and `ratios` of ours over the
    peers'."""
    taken: dict[tuple[int, int, str], list[Figures]] = {}
    with ExitStack() as stack:
        rings = [our_ring(stack, asked, stages) for stages in asked.stages]
        peers = [their_server(*one) for one in asked.server]
        for name, command in asked.peer:
            peers += [
                their_process(stack, name, command, workers, asked)
                for workers in (0, *(stages for stages in asked.stages if stages > 1 and asked.rpc))
            ]
        new = prompts_of(asked.model)
        for side in (*rings, *peers):
            play(side, new(8, 1), asked.tokens)  # what is loaded or compiled at first use
        for _ in range(asked.rounds):
            for length in asked.prompts:
                for users in asked.users:
                    prompts = new(length, users)
                    for side in (*rings, *peers):
                        figures = play(side, prompts, asked.tokens)
                        taken.setdefault((length, users, side.name), []).append(figures)
    return compared(taken, [ring.name for ring in rings])


def our_ring(stack: ExitStack, asked: argparse.Namespace, stages: int) -> Side:
    """A coordinator with its API and so many stages."""
    dtype = ("--dtype", asked.dtype) if asked.dtype else ()
    init, serve = ("--model", asked.model, *dtype), ("--live", str(max(asked.users)))
    ring = stack.enter_context(served(stages, init=init, serve=serve))
    return Side(f"edgespec, {stages} stage(s)", ring.url, lambda: ring.processes().values())


def their_server(name: str, words: list[str]) -> Side:
    """One that runs."""
    url = words[0].rstrip("/")
    if not is_healthy(url):
        sys.exit(f"--server {name}: no llama-server that is ready answers at {url}")
    return Side(name, url)


def their_process(
    stack: ExitStack, name: str, command: list[str], workers: int, asked: argparse.Namespace
) -> Side:
    """A llama-server, with all layers on so many rpc-servers if any."""
    port, ports = free_port(), [free_port() for _ in range(workers)]
    name += f" + {workers} RPC" if workers else ""
    started = []

    def start(words: Sequence[str], *options: str) -> Command:
        started.append(stack.enter_context(Command(*options, command=words)))
        return started[-1]

    for other in ports:
        worker = start(asked.rpc, "-H", "127.0.0.1", "-p", str(other), "-t", "1")
        wait_for(partial(listens, other), worker, f"{name}, rpc-server")
    slots = max(asked.users)
    room = slots * (max(asked.prompts) + asked.tokens + 64)  # llama-server shares it out by slots
    options = ["-m", asked.model, "--host", "127.0.0.1", "--port", str(port), "-t", "1"]
    options += ["-np", str(slots), "-c", str(room), "-ngl", "99" if workers else "0"]
    if workers:
        options += ["--rpc", ",".join(f"127.0.0.1:{other}" for other in ports)]
    url = f"http://127.0.0.1:{port}"
    wait_for(lambda: is_healthy(url), start(command, *options), name)

    def processes() -> Iterator[psutil.Process]:
        for one in started:
            process = psutil.Process(one.process.pid)
            yield from (process, *process.children(recursive=True))

    return Side(name, url, processes)


def is_healthy(url: str) -> bool:
    """Whether that llama-server has its model."""
    try:
        return httpx.get(f"{url}/health", timeout=10.0).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def listens(port: int) -> bool:
    """Whether somebody does at that port."""
    try:
        socket.create_connection(("127.0.0.1", port), 10.0).close()
    except OSError:
        return False
    return True


def wait_for(condition: Callable[[], bool], command: Command, name: str) -> None:
    """Wait for what a process that was started brings about."""
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        if command.process.poll() is not None or time.monotonic() > limit:
            words = shlex.join(map(str, command.arguments))
            sys.exit(f"{name} did not get ready: {words}\n{command.err}")
        time.sleep(0.05)


def prompts_of(model: str) -> Callable[[int, int], list[Prompt]]:
    """What gives so many prompts of about so many tokens, none of which begins as another."""
    tokenizer, numbers = Tokenizer(local_folder(model)), itertools.count(1)
    ids = tokenizer.encode("\n".join(prompt.text for prompt in default_prompts()))

    def new(length: int, count: int) -> list[Prompt]:
        found = []
        for number in itertools.islice(numbers, count):
            begins = tokenizer.encode(f"{number}. ")
            begin = 97 * number % len(ids)
            behind = ids[begin:] + ids * (1 + length // len(ids))
            text = tokenizer.decode((*begins, *behind)[: max(length, len(begins) + 1)])
            found.append(Prompt(str(number), "", (text,)))
        return found

    return new


def play(side: Side, prompts: list[Prompt], tokens: int) -> Figures:
    """A prompt a user, all at once."""
    users = Users(side.url, len(prompts), prompts, {"max_tokens": tokens, "ignore_eos": True})
    before = cpu_seconds(side.processes())
    users.play()
    spent = cpu_seconds(side.processes()) - before
    if len(users.courses) < len(prompts) or not users.tokens:
        sys.exit(f"{side.name} answered {len(users.courses)} of {len(prompts)} users")
    figures = load_figures(Load(len(prompts)), users.courses)
    return {
        "tokens_per_second": users.tokens / span(users.courses),
        "ttft_seconds": figures.ttft_mean,
        "tbt_seconds": figures.tbt_mean,
        "cpu_ms_per_token": 1e3 * spent / users.tokens if side.processes() else None,
    }


def compared(
    taken: dict[tuple[int, int, str], list[Figures]], ours: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """See compare_served; `taken`: by length, users and side, the figures of each round."""
    found: dict[str, list[dict[str, Any]]] = {"figures": [], "ratios": []}
    middle = {
        key: {name: median([one[name] for one in rounds]) for name in FIGURES}
        for key, rounds in taken.items()
    }
    for (length, users, system), own in middle.items():
        case = dict(zip(CASE, (length, users, system), strict=True))
        found["figures"].append({**case, **own})
        for (*other, peer), theirs in middle.items():
            if system in ours and peer not in ours and other == [length, users]:
                over = {name: ratio(own[name], theirs[name]) for name in FIGURES}
                found["ratios"].append({**case, "peer": peer, **over})
    return found


def median(values: Sequence[float | None]) -> float | None:
    """Of the values, None if there are none."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def ratio(own: float | None, theirs: float | None) -> float | None:
    """None if either is not known, or the peer's too little to be measured."""
    return None if own is None or not theirs else own / theirs


def served_table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Both in Markdown."""
    forms = {title: (name, form) for name, (title, form) in FIGURES.items()}
    over = {f"{title}, ours / peer's": (name, ".2f") for title, (name, _) in forms.items()}
    figures = markdown(CASE, forms, found["figures"])
    return f"{figures}\n\n{markdown((*CASE, 'peer'), over, found['ratios'])}"


def markdown(
    keys: Sequence[str], columns: dict[str, tuple[str, str]], rows: Sequence[dict[str, Any]]
) -> str:
    """A table; `columns`: by title the figure and its form. What is not known is left empty."""
    lines = [[*keys, *columns], ["---"] * (len(keys) + len(columns))]
    for row in rows:
        known = [(row[name], form) for name, form in columns.values()]
        cells = ["" if value is None else f"{value:{form}}" for value, form in known]
        lines.append([*(str(row[key]) for key in keys), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- stages alone -------------------------------------------------------------------------------


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """By system, and by rows of a pass, the least CPU milliseconds."""
    quantisation = Quantisation.parse("file")
    source = open_source(asked.model, quantisation)
    head = OutputHead(source, asked.dtype)
    runs = {}
    for stages in asked.stages:
        files = block_files(source, quantisation, stages, folder)
        runs[f"edgespec, {stages} stage(s)"] = [Block(*file, asked.dtype) for file in files]
    prompt = np.random.default_rng(0).integers(0, source.config.vocab_size, PROMPT)
    best: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        peers: dict[str, Binding | Bench] = {
            name: stack.enter_context(peer(words, asked)) for name, words in asked.peer
        }
        for _ in range(asked.rounds):
            round_ = {name: ours(blocks, head, prompt, asked) for name, blocks in runs.items()}
            round_ |= {name: theirs.round(prompt) for name, theirs in peers.items()}
            for name, times in round_.items():
                kept = best.setdefault(name, times)
                for rows, value in times.items():
                    kept[rows] = min(kept[rows], value)
    return best


def ours(
    blocks: list[Block], head: OutputHead, prompt: np.ndarray, asked: argparse.Namespace
) -> dict[str, float]:
    """One round: a chain of tokens, and a pass of each number of rows."""
    found = {}
    for count in ROWS:
        work = steps(blocks, head, prompt, count)
        next(work)
        began = time.process_time()
        repeats = asked.tokens if count == 1 else 1
        for _ in range(repeats):
            next(work)
        found[str(count)] = 1e3 * (time.process_time() - began) / repeats
    return found


class Binding:
    """llama-cpp-python in a process of its own."""

    def __init__(self, words: list[str], asked: argparse.Namespace) -> None:
        command = [*words, "-c", _BINDING, asked.model, str(asked.tokens), json.dumps(ROWS)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Binding:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def round(self, prompt: np.ndarray) -> dict[str, float]:
        """CPU milliseconds by rows."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(prompt.tolist()) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._process.args} ended; is llama-cpp-python installed there?")
        found: dict[str, float] = json.loads(line)
        return found


class Bench:
    """A llama-bench, run once a round."""

    def __init__(self, words: list[str], asked: argparse.Namespace) -> None:
        self._command = [*words, "-m", asked.model, "-t", "1", "-r", "1", "-o", "json"]
        self._command += ["-n", str(asked.tokens)]
        for count in ROWS[1:]:
            self._command += ["-p", str(count)]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None: ...

    def round(self, prompt: np.ndarray) -> dict[str, float]:
        """Milliseconds by rows; its context is its own."""
        run = subprocess.run(self._command, capture_output=True, text=True, check=True)
        found = {}
        for test in json.loads(run.stdout):
            if test["n_gen"]:
                found["1"] = 1e-6 * test["avg_ns"] / test["n_gen"]
            else:
                found[str(test["n_prompt"])] = 1e-6 * test["avg_ns"]
        return found


def peer(words: list[str], asked: argparse.Namespace) -> Binding | Bench:
    """What a `--peer` names."""
    kind = Binding if "python" in os.path.basename(words[0]) else Bench
    return kind(words, asked)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its processes
    main()
