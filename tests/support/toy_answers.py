"""Toy answers: what plain decoding says, written down without the code that is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.sim.toy import VOCABULARY, ToyCodec, text_of
from edgespec.sim.toy_model import toy_next
from edgespec.wire.client_messages import Submit


@dataclass(frozen=True, slots=True)
class Expected:
    """What a request must get. `whole`: its prompt, its answer, and the tokens that a model would
    go on with: what a draft may be told."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    whole: tuple[int, ...]


def plain_answer(
    codec: ToyCodec,
    ask: Submit,
    stages: int,
    context_length: int,
    following: Callable[[Sequence[int]], int] | None = None,
) -> Expected:
    """Plain decoding, one token at a time, written down without the code that is checked.
    `following`: the token behind a context; that of the toy model if none is given."""

    def toy(context: Sequence[int]) -> int:
        return toy_next(context, stages, VOCABULARY, ask.seed)

    following = following or toy
    prompt = list(codec.encode(ask.prompt))
    tokens: list[int] = []
    text = ""
    reason = ""
    limit = min(ask.max_new_tokens, context_length - len(prompt))
    while not reason:
        token = following(prompt + tokens)
        tokens.append(token)
        at_end = token in codec.eos_ids
        at_limit = len(tokens) == limit
        text += "" if at_end else text_of(token)
        # Text that the stream holds back cannot stop an answer yet.
        held = token % 3 == 0 and not at_end and not at_limit
        visible = text[:-1] if held else text
        ends = [visible.index(s) + len(s) for s in ask.stop if s in visible]
        if ends:
            first = min(ends)
            starts = [first - len(s) for s in ask.stop if visible[:first].endswith(s)]
            text, reason = text[: min(starts)], "stop"
        elif at_end:
            reason = "stop"
        elif at_limit:
            reason = "length"
    whole = prompt + tokens
    for _ in range(3):
        whole.append(following(whole))
    return Expected(tuple(tokens), text, reason, tuple(whole))
