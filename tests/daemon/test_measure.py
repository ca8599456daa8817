"""Measuring: made-up times come back as figures; real ones are only looked at for their form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.cases import case
from support.checkpoints import write_checkpoint
from support.keys import OWNER_IDENTITY
from support.packed_forms import FORMS

from edgespec.config import FILE, QUANTISATIONS, Address, Quantisation
from edgespec.daemon import bandwidths, coordinator_times, device, measure, timing
from edgespec.daemon.layer_times import (
    LayerTimes,
    Shape,
    check_room,
    default_shape,
    measure_layer,
)
from edgespec.daemon.measure import MeasureRequest
from edgespec.daemon.profile_figures import (
    Fit,
    ProfileFigures,
    best_four_bit,
    by_layer,
    doubts,
    fit,
)
from edgespec.daemon.random_layers import RandomLayers
from edgespec.daemon.timing import LEAST_RUNS, Sample, round_trips, shown, timed
from edgespec.errors import CapacityError, ModelError
from edgespec.model.block import Block, row_math
from edgespec.model.loader import open_config
from edgespec.model.model_config import ModelConfig
from edgespec.planning.profile import ROWS, Profile

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Others use the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- timing -------------------------------------------------------------------------------------


class Clock:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, *seconds: float) -> object:
        """Work that takes these times in turn, then the last one for ever."""
        left = list(seconds)

        def run() -> None:
            self.order.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_every_piece_gets_its_turn_and_the_first_run_does_not_count() -> None:
    clock = Clock()
    works = {"slow": clock.work("slow", 9.0, 1.0), "fast": clock.work("fast", 5.0, 0.5)}
    found = timed(works, 20.0, clock)  # type: ignore[arg-type]
    assert clock.order[:6] == ["slow", "fast"] * 3
    assert set(found["slow"].seconds) == {1.0}
    assert set(found["fast"].seconds) == {0.5}
    assert clock.now - 100.0 == pytest.approx(20.0, abs=1.5)


def test_short_work_is_repeated_before_the_next_turn() -> None:
    clock = Clock()
    works = {"long": clock.work("long", 1.0), "short": clock.work("short", 0.004)}
    found = timed(works, 3.5, clock)  # type: ignore[arg-type]
    assert len(found["short"].seconds) == 5 * len(found["long"].seconds)


@pytest.mark.parametrize(
    ("seconds", "runs"), [(0.0, [9.0]), (4.0, [9.0]), (5.0, [1.0]), (6.0, [1.0] * LEAST_RUNS)]
)
def test_a_spent_budget_leaves_fewer_runs_but_one(seconds: float, runs: list[float]) -> None:
    clock = Clock()
    found = timed({0: clock.work("x", 9.0, 1.0)}, seconds, clock)  # type: ignore[dict-item]
    assert list(found[0].seconds) == runs


def test_a_sample_tells_its_middle_and_its_spread() -> None:
    sample = Sample((0.003, 0.001, 0.5))
    assert (sample.median, sample.least) == (0.003, 0.001)
    assert str(sample) == "median of 3 runs, 1 ms to 500 ms"
    assert [shown(value) for value in (2.5, 0.00123, 0.0000456)] == ["2.5 s", "1.23 ms", "45.6 µs"]


# --- fitting ------------------------------------------------------------------------------------


def made_up(
    table: dict[int, float],
    *,
    layer: float = 0.001,
    once: float = 0.0004,
    stored: int = 50_000_000,
    depth: int = 1,
) -> LayerTimes:
    """The times of a device that costs exactly this; `table` in seconds for 10^9 bytes."""

    def sample(seconds: float) -> Sample:
        return Sample((seconds, seconds, seconds * 1.2))

    def passes(layers: int, seconds: float) -> Sample:
        return sample(once + layers * (layer + seconds))

    return LayerTimes(
        stored=stored,
        weights=2 * stored,
        depth=depth,
        copies=1,
        passes={rows: passes(depth, stored / 1e9 * table[rows]) for rows in ROWS},
        tiny={layers: passes(layers, 0.0) for layers in (1, 9)},
        launched={layers: sample(once + layers * layer / 2) for layers in (1, 9)},
        seen=sample(1.0),
    )


LINE = {rows: 0.1 + 0.01 * rows for rows in ROWS}
FAST_MEMORY = 1e11


@pytest.mark.parametrize("depth", [1, 4])
def test_what_a_layer_and_its_bytes_cost_comes_back(depth: int) -> None:
    times = {
        "none": made_up(LINE, stored=200_000_000, depth=depth),
        "int4": made_up({rows: 3 * seconds for rows, seconds in LINE.items()}, depth=depth),
    }
    found = fit(times, "int4", FAST_MEMORY)
    assert found.layer_seconds == pytest.approx(0.001)
    assert found.tables["none"] == pytest.approx(tuple(LINE.values()))
    assert found.tables["int4"] == pytest.approx(tuple(3 * one for one in LINE.values()))
    assert found.raised == {"none": (), "int4": ()}


def test_on_a_cpu_nothing_overlaps_and_slow_memory_changes_nothing() -> None:
    found = fit({"int4": made_up(LINE)}, "int4", None)
    assert found.layer_seconds == pytest.approx(0.001)
    assert found.tables["int4"] == pytest.approx(tuple(LINE.values()))
    small = made_up(LINE, stored=1_000_000)  # a layer of 1.11 ms at one row, 1 ms of it fixed
    found = fit({"int4": small}, "int4", None)
    assert found.layer_seconds == pytest.approx(0.00111 / 2)
    assert predicted(found, "int4", 1_000_000) == pytest.approx(
        [0.001 + 0.001 * seconds for seconds in LINE.values()]
    )


def predicted(found: Fit, name: str, stored: int) -> list[float]:
    return [found.layer_seconds + stored / 1e9 * seconds for seconds in found.tables[name]]


def test_where_launching_hides_reading_nothing_is_charged_twice() -> None:
    # A pass takes 1 ms however many rows, of which launching takes all: the memory works meanwhile.
    table = dict.fromkeys(ROWS, 0.0)
    times = {name: made_up(table) for name in ("none", "int4")}
    found = fit(times, "int4", FAST_MEMORY)
    assert found.layer_seconds == pytest.approx(0.001 - 50e6 / FAST_MEMORY)
    assert found.tables["int4"] == pytest.approx([1e9 / FAST_MEMORY] * len(ROWS))
    assert predicted(found, "int4", 50_000_000) == pytest.approx([0.001] * len(ROWS))


def test_more_rows_take_no_less_and_which_were_raised_is_known() -> None:
    table = {**LINE, 4: 0.05, 64: 0.2}
    found = fit({"int4": made_up(table)}, "int4", FAST_MEMORY)
    expected = [0.11, 0.12, 0.12, 0.18, 0.26, 0.42, 0.42]
    assert found.tables["int4"] == pytest.approx(expected)
    assert found.raised == {"int4": (4, 64)}


def test_times_without_sense_still_make_a_profile_s_figures() -> None:
    times = made_up(dict.fromkeys(ROWS, 0.0), layer=0.0, once=0.0)
    found = fit({"int4": times}, "int4", FAST_MEMORY)
    assert found.layer_seconds == 0.0
    assert all(seconds > 0 for seconds in found.tables["int4"])


def scaled(factor: float, at: tuple[int, ...] = ROWS) -> dict[int, float]:
    return {rows: seconds * (factor if rows in at else 1.0) for rows, seconds in LINE.items()}


def test_the_best_four_bit_one_is_chosen_over_the_rows_of_segments() -> None:
    def best(**tables: dict[int, float]) -> str:
        return best_four_bit({name.replace("_", "-"): made_up(t) for name, t in tables.items()})

    assert best(none=scaled(0.1), int8=scaled(0.1)) == ""
    assert best(none=scaled(0.1), int4=scaled(2.0), nf4=scaled(1.0)) == "nf4"
    assert best(nf4=scaled(0.99), int4=scaled(1.0)) == "int4"  # as good, and listed first
    assert best(nf4=scaled(0.01, at=(32, 64)), int4=scaled(0.8)) == "int4"  # prompts do not count
    assert best(int4=scaled(1.0), int4_g128=scaled(0.5)) == "int4-g128"


def test_a_disturbed_measurement_is_noticed() -> None:
    calm = made_up(LINE)
    assert doubts({"none": calm}) == []
    busy = replace(calm, passes={**calm.passes, 8: Sample((1.0, 4.0, 5.0))})
    (found,) = doubts({"none": calm, "int4": busy})
    assert found.startswith("some passes took 4.0 times as long")
    hasty = replace(calm, passes={**calm.passes, 64: Sample((1.0, 1.0))})
    (found,) = doubts({"none": calm, "int4": hasty})
    assert "no time for 3 runs of every pass" in found


def test_what_a_pass_costs_once_cannot_be_more_than_half_of_it() -> None:
    slow = replace(made_up(LINE), tiny={1: Sample((9.0,)), 9: Sample((9.0,))})
    assert by_layer(slow)[1] == pytest.approx(slow.passes[1].median / 2)


def test_on_a_gpu_launching_has_a_figure_of_its_own(tmp_path: Path) -> None:
    shape, times = small(tmp_path), {name: made_up(LINE) for name in ("none", "int4")}

    def figures(overlaps: bool) -> ProfileFigures:
        found = fit(times, "int4", FAST_MEMORY if overlaps else None)
        return ProfileFigures("measured", shape, times, found, "int4", overlaps)

    assert figures(True).launch_seconds().value == pytest.approx(0.0005), "until it is launched"
    assert figures(True).layer_seconds().value == pytest.approx(0.001)
    assert figures(False).launch_seconds().value == pytest.approx(0.001), "all that is fixed"
    assert figures(False).layer_seconds().value == 0


def test_work_on_logits_is_timed_for_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of work runs, and a line through made-up times gives its call and its logits."""
    per_logit = {"greedy": 1e-9, "sampled": 2e-9, "filtered": 3e-9, "": 4e-9}

    def made_up_times(works: dict[tuple[str, str, int], Any], seconds: float) -> dict[Any, Sample]:
        found = {}
        for (kind, way, width), work in works.items():
            work()
            rows = (
                coordinator_times.ROWS
                if kind == "ranking" and width == coordinator_times.WIDE
                else 1
            )
            call = 0.0 if kind == "noise" else 0.001
            found[kind, way, width] = Sample((call + rows * width * per_logit[way],))
        return found

    monkeypatch.setattr(coordinator_times, "timed", made_up_times)
    choosing, ranking, noise = coordinator_times.measure_logits(CPU, "measured", 0.0)
    for times in (choosing, ranking):
        assert times.origin.startswith("measured: ")
        for way in coordinator_times.WAYS:
            assert times.of(way).call == pytest.approx(0.001)
            assert times.of(way).million == pytest.approx(per_logit[way] * 1e6)
    assert noise.value == pytest.approx(0.004)


