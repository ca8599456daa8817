"""Estimates the shipped device profiles; writes profiles/*.json, or a table.

    python tools/estimate_profiles.py [FOLDER]     writes NAME.json for every profile
    python tools/estimate_profiles.py --table      prints block times as Markdown
    python tools/estimate_profiles.py --loop       measures here what LOOP below has

**Boards with a GPU** stand on what others measured on them, with other engines: the share of the
data sheet's memory bandwidth that a pass of one row reaches, and what a further row costs. The
time of R rows over B bytes of weights is a line,

    seconds = B / (memory share × data-sheet bandwidth) × (1 + price × (R - 1))

NVIDIA's own table (PUBLISHED_ROWS) gives a price of 0.033 to 0.049 of the layers' step, between one
row and 57 to 61, on four boards and four models in 4 bits (tests/planning/test_published.py has the
figures), and 2,048 rows in one pass took 0.021 to 0.041 a row. It is taken as 0.04 for weights in 4
bits; weights in 16 cost a row the same arithmetic, and the step is longer by the bytes.

What the data sheet would allow is a lower bound: reading and arithmetic at half the peak, both at
once (`simulate --row-price data-sheet`),

    seconds = sqrt(memory² + compute²),   compute = R × B × flop per byte / (0.5 × peak flop/s)

with 2 flop a weight and row. The Raspberry Pi has this formula alone, as nobody published rows.
None of it was measured by this project, on any board.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec.daemon.coordinator_times import measure_loop
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

GPU_COMPUTE_SHARE = 0.5
ROW_PRICE = 0.04
PUBLISHED_ROWS = (
    "NVIDIA TensorRT Edge-LLM 0.10.0, performance benchmarks (JetPack 7.2, INT4 AWQ, batch 1; "
    "power mode not stated)"
)
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
"""Seconds of a call, and of 10^6 logits, by daemon/coordinator_times.py."""
X86_RANKING = {
    "greedy": (0.125e-3, 2.8e-3),
    "sampled": (0.144e-3, 3.2e-3),
    "filtered": (0.25e-3, 10.5e-3),
}
X86_NOISE = 6.4e-3  # of 10^6 tokens
LOOP = LoopSeconds(0.2e-3, 2.0e-6, "one core of an Intel Xeon of 2023 (family 6, model 207)")
"""The coordinator's loop, as --loop measured it there."""
A78_CYCLES = 6e9
"""How many cycles of a Cortex-A78AE do the work of a second of that core: taken for four times the
time at the 1.5 GHz of an Orin Nano, in the middle of three to five; no board was at hand."""
A76_CYCLES = 6.6e9  # a tenth more than its successor
V3AE_CYCLES = 3.6e9  # a guess: four generations after the A78

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

# --- SpecPipe's server --------------------------------------------------------------------------

SPECPIPE_ORIGIN = (
    "SpecPipe, Figure 11: plain pipelining of LLaMA3.1-70B over eight RTX 3090 of one server takes "
    "302 ms a token (HumanEval-X)"
)
SPECPIPE_STEP_SECONDS = 0.302 / 8  # 10 layers of llama-3.1-70b, 1 row, and the way to the next GPU
SPECPIPE_SIXTY_FOUR = 1.15  # what a step of 64 rows takes, in those of one: nothing was published
SPECPIPE_LAYER_SECONDS = 0.6e-3  # of a layer, the host's: so that a pass of the draft takes 15 ms
SPECPIPE_LINK_LATENCY = 0.1e-3
SPECPIPE_LINK_BANDWIDTH = 10e9
SPECPIPE_LAYERS = 10
SPECPIPE_MODEL = COST_MODELS["llama-3.1-70b"]

