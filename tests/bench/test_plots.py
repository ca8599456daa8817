"""The pictures: there, of a sensible size, for one policy or many."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from support.load_plots import plot_load

from edgespec.bench.plots import COLORS, LABELS, plot_speedup, plot_timeline
from edgespec.bench.timeline import DRAFT, HEAD, USED, WASTED, Activity, Bar


def size_of(path: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize("count", [1, 3])
def test_a_timeline_grows_with_the_policies(tmp_path: Path, count: int) -> None:
    bars = (Bar(0, HEAD, 0.0, 0.1), Bar(0, DRAFT, 0.1, 0.3), Bar(1, USED, 0.3, 0.5))
    bars += (Bar(2, WASTED, 0.5, 0.9),)
    activity = Activity(1.0, bars, (0.3, 0.2, 0.4), (0.0, 0.0, 0.4), (0.0,) * 3, 10)
    path = tmp_path / "timeline.png"
    plot_timeline(path, [(f"policy{n}", activity, 5.0) for n in range(count)], "title")
    width, height = size_of(path)
    assert width > 1000
    assert 150 * count < height < 1000


@pytest.mark.parametrize("groups", [["all"], ["all", "math", "chat"]])
def test_bars_stand_for_policies_or_for_categories(tmp_path: Path, groups: list[str]) -> None:
    speedups = {
        group: {"autoregressive": 1.0, "naive_tree": 1.5, "flowspec": 2.5} for group in groups
    }
    path = tmp_path / "speedup.png"
    plot_speedup(path, speedups, "title")
    width, height = size_of(path)
    assert width >= 800
    assert height >= 400


def test_the_reference_alone_has_a_picture_too(tmp_path: Path) -> None:
    plot_speedup(tmp_path / "a.png", {"all": {"autoregressive": 1.0}}, "title")
    assert size_of(tmp_path / "a.png")


def test_lines_over_the_requests_at_once(tmp_path: Path) -> None:
    figures = [
        {"live": live, "tokens_per_second": 5.0 * live, "tbt_mean": 0.1, "tbt_p99": 0.3}
        for live in (1, 2, 4, 8)
    ]
    path = tmp_path / "load.png"
    plot_load(path, {"adaptive": figures, "specpipe": figures[:3]}, "title")
    width, height = size_of(path)
    assert width >= 1000
    assert height >= 400


def test_every_kind_of_work_has_a_colour_and_a_name() -> None:
    assert set(COLORS) == set(LABELS) == {USED, WASTED, HEAD, DRAFT}
