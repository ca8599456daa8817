"""edgespec bench: policies on a real ring of processes, side by side, with figures and pictures."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import typer

from edgespec.bench.harness import (
    BenchAnswer,
    BenchSettings,
    MeasuredRing,
    answer_lines,
    differences,
    overall,
    play,
    play_at_once,
    results,
    sharing,
)
from edgespec.bench.load import Load, span
from edgespec.bench.plots import plot_speedup, plot_timeline
from edgespec.bench.report import COLUMNS, LOAD_COLUMNS, REFERENCE, cells
from edgespec.bench.simulated import chosen_policies
from edgespec.bench.timeline import Activity, activity_of, read_traces
from edgespec.bench.workloads import DEFAULT_WORKLOAD, Prompt, default_prompts, read_prompts
from edgespec.cli import options
from edgespec.cli.demo import ring_here
from edgespec.cli.kit import kit
from edgespec.cli.notes import Notes
from edgespec.cli.tables import show_table
from edgespec.config import LOOPBACK, Address, CoordinatorConfig, Emulation
from edgespec.daemon.emulation import described, emulated_costs
from edgespec.daemon.extras import require
from edgespec.daemon.precision import AUTO
from edgespec.daemon.settings import RingOptions, coordinator_config
from edgespec.door.asking import GREEDY, SamplingOptions
from edgespec.errors import EXIT_FAILED, ConfigError


@options.grouped
def bench(
    policy: str = options.POLICIES,
    stages: int = options.STAGES_HERE,
    with_stage: int | None = options.WITH_STAGE,
    emulate: str = options.EMULATE,
    cost_model: str = options.COST_MODEL,
    prompts: str = options.PROMPTS,
    limit: int = options.LIMIT,
    live: int | None = options.LIVE,
    sampling: SamplingOptions = GREEDY,
    model: str = options.MODEL,
    draft: str = options.DRAFT,
    quant: options.Quant = AUTO,
    head_quant: options.HeadQuant = AUTO,
    draft_quant: options.DraftQuant = AUTO,
    dtype: options.Dtype = AUTO,
    out: str = typer.Option("bench-results", help="Folder for results, answers and pictures."),
    as_kit: bool = typer.Option(
        False,
        "--kit",
        help="Measure this board instead, and write all that the project needs to know of it into "
        "one file, edgespec-kit.json in --out, with nothing personal in it; beside it the board's "
        "profile, for yourself. Some minutes.",
    ),
    as_json: bool = options.JSON,
) -> None:
    """Let policies answer the same prompts on a ring of processes on this machine, side by side.

    The processes are those of a real cluster. With --emulate each of them takes the time that the
    device of a profile would. Every answer is compared with plain decoding's.
    """
    if as_kit:
        kit(_made(Path(out)) / "edgespec-kit.json", Notes())
        return
    require("bench", "edgespec bench, which draws pictures,")
    load = None if live is None else Load(live)
    emulation = Emulation.parse(emulate, cost_model)
    config = coordinator_config(
        RingOptions(
            *(model, draft, stages, dtype, quant, head_quant, draft_quant), with_stage=with_stage
        ),
        Address(LOOPBACK, 0),
        emulation,
        usual_stages=options.USUAL_STAGES,
    )
    if live is not None:
        config = replace(config, live=live)
    names = chosen_policies([name.strip() for name in policy.split(",")], config.draft)
    settings = BenchSettings(
        tuple(dict.fromkeys((REFERENCE, *names))),
        sampling.max_new_tokens,
        sampling.sampling,
    )
    workload = read_prompts(prompts, limit) if prompts else default_prompts(limit)
    notes = Notes()
    if load is not None:
        load.check_prompts(len(workload), notes.say)
    ring = _ring(config, notes)
    folder = _made(Path(out))
    answers, activities = _played(config, workload, settings, load, notes)
    content = results(
        answers,
        activities,
        ring,
        {
            "stages": config.stages,
            "with_stage": config.with_stage,
            "profiles": list(ring.profiles),
            "cost_model": ring.cost_model,
            "model": model or options.BUNDLED,
            "draft": draft or (options.BUNDLED if config.draft else ""),
            "quantisation": config.quantisation.name,
            "head_quantisation": config.head_quantisation.name,
            "draft_quantisation": config.draft_quantisation.name,
            "dtype": config.dtype,
            "workload": prompts or DEFAULT_WORKLOAD,
            "prompts": len(workload),
            "prompts_sha256": _digest(workload),
            "policies": list(settings.policies),
            "max_new_tokens": sampling.max_new_tokens,
            **asdict(settings.sampling),
            **(load.settings() if load else {}),
        },
        load,
    )
    _write(folder, content, answers, activities, ring, load)
    if as_json:
        print(json.dumps(content))
    else:
        columns = COLUMNS + (LOAD_COLUMNS if load else ())
        runs = overall(answers, activities, ring, load)
        show_table(columns, map(cells, runs), left=("policy",))
    notes.say(f"results, answers and pictures are in {folder}")
    _judge(answers, notes)


def _ring(config: CoordinatorConfig, notes: Notes) -> MeasuredRing:
    """What is measured; with --emulate it says that the times are not of this machine."""
    if config.emulation is None:
        return MeasuredRing(("",) * (config.stages + 1), "")
    costs = emulated_costs(config.emulation, config.stages)
    notes.say(described(costs))
    names = tuple(node.profile.name for node in (costs.coordinator, *costs.stages))
    return MeasuredRing(names, costs.coordinator.model.name)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"cannot make the folder {folder}: {problem.strerror}") from None
    return folder


def _digest(workload: Sequence[Prompt]) -> str:
    """Equal for two runs with the same prompts."""
    content = json.dumps([[prompt.id, *prompt.turns] for prompt in workload])
    return hashlib.sha256(content.encode()).hexdigest()


def _played(
    config: CoordinatorConfig,
    workload: Sequence[Prompt],
    settings: BenchSettings,
    load: Load | None,
    notes: Notes,
) -> tuple[list[BenchAnswer], dict[int, Activity]]:
    """All answers, and the activity of the ring by request number (see harness.overall)."""
    with tempfile.TemporaryDirectory(prefix="edgespec-") as traces:
        with (
            ring_here(config, notes, Path(traces)) as client,
            notes.waiting("answering") as waiting,
        ):
            if load is None:
                answers = play(client, workload, settings, waiting)
            else:
                answers = play_at_once(client, workload, settings, load, waiting)
        entries = read_traces(sorted(Path(traces).glob("*.jsonl")))
    found = {}
    for mine in sharing(answers, load):
        ends = {answer.request: answer.finished for answer in mine}
        lines = [line for request in ends for line in entries.get(request, ())]
        courses = [answer.course for answer in mine if answer.course is not None]
        seconds = span(courses) if courses else mine[0].finished.seconds
        found[mine[0].request] = activity_of(lines, ends, seconds)
    return answers, found


def _write(
    folder: Path,
    content: dict[str, object],
    answers: Sequence[BenchAnswer],
    activities: dict[int, Activity],
    ring: MeasuredRing,
    load: Load | None,
) -> None:
    def write(name: str, text: str) -> None:
        (folder / name).write_text(text, encoding="utf-8")

    runs: Sequence[dict[str, object]] = content["runs"]  # type: ignore[assignment]
    write("results.json", json.dumps(content, indent=1) + "\n")
    for run in runs:
        policy = str(run["policy"])
        counted = [a for mine in sharing(answers, load) for a in mine]
        lines = answer_lines(counted, policy, f"edgespec-{policy}", time.time())
        write(f"answers-{policy}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    what = "real times on one machine"
    if ring.is_emulated:
        devices = " + ".join(dict.fromkeys(ring.profiles))
        what = f"emulated: {ring.cost_model} on {len(ring.profiles)} × {devices}"
    shown = [mine for mine in sharing(answers, load) if (mine[0].number, mine[0].turn) == (1, 1)]
    plot_timeline(
        folder / "timeline.png",
        [
            (mine[0].policy, activity, sum(a.finished.new_tokens for a in mine) / activity.seconds)
            for mine in shown
            for activity in [activities[mine[0].request]]
        ],
        f"{'One answer' if load is None else f'{load.live} at once'} by every policy ({what})",
    )
    groups = {"all prompts": {str(run["policy"]): run for run in runs}}
    for run in runs:
        parts: dict[str, dict[str, object]] = run["categories"]  # type: ignore[assignment]
        for category, part in parts.items() if len(parts) > 1 else ():
            groups.setdefault(category, {})[str(run["policy"])] = part
    plot_speedup(
        folder / "speedup.png",
        {
            group: {policy: run["speedup_vs_autoregressive"] for policy, run in of_it.items()}  # type: ignore[misc]
            for group, of_it in groups.items()
        },
        f"Speed-up ({what})",
    )


def _judge(answers: Sequence[BenchAnswer], notes: Notes) -> None:
    """Report answers that differ from the reference's; exit code 1 if there is one."""
    found = differences(answers)
    for one in found:
        notes.say(
            f"prompt {one.prompt!r}, turn {one.turn}: {one.policy} differs from {REFERENCE} at "
            f"token {one.position}, smallest margin {one.margin:.2g}: a fault, or a GPU on which "
            "edgespec's kernels are not used, as its log says"
        )
    if found:
        raise typer.Exit(EXIT_FAILED)
