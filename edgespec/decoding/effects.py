"""Effects of decoding: what the coordinator and a stage want sent and computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from edgespec.machines.effects import Effect
from edgespec.policy.base import Plan
from edgespec.tree.ledger import IntArray, Rows
from edgespec.tree.stems import Fork
from edgespec.types.features import NO_FEATURES, Features
from edgespec.types.record import NO_IDS
from edgespec.types.tensor import Tensor
from edgespec.verify.rules import Answer, Grammar, RulesAt
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import Submit
from edgespec.wire.segment import Segment


@dataclass(frozen=True, slots=True)
class SendRing(Effect):
    """Send a segment to the next node of the data ring."""

    segment: Segment


@dataclass(frozen=True, slots=True)
class Renew(Effect):
    """Have a new ring begun, in which nothing of this one counts; not at once if the last time was
    just before. `why` is a clause whose subject is the node or, with `by_sender`, the node before
    it, of which a segment came that cannot be right."""

    why: str
    by_sender: bool = False


@dataclass(frozen=True, slots=True)
class OpenCache(Effect):
    """Make an empty KV cache for a request with room for `reserve` rows."""

    request: int
    reserve: int


@dataclass(frozen=True, slots=True)
class MoveCache(Effect):
    """A request begins with the KV cache of an answered one, which has none afterwards."""

    request: int
    base: int


@dataclass(frozen=True, slots=True)
class ForkCache(Effect):
    """A request begins with rows of another, which are held once from then on."""

    request: int
    base: int
    how: Fork


@dataclass(frozen=True, slots=True)
class CloseCache(Effect):
    """Free a request's KV cache."""

    request: int


@dataclass(frozen=True, slots=True)
class AbortBlock(Effect):
    """Stop this running job between two layers: none of its rows is wanted; with a `request`: go on
    without its rows, as others are wanted."""

    job: int
    request: int | None = None


@dataclass(frozen=True, slots=True)
class GatherRows(Effect):
    """After slot `start` of the request's cache keep the slots `start + order`, in that order."""

    request: int
    start: int
    order: IntArray


@dataclass(frozen=True, slots=True)
class EncodePrompt(Effect):
    """Turn what a client asked into tokens; comes back as PromptEncoded.

    A conversation comes first if the model has a chat template, or if there is no prompt. `most`:
    how many tokens may fit. A grammar is compiled with the prompt. It takes long if the text is
    long, and it is for the model's chat template, and the grammar's author, to say what is done:
    not in the thread of the I/O loop, nor in front of the head's work.
    """

    request: int
    asked: Submit
    most: int


@dataclass(frozen=True, slots=True)
class OpenDraft(Effect):
    """Start a request on the draft source; with a `base`, a request whose first `rows` tokens are
    its own too. `ends`: the base is answered, and ends with this. `grammar`: of its answer, which
    begins after the first `prompt` tokens of what it reads."""

    request: int
    sampling: Sampling
    base: int = 0
    rows: int = 0
    ends: bool = False
    grammar: Grammar | None = None
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class CloseDraft(Effect):
    """Free a request on the draft source."""

    request: int


@dataclass(frozen=True, slots=True)
class Draft(Effect):
    """Have the draft source guess what `plan` says; comes back as Drafted.

    `context`: all committed tokens. Grow makes a fresh tree below the last of them, Deepen adds
    levels to the request's last tree, Expand guesses children of each of `paths`: the tokens from
    the first one after `context` to each of the plan's nodes (empty: the context's last token),
    with the `scores` of these nodes.
    `features`: what the ring gave for committed rows since the last draft effect.
    """

    job: int
    request: int
    plan: Plan
    context: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...] = ()
    features: Features = NO_FEATURES
    scores: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FindMasks(Effect):
    """Ask grammars what may come behind rows of the segment of that number, which waits for it;
    comes back as MasksFound. `asked`: of each request the answers up to those rows."""

    seq: int
    asked: tuple[tuple[int, Grammar, tuple[Answer, ...]], ...]


@dataclass(frozen=True, slots=True)
class RunHead(Effect):
    """Walk `rows` from the first one: sample the token after it, then after the row below it that
    stands for that token, and so on; comes back as HeadDone.

    `hidden`: their hidden rows [R, H]. `top`: how many of the likeliest tokens are wanted beside
    those sampled, -1 for none and no log-probabilities either. `rules`: what changes the logits.
    `known`: the tokens after the first rows, which are a prompt's: they are scored by the model
    alone, and the walk begins behind them.
    """

    job: int
    request: int
    hidden: Tensor
    rows: Rows
    sampling: Sampling
    top: int = -1
    rules: RulesAt | None = None
    known: IntArray = field(default_factory=lambda: NO_IDS)

    @property
    def walk(self) -> IntArray:
        """Places of the rows after which tokens are sampled."""
        return np.arange(len(self.known), len(self.rows))
