"""Models to be mutated, of every form that is read; what a user does with one; and what came of it
in a process with little memory and time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from support import dspark_heads, eagle_heads
from support.checkpoints import FAMILY_SETTINGS, write_checkpoint, write_family, write_tokenizer
from support.draft_sources import Fed
from support.ggufs import all_as, tokenizer_values, write_gguf
from support.packed_folders import awq, compressed, fp8, gptq, nf4, write_mxfp4, write_packed

from edgespec.config import FILE
from edgespec.drafting.base import Guesser
from edgespec.drafting.dspark.guesser import load_dspark
from edgespec.drafting.eagle.guesser import load_eagle
from edgespec.drafting.ppd import PPDTokens, read_ppd_tokens, write_ppd_tokens
from edgespec.errors import MOST_CHARS, CapacityError, ConfigError, EdgespecError
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.hub import local_folder
from edgespec.model.inventory import block_parts
from edgespec.model.loader import fingerprint
from edgespec.model.source import TensorSource
from edgespec.model.sources import PLAIN, open_source
from edgespec.model.tokenizer import Tokenizer
from edgespec.model.tree_attention import tree_mask
from edgespec.verify.sampling import Sampling

MORE_BYTES = 1 << 30
"""That a process may take beside the model's file."""
CPU_S = 20
STUCK_S = 900

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
_GGUFS = {
    "llama": ("Q8_0", "bytes"),
    "llama-rope": ("Q4_0", "fallback"),
    "qwen3": ("F16", "bytes"),
    "gemma2": ("Q5_1", "fallback"),
    "gemma3_text": ("Q5_0", "fallback"),
    "phi3": ("Q4_1", "bytes"),
    "granite": ("BF16", "fallback"),
    "qwen3_moe": ("Q8_0", "bytes"),
    "smollm3": ("Q4_K", "bytes"),
    "qwen2": ("Q6_K", "fallback"),
    "mistral": ("Q5_K", "bytes"),
    "gpt_oss": ("MXFP4", "bytes"),
    "olmo2": ("IQ4_NL", "bytes"),
    "ministral3": ("IQ4_XS", "bytes"),
    "mixtral": ("Q3_K", "fallback"),
    "phi3-long": ("Q2_K", "bytes"),
}
_FOLDERS = ("deepseek_v2", "nemotron_h", "qwen3_next")
"""With latents, states and shared MLPs; the rest of these is for many cases alone."""
_MORE_FOLDERS = (
    *("gpt_oss", "granitemoehybrid", "olmo3", "granitemoehybrid-experts", "falcon_h1", "qwen2_moe"),
    *("glm4_moe", "glm4_moe_lite", "ernie4_5_moe", "hunyuan_v1_moe"),
)
_HEADS = {
    "dspark": ("deepspec", "z-lab-window", "specforge-vocabulary", "own"),
    "eagle": ("eagle-llama3", "eagle-vicuna"),
    "eagle3": ("eagle3-official", "eagle3-speculators", "eagle3-pickled", "eagle3-narrow"),
}


@dataclass(frozen=True)
class Seed:
    """`kind`: how it is used: "model", or the draft source that it is for."""

    name: str
    kind: str
    path: Path


