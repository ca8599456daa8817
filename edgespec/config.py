"""Settings: frozen dataclasses, validated when they are made; unknown keys are refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from ipaddress import IPv6Address
from typing import Literal

from edgespec.errors import ConfigError

DEFAULT_PORT = 7430
LOOPBACK = "127.0.0.1"
RESTS = 12
"""Beats and silences are so many times as long in a ring that rests."""
DEFAULT_LIVE, MOST_LIVE = 8, 64
"""Requests that are answered at once, at most: one segment holds rows of so many."""
DTYPES = ("float32", "bfloat16", "float64", "float16")
SIXTEEN_BITS = ("float16", "bfloat16")
"""In which a ring in float32 may hold keys and values on CPUs."""
EIGHT_BITS = "int8"
"""In which any may hold them but one in float64: codes with a scale for each row and head."""
MOST_STAGES = 256
HEADS = (HEAD_ON_COORDINATOR, HEAD_ON_LAST_STAGE) = ("coordinator", "last-stage")
"""Where the output head can be."""
DRAFT_VOCABULARY = 1 << 16
"""Tokens that a draft head guesses at most, if it does not say which: a product with more is most
of what it takes."""
FREE_SOURCES = ("ngram",)
"""Draft sources that run no model: their guesses take next to no time."""

MAX_TEMPERATURE = 2.0
"""Of sampling, wherever it is asked for; as OpenAI's API has it."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the matrices of a block's layers are held, or the form of one of them.

    `kind`: "none" (as the model has them), "int8" (codes of 8 bits), "int4" (of 4 bits), "nf4"
    (QLoRA's NormalFloat) or "file" (each matrix as the model's own file packs it, so that forms
    differ). Only files have "iq4" and "fp4", codes of 4 bits for the numbers of a table, and "fp8",
    floating point of 8 bits (E4M3). `group`: columns that share a scale; 0 in "int8": a row does.

    The rest is of the forms that files come in (docs/quantisation.md has the formulas). `double`:
    the scales are quantised too: of "nf4" as bitsandbytes does it, else a whole number for each
    group times a float16 for 256 columns. `zeros`: what is added in a group: "" (nothing),
    "middle" (a number, to 8 steps up from the least code), "low" (a number, to the code 0) or
    "points" (minus a whole number of steps). `scales`: dtype of scales and zeros, but of "nf4".
    `ordered`: columns are stored in an order of their own.
    """

    kind: Literal["none", "int8", "int4", "nf4", "iq4", "fp4", "fp8", "file"] = "none"
    group: int = 0
    double: bool = False
    zeros: Literal["", "middle", "low", "points"] = ""
    scales: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    ordered: bool = False

    @property
    def name(self) -> str:
        """What users call it; a form that only files have is described."""
        for name, one in NAMED.items():
            if one == self:
                return name
        words = [self.kind, f"g{self.group}", self.scales, self.zeros]
        words += ["double"] * self.double + ["ordered"] * self.ordered
        return "-".join(word for word in words if word)

    @staticmethod
    def parse(name: str) -> Quantisation:
        """The one of this name; raises ConfigError, with all names, if there is none."""
        if name not in NAMED:
            raise ConfigError(f"unknown quantisation {name!r}; choose one of: {', '.join(NAMED)}")
        return NAMED[name]


QUANTISATIONS = {
    "none": Quantisation(),
    "int8": Quantisation("int8"),
    "int4": Quantisation("int4", 64, zeros="middle"),
    "int4-g32": Quantisation("int4", 32, zeros="middle"),
    "int4-g128": Quantisation("int4", 128, zeros="middle"),
    "nf4": Quantisation("nf4", 64),
    "nf4-dq": Quantisation("nf4", 64, double=True),
}
"""All that any model's matrices can be rounded to, by name."""

FILE = Quantisation("file")
"""For models whose files are packed already."""

