"""Plot of a measured profile: time of a layer by rows, and what the memory's bandwidth allows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

COLORS = {
    "none": "#444444",
    "int8": "#8a5fb0",
    "int4": "#2b7a4b",
    "int4-g32": "#7fb89a",
    "int4-g128": "#14452a",
    "nf4": "#d9902f",
    "nf4-dq": "#a8531a",
}
_MARKERS = {"none": "s", "int8": "D", "int4": "o", "int4-g32": "v", "int4-g128": "^", "nf4": "X",
            "nf4-dq": "P"}  # fmt: skip
_DPI = 120


def plot_profile(
    path: Path,
    layer: Mapping[str, Mapping[int, float]],
    stored: Mapping[str, int],
    bandwidth: float,
    title: str,
    subtitle: str,
) -> None:
    """One line a quantisation ("none": 16 bit), both axes logarithmic.

    `layer`: seconds of a layer by rows; `stored`: its bytes. The dashed line of the same colour is
    the time in which `bandwidth` (bytes a second) reads so many bytes: nothing can be below it,
    unless weights are still in a cache.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, panel = plt.subplots(figsize=(9.5, 5.6), layout="constrained")
    rows = sorted({count for column in layer.values() for count in column})
    handles = []
    for name in sorted(layer, key=lambda name: -layer[name][rows[-1]]):  # as the lines end
        color = COLORS[name]
        label = f"{'16 bit' if name == 'none' else name}: {_bytes(stored[name])}"
        handles += panel.plot(
            rows,
            [layer[name][count] * 1e3 for count in rows],
            color=color,
            marker=_MARKERS[name],
            markersize=6,
            linewidth=1.8,
            label=label,
        )
        panel.axhline(
            stored[name] / bandwidth * 1e3, color=color, linestyle=(0, (4, 3)), linewidth=0.9
        )
    handles.append(
        Line2D([], [], color="black", linestyle=(0, (4, 3)), linewidth=0.9,
               label=f"reading the bytes\nonce at {bandwidth / 1e9:.3g} GB/s")
    )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(rows, [str(count) for count in rows])
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=40))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.set_xlabel("rows in a pass")
    panel.set_ylabel("time of one layer, ms")
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=handles, loc="outside right upper", fontsize=9, frameon=False,
                  title="a layer's matrices", alignment="left")  # fmt: skip
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    panel.set_title(subtitle, loc="left", fontsize=9, color="#555555")
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