class Models:
    """The seeds, in one folder, and the base that heads are for."""

    def __init__(self, root: Path, every: bool = True) -> None:
        """`every`: of all forms, not of some."""
        self.root = root
        self._every = every
        self.seeds = list(self._written())

    @cached_property
    def base(self) -> Path:
        return write_checkpoint(self.root / "base", num_hidden_layers=dspark_heads.LAYERS)

    @cached_property
    def base_source(self) -> tuple[TensorSource, OutputHead]:
        source = open_source(self.base)
        return source, OutputHead(source)

    def _written(self) -> Iterator[Seed]:
        (self.root / "gguf").mkdir(parents=True)
        for family in list(_GGUFS)[: None if self._every else 3]:
            yield Seed(f"{family}.gguf", "model", self._gguf(family, *_GGUFS[family]))
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
        plain = self._folder(write_checkpoint(self.root / "plain", **sizes))
        yield Seed("plain", "model", plain)
        for name, method in (
            ("gptq", gptq(16, act_order=True)),
            ("awq", awq(16)),
            ("compressed", compressed(16, symmetric=False)),
            ("fp8", fp8(16)),
        ):
            write_packed(plain, self.root / name, method)
            yield Seed(name, "model", self.root / name)
        for family in _FOLDERS:
            folder = write_family(self.root / family, family)
            yield Seed(family, "model", self._folder(folder))
        if self._every:
            with contextlib.suppress(ImportError):
                write_packed(plain, self.root / "nf4", nf4(double=True))
                yield Seed("nf4", "model", self.root / "nf4")
            for family in _MORE_FOLDERS:
                more: dict[str, object] = {}
                if family in ("gpt_oss", "granitemoehybrid", "olmo3"):
                    more["num_hidden_layers"] = 2
                if family == "olmo3":
                    more["layer_types"] = ["sliding_attention", "full_attention"]
                if family == "granitemoehybrid":
                    more["layer_types"] = ["full_attention"] * 2
                if family == "gpt_oss":
                    more["intermediate_size"] = 32
                folder = write_family(self.root / family, family, **more)
                yield Seed(family, "model", self._folder(folder))
            write_mxfp4(self.root / "gpt_oss", self.root / "mxfp4")
            yield Seed("mxfp4", "model", self._folder(self.root / "mxfp4"))
        yield from self._heads()

    def _folder(self, folder: Path) -> Path:
        write_tokenizer(folder, vocab=300)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        return folder

    def _gguf(self, family: str, kind: str, style: str) -> Path:
        columns = 256 if kind.endswith(("_K", "_XS")) else 64
        more: dict[str, object] = {"intermediate_size": columns, "num_hidden_layers": 2}
        if family == "phi3":
            more |= {"partial_rotary_factor": 1.0}
        if columns == 256:
            more |= {"hidden_size": 256, "head_dim": 64}
        if family == "qwen3_moe":
            more |= {"mlp_only_layers": [], "moe_intermediate_size": 32}
        if family == "phi3-long":
            # As the angles of a head of 64 numbers need.
            more |= {"partial_rotary_factor": 1.0, "head_dim": 64}
            rope = FAMILY_SETTINGS[family]["rope_parameters"]
            factors = {one: rope[one] * 16 for one in ("short_factor", "long_factor")}
            more |= {"rope_parameters": rope | factors}
        if family in ("mistral", "mixtral", "qwen3_moe"):
            more |= {"sliding_window": None, "use_sliding_window": False}
        if family == "smollm3":
            more |= {"no_rope_layers": None, "layer_types": None, "sliding_window": None}
        folder = write_family(self.root / "originals" / family, family, **more)
        file = self.root / "gguf" / f"{family}.gguf"
        values = tokenizer_values(self.root, style) | {"tokenizer.chat_template": TEMPLATE}
        write_gguf(folder, file, all_as(kind), values)
        return file

    def _heads(self) -> Iterator[Seed]:
        for kind, names in _HEADS.items():
            for name in names if self._every else names[:1]:
                folder = self.root / name
                if kind == "dspark":
                    dspark_heads.write_dspark(folder, dspark_heads.FORMS[name])
                else:
                    eagle_heads.write_eagle(folder, eagle_heads.FORMS[name])
                yield Seed(name, kind, folder)
        (self.root / "ppd").mkdir()
        write_ppd_tokens(self.root / "ppd", PPDTokens(3, 2, torch.randn(6, 32)), "base")
        yield Seed("ppd", "ppd", self.root / "ppd")

    def use(self, kind: str, path: Path) -> None:
        """All that a ring does with a model or draft up to its first rows.

        Raises EdgespecError for one that cannot be used, and nothing else.
        """
        if kind == "model":
            _use_model(path)
            return
        source, head = self.base_source
        if kind == "ppd":
            read_ppd_tokens(path, head.hidden_size)
        elif kind == "dspark":
            _guess(load_dspark(path, source, head))
        else:
            _guess(load_eagle(path, "eagle" if kind == "eagle" else "eagle3", source, head))


def _guess(guesser: Guesser) -> None:
    source = Fed(guesser)
    source.open(1, Sampling())
    source.refresh(1, [3, 1, 4, 1, 5], 2, 2)


