"""Train the bundled demo pair (tokenizer, base model, draft model) on a CPU and export it.

The base is a small Llama trained with cross-entropy. The draft is a smaller Llama with the same
tokenizer, begun from the base's first layers and from then on trained in the same loop to copy
the base's distribution at every token of each batch.
The run is resumable: stop it at any time (SIGTERM included) and start it again with the same
folders. Started again with a smaller ``--steps``, it goes straight into the learning-rate decay.

Usage::

    python tools/train_demo_models.py --data DATA --out edgespec/models --work WORK --steps 3000
    python tools/train_demo_models.py --data DATA --out edgespec/models --work WORK --export-only

``DATA`` holds ``gsm8k_train.jsonl`` (openai/grade-school-math) and ``tldr_pages_en.jsonl.gz``
(tldr-pages/tldr); the third source is the running Python's own standard library.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import sysconfig
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 2048
MAX_POSITIONS = 1024
ROW_LENGTH = 256
BOS, EOS = "<s>", "</s>"
HELD_OUT_ONE_IN = 50
MIX = {"gsm8k": 0.40, "tldr": 0.30, "code": 0.30}
STDLIB_SKIPPED = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "pydoc_data",
    "encodings",
    "__pycache__",
}
CODE_PIECE_CHARS = 3000
BASE_SHAPE = {"hidden": 256, "layers": 8, "heads": 4, "kv_heads": 2, "intermediate": 704}
DRAFT_SHAPE = {**BASE_SHAPE, "layers": 2}
SAMPLE_PROMPTS = {
    "maths": (
        "Question: Mia has 12 pencils. She buys 3 boxes with 6 pencils each and gives 5 pencils "
        "to her brother. How many pencils does Mia have now?\nAnswer:"
    ),
    "command help": "# tar\n\n>",  # the space belongs to the next token
    "code": 'def read_lines(path, encoding=None):\n    """Return',
}
HELD_OUT_DOCUMENTS = 150
AGREEMENT_DEPTHS = (1, 4, 8)
OWN_PROMPTS = 16
OWN_PROMPT_TOKENS = 32
OWN_NEW_TOKENS = 128
SAMPLE_TOKENS = 120
HELD_OUT_RULE = (
    "a document is held out when the first 8 bytes of the SHA-256 of its name, read as a "
    "big-endian number, are a multiple of 50; names are gsm8k_train/NNNNN (line number from 0), "
    "tldr/PLATFORM/PAGE.md and stdlib/PATH.py (a whole module)"
)

CARD_HEAD = """\
# The demo pair

Two small language models with one tokenizer, made to show a draft model and a base model work
together without a download. The base has {base_millions:.1f} M parameters, the draft
{draft_millions:.1f} M. It is a toy: it demonstrates the ring, do not trust its answers. It writes
in the style of maths answers, command help and Python; its sums, its commands and its code are
mostly wrong.

## Architecture

| | base | draft |
| --- | --- | --- |
| folder | `base/` | `draft/` |
| kind | `LlamaForCausalLM` | `LlamaForCausalLM` |
| layers | {base[layers]} | {draft[layers]} |
| hidden size | {base[hidden]} | {draft[hidden]} |
| attention heads (key/value) | {base[heads]} ({base[kv_heads]}) | {draft[heads]} \
({draft[kv_heads]}) |
| MLP size | {base[intermediate]} | {draft[intermediate]} |
| embeddings | tied, stored once | tied, stored once |
| positions | {positions} | {positions} |
| weights | bfloat16 | bfloat16 |

The tokenizer is a byte-level BPE of {vocab} entries with single digits, `<s>` (put in front of
every text) and `</s>` (the end). Any text comes back from it byte for byte.
"""

CARD_DATA = """\
## Data

- GSM8K, its training split only, from `openai/grade-school-math` (MIT licence), without the
  calculator notes: {gsm8k}.
- The English pages of tldr-pages, from `tldr-pages/tldr` (CC BY 4.0,
  <https://github.com/tldr-pages/tldr>): {tldr}. These models are
  trained on the work of the tldr-pages project and its contributors; the pages were used as they
  are.
- The standard library of Python {python}, its own modules without tests, IDLE, lib2to3 and the
  codec tables (PSF licence): {code}.

No evaluation set was trained on: not GSM8K's test split, not HumanEval, not Spec-Bench. Hold-out
rule: {rule}.
"""

