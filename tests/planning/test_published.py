"""Published: what `plan` says of plain decoding beside what others measured on these boards.

The table is in profiles/README.md, with sources and power modes; this computes its last columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from edgespec.daemon.planning import Quants, devices_of, model_to_plan
from edgespec.daemon.profiles import profile_named, profile_names
from edgespec.drafting.choice import NONE
from edgespec.errors import CapacityError
from edgespec.planning.plan import plan
from edgespec.planning.problem import Problem

README = Path(__file__).resolve().parent.parent.parent / "profiles" / "README.md"
HEADING = "## Published speeds"

MOST_OFF = 0.15
"""By so much a prediction may be off without a reason beside it."""

REASONS = {"launches", "head", "vocabulary", "engine", "mode", "memory"}
"""Each is explained below the table."""


class Row(NamedTuple):
    """A row of the table: `cached`: rows that a token attends to; `speed`: published, tokens/s."""

    profile: str
    model: str
    speed: float
    source: str
    cached: int
    planned: str
    off: str
    reason: str


def rows() -> Iterator[Row]:
    text = README.read_text(encoding="utf-8").partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    for line in text.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            profile, model, speed, source, cached, planned, off, reason = cells
            yield Row(profile, model, float(speed), source, int(cached), planned, off, reason)


def planned(row: Row) -> float | None:
    """Tokens a second by the plan of this board alone; None if the model does not fit it."""
    board, others = devices_of(row.profile)
    model = model_to_plan(row.model, Quants(), NONE).model
    try:
        made = plan(Problem(model, board, others, max(row.cached + 128, 512)))
    except CapacityError:
        return None
    return 1 / made.trip_seconds(row.cached)


def test_every_deviation_from_what_was_published_is_named() -> None:
    wrong, table = [], list(rows())
    assert len(table) > 30
    for row in table:
        speed = planned(row)
        off = None if speed is None else speed / row.speed - 1
        told = ("-", "-") if speed is None else (f"{speed:.1f}", f"{off:+.0%}")
        named = off is None or abs(off) > MOST_OFF
        if (row.planned, row.off) != told or (row.reason in REASONS) != named:
            why = row.reason if named else ""
            wrong.append(
                f"| `{row.profile}` | `{row.model}` | {row.speed:g} | {row.source} | {row.cached} "
                f"| {told[0]} | {told[1]} | {why or ('WHY?' if named else '')} |"
            )
    assert not wrong, "these rows of profiles/README.md should be:\n" + "\n".join(wrong)


def test_what_is_charged_beside_what_is_predicted_of_our_kernel() -> None:
    """The table of 10^9 bytes, of 4.5 bits a weight, where profiles count 4.25."""
    text = README.read_text(encoding="utf-8").partition("| charged: 1 |")[2].partition("\n\n")[0]
    lines = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert {name for name, *_ in lines} == {n for n in profile_names() if n.startswith("jetson")}
    for name, *cells in lines:
        steps = profile_named(name).four_bit
        charged = [f"{steps.at(rows) * 1e3 * 4.25 / 4.5:.1f}" for rows in (1, 16, 64)]
        assert cells[:3] == charged, name
        assert all(float(a) > float(b) for a, b in zip(cells[:3], cells[3:], strict=True)), name


def test_an_eight_billion_model_fits_a_board_of_8_gb() -> None:
    """As it does elsewhere, in 4 bits and with a context of 4096."""
    for name in ("jetson-orin-nano-8gb", "jetson-orin-nano-super-8gb"):
        board, others = devices_of(name)
        for model in ("llama-3.1-8b", "qwen3-8b", "qwen2.5-7b"):
            made = plan(Problem(model_to_plan(model, Quants(), NONE).model, board, others))
            assert sum(node.need.total for node in made.nodes) <= board.memory