# --- data sheets --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Board:
    """A board as its data sheet has it.

    `memory`: bytes of RAM; `reserved`: of these, what models cannot use. `bandwidth`: bytes a
    second. `peak`: for weights of 4 and of 16 bits, operations a second and where they come from.
    `memory_share`: of the bandwidth that a pass of one row reaches; `shared_by`: where that was
    published, "": estimated. `slowness`: how many times as long as X86 one `core` takes for Python
    and numpy.
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
    shared_by: str
    compute_share: float
    layer_seconds: float
    layer_origin: str
    core: str
    slowness: float
    has_gpu: bool
    ethernet: str = ETHERNET


def jetson(
    name: str,
    title: str,
    sheet: str,
    *,
    gigabytes: int,
    bandwidth: float,
    share: float,
    shared_by: str,
    peak: tuple[float, str],
    core: str,
    slowness: float,
    ethernet: str = ETHERNET,
) -> Board:
    """A board of NVIDIA's, of whose bandwidth a `share` was reached (`shared_by`: by whom)."""
    return Board(
        name=name,
        title=title,
        sheet=sheet,
        memory=gigabytes * GIB,
        reserved=1.5 * GIB,
        reserved_for="firmware, JetPack without a desktop, and the CUDA context",
        bandwidth=bandwidth,
        peak={4: peak, 16: peak},
        memory_share=share,
        shared_by=shared_by,
        compute_share=GPU_COMPUTE_SHARE,
        layer_seconds=GPU_LAYER_SECONDS,
        layer_origin="some ten small kernels a layer, were they replayed as a CUDA graph",
        core=core,
        slowness=slowness,
        has_gpu=True,
        ethernet=ethernet,
    )


def orin_peak(cores: int, clock: float) -> tuple[float, str]:
    """Of so many of Orin's tensor cores at `clock` Hz, and where it comes from."""
    flops = TENSOR_CORE_FLOP * cores * clock
    return flops, (
        f"{cores} tensor cores × {TENSOR_CORE_FLOP} flop × {clock / 1e6:.0f} MHz = "
        f"{flops / 1e12:.4g} TFLOPS dense FP16"
    )


def a78(clock: float) -> tuple[str, float]:
    """A core of Orin's, and how slow it is."""
    return f"a Cortex-A78AE at {clock / 1e9:g} GHz", A78_CYCLES / clock


NANO_15W, SUPER_25W = a78(1.5e9), a78(1.7e9)
NX_CORE, AGX_CORE = a78(2.0e9), a78(2.2e9)
MLC = "MLC LLM by NVIDIA's Jetson AI Lab (INT4, one user)"

