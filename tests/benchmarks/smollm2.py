"""Tokens a trip of SmolLM2-135M-Instruct for every draft source, in chats; run by name.

    python tests/benchmarks/smollm2.py [--sources ngram,dspark:FOLDER] [--policies adaptive]
        [--prompts 3] [--new-tokens 48] [--stages 3] [--questions FILE]

The first prompts of each of the files that `edgespec bench` ships and of tests/data/chats.jsonl, by
the model's chat template, or the first of each category of FILE (JSON lines with "category" and
"turns", as Spec-Bench has them; those that fit); no head was trained on them. A lock-step ring in
float32 that multiplies by the file's codes: a trip is `stages` steps of a segment, so the figures
are the same on every machine (support.local_ring).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from importlib import resources
from pathlib import Path

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.smollm2 import CONTEXT, smollm2_ring, tokenizer
from support.torch_rings import request

from edgespec.wire.client_messages import ChatMessage

BUNDLED = {"math": "gsm8k-test-40.jsonl", "help": "help-20.jsonl", "code": "code-20.jsonl"}
TEMPLATE_TOKENS = 48  # and some that guesses take
CHATS = Path(__file__).parent.parent / "data" / "chats.jsonl"


def asked(most: int) -> list[tuple[str, str]]:
    """Category and text of each prompt."""
    found = []
    folder = resources.files("edgespec.bench") / "prompts"
    for category, name in BUNDLED.items():
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        rows = (json.loads(line) for line in lines[:most])
        found += [(category, row.get("question") or row["prompt"]) for row in rows]
    counts: dict[str, int] = defaultdict(int)
    for line in CHATS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        counts[row["category"]] += 1
        if counts[row["category"]] <= most:
            found.append((row["category"], row["prompt"]))
    return found


def asked_in(file: Path, most: int, room: int) -> list[tuple[str, str]]:
    """Category and text of the first prompts of each category that have at most `room` tokens."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts, text = found[row["category"]], row["turns"][0]
        if len(texts) < most and len(tokenizer().encode(text)) <= room:
            texts.append(text)
    return [(category, text) for category, texts in found.items() for text in texts]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sources", default="ngram")
    parser.add_argument("--policies", default="adaptive")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--questions", type=Path)
    options = parser.parse_args()
    room = CONTEXT - options.new_tokens - TEMPLATE_TOKENS
    prompts = (
        asked_in(options.questions, options.prompts, room)
        if options.questions
        else asked(options.prompts)
    )
    names = list(dict.fromkeys(category for category, _ in prompts))
    print("source, policy, T:", *names, "all")
    said: dict[tuple[float, int], tuple[int, ...]] = {}
    for source in options.sources.split(","):
        for policy in options.policies.split(","):
            for temperature in map(float, options.temperatures.split(",")):
                tokens: dict[str, int] = defaultdict(int)
                trips: dict[str, float] = defaultdict(float)
                ring = smollm2_ring(options.stages, dtype="float32", draft_name=source)
                for tag, (category, text) in enumerate(prompts):
                    ring.replies.clear()
                    ask = request(
                        text, policy, options.new_tokens, tag=tag, temperature=temperature
                    )
                    answer = ring.ask(replace(ask, messages=(ChatMessage("user", text),)))
                    same = said.setdefault((temperature, tag), answer.token_ids)
                    assert same == answer.token_ids, f"{source} changed the text of {text!r}"
                    for part in (category, "all"):
                        tokens[part] += answer.new_tokens
                        trips[part] += answer.trips
                figures = (f"{tokens[part] / trips[part]:.2f}" for part in (*names, "all"))
                print(f"{source} {policy} {temperature}:", *figures, flush=True)


if __name__ == "__main__":
    main()
