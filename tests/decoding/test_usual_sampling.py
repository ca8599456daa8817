"""What a request does not say of sampling is as the model publishes it; and a loop is told once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs
from support.rings import FakeRing, submit

from edgespec.decoding.admission import admit
from edgespec.decoding.finish import looped
from edgespec.decoding.request import Request
from edgespec.errors import ConfigError
from edgespec.types.usual_sampling import NAMES, UsualSampling
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import Submit

OWN = UsualSampling(0.6, 20, 0.95, 0.05, 1.05)
NOT_SAID = structs.replace(submit(seed=3), **dict.fromkeys(NAMES))


def admitted(asked: Submit, usual: UsualSampling = OWN, head_last: bool = False) -> Request:
    """The request as a ring whose model publishes that takes it up."""
    fake = FakeRing(2, usual=usual)
    machine = fake.coordinator
    ring = replace(machine._ring, head_last=head_last)
    return admit(ring, fake.codec, machine._shared, 1, b"client", asked, 0.0)


def test_what_is_not_said_is_the_models_own() -> None:
    request = admitted(NOT_SAID)
    assert request.sampling == Sampling(0.6, 20, 0.95, 0.05, 3)
    assert request.rules is not None
    assert request.rules.repetition == 1.05
    assert request.client.sampled.startswith("temperature 0.6, top k 20, ")


def test_a_value_that_is_said_wins() -> None:
    said = structs.replace(NOT_SAID, temperature=0.0, repetition_penalty=1.0)
    request = admitted(said)
    assert (request.sampling.temperature, request.sampling.top_k) == (0.0, 20)
    assert (request.rules, request.client.sampled) == (None, "")
    for wrong in ({"temperature": -1.0}, {"repetition_penalty": 0.0}, {"top_k": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            admitted(structs.replace(NOT_SAID, **wrong))


def test_a_last_stage_that_chooses_is_told_the_models_penalty() -> None:
    request = admitted(NOT_SAID, head_last=True)
    assert request.rules is not None
    assert request.choosing is not None
    assert request.choosing.rules is not None
    assert request.choosing.rules.repetition == request.rules.repetition == 1.05
    assert request.client.sampled == admitted(NOT_SAID).client.sampled


def test_a_model_that_publishes_nothing_is_greedy() -> None:
    request = admitted(NOT_SAID, UsualSampling())
    assert request.sampling == Sampling(seed=3)
    assert (request.rules, request.client.sampled) == (None, "")


@pytest.mark.parametrize("length", [1, 3, 17, 64])
def test_an_end_that_repeats_itself_is_noticed(length: int) -> None:
    begin, part = list(range(1000, 1030)), list(range(length))
    words = looped(begin + part * (300 // length))
    assert words.startswith(
        f"from its token 31 on the answer repeats the same {length} token(s); another temperature"
    )
    assert looped(begin + part * 3) == "", "a refrain is none"
    assert looped(begin + part * (300 // length) + [7, 2000, 8]) == "", "it came out of it"
    assert looped(begin * 9 + list(range(100))) == ""
    assert looped([]) == ""


def test_the_end_tells_which_settings_were_the_models_own() -> None:
    end = FakeRing(2, usual=OWN).ring.ask(NOT_SAID)
    assert (end.sampled, end.looped) == (OWN.own_words(), "")
    said = {name: getattr(OWN, name) for name in NAMES}
    assert FakeRing(2, usual=OWN).ring.ask(structs.replace(NOT_SAID, **said)).sampled == ""
