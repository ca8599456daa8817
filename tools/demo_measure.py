"""The figures of an exported demo pair: losses, agreement of the draft, and samples."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from demo_data import MAX_POSITIONS, VOCAB_SIZE
from transformers import AutoModelForCausalLM, AutoTokenizer

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


@dataclass
class RequestStats:
    """Sums over held-out tokens of one source."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    base_nats: float = 0.0
    draft_nats: float = 0.0
    unigram_nats: float = 0.0
    draft_hits: Counter[int] = field(default_factory=Counter)

    def add(self, other: RequestStats) -> None:
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
    def stats(self, ids: torch.Tensor, unigram: torch.Tensor) -> RequestStats:
        """Losses and agreement over one document, cut at the models' last position."""
        ids = ids[: MAX_POSITIONS + 1].long()
        inputs, targets = ids[None, :-1], ids[1:]
        base, draft = self.base(inputs).logits[0], self.draft(inputs).logits[0]
        return RequestStats(
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
        tokens: torch.Tensor = self.base.generate(
            prompts, attention_mask=mask, max_new_tokens=new_tokens
        )
        return tokens

    @torch.inference_mode()
    def own_text_agreement(
        self, prompts: torch.Tensor, new_tokens: int
    ) -> tuple[Counter[int], int]:
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
    everything, own_hits, own_total = RequestStats(), Counter[int](), 0
    for source, rows in encoded[True].items():
        stats = RequestStats()
        for ids in rows[:HELD_OUT_DOCUMENTS]:
            stats.add(pair.stats(ids, unigram[source]))
        by_source[source] = stats.report()
        everything.add(stats)
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
