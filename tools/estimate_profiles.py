"""Estimates the shipped device profiles from data sheets; writes profiles/*.json, or a table.

    python tools/estimate_profiles.py [FOLDER]     writes NAME.json for every profile
    python tools/estimate_profiles.py --table      prints block times as Markdown
    python tools/estimate_profiles.py --loop       measures here what LOOP below has

The formula for the time of R rows over B bytes of weights is a smooth roofline,

    seconds = sqrt(memory² + compute²)
    memory  = B / (memory share × data-sheet bandwidth)
    compute = R × B × flop per byte / (compute share × peak flop/s)

with 2 flop a weight and row. A plain roofline, max(memory, compute), would be right for a kernel
that overlaps both perfectly; near the ridge none does, and the root of the squares is within a
few percent of max away from it and 1.41 × max on it. The shares are what good kernels of the kind
reach: the 4-bit kernel Marlin (arXiv 2408.11743) is published to stay near the memory line up to
16-32 rows on an A10, whose 200 flop a byte resemble an Orin's 150-210; with the shares below the
formula gives 1.08 × the memory line at 16 rows there, and 1.3 × at 32. None of it was measured by
this project, on any board.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec.daemon.loop_times import measure_loop
from edgespec.planning.cost_model import COST_MODELS, packed_bytes
from edgespec.planning.costs import NodeCosts
from edgespec.planning.operations import USUAL_OPERATIONS
from edgespec.planning.profile import (
    ROWS,
    Figure,
    LogitTime,
    LogitTimes,
    LoopSeconds,
    Profile,
    RowTable,
)

# --- what every estimate assumes ----------------------------------------------------------------

GPU_MEMORY_SHARE = 0.7
GPU_COMPUTE_SHARE = 0.5
CPU_MEMORY_SHARE = 0.6  # a Cortex-A76 cluster does not saturate the memory it is given
CPU_COMPUTE_SHARE = 0.25  # 4-bit weights are unpacked and scaled between the dot products
COPY_SHARE = 0.5  # cache rows lie scattered, so they stream worse than weights
TENSOR_CORE_FLOP = 512  # a clock, dense FP16, Orin's Ampere GPU; 4 × this is its sparse INT8 rate
GPU_LAYER_SECONDS = 30e-6  # some ten small kernels, were they replayed as a CUDA graph
CPU_LAYER_SECONDS = 10e-6  # barriers between the threads
LINK_BANDWIDTH = 117e6  # TCP payload of 1 Gbit/s Ethernet, bytes a second
LINK_LATENCY = 0.25e-3
ETHERNET = "1 Gbit/s Ethernet and one switch"
GIB = 2**30

# --- what was measured on one core of an x86 processor --------------------------------------------

X86 = "one core of an AMD EPYC, torch 2.13, times of the thread"
X86_LAUNCH_SECONDS = 0.37e-3 / 40  # an operation: a tiny layer of transformers' has 40
X86_CHOOSING = {
    "greedy": (18e-6, 0.18e-3),
    "sampled": (26e-6, 0.88e-3),
    "filtered": (0.12e-3, 12.5e-3),
}
"""Seconds of a call, and of 10^6 logits, by daemon/logit_times.py."""
X86_RANKING = {
    "greedy": (0.125e-3, 2.8e-3),
    "sampled": (0.144e-3, 3.2e-3),
    "filtered": (0.25e-3, 10.5e-3),
}
X86_NOISE = 6.4e-3  # of 10^6 tokens
LOOP = LoopSeconds(0.2e-3, 5.4e-6, "one core of an Intel Xeon of 2023 (family 6, model 207)")
"""The coordinator's loop, as --loop measured it there."""
A78_CYCLES = 6e9
"""How many cycles of a Cortex-A78AE do the work of a second of that core: taken for four times the
time at the 1.5 GHz of an Orin Nano, in the middle of three to five; no board was at hand."""
A76_CYCLES = 6.6e9  # a tenth more than its successor

RANKING_KERNELS = 25  # launched to rank guesses on a GPU
X86_KERNEL_SECONDS = 5e-6  # of the driver, for each, beside what torch takes on a CPU too
RANKING_BYTES = {"greedy": 47, "sampled": 59, "filtered": 55}
"""Read and written for each logit by these kernels, of which each goes over all (float32)."""