BOARDS = (
    jetson(
        "jetson-orin-nano-8gb",
        "NVIDIA Jetson Orin Nano 8 GB",
        "NVIDIA Jetson Orin Nano Series data sheet",
        gigabytes=8,
        bandwidth=68e9,
        share=0.85,
        shared_by=f"{PUBLISHED_ROWS}: Qwen3-1.7B 36.5 tokens/s, {0.8:g} with its head in 16 bits; "
        f"{MLC}, at 15 W: Llama-3.1-8B 14.0, 0.93, and Phi-3.5-mini 24.7, 0.78",
        peak=orin_peak(32, 625e6),
        core=NANO_15W[0],
        slowness=NANO_15W[1],
    ),
    jetson(
        "jetson-orin-nano-super-8gb",
        "NVIDIA Jetson Orin Nano Super 8 GB",
        "NVIDIA Jetson Orin Nano Super Developer Kit data sheet",
        gigabytes=8,
        bandwidth=102e9,
        share=0.85,
        shared_by=f"{MLC}, in the Super mode: Llama-3.1-8B 19.1 tokens/s, 0.84; Qwen2.5-7B 21.8, "
        "0.91; Phi-3.5-mini 38.1, 0.80; Llama-3.2-3B 43.1, 0.76",
        peak=orin_peak(32, 1020e6),
        core=SUPER_25W[0],
        slowness=SUPER_25W[1],
    ),
    jetson(
        "jetson-orin-nx-16gb",
        "NVIDIA Jetson Orin NX 16 GB",
        "NVIDIA Jetson Orin NX Series data sheet (its 100 TOPS include 40 of accelerators that "
        "are not counted here)",
        gigabytes=16,
        bandwidth=102.4e9,
        share=0.85,
        shared_by=f"{PUBLISHED_ROWS}: Qwen3-8B 18.4 tokens/s, 0.90; Qwen3-4B 32.2, 0.87; "
        "Qwen3-1.7B 59.0, 0.82; vLLM by NVIDIA's Jetson AI Lab in a mode that is not stated has "
        "half of that",
        peak=orin_peak(32, 918e6),
        core=NX_CORE[0],
        slowness=NX_CORE[1],
    ),
    jetson(
        "jetson-agx-orin-64gb",
        "NVIDIA Jetson AGX Orin 64 GB",
        "NVIDIA Jetson AGX Orin Series data sheet (its 275 TOPS include 105 of accelerators that "
        "are not counted here)",
        gigabytes=64,
        bandwidth=204.8e9,
        share=0.75,
        shared_by=f"{PUBLISHED_ROWS}: Qwen3-8B 32.2 tokens/s, 0.79; Qwen3-4B 55.3, 0.77; vLLM by "
        "NVIDIA's Jetson AI Lab (W4A16): Llama-3.1-8B 28.1",
        peak=orin_peak(64, 1300e6),
        core=AGX_CORE[0],
        slowness=AGX_CORE[1],
        ethernet="10 Gbit/s Ethernet, held to 1 Gbit/s by the switch",
    ),
    jetson(
        "jetson-thor-t5000-128gb",
        "NVIDIA Jetson AGX Thor, T5000 128 GB",
        "NVIDIA Jetson Thor Series Modules data sheet",
        gigabytes=128,
        bandwidth=273e9,
        share=0.85,
        shared_by=f"{PUBLISHED_ROWS}: Qwen3-8B 49.0 tokens/s, 0.90; Qwen3-4B 83.3, 0.84",
        peak=(2070e12 / 8, "2070 TFLOPS sparse FP4 / 8 = 258.8 TFLOPS dense FP16"),
        core="a Neoverse V3AE at 2.6 GHz, of which no time was at hand",
        slowness=V3AE_CYCLES / 2.6e9,
        ethernet="25 Gbit/s Ethernet, held to 1 Gbit/s by the switch",
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
        shared_by="",
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


def row_table(board: Board, bits: int) -> RowTable:
    """The time of 10^9 bytes of weights on a board, by the formulas above."""
    memory = 1e9 / (board.memory_share * board.bandwidth)
    reading = f"1e9 / ({board.memory_share} × {board.bandwidth / 1e9:.5g} GB/s)"
    if board.shared_by:
        price = ROW_PRICE * packed_bytes(10**9, 4) / packed_bytes(10**9, bits)
        return table(
            lambda rows: memory * (1 + price * (rows - 1)),
            f"estimated from what others published: {reading} × (1 + {price:.3g} a further row); "
            f"the share of {board.sheet}: {board.shared_by}; the row: {PUBLISHED_ROWS}, one row "
            "against 57 to 61; why this formula: tools/estimate_profiles.py",
        )
    return table(
        lambda rows: math.hypot(memory, rows * row_seconds(board, bits)),
        f"estimated, no kernel was timed on this board: sqrt(memory² + compute²), memory = "
        f"{reading}, compute = {rows_at_peak(board, bits)}; {board.sheet}; why this formula: "
        "tools/estimate_profiles.py",
    )


def row_seconds(board: Board, bits: int) -> float:
    """What a row of 10^9 bytes takes at the share of the peak."""
    return 1e9 * flop_per_byte(bits) / (board.compute_share * board.peak[bits][0])


def flop_per_byte(bits: int) -> float:
    """Of one row: two for each weight."""
    return 2 * 1e9 / packed_bytes(10**9, bits)


def rows_at_peak(board: Board, bits: int) -> str:
    """How `row_seconds` comes about."""
    return (
        f"rows × 1e9 × {flop_per_byte(bits):.4g} flop a byte / ({board.compute_share} × peak), "
        f"peak = {board.peak[bits][1]}"
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
        title=board.title
        + (
            ", estimated from published measurements of other engines"
            if board.shared_by
            else ", estimated; no kernel was timed on it"
        ),
        memory_bytes=Figure(
            int(board.memory - board.reserved),
            f"estimated: {board.memory / GIB:.0f} GiB of RAM less {board.reserved / GIB} GiB for "
            f"{board.reserved_for}",
        ),
        memory_bandwidth=Figure(tidy(board.bandwidth), board.sheet),
        four_bit=row_table(board, 4),
        sixteen_bit=row_table(board, 16),
        layer_seconds=Figure(board.layer_seconds, f"estimated: {board.layer_origin}"),
        launch_seconds=Figure(
            tidy(board.slowness * USUAL_OPERATIONS * X86_LAUNCH_SECONDS),
            f"estimated: {X86_LAUNCH_SECONDS * 1e6:g} µs for each of the {USUAL_OPERATIONS} "
            f"operations of a layer, launched one by one from Python, {on_core(board)}",
        ),
        launches_ahead=board.has_gpu,
        least_row_seconds=Figure(
            tidy(row_seconds(board, 4)),
            f"estimated: {rows_at_peak(board, 4)}; {board.sheet}",
        )
        if board.shared_by
        else None,
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


def specpipe() -> Profile:
    """The GPUs of SpecPipe's single server, from the constants above."""
    stage_bytes = SPECPIPE_LAYERS * SPECPIPE_MODEL.layer_bytes
    fixed = SPECPIPE_LAYERS * SPECPIPE_LAYER_SECONDS + SPECPIPE_LINK_LATENCY
    one = (SPECPIPE_STEP_SECONDS - fixed) * 1e9 / stage_bytes
    further = (SPECPIPE_SIXTY_FOUR - 1) * SPECPIPE_STEP_SECONDS * 1e9 / stage_bytes / 63
    read = 1e9 / (0.75 * 936e9)
    sheet = "NVIDIA GeForce RTX 3090 data sheet"
    nothing = "nothing extra: it is a part of the time of a stage"
    free = LogitTime(0, 0)
    link = "assumed: GPUs of one server"
    return Profile(
        name="paper-specpipe-70b",
        title="SpecPipe's server: eight RTX 3090, LLaMA3.1-70B in bfloat16",
        cost_model=SPECPIPE_MODEL.name,
        memory_bytes=Figure(24 * GIB, sheet),
        memory_bandwidth=Figure(936e9, sheet),
        four_bit=table(
            lambda rows: one + further * (rows - 1),
            f"{SPECPIPE_ORIGIN}: {SPECPIPE_LAYERS} layers at 1 row, which the paper held in 16 "
            f"bits, are charged as {stage_bytes / 1e9:.3f} GB in 4 bits; that 64 rows take "
            f"{SPECPIPE_SIXTY_FOUR} times as long is assumed",
        ),
        sixteen_bit=table(
            lambda rows: read * (1 + (SPECPIPE_SIXTY_FOUR - 1) * (rows - 1) / 63),
            f"estimated: 0.75 of the {sheet}'s 936 GB/s",
        ),
        layer_seconds=Figure(
            SPECPIPE_LAYER_SECONDS, "assumed: a pass of llama-3.2-1b then takes about 15 ms"
        ),
        launch_seconds=Figure(0, nothing),
        launches_ahead=True,
        choosing=LogitTimes(free, free, free, nothing),
        ranking=LogitTimes(free, free, free, nothing),
        noise=Figure(0, nothing),
        copy_bandwidth=Figure(0.5 * 936e9, f"estimated: half of the {sheet}'s 936 GB/s"),
        link_latency=Figure(SPECPIPE_LINK_LATENCY, link),
        link_bandwidth=Figure(int(SPECPIPE_LINK_BANDWIDTH), link),
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
    profiles = [*map(estimated, BOARDS), flowspec(), specpipe()]
    if options.table:
        print(markdown(profiles))
        return
    for profile in profiles:
        text = json.dumps(profile.to_dict(), indent=2, ensure_ascii=False)
        (options.folder / f"{profile.name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