# --- layers -------------------------------------------------------------------------------------


def small(tmp_path: Path, kind: str = "llama", **settings: int) -> Shape:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, **settings}
    folder = write_checkpoint(tmp_path / kind, kind=kind, **sizes)
    return Shape("small", open_config(folder / "config.json"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "quantisation"),
    [("llama", "none"), ("llama", "int4"), ("qwen2", "int8"), ("mistral", "none")],
)
def test_a_layer_is_timed_on_the_way_that_a_stage_goes(
    tmp_path: Path, kind: str, quantisation: str
) -> None:
    found = measure_layer(
        small(tmp_path, kind),
        Quantisation.parse(quantisation),
        "bfloat16",
        CPU,
        beyond_cache=300_000,
        bandwidth=1e3,
        room=10**9,
        seconds=lambda: 0.0,
    )
    # 4 heads and 2 key heads of 32, and three matrices of 128 × 128.
    assert found.weights == 128 * (128 + 64 + 64 + 128) + 3 * 128 * 128
    bits = {"none": 16, "int4": 4.5, "int8": 8}[quantisation]
    assert found.weights * bits / 8 <= found.stored <= found.weights * (bits + 0.3) / 8
    assert tuple(found.passes) == ROWS
    assert all(seconds > 0 for seconds in by_layer(found).values())
    assert found.seen.median > 0


