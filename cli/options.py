"""Options that several commands share, with one help text each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from edgespec.config import MOST_STAGES
from edgespec.errors import ConfigError


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Expand parameters that are dataclasses into one option for each field.

    Typer has no option groups. It sees the fields in place of the parameter; their defaults are the
    values of the parameter's default, and a text that annotates one is its help.
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
            kind, (mark, *_) = types[name], getattr(types[name], "__metadata__", (None,))
            if isinstance(mark, str):
                kind = Annotated[get_args(kind)[0], typer.Option(help=mark)]
            shown.append(one.replace(name=name, default=default, annotation=kind))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return run


class RingCommand(TyperCommand):
    """A command whose --with-stage may be given without a number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        for at, word in enumerate(words):
            following = words[at + 1 : at + 2]
            if word == "--with-stage" and not (following and following[0].isdecimal()):
                from edgespec.daemon.settings import LAST_STAGE

                words[at] = f"{word}={LAST_STAGE}"
        return super().parse_args(ctx, words)


def check_stages(context: typer.Context, value: int) -> int:
    """0 means that --stages was not given; a given 0 is refused."""
    source = context.get_parameter_source("stages")
    if not value and source is not None and source.name == "COMMANDLINE":
        raise ConfigError(f"{value} stages; a ring has 1 to {MOST_STAGES}")
    return value


def check_policies(value: str) -> str:
    """Policies of somebody's own are known to this process from now on."""
    from edgespec.plugins import known_policies
    from edgespec.policy.registry import policy_named

    names = [name.strip() for name in value.split(",") if name.strip()]
    for name in known_policies(names):
        policy_named(name)
    return value


def check_model(value: str) -> str:
    """What the short name of a model stands for; anything else as it is."""
    from edgespec.daemon.model_names import resolved

    return resolved(value)


