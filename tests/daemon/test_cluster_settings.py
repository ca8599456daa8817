"""What a cluster serves: settings that cannot be, and that all others come back from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.config import DTYPES, QUANTISATIONS
from edgespec.daemon.cluster import ClusterSettings
from edgespec.errors import ConfigError


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": 0}, "0 stages"),
        ({"dtype": "int7"}, "unknown dtype"),
        ({"quant": "int3"}, "unknown quantisation"),
        ({"draft_quant": ""}, "unknown quantisation"),
        ({"layers": "2,two"}, "layers is '2,two'"),
        ({"layers": "2,2,2"}, "layers for 3 stages, but 2 stages"),
        ({"context": 1}, "at least 2 tokens"),
        ({"host": "a b"}, "is no host name"),
        ({"places": ("one",)}, "places names 1 devices"),
        ({"places": ("one", "one")}, "places names 1 devices"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClusterSettings(**{"stages": 2, **change})  # type: ignore[arg-type]


WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@st.composite
def all_settings(draw: st.DrawFn) -> ClusterSettings:
    """Any that can be."""
    stages = draw(st.integers(1, 5))
    layers = draw(st.lists(st.integers(1, 99), min_size=stages, max_size=stages))
    names = st.lists(WORDS.filter(bool), min_size=stages, max_size=stages, unique=True)
    return ClusterSettings(
        model=draw(WORDS),
        draft=draw(WORDS),
        stages=stages,
        dtype=draw(st.sampled_from(DTYPES)),
        quant=draw(st.sampled_from(["", *QUANTISATIONS])),
        draft_quant=draw(st.sampled_from(list(QUANTISATIONS))),
        layers=draw(st.sampled_from(["", ",".join(map(str, layers))])),
        context=draw(st.sampled_from([0, 2, 4096])),
        host=draw(st.sampled_from(["0.0.0.0", "board.local", "fd00::1"])),
        port=draw(st.integers(0, 65535)),
        places=tuple(draw(st.one_of(st.just([]), names))),
    )


@given(all_settings())
def test_settings_come_back_as_they_were(settings: ClusterSettings) -> None:
    assert ClusterSettings.from_json(settings.to_json(), Path("settings.json")) == settings


@given(st.text(max_size=200))
def test_no_text_is_worse_than_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"settings\.json"):
        ClusterSettings.from_json(text, Path("settings.json"))