def test_random_layers_give_every_block_memory_of_its_own(tmp_path: Path) -> None:
    shape = small(tmp_path)
    source = RandomLayers(shape.config, Quantisation.parse("int4"))
    size = torch.Size((128, 128))
    one, other = source.packed("a", size), source.packed("b", size)
    for part, tensor in one.items():
        assert torch.equal(tensor, other[part])
        assert tensor.data_ptr() != other[part].data_ptr()


def test_a_packed_model_is_timed_in_the_forms_of_its_matrices(tmp_path: Path) -> None:
    shape = small(tmp_path)
    weights = [
        name.removeprefix("model.layers.0.")
        for name in RandomLayers(shape.config, FILE).names
        if ".0." in name and "norm" not in name
    ]
    for name, form in FORMS.items():
        fits = replace(form, group=min(form.group, 64), double=False)
        mixed = {one: QUANTISATIONS["none"] if "v_proj" in one else fits for one in weights}
        source = RandomLayers(shape.config, FILE, mixed)
        with case(name):
            count, stored = source.size
            assert (4 if form.kind in ("int4", "iq4", "fp4") else 8) < 8 * stored / count < 12
            packed, plain = Mock(wraps=source.packed), Mock(wraps=source.tensor)
            source.packed, source.tensor = packed, plain  # type: ignore[method-assign]
            Block(source, 1, 2, "bfloat16")  # every matrix comes in its form
            asked = [one.args[0] for one in plain.call_args_list]
            assert sum(".v_proj.weight" in one for one in asked) == 1
            assert sum("_proj.weight" in one for one in asked) == 1
            assert packed.call_count == 6


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("qwen3_moe", "mixture of experts"),
        ("lfm2_moe", "mixture of experts"),
        ("lfm2", "layers are of two kinds"),
        ("qwen3_5_text", "layers are of two kinds"),
    ],
)
def test_layers_whose_times_are_no_times_a_byte_are_refused(kind: str, says: str) -> None:
    config = ModelConfig(
        {
            "model_type": kind,
            "layer_types": ["conv", "full_attention"] if "lfm2" in kind else None,
            "num_dense_layers": 0,
            "vocab_size": 8,
            "hidden_size": 64,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
    )
    with pytest.raises(ModelError, match=says):
        RandomLayers(config, Quantisation())


def test_the_default_layer_is_the_largest_that_fits() -> None:
    assert default_shape(100 * 10**9, 1).name == "llama-2-7b"
    assert default_shape(10**9, 1).name == "tinyllama-1.1b"
    assert default_shape(10**9, 8).name == "qwen2.5-0.5b"  # deeper, so smaller
    assert default_shape(300_000_000, 1).name == "qwen2.5-0.5b"
    with pytest.raises(CapacityError, match=r"needs 0\.14 GiB, and 0\.01 GiB are free"):
        default_shape(10**7, 1)
    with pytest.raises(CapacityError, match="smaller model with --model"):
        check_room(default_shape(100 * 10**9, 1), 10**9, 1)


# --- the link -----------------------------------------------------------------------------------


def test_the_link_is_half_the_median_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    class Coordinator:
        def __init__(self, *_: object) -> None:
            self.answer = clock.work("answer", 7.0, *[0.004] * 20, 0.5)

        def __enter__(self) -> Coordinator:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def status(self) -> None:
            self.answer()  # type: ignore[operator]

    monkeypatch.setattr(timing, "Client", Coordinator)
    trips = round_trips(Address("127.0.0.1", 1), OWNER_IDENTITY, 5.0, 30, clock=clock)
    assert trips.median == pytest.approx(0.004)  # connecting does not count, nor do ten slow ones


# --- all of it ----------------------------------------------------------------------------------


def request(tmp_path: Path, **more: object) -> MeasureRequest:
    folder = write_checkpoint(tmp_path / "base", hidden_size=128, intermediate_size=128)
    return MeasureRequest("mine", model=str(folder), seconds=0.02, **more)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_a_measured_profile_can_be_read_and_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidths, "LEAST_BUFFER", 2**22)
    monkeypatch.setattr(bandwidths, "MOST_BUFFER", 2**22)
    said: list[str] = []
    reasons = {"nf4": "it is not installed"}
    found = measure.measure(request(tmp_path), ["none", "int4", "int8"], reasons, said.append)
    profile = found.profile
    again = json.loads(json.dumps(profile.to_dict()))
    assert Profile.from_dict(again, "mine.json") == profile
    assert (profile.name, profile.quantisation) == ("mine", "int4")
    assert set(profile.quantisations) == {"int4", "int8"}
    assert profile.kernels == row_math(torch.device("cpu"), torch.bfloat16).kernels
    assert profile.unusable == reasons
    assert list(found.layer) == ["none", "int4", "int8"]
    for key, entry in profile.to_dict().items():
        if isinstance(entry, dict) and "origin" in entry and not key.startswith("link_"):
            start = entry["origin"].partition("measured on 20")[2]
            assert "edgespec profile` 0." in start, key
            assert f"torch {torch.__version__}, 1 CPU threads" in start, key
    assert profile.link_latency.origin.startswith("assumed, not measured")
    assert profile.link_bandwidth.origin.startswith("assumed, not measured")
    assert any("int8 (3 of 3)" in text for text in said)


