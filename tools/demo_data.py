"""The training text of the demo pair: documents, their hold-out, tokenizer and batches."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
MAX_POSITIONS = 1024
BOS, EOS = "<s>", "</s>"
HELD_OUT_ONE_IN = 50
HELD_OUT_RULE = (
    "a document is held out when the first 8 bytes of the SHA-256 of its name, read as a "
    "big-endian number, are a multiple of 50; names are gsm8k_train/NNNNN (line number from 0), "
    "tldr/PLATFORM/PAGE.md and stdlib/PATH.py (a whole module)"
)
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