# --- the fit to FlowSpec Table 1 ----------------------------------------------------------------

FLOWSPEC_ORIGIN = (
    "fitted to FlowSpec Table 1 (arXiv 2507.02620: LLaMA2-7B on five Jetson Orin Nano 8GB, PyTorch "
    "1.11, T = 0, GSM8K, tokens/s: naive pipeline 6.24, PipeDec 7.12, FlowSpec 8.71) as in "
    "tools/fit_paper_profile.py with the bundled pair, whose draft guesses better than theirs"
)
FLOWSPEC_STAGE_SECONDS = 0.100  # 8 layers of llama-2-7b, 1 row
FLOWSPEC_STAGE_ROW_SECONDS = 0.00044  # the same for each further row
FLOWSPEC_DRAFT_SECONDS = 0.0212  # the EAGLE head and the output head behind it, 1 row
FLOWSPEC_DRAFT_ROW_SECONDS = 0.0002  # the same for each further row
FLOWSPEC_LAYER_SECONDS = 0.5e-3  # of both of the above, a layer
FLOWSPEC_LINK_LATENCY = 0.5e-3
FLOWSPEC_LINK_BANDWIDTH = 117e6

FLOWSPEC_LAYERS = 8  # of 32, on each of 4 stages
FLOWSPEC_MODEL = COST_MODELS["llama-2-7b-eagle"]

# --- data sheets --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Board:
    """A board as its data sheet has it.

    `memory`: bytes of RAM; `reserved`: of these, what models cannot use. `bandwidth`: bytes a
    second. `peak`: for weights of 4 and of 16 bits, operations a second and where they come from.
    `slowness`: how many times as long as X86 one `core` takes for Python and numpy.
    """

    name: str
    title: str
    sheet: str
    memory: float
    reserved: float
    reserved_for: str
    bandwidth: float
    peak: dict[int, tuple[float, str]]
    memory_share: float
    compute_share: float
    layer_seconds: float
    layer_origin: str
    core: str
    slowness: float
    has_gpu: bool
    ethernet: str = ETHERNET


def orin(
    name: str,
    title: str,
    sheet: str,
    *,
    gigabytes: int,
    bandwidth: float,
    cores: int,
    clock: float,
    cpu_clock: float,
    ethernet: str = ETHERNET,
) -> Board:
    """A Jetson Orin: `cores` tensor cores at `clock` Hz, its processor's at `cpu_clock` Hz."""
    flops = TENSOR_CORE_FLOP * cores * clock
    peak = (
        flops,
        f"{cores} tensor cores × {TENSOR_CORE_FLOP} flop × {clock / 1e6:.0f} MHz = "
        f"{flops / 1e12:.4g} TFLOPS dense FP16",
    )
    return Board(
        name=name,
        title=title,
        sheet=sheet,
        memory=gigabytes * GIB,
        reserved=1.5 * GIB,
        reserved_for="firmware, JetPack without a desktop, and the CUDA context",
        bandwidth=bandwidth,
        peak={4: peak, 16: peak},
        memory_share=GPU_MEMORY_SHARE,
        compute_share=GPU_COMPUTE_SHARE,
        layer_seconds=GPU_LAYER_SECONDS,
        layer_origin="some ten small kernels a layer, were they replayed as a CUDA graph",
        core=f"a Cortex-A78AE at {cpu_clock / 1e9:g} GHz",
        slowness=A78_CYCLES / cpu_clock,
        has_gpu=True,
        ethernet=ethernet,
    )


