"""The model card of the demo pair, written from its figures."""

from __future__ import annotations

import textwrap
from typing import Any

from demo_data import HELD_OUT_RULE, MAX_POSITIONS, MIX, VOCAB_SIZE
from demo_measure import AGREEMENT_DEPTHS, OWN_PROMPT_TOKENS
from demo_model import BASE_SHAPE, DRAFT_SHAPE

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

For the bundled pair, this exact command was not run end to end in one go, and the first 696 steps
of its own run also trained another draft, 192 wide, which was then dropped and did not affect the
base.
"""


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