NAMED = {**QUANTISATIONS, "file": FILE}
"""All that can be chosen, by name."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long to wait, in seconds.

    A node sends a `Heartbeat` every `beat`; stage and coordinator count as lost to each other after
    `silence` without a message. A stage without layers asks again every `retry`. A client gives up
    a coordinator after `answer_silence`, and the coordinator a client after `client_silence`: a
    process that is stopped for some seconds loses nobody an answer, and one that has ended is told
    by its connection.
    `recovery`: how long a request waits for a ring that was lost, or for the next progress of what
    replaces it; 0: not at all. What a coordinator has, it tells stages and clients in its
    heartbeats.

    In a ring in which nothing has run for a while nodes wake up as seldom as can be (`resting`).
    What is lost then is noticed by its connection, if it has ended, or after a longer silence, and
    in any case within `silence` of the next request.

    A dead stage is noticed within two seconds, as promised. A false alarm is cheap: a stage keeps
    its block and is back within a beat or two, so that only the committed tokens are read again;
    but one every minute would be a nuisance. A stage's loop runs in a thread beside torch, which
    holds Python's lock for some tenths of a second at most during decoding, and for longer while
    a block is imported, packed and read: see `loading_silence`.
    """

    beat: float = 0.25
    silence: float = 1.5
    answer_silence: float = 12.0
    client_silence: float = 10.0
    retry: float = 1.0
    recovery: float = 60.0

    @property
    def loading_silence(self) -> float:
        """The silence of a stage that does not hold its block yet: the ring is idle then."""
        return 4 * self.silence

    @property
    def resting(self) -> Timing:
        """That of a ring which has nothing to do."""
        return replace(self, beat=RESTS * self.beat, silence=RESTS * self.silence)

    def slowed(self, slow: float) -> Timing:
        """That of a machine on which things take `slow` times as long as usual, or which has a
        longer `silence` than usual: clients, for which a false alarm is not cheap, follow."""
        factor = max(slow, self.silence / Timing().silence)
        return replace(
            self,
            answer_silence=factor * self.answer_silence,
            client_silence=factor * self.client_silence,
        )

    def __post_init__(self) -> None:
        if not 0.0 <= self.recovery <= 86400.0:
            raise ConfigError(
                f"recovery is {self.recovery}; it must be between 0 and 86400 seconds"
            )
        for name in ("beat", "silence", "answer_silence", "client_silence", "retry"):
            value = getattr(self, name)
            if not 0.0 < value < 3600.0:
                raise ConfigError(f"{name} is {value}; it must be between 0 and 3600 seconds")
        if self.silence < 2 * self.beat:
            raise ConfigError(f"silence ({self.silence} s) must be at least two beats")


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP host and port. `host`: a name, an IPv4 number, or an IPv6 number without brackets,
    followed by a zone (`fe80::1%eth0`) if it is link-local."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not self.host or any(
            c.isspace() or not c.isprintable() or c in "/*[]" for c in self.host
        ):
            raise ConfigError(f"{self.host!r} is no host name or address")
        if self.is_ipv6:
            try:
                IPv6Address(self.host)
            except ValueError:
                raise ConfigError(
                    f"{self.host!r} is no IPv6 address; with a port it is written [ADDRESS]:PORT, "
                    "and a link-local one has its interface behind it: fe80::1%eth0"
                ) from None
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"{self.port} is no port; ports go from 1 to 65535")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"

    @property
    def is_ipv6(self) -> bool:
        """Whether it is an IPv6 number (a name is not)."""
        return ":" in self.host

    @property
    def endpoint(self) -> str:
        """ZeroMQ's name for it."""
        return f"tcp://{self}"

    @staticmethod
    def parse(text: str) -> Address:
        """HOST or HOST:PORT, an IPv6 number with a port in brackets; raises ConfigError for
        anything else."""
        text = text.strip()
        bracketed = re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?", text)
        if bracketed:
            host, port = bracketed[1], bracketed[2]
        elif text.count(":") > 1:
            host, port = text, None
        else:
            host, colon, rest = text.partition(":")
            port = rest if colon else None
        if port is None:
            return Address(host, DEFAULT_PORT)
        if not (port.isascii() and port.isdecimal() and len(port) <= 5) or int(port) == 0:
            raise ConfigError(f"{text!r} is no HOST:PORT; ports go from 1 to 65535")
        return Address(host, int(port))


