"""What a cluster serves: settings that cannot be, and that all others come back from disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.config import DTYPES, HEADS, NAMED, QUANTISATIONS
from edgespec.daemon.cluster import ClusterSettings
from edgespec.daemon.settings import LAST_STAGE, RingOptions, served_config
from edgespec.errors import ConfigError


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": 0}, "0 stages"),
        ({"dtype": "int7"}, "unknown dtype"),
        (
            {"cache_dtype": "int4"},
            "caches in 'int4' of a ring in float32, which may have them in fl",
        ),
        ({"cache_dtype": "float16", "dtype": "bfloat16"}, "caches in 'float16' of a ring in bf"),
        ({"cache_dtype": "int8", "dtype": "float64"}, "have them in float64$"),
        ({"quant": "int3"}, "unknown quantisation"),
        ({"head_quant": "auto"}, "unknown quantisation"),
        ({"draft_quant": ""}, "unknown quantisation"),
        ({"layers": "2,two"}, "layers is '2,two'"),
        ({"layers": "2,2,2"}, "layers for 3 stages, but 2 stages"),
        ({"head": "auto"}, "unknown head 'auto'; choose one of: coordinator, last-stage"),
        ({"context": 1}, "at least 2 tokens"),
        ({"host": "a b"}, "is no host name"),
        ({"with_stage": 3}, "stages 1 to 2"),
        ({"with_stage": -1}, "with_stage is -1"),
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
        head_quant=draw(st.sampled_from(list(NAMED))),
        draft_quant=draw(st.sampled_from(list(QUANTISATIONS))),
        layers=draw(st.sampled_from(["", ",".join(map(str, layers))])),
        context=draw(st.sampled_from([0, 2, 4096])),
        host=draw(st.sampled_from(["0.0.0.0", "board.local", "fd00::1"])),
        port=draw(st.integers(0, 65535)),
        places=tuple(draw(st.one_of(st.just([]), names))),
        with_stage=draw(st.integers(0, stages)),
        head=draw(st.sampled_from(HEADS)),
    )


@given(all_settings())
def test_settings_come_back_as_they_were(settings: ClusterSettings) -> None:
    assert ClusterSettings.from_json(settings.to_json(), Path("settings.json")) == settings


EARLIEST = (
    *("version", "model", "draft", "stages", "dtype", "quant", "draft_quant", "layers", "context"),
    *("host", "port", "places"),
)
"""The keys of release 0.2.0."""


def test_a_cluster_of_an_earlier_release_is_read_and_nothing_of_it_changes() -> None:
    stored = json.loads(ClusterSettings(stages=2).to_json())
    earlier = {key: stored[key] for key in EARLIEST}
    read = ClusterSettings.from_json(json.dumps(earlier), Path("settings.json"))
    assert read == ClusterSettings(stages=2)
    assert (read.with_stage, read.head, read.share_prefixes) == (0, "coordinator", False)
    del earlier["stages"]
    with pytest.raises(ConfigError, match="the key 'stages' is missing"):
        ClusterSettings.from_json(json.dumps(earlier), Path("settings.json"))


@pytest.mark.parametrize(
    ("has", "asked", "got"),
    [
        (0, None, 0),
        (2, None, 2),
        (0, LAST_STAGE, 3),
        (2, LAST_STAGE, 2),
        (2, 1, 1),
        (2, 0, 0),
    ],
)
def test_the_option_comes_before_the_cluster_which_comes_before_the_last_stage(
    has: int, asked: int | None, got: int
) -> None:
    settings = ClusterSettings(
        stages=3, with_stage=has, places=("a", "b", "c"), share_prefixes=bool(has)
    )
    options = RingOptions("", "", 0, "", with_stage=asked)
    config = served_config(settings, options, None)
    assert (config.stages, config.with_stage, config.places) == (3, got, ("a", "b", "c"))
    assert config.share_prefixes is bool(has)
    other = served_config(settings, replace(options, stages=4), None)
    last = 4 if asked == LAST_STAGE else asked or 0
    assert (other.stages, other.with_stage) == (4, last), "a ring of its own"


def test_a_stage_that_the_ring_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="with_stage is 4; the ring has the stages 1 to 3"):
        served_config(ClusterSettings(stages=3), RingOptions("", "", 0, "", with_stage=4), None)


@given(st.text(max_size=200))
def test_no_text_is_worse_than_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"settings\.json"):
        ClusterSettings.from_json(text, Path("settings.json"))