CARD_TRAINING = """\
## Training

Both models were trained from nothing in one loop: {step} steps{state} of {batch_tokens} tokens,
{millions:.1f} M tokens in all, seed {seed}, {minutes:.0f} minutes on {threads} CPU cores, torch
{torch}. The base learns by cross-entropy. The draft joins at step {draft_from} as a copy of the
base's embedding and first layers, and learns by the KL divergence to the base's current
distribution plus {truth_share} of cross-entropy. Muon for the inner matrices and AdamW for the
rest, at {learning_rate} (base) and {draft_learning_rate} (draft): warm-up, a constant rate, then a
straight line to zero over the last {decay:.0%} of the steps. Rows are 256 tokens long; over the
last {long:.0%} of the steps a quarter of the tokens come in rows of 1024. {note}

The command:

    python tools/train_demo_models.py --data DATA --out edgespec/models --work WORK \\
        --steps {steps} --draft-from {draft_from} --seed {seed} --threads {threads}

It continues from its checkpoint when started again, and a smaller `--steps` then brings the decay
forward. The same seed gives the same data order; the rounding of sums depends on which worker
process takes which part of a batch.
"""


# --------------------------------------------------------------------------- documents


@dataclass(frozen=True)
class Document:
    """One named text; the name alone decides whether it is held out."""

    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return is_held_out(self.name)


def is_held_out(name: str) -> bool:
    """One document in fifty, by a stable hash of its name, is never trained on."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def gsm8k_documents(path: Path) -> Iterator[Document]:
    """The worked problems, without their ``<<...>>`` calculator notes."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            answer = re.sub(r"<<.*?>>", "", row["answer"])
            text = f"Question: {row['question'].strip()}\nAnswer: {answer.strip()}\n"
            yield Document("gsm8k", f"gsm8k_train/{number:05d}", text)


def tldr_documents(path: Path) -> Iterator[Document]:
    """The tldr pages, their Markdown as it is."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield Document("tldr", f"tldr/{row['page']}", row["text"])


def stdlib_documents(root: Path) -> Iterator[Document]:
    """The standard library's modules, each cut at line ends into pieces of a few kilobytes."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if STDLIB_SKIPPED.intersection(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for piece in cut_at_lines(text, CODE_PIECE_CHARS):
            yield Document("code", f"stdlib/{relative.as_posix()}", piece)


def cut_at_lines(text: str, limit: int) -> Iterator[str]:
    """Cut text into pieces of at most about ``limit`` characters, at blank lines if they come."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        starts_block = size > limit // 2 and re.match(r"(class |def |@|    def )", line)
        if piece and (starts_block or size + len(line) > limit):
            yield "".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if piece and "".join(piece).strip():
        yield "".join(piece)


def all_documents(data: Path) -> list[Document]:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    return [
        *gsm8k_documents(data / "gsm8k_train.jsonl"),
        *tldr_documents(data / "tldr_pages_en.jsonl.gz"),
        *stdlib_documents(stdlib),
    ]


# --------------------------------------------------------------------------- tokenizer


def train_tokenizer(documents: list[Document], seed: int) -> Tokenizer:
    """Byte-level BPE with single digits, trained on about as much text of each source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(balanced_texts(documents, seed), trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos_id)]
    )
    return tokenizer


def balanced_texts(documents: list[Document], seed: int, per_source: int = 4_000_000) -> list[str]:
    """Training texts, shuffled, at most ``per_source`` characters from each source."""
    shuffled = [document for document in documents if not document.held_out]
    random.Random(seed).shuffle(shuffled)
    taken: Counter[str] = Counter()
    texts = []
    for document in shuffled:
        if taken[document.source] < per_source:
            taken[document.source] += len(document.text)
            texts.append(document.text)
    return texts


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def load_or_train_tokenizer(work: Path, documents: list[Document], seed: int) -> Tokenizer:
    path = work / "tokenizer.json"
    if not path.exists():
        train_tokenizer(documents, seed).save(str(path))
    return Tokenizer.from_file(str(path))


