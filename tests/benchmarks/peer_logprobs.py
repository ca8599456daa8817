"""An independent reader of the same file: llama-server's tokens and probabilities beside ours.

    python tests/benchmarks/peer_logprobs.py --server http://127.0.0.1:8080 --model FILE.gguf
        [--ours URL] [--tokens 32] [--most 0.02] [--dtype float32]

`--server`: a llama-server that runs already, with that file and `--jinja`; nothing is fetched. Ours
is a ring of one stage that this starts, or an API that runs (`--ours`). Twelve chats, six of them
with tools, are read by both: the ids of their prompts have to be equal, but those with tools where
the peer's template leaves tools out. Then the peer answers at temperature 0, and we score its
tokens. For each of them the Kullback-Leibler divergence of our
probabilities from the peer's is taken, over the peer's likeliest tokens, with all others as one; so
it is at most the whole one. Ends with 1 if ids differ, or the mean is above
`--most`: llama.cpp rounds activations to 8 bit.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

TOP = 20
"""Tokens of each place that are told: as many as our API tells."""
PATIENCE_S = 600.0

Chat = dict[str, Any]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {
                "type": "object",
                "properties": {of: {"type": "string", "description": said}},
                "required": [of],
            },
        },
    }
    for name, what, of, said in (
        ("weather", "The weather of a place.", "city", "Where."),
        ("search", 'Searches the "web".', "words", "What for: é, 日本, <b>."),
    )
]
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about a small computer.",
    "Explain in two sentences why the sky is blue.",
    "def mean(values):\n    # go on\n",
    "Übersetze ins Englische: »Guten Morgen, liebe Sorgen« 🙂",
    "  leading blanks, a tab\tand\n\n\nthree line ends",
)


def chats() -> Iterator[Chat]:
    """Twelve: with a system message, an answer before, a call and its result; without and with
    tools."""
    for number, question in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": question}]
        if number % 2:
            messages = [{"role": "system", "content": "Answer briefly."}, *messages]
        if number % 3 == 2:
            before = {"role": "assistant", "content": "Hello! How can I help?"}
            messages = [*messages[:-1], {"role": "user", "content": "Hi."}, before, messages[-1]]
        yield {"messages": messages}
        yield {"messages": messages, "tools": TOOLS}


@dataclass(frozen=True)
class Place:
    """One token of the peer's answer: the log-probabilities that it tells, by id; none of one that
    ends within a character."""

    token: int
    told: Mapping[int, float]


class Peer:
    """A llama-server; see tools/server/README.md of llama.cpp."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def ids(self, chat: Chat) -> list[int]:
        """Of a prompt, as it reads one before an answer."""
        prompt = _asked(self._http, "/apply-template", chat)["prompt"]
        body = {"content": prompt, "add_special": True, "parse_special": True}
        return list(_asked(self._http, "/tokenize", body)["tokens"])

    def answer(self, prompt: Sequence[int], tokens: int) -> list[Place]:
        body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "n_probs": TOP}
        said = _asked(
            self._http, "/completion", {**body, "cache_prompt": False, "return_tokens": True}
        )
        left, places = list(said["completion_probabilities"]), []
        for token in said["tokens"]:
            one = left.pop(0) if left and left[0]["id"] == token else {"top_logprobs": []}
            told = {each["id"]: each["logprob"] for each in one["top_logprobs"]}
            places.append(Place(token, told))
        if left:
            raise SystemExit(f"{self._http.base_url}: {left[0]} is no token of {said['tokens']}")
        return places


class Ours:
    """An API of edgespec."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def ids(self, chat: Chat) -> list[int]:
        return list(_asked(self._http, "/tokenize", chat)["tokens"])

    def scores(self, prompt: Sequence[int], answer: Sequence[int]) -> list[dict[int, float]]:
        """Of each place of an answer: the log-probabilities of its token and the likeliest."""
        body = {"prompt": [*prompt, *answer], "max_tokens": 0, "prompt_logprobs": TOP}
        told = _asked(self._http, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
        return [
            {int(token): each["logprob"] for token, each in one.items()}
            for one in told[len(prompt) :]
        ]


def _asked(http: httpx.Client, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    reply = http.post(path, json=body)
    if reply.status_code != 200:
        raise SystemExit(f"{http.base_url}{path[1:]}: {reply.status_code} {reply.text[:500]}")
    return dict(reply.json())


def divergence(peer: Mapping[int, float], ours: Mapping[int, float]) -> float:
    """Of our distribution from the peer's, in nats: the tokens that the peer tells, and all others
    together. What we do not tell is at most as likely as the least likely that we do."""
    least = min(ours.values())
    pairs = [(math.exp(value), math.exp(ours.get(one, least))) for one, value in peer.items()]
    rest = [max(1.0 - sum(side), 1e-12) for side in zip(*pairs, strict=True)]
    return sum(p * math.log(p / q) for p, q in [*pairs, (rest[0], rest[1])] if p > 0)


def compared(peer: Peer, ours: Ours, tokens: int) -> tuple[list[str], list[float]]:
    """What differs in the chats' ids, and the divergence of each token of the answers."""
    differ, found = [], []
    for number, chat in enumerate(chats()):
        theirs, own = peer.ids(chat), ours.ids(chat)
        what = "with tools" if "tools" in chat else "without tools"
        if "tools" in chat and theirs == peer.ids({"messages": chat["messages"]}):
            what += ", which the peer leaves out"
        elif theirs != own:
            pairs = enumerate(zip(theirs, own, strict=False))
            first = next((at for at, (a, b) in pairs if a != b), min(len(theirs), len(own)))
            lengths = f"{len(theirs)} ids of the peer, {len(own)} of ours"
            differ.append(f"chat {number} {what}: {lengths}, other from place {first} on")
        places = peer.answer(own, tokens)
        scored = ours.scores(own, [place.token for place in places])
        both = zip(places, scored, strict=True)
        mine = [divergence(one.told, two) for one, two in both if one.told]
        found += mine
        print(
            f"chat {number:2} {what}: {len(own)} ids, KL {statistics.fmean(mine):.5f}", flush=True
        )
    return differ, found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server", required=True, metavar="URL")
    parser.add_argument("--model", default="", metavar="FILE")
    parser.add_argument("--ours", default="", metavar="URL")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--most", type=float, default=0.02)
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args(words)
    if not (asked.ours or asked.model):
        parser.error("--model FILE, or --ours URL of an API that has it")
    with contextlib.ExitStack() as stack:
        url = asked.ours
        if not url:
            sys.path.insert(0, str(Path(__file__).parent.parent))
            from support.served import served  # late: it imports much

            form = ("--model", asked.model, "--draft", "none", "--dtype", asked.dtype)
            url = stack.enter_context(served(1, init=form)).url
        differ, found = compared(Peer(asked.server), Ours(url), asked.tokens)
    mean = statistics.fmean(found)
    print(*differ, sep="\n", end="\n" if differ else "")
    told = f"mean KL {mean:.5f}, largest {max(found):.5f}"
    print(f"{len(found)} tokens: {told} (mean at most {asked.most})")
    return int(bool(differ) or mean > asked.most)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its processes
    sys.exit(main())