STAGES_HERE = typer.Option(
    0,
    help="Number of stages in the ring. Default: as --layers or the model's folder has, or 3.",
    show_default=False,
    callback=check_stages,
)
USUAL_STAGES = 3
BUNDLED = "bundled"
"""The name of the bundled models in the JSON."""
WAIT = typer.Option(10.0, help="Seconds to wait for a coordinator that does not answer.")
CLIENT_TOKEN = typer.Option(
    "",
    metavar="TOKEN",
    help="A token of `edgespec token new --client`: lets this machine ask, from now on. "
    "-: read it from standard input.",
)
JOBS = typer.Option(0, help="Processes that compute at once; 0: one a processor.")
JSON = typer.Option(False, "--json", help="Print one JSON object instead of text.")
RAW = typer.Option(
    False,
    "--raw",
    help="Let the model continue the bare text. Without it, the model's chat template makes a "
    "question of the text; a model without a template continues it in any case.",
)
VERBOSE = typer.Option(
    False, "--verbose", help="Tell more: what the ring did for the answer, and with what success."
)
MODEL = typer.Option(
    "",
    help="The base model: a name of `edgespec models`, a hub id (ORG/NAME), a GGUF file (here, or "
    "ORG/NAME/FILE.gguf of the hub), a folder in Hugging Face format, or one that `edgespec shard` "
    "made. Default: the bundled toy model; for demo "
    "smollm2-135m, where `make` has installed it.",
    callback=check_model,
)
DRAFT = typer.Option(
    "",
    help="Who guesses: none; ngram; mtp, the head in the base's own files; independent, easyspec, "
    "eagle, eagle3, dspark or ppd, each with :MODEL, its weights by name, hub id or folder (MODEL "
    "alone: an independent draft model); or ngram beside one, as in hybrid:ngram+eagle3:MODEL. "
    "Without :MODEL those that `edgespec models` has for the base. A source of your own: "
    "package.module:Class[:ARGUMENT]. "
    "Default: none; for the bundled base model independent, and `init` serves smollm2-135m with "
    "hybrid:ngram+dspark, bases that ship an MTP head with hybrid:ngram+mtp.",
)
Quant = Annotated[
    str,
    typer.Option(
        help="How the stages hold the layers' matrices: none, int8, int4, int4-g32, int4-g128, "
        "nf4, nf4-dq, or file, as the files of a packed model have them. auto: file for such a "
        "one; else 4 bits a weight, or none for a model below 100 MB."
    ),
]
HeadQuant = Annotated[
    str,
    typer.Option(
        help="How the coordinator holds output heads, the base's and a draft's: a name as for "
        "--quant. auto: as the base's file has it, if stages take its codes; else int8, or none "
        "where --quant is none."
    ),
]
DraftQuant = Annotated[
    str,
    typer.Option(
        help="As --quant, of the draft model, or the layer of an EAGLE head. auto: none where "
        "--quant is."
    ),
]
LAYERS = typer.Option(
    "",
    metavar="N[,N...]",
    help="Layers of stage 1, 2, ..., as `edgespec plan` advises. Default: equal shares.",
)
WITH_STAGE = typer.Option(
    None,
    metavar="[N]",
    help="This stage runs on the coordinator's machine, beside it; it counts as one of --stages. "
    "Without a number: as the plan or the cluster has it, or the last one. 0: none.",
    show_default=False,
)
CONTEXT = typer.Option(
    0, help="Tokens that prompt and answer may have together. Default: what the model takes."
)
CACHE = typer.Option(
    "", metavar="DIR", help="Folder that keeps finished blocks. Default: ~/.cache/edgespec/blocks."
)
CLUSTER = typer.Option(
    "",
    metavar="DIR",
    envvar="EDGESPEC_CLUSTER",
    help="Folder with this machine's keys and what it knows of its cluster. Default: "
    "~/.local/state/edgespec.",
)
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float64 or (CUDA) float16. auto: 16 bit for packed "
        "blocks on a GPU or a processor that is faster by it, else float32."
    ),
]
CacheDtype = Annotated[
    str,
    typer.Option(
        help="What stages hold keys and values in: int8 (codes, with a scale for each row and "
        "head), float16 or bfloat16 (of float32 rings), or --dtype. auto: "
        "float16 for packed blocks in float32, else --dtype."
    ),
]
Head = Annotated[
    str,
    typer.Option(
        help="Where the output head is: coordinator, or last-stage. auto: as a plan chooses it, "
        "without one on the coordinator."
    ),
]
COORDINATOR = typer.Option(
    None,
    metavar="HOST[:PORT]",
    help="Where the coordinator is. Default: where it was the last time, or the one of this "
    "cluster that is found on the local network.",
    show_default=False,
)
DEFAULT_HTTP = "127.0.0.1:8000"
HTTP = typer.Option(
    DEFAULT_HTTP,
    metavar="HOST:PORT|none",
    envvar="EDGESPEC_HTTP",
    help="Where the HTTP API listens. Any address but loopback needs API keys (`edgespec key "
    "new`).",
)
ALIAS = typer.Option(
    None,
    metavar="NAME",
    help="Another name by which clients of the HTTP API may ask for the model, such as gpt-4o; may "
    "be given several times.",
    show_default=False,
)
OLLAMA = typer.Option(
    "",
    metavar="HOST:PORT",
    help="Listen here too, where clients of Ollama look for it: 127.0.0.1:11434. They find the "
    "same at --http.",
    show_default=False,
)
REQUIRE_KEY = typer.Option(
    False,
    "--require-key",
    help="Ask for an API key on loopback, too: for an API behind a proxy, or on a machine of "
    "several users.",
)
CORS_ORIGIN = typer.Option(
    None,
    metavar="URL",
    help="A site whose pages may ask the HTTP API from a browser, such as http://localhost:3000; "
    "may be given several times.",
    show_default=False,
)
HOST_NAME = typer.Option(
    None,
    metavar="NAME",
    help="A name by which the HTTP API may be called, beside localhost and addresses; may be given "
    "several times. Default: where keys are asked for, any.",
    show_default=False,
)
EMULATE = typer.Option(
    "",
    metavar="PROFILE[,PROFILE...]",
    help="Take the time that other devices would: a profile's name or file, or those of D0, "
    "V1, ... VN with commas between them.",
)
COST_MODEL = typer.Option(
    "",
    help="The model whose costs are charged. Default: the one that the profile was fitted "
    "with, or llama-2-13b.",
)
TRACE = typer.Option("", help="File to write into, line by line, what this node does when.")
POLICIES = typer.Option(
    "all",
    help="Policies to compare, separated by commas; all: every one. One of your own is "
    "package.module:Class.",
)
OWN_POLICY = typer.Option(
    "",
    "--policy",
    metavar="package.module:Class[,...]",
    help="Policies of your own that requests may name, each by its name, beside edgespec's.",
    callback=check_policies,
)
PROMPTS = typer.Option(
    "",
    metavar="FILE",
    help="Prompts: JSON lines of Spec-Bench or GSM8K or with a prompt each, or plain lines. "
    "Default: 40 bundled problems of GSM8K's test split.",
)
LIMIT = typer.Option(0, help="Take the first so many prompts only; 0: all.")
LIVE = typer.Option(
    None,
    metavar="K",
    help="So many requests at once: the next one as soon as one ends, until the prompts are "
    "through. Without it each waits for an idle ring.",
)
