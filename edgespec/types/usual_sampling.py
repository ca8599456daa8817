"""Usual sampling: how answers are sampled where a request does not say, as the model publishes."""

from __future__ import annotations

from collections.abc import Collection

from edgespec.types.record import Finite, Record


class UsualSampling(Record, frozen=True):
    """See verify.sampling.Sampling, and `repetition` at verify.rules.Rules.

    The defaults are those of a model that publishes nothing: the likeliest token every time.
    """

    temperature: Finite = 0.0
    top_k: int = 0
    top_p: Finite = 1.0
    min_p: Finite = 0.0
    repetition_penalty: Finite = 1.0

    def own_words(self, without: Collection[str] = ()) -> str:
        """Which of its settings count, but for some; "" for none. No filter does at temperature
        0."""
        counts = NAMES if self.temperature else ("repetition_penalty",)
        own = [
            f"{name.replace('_', ' ')} {getattr(self, name):g}"
            for name in counts
            if name not in without and getattr(self, name) != getattr(NOTHING_SAID, name)
        ]
        return f"{', '.join(own)} of the model's own" if own else ""


NAMES = UsualSampling.__struct_fields__
NOTHING_SAID = UsualSampling()
