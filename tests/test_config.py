"""Settings are checked when they are made, and say what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.config import (
    DEFAULT_PORT,
    Address,
    CoordinatorConfig,
    StageConfig,
    Timing,
)
from edgespec.errors import ConfigError

HERE = Address("127.0.0.1", 7430)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1", Address("10.0.0.1", DEFAULT_PORT)),
        ("nano.local:1", Address("nano.local", 1)),
        (" d0:65535 ", Address("d0", 65535)),
        ("::1", Address("::1", DEFAULT_PORT)),
        ("[::1]", Address("::1", DEFAULT_PORT)),
        ("[::1]:7431", Address("::1", 7431)),
        ("fe80::1%eth0", Address("fe80::1%eth0", DEFAULT_PORT)),
        (" [fe80::1%wlan0.7]:1 ", Address("fe80::1%wlan0.7", 1)),
        ("2001:db8:0:0:0:0:0:1", Address("2001:db8:0:0:0:0:0:1", DEFAULT_PORT)),
    ],
)
def test_an_address_is_a_host_and_maybe_a_port(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no host name"),
        (":1", "is no host name"),
        ("a b:1", "is no host name"),
        ("a/b", "is no host name"),
        ("a\x1bb", "is no host name"),
        ("*:1", "is no host name"),
        ("a:", "is no HOST:PORT"),
        ("a:b", "is no HOST:PORT"),
        ("a:-1", "is no HOST:PORT"),
        ("a:0", "ports go from 1"),
        ("a:²", "is no HOST:PORT"),
        ("a:65536", "ports go from 1"),
        ("[::1]:0", "ports go from 1"),
        ("[::1]:", "is no HOST:PORT"),
        ("[::1]x", "is no host name"),
        ("[::1", "is no host name"),
        ("[]:1", "is no host name"),
        ("[a]:1", "is no host name"),
        ("[d0:1]", "is no IPv6 address"),
        ("1:2:3", "is no IPv6 address"),
        ("10.0.0.1:7430:7431", r"with a port it is written \[ADDRESS\]:PORT"),
        ("tcp://a:7430", "is no host name"),
        ("fe80::1%", "is no IPv6 address"),
        ("fe80::1%a%b", "is no IPv6 address"),
        ("fe80::1%a]:1", "is no host name"),
        ("fe80::1%a b", "is no host name"),
    ],
)
def test_anything_else_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Address.parse(text)


@given(st.text(max_size=20) | st.text(alphabet=":[]%0af.e", max_size=20))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = Address.parse(text)
    except ConfigError:
        return
    assert address.endpoint == f"tcp://{address}"
    assert Address.parse(str(address)) == address
    assert 1 <= address.port <= 65535


def test_an_ipv6_number_is_written_in_brackets() -> None:
    address = Address("fe80::1%eth0", 7430)
    assert str(address) == "[fe80::1%eth0]:7430"
    assert address.endpoint == "tcp://[fe80::1%eth0]:7430"
    assert address.is_ipv6
    assert not Address("d0", 7430).is_ipv6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": 0}, "0 stages"),
        ({"stages": 257}, "257 stages"),
        ({"dtype": "int3"}, "unknown dtype 'int3'; choose one of: float32"),
        ({"model": "/m\udcff"}, "model folder's name .* is not valid UTF-8"),
        ({"draft": "/m\udcff"}, "draft folder's name .* is not valid UTF-8"),
    ],
)
def test_a_coordinator_is_refused_settings_that_cannot_be(
    changes: dict[str, object], words: str
) -> None:
    good = {"model": "m", "draft": "", "stages": 3, "dtype": "float32", "address": HERE}
    CoordinatorConfig(**good)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        CoordinatorConfig(**{**good, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage": -1}, "stage -1; stages are numbered from 1"),
        ({"stage": 257}, "numbered from 1 to 256"),
        ({"coordinator": Address("a", 0)}, "port is missing"),
        ({"wait": 0.0}, "wait is 0.0"),
        ({"wait": float("nan")}, "wait is nan"),
    ],
)
def test_a_stage_is_refused_settings_that_cannot_be(changes: dict[str, object], words: str) -> None:
    good = {"stage": 1, "coordinator": HERE, "model": "", "wait": 5.0}
    StageConfig(**good)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        StageConfig(**{**good, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["beat", "silence", "answer_silence", "client_silence", "retry"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_times_are_positive(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        Timing(**{name: value})


def test_a_silence_spans_two_beats() -> None:
    with pytest.raises(ConfigError, match="at least two beats"):
        Timing(beat=3.0, silence=4.0)


@pytest.mark.parametrize("value", [-1.0, 86401.0, float("nan"), float("inf")])
def test_a_recovery_takes_no_time_or_a_day_at_most(value: float) -> None:
    assert Timing(recovery=0.0).recovery == 0.0
    with pytest.raises(ConfigError, match="recovery"):
        Timing(recovery=value)


@pytest.mark.parametrize(
    ("slow", "silence", "factor"), [(1.0, 1.5, 1.0), (7.0, 1.5, 7.0), (1.0, 6.0, 4.0)]
)
def test_what_is_slow_is_waited_for_longer_but_a_lost_stage_is_noticed_as_asked(
    slow: float, silence: float, factor: float
) -> None:
    timing = Timing(silence=silence).slowed(slow)
    assert timing.silence == silence
    assert timing.answer_silence == factor * Timing().answer_silence
    assert timing.client_silence == factor * Timing().client_silence