@pytest.mark.thorough
def test_a_quantisation_that_does_not_fit_the_model_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidths, "LEAST_BUFFER", 2**22)
    monkeypatch.setattr(bandwidths, "MOST_BUFFER", 2**22)
    folder = write_checkpoint(tmp_path / "odd", hidden_size=64, intermediate_size=192, head_dim=16)
    asked = MeasureRequest("mine", model=str(folder), seconds=0.0)
    found = measure.measure(asked, ["none", "int4", "int4-g128"], {}, lambda _: None)
    assert set(found.profile.quantisations) == {"int4"}
    assert "128 columns does not fit" in found.profile.unusable["int4-g128"]
    with pytest.raises(ModelError, match="no 4-bit quantisation fits odd: int4 with groups of 128"):
        measure.measure(asked, ["none", "int4-g128"], {}, lambda _: None)


def test_four_bit_is_charged_by_the_bytes_of_cost_models(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "base", hidden_size=128, intermediate_size=128)
    shape = Shape("small", open_config(folder / "config.json"))
    times = {name: made_up(LINE, stored=450_000, once=0.0) for name in ("none", "int4")}
    times["int4"] = replace(times["int4"], weights=800_000)
    found = Fit(0.0, {"int4": tuple(LINE.values())}, {"int4": ()})
    table = ProfileFigures("measured", shape, times, found, "int4", False).four_bit()
    # 4.5 bits a weight are charged as 4.25.
    expected = [float(f"{seconds * 4.5 / 4.25:.4g}") for seconds in LINE.values()]
    assert list(table.seconds.values()) == pytest.approx(expected)
    assert "4.50 bits a weight where cost models charge 4.25" in table.origin


def test_the_speed_of_the_link_is_that_of_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "interface_speed", lambda name: ("eth0", 2.5e9))
    figure = measure._link_bandwidth("eth0")
    assert figure.value == pytest.approx(0.936 * 2.5e9 / 8)
    assert "the 2500 Mbit/s of eth0" in figure.origin
    monkeypatch.setattr(measure, "interface_speed", lambda name: None)
    assert measure._link_bandwidth("").value == 117_000_000
    assert device.interface_of("127.0.0.1") == "lo"
    assert device.interface_of("192.0.2.1") == ""
