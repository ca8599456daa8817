"""Plots: pictures of bench runs; their figures are in JSON beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.bench.report import REFERENCE
from edgespec.bench.timeline import DRAFT, HEAD, USED, WASTED, Activity

COLORS = {USED: "#2b7a4b", WASTED: "#d9902f", HEAD: "#2f5d9b", DRAFT: "#8a5fb0"}
LABELS = {
    USED: "stage: rows of use",
    WASTED: "stage: rows in vain",
    HEAD: "D0: output head",
    DRAFT: "D0: draft model",
}
_IDLE = "#eeeeee"
_DPI = 120


def plot_timeline(
    path: Path, activities: Sequence[tuple[str, Activity, float]], title: str
) -> None:
    """One panel a policy, one lane a node: (policy, activity, tokens per second)."""
    plt = pyplot()
    nodes = len(activities[0][1].busy)
    height = 0.7 + len(activities) * (0.55 + 0.26 * nodes)
    figure, panels = plt.subplots(
        len(activities), 1, sharex=True, squeeze=False, figsize=(13, height), layout="constrained"
    )
    for panel, (policy, activity, speed) in zip(panels[:, 0], activities, strict=True):
        _draw_lanes(panel, activity, nodes)
        panel.set_title(f"{policy}: {activity.seconds:.2f} s, {speed:.1f} tokens/s", loc="left",
                        fontsize=10)  # fmt: skip
    panels[-1, 0].set_xlabel("seconds since the request began; grey: idle")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[kind]) for kind in LABELS]
    figure.legend(handles, LABELS.values(), loc="outside lower center", ncols=len(LABELS),
                  fontsize=9, frameon=False)  # fmt: skip
    save(plt, figure, panels[:, 0], path, title)


def _draw_lanes(panel: Any, activity: Activity, nodes: int) -> None:
    for node in range(nodes):
        panel.broken_barh([(0, activity.seconds)], (node - 0.38, 0.76), facecolors=_IDLE)
        for kind, color in COLORS.items():
            spans = [
                (bar.start, bar.end - bar.start)
                for bar in activity.bars
                if (bar.node, bar.kind) == (node, kind)
            ]
            # A thin line of the page between two blocks shows that they are two.
            panel.broken_barh(
                spans, (node - 0.38, 0.76), facecolors=color, edgecolors="white", linewidth=0.3
            )
    panel.set_yticks(range(nodes), ["D0", *(f"V{stage}" for stage in range(1, nodes))])
    panel.invert_yaxis()
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)


def plot_speedup(path: Path, speedups: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Bars of {group: {policy: speed-up over the reference}}; a group is a category, or all."""
    plt = pyplot()
    groups = list(speedups)
    policies = [name for name in next(iter(speedups.values())) if name != REFERENCE] or [REFERENCE]
    width = 0.82 / len(policies)
    inches = max(7.0, 1.6 + 0.62 * len(groups) * len(policies))
    figure, panel = plt.subplots(figsize=(inches, 4.6), layout="constrained")
    colors = plt.get_cmap("tab10").colors
    ticks: list[tuple[float, str]] = [(float(at), group) for at, group in enumerate(groups)]
    if len(groups) == 1:  # room for the names below the bars
        ticks = []
    for number, policy in enumerate(policies):
        aside = (number - (len(policies) - 1) / 2) * width
        places = [at + aside for at in range(len(groups))]
        values = [speedups[group][policy] for group in groups]
        bars = panel.bar(places, values, 0.92 * width, label=policy, color=colors[number % 10])
        panel.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
        if len(groups) == 1:
            ticks.append((aside, policy))
    panel.axhline(1.0, color="black", linewidth=1, linestyle="--", label=f"{REFERENCE}: 1")
    panel.set_xticks([at for at, _ in ticks], [name for _, name in ticks])
    panel.set_ylabel(f"speed-up over {REFERENCE}\n(tokens a second, prompt included)")
    panel.set_ylim(0, 1.12 * max(1.0, *(max(group.values()) for group in speedups.values())))
    if len(groups) > 1:
        figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    save(plt, figure, [panel], path, title)


def save(plt: Any, figure: Any, panels: Iterable[Any], path: Path, title: str) -> None:
    """As one file, with a heading."""
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def pyplot() -> Any:
    """matplotlib without a display; it takes a second to import, so not before it is needed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