def _use_model(path: Path) -> None:
    fingerprint(path)
    open_source(path)
    packed = path.suffix == ".gguf" or "quantization_config" in (path / "config.json").read_text()
    source = open_source(path, FILE if packed else PLAIN)
    block_parts(source, 0, source.layers).held_bytes(torch.float32)
    tokenizer = Tokenizer(local_folder(path))
    tokenizer.encode("hello world </s> 123")
    _ = tokenizer.bound
    # A template may refuse what it likes, and a conversation may be too long for it.
    with contextlib.suppress(ConfigError, CapacityError):
        tokenizer.encode_chat([{"role": "user", "content": "hi <s>"}], 100)
    OutputHead(source)
    block = Block(source, 0, source.layers)
    rows = min(3, block.vocab_size)
    sees = tree_mask(0, np.tri(rows, dtype=np.bool_))
    block.forward(torch.arange(rows), torch.arange(rows), block.new_cache(8), sees)


@dataclass(frozen=True)
class Outcome:
    """`kind`: "ok", "refused" in one good message, or what is wrong."""

    kind: str
    detail: str = ""

    @property
    def is_fine(self) -> bool:
        return self.kind in ("ok", "refused")


def tried(work: Callable[[], None], before: int = 0, file: int = 0) -> Outcome:
    """What comes of it. `before`: KiB of memory that this process had taken, if that counts."""
    try:
        work()
        found = Outcome("ok")
    except EdgespecError as error:
        found = _judged(error)
    except MemoryError as error:
        return Outcome("memory", _where(error))
    except BaseException as error:
        return Outcome("traceback", f"{_where(error)} {type(error).__name__}: {str(error)[:200]}")
    if before and found.is_fine:
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        if more > file + MORE_BYTES:
            return Outcome("memory", f"{more >> 20} MiB more")
    return found


def _judged(error: EdgespecError) -> Outcome:
    text = str(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or "can't allocate memory" in str(cause):
            return Outcome("memory", _where(cause))
        cause = cause.__cause__ or cause.__context__
    if len(text) > MOST_CHARS:
        return Outcome("long message", f"{len(text)} characters: {text[:120]!r}")
    if not text.isprintable():
        return Outcome("raw characters", repr(text[:300]))
    return Outcome("refused", text)


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/edgespec/" in frame.filename] or frames
    return f"{own[-1].filename.rpartition('/edgespec/')[2]}:{own[-1].lineno}" if own else "?"


Work = tuple[Callable[[], None], int]
"""What is to be done, and the bytes of the file that it is done with."""


def outcomes(works: Sequence[Work]) -> Iterator[Outcome]:
    """What comes of each in a child of this process, which may take so much CPU time for it, and
    memory beside the file. The child goes on with the next, as forking costs more than most."""
    left = list(works)
    while left:
        answers, status = _child(left)
        for answer in answers:
            yield Outcome(*json.loads(answer))
        if len(answers) < len(left):
            number = os.waitstatus_to_exitcode(status)
            if -number in (signal.SIGXCPU, signal.SIGALRM):
                yield Outcome("hang", f"{CPU_S} s of CPU time")
            else:
                name = signal.Signals(-number).name if number < 0 else f"status {number}"
                yield Outcome("signal", name)
        left = left[len(answers) + 1 :]


def outcome(work: Callable[[], None], file: int) -> Outcome:
    """That of one."""
    return next(outcomes([(work, file)]))


def _child(works: Sequence[Work]) -> tuple[list[bytes], int]:
    """What it found up to its end, and how it ended."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: torch has one here
        child = os.fork()
    if not child:
        try:
            os.close(reader)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            for work, file in works:
                _bound(file)
                found = tried(work, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file)
                told = json.dumps([found.kind, found.detail[:2000]])
                os.write(writer, told.encode() + b"\n")
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as told:
        answers = told.read().splitlines()
    return answers, os.waitpid(child, 0)[1]


def _bound(file: int) -> None:
    """Limits for what this process does next."""
    with open("/proc/self/statm", encoding="ascii") as pages:
        taken = int(pages.read().split()[0]) * resource.getpagesize()
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_AS, (taken + file + MORE_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(STUCK_S)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.iterdir())


def keep(path: Path, kept: Path) -> None:
    remove(kept)
    shutil.copytree(path, kept) if path.is_dir() else shutil.copy(path, kept)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
