"""Timeline: what every node of a real ring did during some answers, from the nodes' own traces."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError
from edgespec.wire.client_messages import Finished

USED = "used"
WASTED = "wasted"
HEAD = "head"
DRAFT = "draft"
KINDS = {"RunHead": HEAD, "Draft": DRAFT, "ReadPart": DRAFT}
"""What D0 computes; a stage's blocks are USED or WASTED."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A node (0: D0) was busy with `kind` from `start` to `end`, in seconds since the beginning.

    A block is wasted if it was stopped, or if no row of it gave a token of an answer. The moving
    of cache rows counts as used.
    """

    node: int
    kind: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Activity:
    """One answer on the ring, or several at once: `bars` in order; entries of the others are those
    of D0, V1 … VN.

    `late`: seconds by which emulated compute ended after its charged time. `sent_bytes`: of
    segments and control messages between the nodes.
    """

    seconds: float
    bars: tuple[Bar, ...]
    busy: tuple[float, ...]
    wasted: tuple[float, ...]
    late: tuple[float, ...]
    sent_bytes: int


def read_traces(paths: Iterable[Path]) -> dict[int, list[dict[str, Any]]]:
    """The lines of all nodes' traces by request; raises ConfigError for a file that is none."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except OSError as problem:
            raise ConfigError(f"cannot read the trace {path}: {problem.strerror}") from None
        for line in lines[:-1]:  # the text after the last newline is no whole line
            try:
                entry = json.loads(line)
                found[entry["request"]].append(entry)
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{path} is no trace: it holds {line[:60]!r}") from None
    return dict(found)


def activity_of(
    entries: Sequence[dict[str, Any]], answers: Mapping[int, Finished], seconds: float
) -> Activity:
    """What the nodes did for some requests in so many seconds, until all of their answers were
    complete; `answers`: by the requests' numbers, at least one."""
    spans = [entry for entry in entries if entry["what"] == "span"]
    nodes = next(iter(answers.values())).stages + 1
    begin = min((span["start"] for span in spans), default=0.0)
    used = {row for request, end in answers.items() for row in _used_rows(spans, request, end)}
    busy, wasted, late = [0.0] * nodes, [0.0] * nodes, [0.0] * nodes
    bars: list[Bar] = []
    done = set()
    for span in sorted(spans, key=lambda span: span["start"]):
        job = span["node"], span["start"], span["end"]
        if job in done:
            continue  # one job for several requests, which is in the trace of each
        done.add(job)
        start = span["start"] - begin
        end = min(span["end"] - begin, seconds)
        if end <= start:
            continue
        node, kind = span["node"], _kind(span, used)
        bars.append(Bar(node, kind, start, end))
        busy[node] += end - start
        wasted[node] += end - start if kind == WASTED else 0.0
        late[node] += span["late"]
    sent = sum(entry["bytes"] for entry in entries if entry["what"] == "sent")
    return Activity(seconds, tuple(bars), tuple(busy), tuple(wasted), tuple(late), sent)


def _kind(span: dict[str, Any], used: set[tuple[int, int]]) -> str:
    if span["kind"] != "RunBlock":
        return KINDS.get(span["kind"], USED)
    rows = zip(_requests(span), span["ids"], strict=True)
    return WASTED if span["stopped"] or used.isdisjoint(rows) else USED


def _requests(span: dict[str, Any]) -> list[int]:
    """Whose each row of a block is."""
    return [request for request, rows in span["parts"] for _ in range(rows)]


def _used_rows(
    spans: Sequence[dict[str, Any]], request: int, finished: Finished
) -> set[tuple[int, int]]:
    """The rows of a request whose target token is in its answer, PPD tokens included, as (request,
    id).

    They are those on the answer's own path: each holds the answer's token at its position, and
    its parent is on the path too.
    """
    prompt, tokens = finished.prompt_tokens, finished.token_ids
    used: set[int] = set()
    rows = [
        row
        for span in spans
        if "tokens" in span
        for whose, *row in zip(
            _requests(span),
            *(span[column] for column in ("ids", "parents", "positions", "tokens")),
            strict=True,
        )
        if whose == request
    ]
    for row, parent, position, token in sorted(rows):
        at = position - prompt  # of the row's own token in the answer
        on_path = at < 0 or (at + 1 < len(tokens) and token == tokens[at] and parent in used)
        if on_path:
            used.add(row)
    return {(request, row) for row in used}