@dataclass(frozen=True, slots=True)
class Emulation:
    """The devices that a ring emulates: names or paths of profiles, and the cost model.

    One profile stands for all devices, several are those of D0, V1 … VN. `cost_model` "" means
    the one that the profile was fitted with, or the default.
    """

    profiles: tuple[str, ...]
    cost_model: str = ""

    def __post_init__(self) -> None:
        if not self.profiles or not all(self.profiles):
            raise ConfigError(
                f"{','.join(self.profiles)!r} names no profiles; give one, or those of D0, V1, … "
                "with commas between them"
            )

    @staticmethod
    def parse(profiles: str, cost_model: str) -> Emulation | None:
        """From the options' texts; None if there is nothing to emulate."""
        if not profiles:
            if cost_model:
                raise ConfigError("--cost-model needs --emulate: nothing is charged without it")
            return None
        return Emulation(tuple(name.strip() for name in profiles.split(",")), cost_model)

    @property
    def options(self) -> list[str]:
        """The same as options of a command."""
        return ["--emulate", ",".join(self.profiles), "--cost-model", self.cost_model]


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """What `edgespec serve` runs.

    `model`: a folder in Hugging Face format, a hub id or a folder that `edgespec shard` made;
    `draft`: what drafting.choice takes, "" means none. `layers`: how many each stage gets; empty
    means equal shares. `quantisation`: of the blocks; `head_quantisation`: of D0's output heads,
    the base's and a draft's; `draft_quantisation`: of a draft's layers. `context`: tokens of prompt
    and answer together; 0 means as many as the model takes. `cache`: the folder that keeps finished
    blocks; "" means the user's own. `trace`: the file for this node's trace, `record` the one for
    all requests and their ends; "" means none.
    `places`: names of the devices that a plan assigns to stages 1, 2, …; empty means that any
    device may be any stage. `with_stage`: the stage that runs on the coordinator's own machine, as
    a process beside it; 0: none. `head`: where the output head is, one of HEADS. `live`: requests
    that are answered at once, at most; fewer if their rows do not fit into the stages' caches.
    `share_prefixes`: prompts of different users may begin with the same rows. `cache_dtype`: of the
    keys and values that stages hold, of 16 bits on CPUs alone; "": `dtype`. `name`: what the model
    is called beside its own names.
    """

    model: str
    draft: str
    stages: int
    dtype: str
    address: Address
    timing: Timing = Timing()
    emulation: Emulation | None = None
    trace: str = ""
    quantisation: Quantisation = Quantisation()
    head_quantisation: Quantisation = Quantisation()
    draft_quantisation: Quantisation = Quantisation()
    layers: tuple[int, ...] = ()
    context: int = 0
    cache: str = ""
    places: tuple[str, ...] = ()
    record: str = ""
    with_stage: int = 0
    head: str = HEAD_ON_COORDINATOR
    live: int = DEFAULT_LIVE
    share_prefixes: bool = False
    cache_dtype: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.live <= MOST_LIVE:
            raise ConfigError(f"live is {self.live}; it must be from 1 to {MOST_LIVE} requests")
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; choose one of: {', '.join(DTYPES)}")
        if complaint := cache_complaint(self.dtype, self.cache_dtype):
            raise ConfigError(complaint)
        if self.head not in HEADS:
            raise ConfigError(f"unknown head {self.head!r}; choose one of: {', '.join(HEADS)}")
        check_path("model", self.model)
        check_path("draft", self.draft)
        if not 1 <= self.stages <= MOST_STAGES:
            raise ConfigError(f"{self.stages} stages; a ring has 1 to {MOST_STAGES}")
        if self.layers and len(self.layers) != self.stages:
            raise ConfigError(
                f"layers for {len(self.layers)} stages, but {self.stages} stages; give one number "
                "of layers for each stage"
            )
        if min(self.layers, default=1) < 1:
            raise ConfigError(f"{min(self.layers)} layers; a stage needs at least one layer")
        if self.context != 0 and self.context < 2:
            raise ConfigError(f"context is {self.context}; it must be at least 2 tokens")
        if self.emulation is not None and self.with_stage:
            raise ConfigError(
                "an emulated ring has a device of its own for each node: give --with-stage 0, or "
                "play one that shares its device with `edgespec simulate --with-stage`"
            )
        if not 0 <= self.with_stage <= self.stages:
            raise ConfigError(
                f"with_stage is {self.with_stage}; the ring has the stages 1 to {self.stages}, and "
                "0 means that none of them is on the coordinator's machine"
            )

    @property
    def head_last(self) -> bool:
        """Whether the last stage holds the output head."""
        return self.head == HEAD_ON_LAST_STAGE


@dataclass(frozen=True, slots=True)
class StageConfig:
    """What `edgespec join` runs. `stage` 0: any stage that is missing, or else a spare.

    `model` "" means: a block in the cache, the folder that the coordinator names, or else the block
    that the coordinator sends. `cache`: the folder that keeps finished blocks; "" means the user's
    own. `metrics`: address of the Prometheus endpoint; None: no endpoint. `listen`: where the data
    socket listens; "": on the route to the coordinator. `reserved`: bytes of this machine's memory
    that are not for its block.
    """

    stage: int
    coordinator: Address
    model: str
    wait: float
    timing: Timing = Timing()
    emulation: Emulation | None = None
    cache: str = ""
    metrics: Address | None = None
    listen: str = ""
    reserved: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.stage <= MOST_STAGES:
            raise ConfigError(
                f"stage {self.stage}; stages are numbered from 1 to {MOST_STAGES} at most"
            )
        if self.coordinator.port == 0:
            raise ConfigError("the coordinator's port is missing; give --coordinator HOST:PORT")
        if not 0.0 < self.wait <= 86400.0:
            raise ConfigError(f"wait is {self.wait}; it must be between 0 and 86400 seconds")


def cache_complaint(dtype: str, cache_dtype: str) -> str:
    """What is wrong with caches of this dtype ("": that of the rows) in a ring of `dtype`; the
    empty string if nothing is."""
    may = [*SIXTEEN_BITS] if dtype == "float32" else []
    may += [EIGHT_BITS] if dtype in ("float32", *SIXTEEN_BITS) else []
    if not cache_dtype or cache_dtype in may:
        return ""
    return (
        f"caches in {cache_dtype!r} of a ring in {dtype}, which may have them in "
        f"{', '.join((dtype, *may))}"
    )


def check_path(what: str, path: str) -> None:
    """Raise ConfigError for a path that cannot be sent to stages."""
    try:
        path.encode("utf-8")  # it is sent to stages
    except UnicodeEncodeError:
        raise ConfigError(f"the {what} folder's name {path!r} is not valid UTF-8") from None