BOARDS = (
    orin(
        "jetson-orin-nano-8gb",
        "NVIDIA Jetson Orin Nano 8 GB",
        "NVIDIA Jetson Orin Nano Series data sheet",
        gigabytes=8,
        bandwidth=68e9,
        cores=32,
        clock=625e6,
        cpu_clock=1.5e9,
    ),
    orin(
        "jetson-orin-nano-super-8gb",
        "NVIDIA Jetson Orin Nano Super 8 GB",
        "NVIDIA Jetson Orin Nano Super Developer Kit data sheet",
        gigabytes=8,
        bandwidth=102e9,
        cores=32,
        clock=1020e6,
        cpu_clock=1.7e9,
    ),
    orin(
        "jetson-orin-nx-16gb",
        "NVIDIA Jetson Orin NX 16 GB",
        "NVIDIA Jetson Orin NX Series data sheet (its 100 TOPS include 40 of accelerators that "
        "are not counted here)",
        gigabytes=16,
        bandwidth=102.4e9,
        cores=32,
        clock=918e6,
        cpu_clock=2.0e9,
    ),
    orin(
        "jetson-agx-orin-64gb",
        "NVIDIA Jetson AGX Orin 64 GB",
        "NVIDIA Jetson AGX Orin Series data sheet (its 275 TOPS include 105 of accelerators that "
        "are not counted here)",
        gigabytes=64,
        bandwidth=204.8e9,
        cores=64,
        clock=1300e6,
        cpu_clock=2.2e9,
        ethernet="10 Gbit/s Ethernet, held to 1 Gbit/s by the switch",
    ),
    Board(
        name="raspberry-pi-5-8gb",
        title="Raspberry Pi 5 8 GB (CPU only)",
        sheet="Raspberry Pi 5 product brief",
        memory=8 * GIB,
        reserved=0.5 * GIB,
        reserved_for="Raspberry Pi OS without a desktop",
        bandwidth=17.07e9,  # LPDDR4X-4267, 32 bit
        peak={
            4: (
                4 * 2.4e9 * 64,
                "4 Cortex-A76 × 2.4 GHz × 2 SDOT a clock × 32 operations = 614.4 GOPS INT8",
            ),
            16: (
                4 * 2.4e9 * 32,
                "4 Cortex-A76 × 2.4 GHz × 2 FMLA a clock × 16 operations = 307.2 GFLOPS FP16",
            ),
        },
        memory_share=CPU_MEMORY_SHARE,
        compute_share=CPU_COMPUTE_SHARE,
        layer_seconds=CPU_LAYER_SECONDS,
        layer_origin="barriers between four threads",
        core="a Cortex-A76 at 2.4 GHz",
        slowness=A76_CYCLES / 2.4e9,
        has_gpu=False,
    ),
)


def tidy(value: float) -> float:
    """Four significant digits, more than any of these figures deserves; whole if they are."""
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded >= 1 and rounded.is_integer() else rounded


def table(seconds: Callable[[int], float], origin: str) -> RowTable:
    """A row table of a function of the rows."""
    return RowTable.of((tidy(seconds(rows)) for rows in ROWS), origin)


def roofline(board: Board, bits: int) -> RowTable:
    """The time of 10^9 bytes of weights on a board, by the formula above."""
    peak, peak_origin = board.peak[bits]
    flop_per_byte = 2 * 1e9 / packed_bytes(10**9, bits)
    memory = 1e9 / (board.memory_share * board.bandwidth)
    compute = 1e9 * flop_per_byte / (board.compute_share * peak)
    return table(
        lambda rows: math.hypot(memory, rows * compute),
        "estimated, no kernel was timed on this board: sqrt(memory² + compute²), memory = 1e9 / "
        f"({board.memory_share} × {board.bandwidth / 1e9:.5g} GB/s), compute = rows × 1e9 × "
        f"{flop_per_byte:.4g} flop a byte / ({board.compute_share} × peak), peak = {peak_origin}; "
        f"{board.sheet}; why this formula: tools/estimate_profiles.py",
    )


def on_core(board: Board) -> str:
    """The end of an origin: where something was measured, and how it was carried over."""
    return f"measured on {X86}, times {board.slowness:.3g} for {board.core}"


def choosing(board: Board) -> LogitTimes:
    """On the processor; from a GPU a row of float32 is copied first."""
    copied = 4e6 / (COPY_SHARE * board.bandwidth) if board.has_gpu else 0.0
    slow = board.slowness
    times = {
        way: LogitTime(tidy(slow * call), tidy(slow * million + copied))
        for way, (call, million) in X86_CHOOSING.items()
    }
    return LogitTimes(
        **times,
        origin=f"estimated: {on_core(board)}"
        + (", and 4 bytes a logit at copy_bandwidth" if board.has_gpu else ""),
    )