def encode_documents(
    tokenizer: Tokenizer, documents: list[Document], held_out: bool
) -> dict[str, list[torch.Tensor]]:
    """Token ids of each document by source, ``<s>`` in front and ``</s>`` behind."""
    chosen = [document for document in documents if document.held_out == held_out]
    end = tokenizer.token_to_id(EOS)
    encodings = tokenizer.encode_batch([document.text for document in chosen])
    encoded: dict[str, list[torch.Tensor]] = {source: [] for source in MIX}
    for document, encoding in zip(chosen, encodings, strict=True):
        encoded[document.source].append(torch.tensor([*encoding.ids, end], dtype=torch.int16))
    return encoded


# --------------------------------------------------------------------------- batches


class SourceStream:
    """Endless rows of tokens from one source's documents, reshuffled each epoch by the seed.

    A row starts at a document's start. A document cut by the row's end comes again, whole, at
    the start of the next row; one longer than a row goes on there instead.
    """

    def __init__(self, name: str, documents: list[torch.Tensor], seed: int) -> None:
        self.name, self.documents, self.seed = name, documents, seed
        self.epoch, self.position = 0, 0
        self.pending: torch.Tensor | None = None
        self.order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.documents)))
        random.Random(f"{self.seed}/{self.name}/{self.epoch}").shuffle(order)
        return order

    def _next_document(self) -> torch.Tensor:
        if self.pending is not None:
            document, self.pending = self.pending, None
            return document
        if self.position == len(self.order):
            self.epoch, self.position = self.epoch + 1, 0
            self.order = self._shuffled()
        self.position += 1
        return self.documents[self.order[self.position - 1]]

    def row(self, size: int) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        space = size
        while space > 0:
            document = self._next_document()
            parts.append(document[:space])
            if len(document) > space:
                self.pending = document if len(document) <= size else document[space:]
            space -= len(parts[-1])
        return torch.cat(parts)

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "pending": self.pending}

    def load_state(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self.pending = state["pending"]
        self.order = self._shuffled()


class Mixture:
    """Rows drawn from the sources in fixed shares, in an order the seed alone decides."""

    def __init__(self, documents: dict[str, list[torch.Tensor]], seed: int) -> None:
        self.streams = {name: SourceStream(name, documents[name], seed) for name in MIX}
        self.given = dict.fromkeys(MIX, 0)

    def batch(self, rows: int, length: int) -> torch.Tensor:
        """``rows`` rows of ``length`` inputs and one token more for the last target."""
        return torch.stack([self._next_stream(length).row(length + 1) for _ in range(rows)]).long()

    def _next_stream(self, length: int) -> SourceStream:
        total = sum(self.given.values()) + length
        name = max(MIX, key=lambda source: MIX[source] * total - self.given[source])
        self.given[name] += length
        return self.streams[name]

    def state(self) -> dict[str, Any]:
        streams = {name: stream.state() for name, stream in self.streams.items()}
        return {"given": dict(self.given), "streams": streams}

    def load_state(self, state: dict[str, Any]) -> None:
        self.given = dict(state["given"])
        for name, stream in self.streams.items():
            stream.load_state(state["streams"][name])


# --------------------------------------------------------------------------- models


def build_model(shape: dict[str, int], tokenizer: Tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["intermediate"],
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(EOS),
    )
    return LlamaForCausalLM(config)


def parameter_count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def pair_losses(
    base: LlamaForCausalLM,
    draft: LlamaForCausalLM | None,
    tokens: torch.Tensor,
    truth_share: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Base cross-entropy, draft loss (KL to the base, a little truth), and top-1 agreement.

    Without a draft the last two are zero.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        base_logits = base(input_ids=inputs, use_cache=False).logits
        draft_logits = draft(input_ids=inputs, use_cache=False).logits if draft else None
    base_log = base_logits.float().flatten(0, 1).log_softmax(-1)
    base_loss = functional.nll_loss(base_log, targets)
    if draft_logits is None:
        return base_loss, torch.zeros(()), torch.zeros(())
    draft_log = draft_logits.float().flatten(0, 1).log_softmax(-1)
    taught = base_log.detach()
    divergence = (taught.exp() * (taught - draft_log)).sum(-1).mean()
    draft_loss = divergence + truth_share * functional.nll_loss(draft_log, targets)
    agreement = (taught.argmax(-1) == draft_log.argmax(-1)).float().mean()
    return base_loss, draft_loss, agreement


@torch.no_grad()
def start_draft(base: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    """Begin the draft as the base without its upper layers: embedding, first layers, last norm."""
    state = base.state_dict()
    for name, weight in draft.state_dict().items():
        weight.copy_(state[name])


def make_optimizers(
    base: LlamaForCausalLM, draft: LlamaForCausalLM, rate: float, draft_rate: float
) -> list[torch.optim.Optimizer]:
    """Muon for the inner matrices; AdamW for the embeddings and the norms."""
    matrices, others = [], []
    for model, peak in ((base, rate), (draft, draft_rate)):
        named = list(model.named_parameters())
        inner = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
        outer = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
        matrices.append({"params": inner, "peak": peak})
        others.append({"params": outer, "peak": peak})
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


# --------------------------------------------------------------------------- workers


def pair_parameters(base: LlamaForCausalLM, draft: LlamaForCausalLM) -> list[torch.nn.Parameter]:
    return [*base.parameters(), *draft.parameters()]


def attach_gradients(parameters: list[torch.nn.Parameter], flat: torch.Tensor) -> None:
    """Let every parameter's gradient be its slice of one flat tensor."""
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        parameter.grad = flat[start:stop].view_as(parameter)
        start = stop


def work(
    args: argparse.Namespace,
    tokenizer_path: str,
    weights: list[torch.Tensor],
    gradients: torch.Tensor,
    tasks: Any,
    results: Any,
) -> None:
    """One worker process: take micro-batches as they come, add their gradients to its sum."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tokenizer = Tokenizer.from_file(tokenizer_path)
    base, draft = build_model(BASE_SHAPE, tokenizer), build_model(DRAFT_SHAPE, tokenizer)
    for model in (base, draft):
        model.set_attn_implementation("eager")  # compiled, faster than the CPU's flash attention
    parameters = pair_parameters(base, draft)
    for parameter, shared in zip(parameters, weights, strict=True):
        parameter.data = shared
    attach_gradients(parameters, gradients)
    losses = torch.compile(pair_losses, dynamic=False) if args.compile else pair_losses
    share = args.micro_tokens / args.batch_tokens
    while True:
        rows, with_draft = tasks.get()
        tokens = torch.from_numpy(rows)
        student = draft if with_draft else None
        base_loss, draft_loss, agreement = losses(base, student, tokens, args.truth_share)
        ((base_loss + draft_loss) * share).backward()
        results.put((base_loss.item(), draft_loss.item(), agreement.item()))


class Workers:
    """Single-threaded processes that share the weights and the micro-batches of each step.

    Each takes the next micro-batch when it is free, so a core busy with other work slows the run
    by its own share only; threads that march in step would all wait for the slowest.
    """

    def __init__(
        self, args: argparse.Namespace, tokenizer_path: Path, parameters: list[torch.nn.Parameter]
    ) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.tasks, self.results = context.SimpleQueue(), context.SimpleQueue()
        weights = [parameter.data.share_memory_() for parameter in parameters]
        size = sum(parameter.numel() for parameter in parameters)
        self.total = torch.zeros(size)
        attach_gradients(parameters, self.total)
        self.gradients = [torch.zeros(size).share_memory_() for _ in range(args.threads)]
        self.processes = [
            context.Process(
                target=work,
                args=(args, str(tokenizer_path), weights, own, self.tasks, self.results),
                daemon=True,
            )
            for own in self.gradients
        ]
        for process in self.processes:
            process.start()

    def gather(self, micro_batches: list[torch.Tensor], with_draft: bool) -> torch.Tensor:
        """Leave the step's gradients in the parameters; return its mean losses and agreement."""
        for tokens in micro_batches:
            self.tasks.put((tokens.numpy(), with_draft))
        measured = torch.tensor([self.results.get() for _ in micro_batches])
        self.total.zero_()
        for own in self.gradients:
            self.total += own
            own.zero_()
        return measured.mean(0)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


# --------------------------------------------------------------------------- training


@dataclass
class Progress:
    """Where a run stands, beyond weights and optimiser: what a checkpoint also holds."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    decay_start: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """The joint loop over both models, with its checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.documents = all_documents(args.data)
        self.tokenizer = load_or_train_tokenizer(args.work, self.documents, args.seed)
        self.base = build_model(BASE_SHAPE, self.tokenizer)
        self.draft = build_model(DRAFT_SHAPE, self.tokenizer)
        self.optimizers = make_optimizers(
            self.base, self.draft, args.learning_rate, args.draft_learning_rate
        )
        self.parameters = pair_parameters(self.base, self.draft)
        self.mixture: Mixture | None = None
        self.progress = Progress()
        self.stopping = False
        self.checkpoint = args.work / "checkpoint.pt"

    def save(self) -> None:
        assert self.mixture is not None
        state = {
            "base": self.base.state_dict(),
            "draft": self.draft.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "data": self.mixture.state(),
            "random": torch.get_rng_state(),
            "progress": vars(self.progress),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def load(self) -> bool:
        """Take up the checkpoint if there is one."""
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint, weights_only=False)
        self.base.load_state_dict(state["base"])
        self.draft.load_state_dict(state["draft"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        torch.set_rng_state(state["random"])
        if self.mixture is not None:
            self.mixture.load_state(state["data"])
        return True

    def rate_share(self) -> float:
        """Warm-up, then the peak, then a straight line down to zero at the last step."""
        step, steps = self.progress.step, self.args.steps
        if self.progress.decay_start is None and step >= self.args.decay_from * steps:
            self.progress.decay_start = step
        share = min(1.0, (step + 1) / self.args.warmup)
        if self.progress.decay_start is not None:
            share *= (steps - step) / max(1, steps - self.progress.decay_start)
        return share

    def train(self) -> None:
        encoded = encode_documents(self.tokenizer, self.documents, held_out=False)
        for name, rows in encoded.items():
            log(f"{name}: {len(rows)} documents, {sum(map(len, rows))} tokens")
        self.mixture = Mixture(encoded, self.args.seed)
        resumed = self.load()
        log(f"{'resumed at' if resumed else 'new run at'} step {self.progress.step}")
        self.progress.settings = settings_of(self.args)
        signal.signal(signal.SIGTERM, self._stop)
        workers = Workers(self.args, self.args.work / "tokenizer.json", self.parameters)
        saved = time.monotonic()
        while self.progress.step < self.args.steps and not self.stopping:
            self._step(workers)
            if time.monotonic() - saved > 60 * self.args.save_minutes:
                self.save()
                saved = time.monotonic()
        workers.stop()
        self.save()
        log(f"stopped at step {self.progress.step} of {self.args.steps}")

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def _step(self, workers: Workers) -> None:
        assert self.mixture is not None
        started = time.monotonic()
        if self.progress.step == self.args.draft_from:
            start_draft(self.base, self.draft)
        micro_batches = [
            self.mixture.batch(self.args.micro_tokens // length, length)
            for length in self._row_lengths()
        ]
        with_draft = self.progress.step >= self.args.draft_from
        totals = workers.gather(micro_batches, with_draft)
        self._update()
        self.progress.step += 1
        self.progress.tokens += self.args.batch_tokens
        self.progress.seconds += time.monotonic() - started
        self._report(totals, time.monotonic() - started)

    def _row_lengths(self) -> list[int]:
        """Short rows are the cheapest; later one part in each step trains every position."""
        count = self.args.batch_tokens // self.args.micro_tokens
        long = self.progress.step >= self.args.long_from * self.args.steps
        return [MAX_POSITIONS if long else ROW_LENGTH, *[ROW_LENGTH] * (count - 1)]

    def _update(self) -> None:
        share = self.rate_share()
        for model in (self.base, self.draft):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * share
            optimizer.step()

    def _report(self, totals: torch.Tensor, seconds: float) -> None:
        step = self.progress.step
        if step % self.args.log_every and step > 5:
            return
        base_loss, draft_loss, agreement = totals.tolist()
        log(
            f"step {step} base {base_loss:.3f} draft {draft_loss:.3f} top1 {agreement:.3f} "
            f"rate {self.optimizers[0].param_groups[0]['lr']:.2e} "
            f"{self.args.batch_tokens / seconds:.0f} tokens/s"
        )


def log(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)


# --------------------------------------------------------------------------- measuring


@dataclass
class Tally:
    """Sums over held-out tokens of one source."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    base_nats: float = 0.0
    draft_nats: float = 0.0
    unigram_nats: float = 0.0
    draft_hits: Counter[int] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.bytes += other.bytes
        self.base_nats += other.base_nats
        self.draft_nats += other.draft_nats
        self.unigram_nats += other.unigram_nats
        self.draft_hits += other.draft_hits

    def report(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"documents": self.documents, "tokens": self.tokens}
        for who in ("base", "draft", "unigram"):
            nats = getattr(self, f"{who}_nats")
            figures[who] = {
                "loss": round(nats / self.tokens, 4),
                "perplexity": round(math.exp(nats / self.tokens), 3),
                "bits_per_byte": round(nats / math.log(2) / self.bytes, 4),
            }
        figures["agreement"] = shares(self.draft_hits, self.tokens)
        return figures


def shares(hits: Counter[int], total: int) -> dict[str, float]:
    return {f"top{k}": round(hits[k] / total, 4) for k in AGREEMENT_DEPTHS}


def count_hits(wanted: torch.Tensor, draft_logits: torch.Tensor) -> Counter[int]:
    """How often each wanted token is among the draft's first k."""
    ranked = draft_logits.topk(max(AGREEMENT_DEPTHS), dim=-1).indices
    found = ranked == wanted[:, None]
    return Counter({k: int(found[:, :k].any(-1).sum()) for k in AGREEMENT_DEPTHS})


def unigram_log_shares(encoded: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Log share of each token in each source's training text, the yardstick of perplexity."""
    logs = {}
    for source, rows in encoded.items():
        counts = torch.bincount(torch.cat(rows).long(), minlength=VOCAB_SIZE).double() + 1.0
        logs[source] = (counts / counts.sum()).log()
    return logs


class Pair:
    """An exported pair, loaded again from its folders as a user would, in float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "base")
        self.base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        self.draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32)

    @torch.inference_mode()
    def tally(self, ids: torch.Tensor, unigram: torch.Tensor) -> Tally:
        """Losses and agreement over one document, cut at the models' last position."""
        ids = ids[: MAX_POSITIONS + 1].long()
        inputs, targets = ids[None, :-1], ids[1:]
        base, draft = self.base(inputs).logits[0], self.draft(inputs).logits[0]
        return Tally(
            documents=1,
            tokens=len(targets),
            bytes=len(self.tokenizer.decode(targets, skip_special_tokens=True).encode()),
            base_nats=float(functional.cross_entropy(base, targets, reduction="sum")),
            draft_nats=float(functional.cross_entropy(draft, targets, reduction="sum")),
            unigram_nats=-float(unigram[targets].sum()),
            draft_hits=count_hits(base.argmax(-1), draft),
        )

    @torch.inference_mode()
    def greedy(self, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """The base's greedy continuation of prompts of one length."""
        mask = torch.ones_like(prompts)
        return self.base.generate(prompts, attention_mask=mask, max_new_tokens=new_tokens)

    @torch.inference_mode()
    def own_text_agreement(self, prompts: torch.Tensor, new_tokens: int) -> tuple[Counter, int]:
        """How often the draft ranks the base's own greedy tokens first, or near it."""
        hits: Counter[int] = Counter()
        total = 0
        length = prompts.shape[1]
        for ids in self.greedy(prompts, new_tokens):
            wanted = ids[length:]
            ends = (wanted == self.tokenizer.eos_token_id).nonzero()
            wanted = wanted[: int(ends[0]) + 1] if len(ends) else wanted
            logits = self.draft(ids[None, : length + len(wanted) - 1]).logits[0, length - 1 :]
            hits += count_hits(wanted, logits)
            total += len(wanted)
        return hits, total

    def samples(self, new_tokens: int) -> dict[str, dict[str, str]]:
        samples = {}
        for name, prompt in SAMPLE_PROMPTS.items():
            ids = torch.tensor([self.tokenizer.encode(prompt)])
            new = self.greedy(ids, new_tokens)[0, ids.shape[1] :]
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            samples[name] = {"prompt": prompt, "continuation": text}
        return samples


def measure(pair: Pair, encoded: dict[bool, dict[str, list[torch.Tensor]]]) -> dict[str, Any]:
    """Every figure of the card: losses, agreement on held-out and on own text, samples."""
    unigram = unigram_log_shares(encoded[False])
    by_source: dict[str, Any] = {}
    own: dict[str, Any] = {}
    everything, own_hits, own_total = Tally(), Counter[int](), 0
    for source, rows in encoded[True].items():
        tally = Tally()
        for ids in rows[:HELD_OUT_DOCUMENTS]:
            tally.add(pair.tally(ids, unigram[source]))
        by_source[source] = tally.report()
        everything.add(tally)
        long_enough = [ids for ids in rows if len(ids) > 2 * OWN_PROMPT_TOKENS][:OWN_PROMPTS]
        prompts = torch.stack([ids[:OWN_PROMPT_TOKENS] for ids in long_enough]).long()
        hits, total = pair.own_text_agreement(prompts, OWN_NEW_TOKENS)
        own[source] = shares(hits, total)
        own_hits, own_total = own_hits + hits, own_total + total
    return {
        "held_out": {"all": everything.report(), **by_source},
        "own_greedy_agreement": {
            "all": shares(own_hits, own_total),
            **own,
            "tokens": own_total,
            "prompts_per_source": OWN_PROMPTS,
        },
        "samples": pair.samples(SAMPLE_TOKENS),
    }


# --------------------------------------------------------------------------- export


def write_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Save one model in bfloat16, its embedding tied and stored once, with the tokenizer."""
    config = LlamaConfig.from_dict(model.config.to_dict())
    copy = LlamaForCausalLM(config)
    copy.load_state_dict(model.state_dict())
    copy.tie_weights()
    copy.to(torch.bfloat16)
    copy.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    copy.save_pretrained(folder)
    wrap_tokenizer(tokenizer).save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    values = json.loads(settings.read_text())
    values["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name older releases know too
    settings.write_text(json.dumps(values, indent=2) + "\n")


def export(trainer: Trainer) -> None:
    """Write the pair beside the output folder, measure it, and move its files in."""
    out = trainer.args.out
    fresh = out.with_name(f"{out.name}.partial")
    shutil.rmtree(fresh, ignore_errors=True)
    write_model(trainer.base, trainer.tokenizer, fresh / "base")
    write_model(trainer.draft, trainer.tokenizer, fresh / "draft")
    encoded = {
        held_out: encode_documents(trainer.tokenizer, trainer.documents, held_out)
        for held_out in (False, True)
    }
    metrics = {
        "training": training_facts(trainer, encoded[False]),
        **measure(Pair(fresh), encoded),
    }
    (fresh / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (fresh / "MODEL_CARD.md").write_text(model_card(metrics))
    for path in sorted(fresh.rglob("*")):
        if path.is_file():
            path.chmod(0o644)
            target = out / path.relative_to(fresh)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    shutil.rmtree(fresh)
    log(f"exported step {trainer.progress.step} to {out}")
    log(json.dumps({"held_out": metrics["held_out"]["all"], "own": own_line(metrics)}))


def own_line(metrics: dict[str, Any]) -> dict[str, float]:
    return metrics["own_greedy_agreement"]["all"]


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings a checkpoint keeps for the card."""
    names = ("steps", "seed", "threads", "batch_tokens", "learning_rate", "draft_learning_rate")
    more = ("truth_share", "draft_from", "decay_from", "long_from")
    return {name: getattr(args, name) for name in (*names, *more)}


def training_facts(trainer: Trainer, encoded: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    progress = trainer.progress
    seen = {name: round(share * progress.tokens) for name, share in MIX.items()}
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds),
        **settings_of(trainer.args),
        **progress.settings,
        "note": trainer.args.note,
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "base_parameters": parameter_count(trainer.base),
        "draft_parameters": parameter_count(trainer.draft),
        "training_tokens": {name: sum(map(len, rows)) for name, rows in encoded.items()},
        "epochs": {
            name: round(seen[name] / sum(map(len, rows)), 2) for name, rows in encoded.items()
        },
        "held_out_rule": HELD_OUT_RULE,
    }


# --------------------------------------------------------------------------- model card


def model_card(metrics: dict[str, Any]) -> str:
    facts = metrics["training"]
    parts = [
        wrapped(
            CARD_HEAD.format(
                base_millions=facts["base_parameters"] / 1e6,
                draft_millions=facts["draft_parameters"] / 1e6,
                base=BASE_SHAPE,
                draft=DRAFT_SHAPE,
                vocab=VOCAB_SIZE,
                positions=MAX_POSITIONS,
            )
        ),
        wrapped(CARD_DATA.format(rule=HELD_OUT_RULE, python=facts["python"], **card_shares(facts))),
        wrapped(card_training(facts)),
        card_figures(metrics),
        card_samples(metrics["samples"]),
    ]
    return "\n".join(line.rstrip() for line in "\n".join(parts).splitlines()) + "\n"


def wrapped(text: str) -> str:
    """Fill the plain paragraphs anew; leave headings, lists, tables and code as they are."""
    blocks = text.split("\n\n")
    plain = [block and block.lstrip("\n")[0] not in "#-| " for block in blocks]
    filled = [
        textwrap.fill(block, 99, break_long_words=False, break_on_hyphens=False) if fill else block
        for block, fill in zip(blocks, plain, strict=True)
    ]
    return "\n\n".join(filled).rstrip("\n") + "\n"


def card_shares(facts: dict[str, Any]) -> dict[str, str]:
    return {
        name: f"{share:.0%} of the tokens seen, {facts['epochs'][name]} epochs"
        for name, share in MIX.items()
    }


def card_training(facts: dict[str, Any]) -> str:
    finished = facts["step"] >= facts["steps"]
    state = "" if finished else f" (an early export: {facts['steps']} steps are planned)"
    return CARD_TRAINING.format(
        state=state,
        millions=facts["tokens"] / 1e6,
        minutes=facts["seconds"] / 60,
        decay=1 - facts["decay_from"],
        long=1 - facts["long_from"],
        **facts,
    )


def card_figures(metrics: dict[str, Any]) -> str:
    lines = [
        "## Held-out figures",
        "",
        "Measured by the training script on the exported bfloat16 files, run in float32. The",
        "unigram column is what a table of each source's own token frequencies would reach.",
        "",
        "| source | tokens | base perplexity | draft perplexity | unigram perplexity "
        "| base bits/byte | draft top-1 | top-4 | top-8 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in metrics["held_out"].items():
        ranks = " | ".join(f"{row['agreement'][f'top{k}']:.3f}" for k in AGREEMENT_DEPTHS)
        lines.append(
            f"| {name} | {row['tokens']} | {row['base']['perplexity']:.2f} "
            f"| {row['draft']['perplexity']:.2f} | {row['unigram']['perplexity']:.0f} "
            f"| {row['base']['bits_per_byte']:.3f} | {ranks} |"
        )
    own = metrics["own_greedy_agreement"]
    lines += [
        "",
        "Top-k: how often the base's greedy token is among the draft's k likeliest. The same on",
        f"the base's own greedy continuations ({own['prompts_per_source']} held-out prompts of",
        f"{OWN_PROMPT_TOKENS} tokens per source, {own['tokens']} tokens in all):",
        "",
        "| source | top-1 | top-4 | top-8 |",
        "| --- | --- | --- | --- |",
    ]
    for name in ("all", *MIX):
        ranks = " | ".join(f"{own[name][f'top{k}']:.3f}" for k in AGREEMENT_DEPTHS)
        lines.append(f"| {name} | {ranks} |")
    return "\n".join([*lines, ""])


def card_samples(samples: dict[str, dict[str, str]]) -> str:
    lines = ["## Greedy samples of the base", ""]
    for name, sample in samples.items():
        lines += [f"{name.capitalize()}; prompt:", "", *indented(sample["prompt"]), ""]
        lines += ["continuation:", "", *indented(sample["continuation"]), ""]
    return "\n".join(lines)


def indented(text: str) -> list[str]:
    return [f"    {line}".rstrip() for line in text.strip("\n").split("\n")]


# --------------------------------------------------------------------------- command line


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the data files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported pair")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="worker processes")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--micro-tokens", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--draft-learning-rate", type=float, default=2e-3)
    parser.add_argument("--truth-share", type=float, default=0.1, help="of the draft's loss")
    parser.add_argument("--warmup", type=int, default=100, help="steps of rising rate")
    parser.add_argument("--decay-from", type=float, default=0.6, help="share of the steps")
    parser.add_argument("--long-from", type=float, default=0.7, help="share of the steps")
    parser.add_argument("--draft-from", type=int, default=700, help="step at which it joins")
    parser.add_argument("--note", default="", help="a sentence for the card's training part")
    parser.add_argument("--save-minutes", type=float, default=4.0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--export-only", action="store_true", help="export the checkpoint")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(args.threads if args.export_only else 1)
    args.work.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    if not args.export_only:
        trainer.train()
    elif not trainer.load():
        log(f"no checkpoint in {args.work}")
        return 1
    if args.export_only or trainer.progress.step >= args.steps:
        export(trainer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
