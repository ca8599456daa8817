"""Load plots: a picture of policies over the number of requests at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.bench.plots import pyplot, save


def plot_load(path: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> None:
    """{policy: its figures (docs/figures.md) for each number of requests at once}: tokens a second
    of all together on the left, seconds between tokens on the right, with what 99 % of them do not
    exceed as a dashed line of the same colour."""
    plt = pyplot()
    from matplotlib.ticker import FuncFormatter

    figure, (speed, between) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    colors = plt.get_cmap("tab10").colors
    for number, (policy, figures) in enumerate(runs.items()):
        color, live = colors[number % 10], [one["live"] for one in figures]
        line = {"color": color, "marker": "o", "markersize": 5, "linewidth": 1.8}
        speed.plot(live, [one["tokens_per_second"] for one in figures], label=policy, **line)
        between.plot(live, [one["tbt_mean"] * 1e3 for one in figures], **line)
        between.plot(
            live, [one["tbt_p99"] * 1e3 for one in figures], color=color, linestyle=(0, (4, 3))
        )
    for panel in (speed, between):
        ticks = sorted({one["live"] for figures in runs.values() for one in figures})
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{live:g}" for live in ticks])
        panel.set_xlabel("requests at once")
        panel.set_ylim(0)
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    speed.set_ylabel("tokens a second, of all together")
    between.set_ylabel("ms between tokens (dashed: 99th percentile)")
    figure.legend(loc="outside lower center", ncols=len(runs), fontsize=9, frameon=False)
    save(plt, figure, [speed, between], path, title)