def ranking(board: Board) -> LogitTimes:
    """Where the draft's logits are: on the GPU if there is one."""
    slow = board.slowness
    if not board.has_gpu:
        times = {
            way: LogitTime(tidy(slow * call), tidy(slow * million))
            for way, (call, million) in X86_RANKING.items()
        }
        return LogitTimes(**times, origin=f"estimated: {on_core(board)}, one of its four")
    launches = RANKING_KERNELS * X86_KERNEL_SECONDS
    times = {
        way: LogitTime(
            tidy(slow * (call + launches)),
            tidy(1e6 * RANKING_BYTES[way] / (board.memory_share * board.bandwidth)),
        )
        for way, (call, _) in X86_RANKING.items()
    }
    return LogitTimes(
        **times,
        origin=f"estimated: a call {on_core(board)}, with {launches * 1e3:g} ms more there for "
        f"launching {RANKING_KERNELS} kernels; its logits by the {RANKING_BYTES['greedy']} to "
        f"{RANKING_BYTES['sampled']} bytes that these read and write for each, at "
        f"{board.memory_share} × {board.bandwidth / 1e9:.5g} GB/s of the data sheet",
    )


def estimated(board: Board) -> Profile:
    """A board's profile from its data sheet."""
    return Profile(
        name=board.name,
        title=f"{board.title}, estimated; no kernel was timed on it",
        memory_bytes=Figure(
            int(board.memory - board.reserved),
            f"estimated: {board.memory / GIB:.0f} GiB of RAM less {board.reserved / GIB} GiB for "
            f"{board.reserved_for}",
        ),
        memory_bandwidth=Figure(tidy(board.bandwidth), board.sheet),
        four_bit=roofline(board, 4),
        sixteen_bit=roofline(board, 16),
        layer_seconds=Figure(board.layer_seconds, f"estimated: {board.layer_origin}"),
        launch_seconds=Figure(
            tidy(board.slowness * USUAL_OPERATIONS * X86_LAUNCH_SECONDS),
            f"estimated: {X86_LAUNCH_SECONDS * 1e6:g} µs for each of the {USUAL_OPERATIONS} "
            f"operations of a layer, launched one by one from Python, {on_core(board)}",
        ),
        launches_ahead=board.has_gpu,
        choosing=choosing(board),
        ranking=ranking(board),
        noise=Figure(
            tidy(board.slowness * X86_NOISE),
            f"estimated: {X86_NOISE * 1e3:g} ms {on_core(board)}",
        ),
        copy_bandwidth=Figure(
            tidy(COPY_SHARE * board.bandwidth),
            f"estimated: {COPY_SHARE} × {board.bandwidth / 1e9:.5g} GB/s of the data sheet, as "
            "cache rows lie scattered",
        ),
        link_latency=Figure(LINK_LATENCY, f"estimated: one TCP message over {board.ethernet}"),
        link_bandwidth=Figure(
            int(LINK_BANDWIDTH), f"estimated: what TCP carries over {board.ethernet}"
        ),
        loop_seconds=LoopSeconds(
            tidy(board.slowness * LOOP.event),
            tidy(board.slowness * LOOP.row),
            f"estimated: {LOOP.event * 1e3:g} ms for an event and {LOOP.row * 1e6:g} µs for a row, "
            f"measured on {LOOP.origin} as `edgespec profile` does, times of the thread, times "
            f"{board.slowness:.3g} for {board.core}: the factor that launch_seconds has",
        ),
    )


