"""Options that several commands share, with one help text each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from edgespec.config import MAX_TEMPERATURE, MOST_STAGES
from edgespec.errors import ConfigError
from edgespec.policy.registry import POLICIES


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command have parameters that are dataclasses: one option for each of their fields.

    Typer has no groups of options. It is shown the fields where the parameter stands, with the
    values of its default as their defaults.
    """
    signature = inspect.signature(command, eval_str=True)
    shown: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for one in signature.parameters.values():
        if not is_dataclass(one.annotation):
            shown.append(one)
            continue
        groups[one.name] = one.annotation
        types = get_type_hints(one.annotation, include_extras=True)
        for name in (field.name for field in fields(one.annotation)):
            default = getattr(one.default, name)
            shown.append(one.replace(name=name, default=default, annotation=types[name]))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return run


def a_ring(context: typer.Context, value: int) -> int:
    """An option of 0 stages is one that was not given, and a ring of none if it was."""
    source = context.get_parameter_source("stages")
    if not value and source is not None and source.name == "COMMANDLINE":
        raise ConfigError(f"{value} stages; a ring has 1 to {MOST_STAGES}")
    return value


Stages = Annotated[int, typer.Option(help="Number of stages in the ring.")]
StagesOrFolders = Annotated[
    int,
    typer.Option(
        help="Number of stages in the ring. Default: as --layers or the model's folder has.",
        show_default=False,
        callback=a_ring,
    ),
]
StagesHere = Annotated[
    int,
    typer.Option(
        help="Number of stages in the ring. Default: as --layers or the model's folder has, or 3.",
        show_default=False,
        callback=a_ring,
    ),
]
USUAL_STAGES = 3
_POLICIES = " or ".join(", ".join(sorted(POLICIES)).rsplit(", ", 1))
Policy = Annotated[
    str,
    typer.Option(
        help=f"What to send when: {_POLICIES}. Default: adaptive, or autoregressive where there "
        "is no draft model."
    ),
]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[
    float,
    typer.Option(
        help=f"From 0, which takes the most likely token every time, to {MAX_TEMPERATURE:g}."
    ),
]
TopK = Annotated[int, typer.Option(help="Sample from the K most likely tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens of total share P.")]
MinP = Annotated[
    float, typer.Option(help="Leave out tokens below P times the likeliest one's share.")
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this text; may be given several times.")
]
Wait = Annotated[
    float, typer.Option(help="Seconds to wait for a coordinator that does not answer.")
]
WAIT_S = 10.0
ClientToken = Annotated[
    str,
    typer.Option(
        metavar="TOKEN",
        help="A token of `edgespec token new --client`: lets this machine ask, from now on. "
        "-: read it from standard input.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Model = Annotated[
    str,
    typer.Option(
        help="The base model: a folder in Hugging Face format, a hub id (ORG/NAME), or a folder "
        "that `edgespec shard` made. Default: the bundled demo model."
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        help="Who guesses: none; ngram; independent, easyspec, eagle, eagle3 or ppd, each with "
        ":FOLDER of its weights (FOLDER alone: an independent draft model); or several, as in "
        "hybrid:ngram+eagle3:FOLDER. With the bundled base model names find bundled weights, and "
        "the default is independent; else none."
    ),
]
Quant = Annotated[
    str,
    typer.Option(
        help="How the stages hold the layers' matrices: none, int8, int4, int4-g32, int4-g128, nf4 "
        "or nf4-dq."
    ),
]
DraftQuant = Annotated[
    str, typer.Option(help="The same for the draft model, or the layer of an EAGLE head.")
]
Layers = Annotated[
    str,
    typer.Option(
        metavar="N[,N...]",
        help="Layers of stage 1, 2, ..., as `edgespec plan` advises. Default: equal shares.",
    ),
]
Context = Annotated[
    int,
    typer.Option(
        help="Tokens that prompt and answer may have together. Default: what the model takes."
    ),
]
Cache = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        help="Folder that keeps finished blocks. Default: ~/.cache/edgespec/blocks.",
    ),
]
Cluster = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        envvar="EDGESPEC_CLUSTER",
        help="Folder with this machine's keys and what it knows of its cluster. Default: "
        "~/.local/state/edgespec.",
    ),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float64 or (CUDA) float16.")]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST[:PORT]",
        help="Where the coordinator is. Default: where it was the last time, or the one of this "
        "cluster that is found on the local network.",
        show_default=False,
    ),
]
DEFAULT_HTTP = "127.0.0.1:8000"
Http = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT|none",
        envvar="EDGESPEC_HTTP",
        help="Where the HTTP API listens. Any address but loopback needs API keys (`edgespec key "
        "new`).",
    ),
]
Emulate = Annotated[
    str,
    typer.Option(
        metavar="PROFILE[,PROFILE...]",
        help="Take the time that other devices would: a profile's name or file, or those of D0, "
        "V1, ... VN with commas between them.",
    ),
]
CostModel = Annotated[
    str,
    typer.Option(
        help="The model whose costs are charged. Default: the one that the profile was fitted "
        "with, or llama-2-13b."
    ),
]
Trace = Annotated[
    str, typer.Option(help="File to write into, line by line, what this node does when.")
]
DEFAULT_PROFILE = "jetson-orin-nano-8gb"
Profiles = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PROFILE[,PROFILE...]",
        help="The devices, by name or file: one for all, or those of D0, V1, ... VN, separated by "
        f"commas or given one by one. Default: {DEFAULT_PROFILE}.",
    ),
]
Policies = Annotated[
    str, typer.Option(help="Policies to compare, separated by commas; all: every one.")
]
Prompts = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="Prompts: JSON lines of Spec-Bench or GSM8K or with a prompt each, or plain lines. "
        "Default: 40 bundled problems of GSM8K's test split.",
    ),
]
Limit = Annotated[int, typer.Option(help="Take the first so many prompts only; 0: all.")]
AllLinks = Annotated[
    str,
    typer.Option(
        metavar="LATENCY_MS:MBIT[:JITTER_MS[:LOSS]]",
        help="Every link of the ring, instead of the profiles' own; MBIT 0: no limit.",
    ),
]
Jobs = Annotated[int, typer.Option(help="Processes that compute at once; 0: one a processor.")]