def flowspec() -> Profile:
    """The boards of FlowSpec's testbed, from the constants above."""
    stage_bytes = FLOWSPEC_LAYERS * FLOWSPEC_MODEL.layer_bytes
    draft = FLOWSPEC_MODEL.draft
    draft_bytes = draft.layers * draft.layer_bytes + draft.head.bytes

    def stage(rows: int) -> float:
        further = FLOWSPEC_STAGE_ROW_SECONDS * (rows - 1)
        fixed = FLOWSPEC_LAYERS * FLOWSPEC_LAYER_SECONDS
        return (FLOWSPEC_STAGE_SECONDS + further - fixed) * 1e9 / stage_bytes

    def draft_pass(rows: int) -> float:
        further = FLOWSPEC_DRAFT_ROW_SECONDS * (rows - 1)
        fixed = draft.layers * FLOWSPEC_LAYER_SECONDS
        return (FLOWSPEC_DRAFT_SECONDS + further - fixed) * 1e9 / draft_bytes

    same = estimated(BOARDS[0])
    nothing = "nothing extra: it is a part of the fitted times of a stage and of the draft"
    free = LogitTime(0, 0)

    def as_estimated(figure: Figure) -> Figure:
        return Figure(figure.value, f"not fitted, that of {same.name}: {figure.origin}")

    return Profile(
        name="paper-flowspec-7b",
        title="FlowSpec's testbed: Jetson Orin Nano 8 GB, LLaMA2-7B in FP16",
        cost_model=FLOWSPEC_MODEL.name,
        memory_bytes=as_estimated(same.memory_bytes),
        memory_bandwidth=as_estimated(same.memory_bandwidth),
        four_bit=table(
            stage,
            f"{FLOWSPEC_ORIGIN}: {FLOWSPEC_LAYERS} layers take "
            f"{FLOWSPEC_STAGE_SECONDS * 1e3:g} ms at 1 row, "
            f"{FLOWSPEC_STAGE_ROW_SECONDS * 1e3:g} ms more for each further one; the testbed held "
            f"them in FP16, here they are charged as {stage_bytes / 1e9:.3f} GB in 4 bits",
        ),
        sixteen_bit=table(
            draft_pass,
            f"{FLOWSPEC_ORIGIN}: a pass of the EAGLE head takes "
            f"{FLOWSPEC_DRAFT_SECONDS * 1e3:g} ms at 1 row, "
            f"{FLOWSPEC_DRAFT_ROW_SECONDS * 1e3:g} ms more for each further one",
        ),
        layer_seconds=Figure(
            FLOWSPEC_LAYER_SECONDS,
            f"{FLOWSPEC_ORIGIN}: a part of the times of a stage and of the draft",
        ),
        launch_seconds=Figure(0, nothing),
        launches_ahead=True,
        choosing=LogitTimes(free, free, free, nothing),
        ranking=LogitTimes(free, free, free, nothing),
        noise=Figure(0, nothing),
        copy_bandwidth=as_estimated(same.copy_bandwidth),
        link_latency=Figure(FLOWSPEC_LINK_LATENCY, FLOWSPEC_ORIGIN),
        link_bandwidth=Figure(int(FLOWSPEC_LINK_BANDWIDTH), FLOWSPEC_ORIGIN),
        loop_seconds=LoopSeconds(0, 0, nothing),
    )


def markdown(profiles: list[Profile]) -> str:
    """Times of a block of a quarter of llama-2-13b, without the reading of a cache."""
    model = COST_MODELS["llama-2-13b"]
    lines = ["| profile | 1 row | 16 rows | 64 rows |", "| --- | --- | --- | --- |"]
    for profile in profiles:
        costs = NodeCosts(profile, model, model.layers // 4)
        times = (f"{costs.block_seconds(rows, 0) * 1e3:.0f} ms" for rows in (1, 16, 64))
        lines.append(f"| `{profile.name}` | {' | '.join(times)} |")
    return "\n".join(lines)


def main() -> None:
    """Writes or prints, as asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    home = Path(__file__).resolve().parent.parent / "profiles"
    parser.add_argument("folder", nargs="?", type=Path, default=home)
    parser.add_argument("--table", action="store_true", help="print block times, write nothing")
    parser.add_argument("--loop", action="store_true", help="measure the loop, write nothing")
    options = parser.parse_args()
    if options.loop:
        print(measure_loop("measured here", 60.0))
        return
    profiles = [*map(estimated, BOARDS), flowspec()]
    if options.table:
        print(markdown(profiles))
        return
    for profile in profiles:
        text = json.dumps(profile.to_dict(), indent=2, ensure_ascii=False)
        (options.folder / f"{profile.name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
