"""Plan: the best ring by its formula, what is left out, and refusals whose advice works."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from msgspec import structs
from support.tiers import tiered

from edgespec.config import FILE, HEAD_ON_LAST_STAGE, HEADS, QUANTISATIONS
from edgespec.daemon.profiles import profile_named
from edgespec.errors import CapacityError, ConfigError
from edgespec.planning.architecture import Architecture
from edgespec.planning.cost_model import (
    ARCHITECTURES,
    COST_MODELS,
    NO_DRAFT,
    FileBytes,
    draft_costs_of,
)
from edgespec.planning.costs import NodeCosts
from edgespec.planning.memory import GIB, Device, PlannedModel
from edgespec.planning.plan import LEAST_GAIN, Plan, candidates, plan
from edgespec.planning.problem import (
    CHOSEN_ROWS,
    DRAFT_ROWS,
    MODEL_DRAFT,
    SEGMENT_ROWS,
    TOKEN_DRAFT,
    Problem,
    coordinator_step,
)
from edgespec.planning.profile import Figure, RowTable
from edgespec.planning.refusal import draft_room, remedies, shortages

NANO = profile_named("jetson-orin-nano-8gb")
AGX = profile_named("jetson-agx-orin-64gb")
PI = profile_named("raspberry-pi-5-8gb")
MODEL = PlannedModel(
    "llama-2-13b",
    ARCHITECTURES["llama-2-13b"],
    QUANTISATIONS["int4"],
    COST_MODELS["llama-2-13b"].draft,
)


def nanos(count: int) -> tuple[Device, ...]:
    return tuple(Device(f"nano-{number}", NANO) for number in range(1, count + 1))


def with_memory(name: str, gibibytes: float) -> Device:
    return Device(name, structs.replace(NANO, memory_bytes=Figure(gibibytes * GIB, "made up")))


def problem(count: int = 4, **settings: int) -> Problem:
    return Problem(MODEL, Device("d0", NANO), nanos(count), **settings)


# --- what is chosen -----------------------------------------------------------------------------


def test_alike_boards_share_the_layers() -> None:
    made = plan(problem(4))
    assert made.split == (10, 10, 10, 10)
    assert [node.stage for node in made.nodes] == [0, 1, 2, 3, 4]
    assert [(node.first, node.end) for node in made.nodes[1:]] == [
        (0, 10),
        (10, 20),
        (20, 30),
        (30, 40),
    ]
    assert made.left_out == ()


def test_all_that_is_promised_fits() -> None:
    made = plan(problem(2))
    assert made.split == (20, 20)
    for node in made.nodes:
        assert node.need.total <= node.device.memory


def test_the_seconds_are_those_of_the_formula() -> None:
    made = plan(problem(4, context=512))
    costs = made.costs
    step = max(stage.block_seconds(SEGMENT_ROWS, 256) for stage in costs.stages)
    node = costs.coordinator
    head = node.head_seconds(SEGMENT_ROWS) + node.choose_seconds(CHOSEN_ROWS, "greedy")
    draft = node.draft_seconds(DRAFT_ROWS, 256) + node.rank_seconds(DRAFT_ROWS, "greedy")
    expected = (
        MODEL_DRAFT.step * step
        + MODEL_DRAFT.trip * made.trip_seconds(256)
        + MODEL_DRAFT.coordinator * (head + draft)
    )
    assert made.seconds == pytest.approx(expected)


def test_without_a_draft_a_token_is_a_trip() -> None:
    made = plan(Problem(replace(MODEL, draft=NO_DRAFT), Device("d0", NANO), nanos(4), 512))
    assert made.seconds == pytest.approx(made.trip_seconds(256))
    # Then nothing is gained by more stages than hold the layers: each costs a link. The one on the
    # coordinator's board costs least.
    assert len(made.split) == made.with_stage == 2


def test_with_n_grams_stages_help() -> None:
    """Guesses are on their way while others are computed, so that it is not one trip a token."""
    drafting = replace(MODEL, draft=replace(NO_DRAFT, name="ngram"))
    made = plan(Problem(drafting, Device("d0", AGX), nanos(4), 512))
    node, stages = made.costs.coordinator, made.costs.stages
    steps = [stage.block_seconds(SEGMENT_ROWS, 256) for stage in stages]
    expected = (
        TOKEN_DRAFT.step * max(steps)
        + TOKEN_DRAFT.trip * made.trip_seconds(256)
        + TOKEN_DRAFT.coordinator * coordinator_step(node, 256)
        + (TOKEN_DRAFT.shared * steps[-1] if made.with_stage else 0.0)
    )
    assert made.seconds == pytest.approx(expected)
    boards = plan(Problem(drafting, Device("d0", NANO), nanos(4), 512))
    assert len(boards.split) >= 4


def test_the_head_on_the_last_stage_is_part_of_its_step() -> None:
    made = plan(problem(4, context=512), (HEAD_ON_LAST_STAGE,))
    costs = made.costs
    last = costs.stages[-1]
    head = last.head_seconds(SEGMENT_ROWS) + last.choose_seconds(CHOSEN_ROWS, "greedy")
    steps = [stage.block_seconds(SEGMENT_ROWS, 256) for stage in costs.stages]
    steps[-1] += head
    d0 = coordinator_step(costs.coordinator, 256, head_last=True)
    assert d0 == pytest.approx(coordinator_step(costs.coordinator, 256) - head)
    expected = MODEL_DRAFT.step * max(steps) + MODEL_DRAFT.trip * made.trip_seconds(256)
    assert made.seconds == pytest.approx(expected + MODEL_DRAFT.coordinator * d0)
    here = plan(problem(4, context=512))
    assert made.nodes[0].need.weights == here.nodes[0].need.weights - MODEL.costs.head.bytes
    for node in made.nodes:
        assert node.need.total <= node.device.memory
    both = plan(problem(4, context=512), HEADS)
    assert both.problem.head_last == (made.seconds * LEAST_GAIN < here.seconds)


def test_a_head_that_fits_on_no_stage_is_refused_or_stays_where_it_is() -> None:
    """The coordinator has room for head and draft alone, the stages for 20 layers each."""

    def with_context(context: int) -> Problem:
        one = problem(2, context=context)
        need = Figure(one.needs.coordinator().total, "just enough")
        d0 = Device("d0", structs.replace(NANO, memory_bytes=need))
        return replace(one, coordinator=d0)

    tight = with_context(max(c for c in range(2000, 9000, 10) if with_context(c).fits()))
    assert not replace(tight, head_last=True).fits()
    with pytest.raises(CapacityError, match="--head coordinator"):
        plan(tight, (HEAD_ON_LAST_STAGE,))
    made = plan(tight, HEADS)
    assert not made.problem.head_last


# --- layers on the coordinator's board ----------------------------------------------------------


def test_the_coordinators_board_carries_what_does_not_fit_elsewhere() -> None:
    """Two stages of 6.5 GiB hold 43 layers with 4096 tokens; the rest is beside head and draft."""
    made = plan(problem(2, context=5500))
    assert made.with_stage == 3
    assert made.nodes[3].device is made.problem.coordinator
    assert made.why_idle == ""
    both = made.nodes[0].need.total + made.nodes[3].need.total
    assert both <= made.problem.coordinator.memory
    assert made.costs.with_stage == 3
    assert made.costs.links[3].latency < made.costs.links[0].latency
    # Its steps count twice: for the ring, and for D0's time.
    step = [one.block_seconds(SEGMENT_ROWS, 2750) for one in made.costs.stages]
    own = made.costs.coordinator
    d0 = coordinator_step(own, 2750)
    assert made.seconds == pytest.approx(
        MODEL_DRAFT.step * max(step)
        + MODEL_DRAFT.trip * made.trip_seconds(2750)
        + MODEL_DRAFT.coordinator * d0
        + MODEL_DRAFT.shared * step[2]
    )


def test_it_is_left_empty_where_that_is_faster() -> None:
    made = plan(problem(4))
    assert made.with_stage == 0
    assert made.why_idle.startswith("no faster with it: +")
    full = plan(Problem(MODEL, with_memory("small", 2.0), nanos(4)))
    assert full.why_idle.startswith("not one layer fits: it needs ")


def test_one_board_may_be_the_whole_ring() -> None:
    made = plan(Problem(MODEL, Device("desk", AGX), ()))
    assert (made.split, made.with_stage) == ((40,), 1)
    assert made.is_alone
    assert candidates(made.problem) == (made,)
    assert refused(Problem(MODEL, Device("nano", NANO), ())) == (
        "llama-2-13b (int4, 1 request(s) of 4096 tokens) does not fit: stage 1 (nano) needs 12.59 "
        "GiB for 40 layer(s) beside the output head and the draft tinyllama-1.1b, has 6.50 GiB; "
        "add 2 device(s) like nano"
    )


def test_boards_that_could_hold_the_model_alone_are_named() -> None:
    """One of each kind, the coordinator's own first; with what is left out of it."""
    ring, own, alone = candidates(
        Problem(MODEL, Device("desk", AGX), (Device("a", AGX), *nanos(2)))
    )
    assert not ring.with_stage
    assert own.with_stage == len(own.split) > 1
    assert alone.is_alone
    assert [node.device.name for node in alone.nodes] == ["desk", "desk"]
    assert [device.name for device, _ in alone.left_out] == ["a", "nano-1", "nano-2"]
    assert [made.is_alone for made in candidates(problem(4))] == [False, False]


def test_a_draft_that_has_no_room_may_be_left_out() -> None:
    tight = Problem(MODEL, with_memory("small", 1.2), (with_memory("large", 12.0),))
    with pytest.raises(CapacityError):
        candidates(tight)
    ring, alone = candidates(tight, needs_draft=False)
    assert [one.problem.model.draft.name for one in (ring, alone)] == ["", ""]
    assert alone.nodes[0].device.name == "large"


def test_a_coordinator_that_cannot_multiply_carries_nothing() -> None:
    unable = Device("d0", structs.replace(NANO, unusable={"int4": "no kernel"}))
    assert plan(Problem(MODEL, unable, nanos(2))).with_stage == 0
    with pytest.raises(CapacityError, match="does not fit"):
        plan(Problem(MODEL, unable, nanos(2), 5500))


def test_slow_devices_are_left_out_with_the_reason() -> None:
    others = (Device("pi", PI), Device("agx", AGX), with_memory("crumb", 0.5))
    made = plan(Problem(MODEL, Device("d0", NANO), others))
    assert [node.device.name for node in made.nodes] == ["d0", "agx"]
    reasons = {device.name: reason for device, reason in made.left_out}
    assert reasons["pi"].startswith("no faster with it: +")
    assert reasons["crumb"].startswith("not one layer fits: it needs 0.9")
    assert reasons["crumb"].endswith("has 0.50 GiB")


def test_more_devices_than_layers() -> None:
    small = replace(MODEL, of=replace(MODEL.of, layers=2))
    made = plan(Problem(small, Device("d0", NANO), nanos(5)))
    assert sum(made.split) == 2
    assert len(made.left_out) == 5 - len(made.split)


def test_a_measured_table_of_the_quantisation_counts() -> None:
    slower = RowTable.of((9 * s for s in NANO.four_bit.seconds.values()), "made up")
    measured = structs.replace(NANO, quantisations={"int4": slower})
    node = NodeCosts(measured, MODEL.costs, 1)
    usual = NodeCosts(NANO, MODEL.costs, 1)
    fixed = NANO.layer_seconds.value
    assert node.layer_seconds(4, 0) - fixed == pytest.approx(
        9 * (usual.layer_seconds(4, 0) - fixed)
    )


def test_a_quantisation_that_a_device_cannot_run_is_refused() -> None:
    unable = structs.replace(NANO, unusable={"int4": "no kernel", "nf4": "no kernel"})
    with pytest.raises(
        ConfigError, match=r"nano-b cannot run int4 \(no kernel\); leave it out, or .* none or int8"
    ):
        plan(Problem(MODEL, Device("d0", NANO), (*nanos(2), Device("nano-b", unable))))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 17}, "18 devices; a plan has at most 17"),
        ({"context": 0}, "context is 0"),
        ({"requests": -1}, "requests is -1"),
    ],
)
def test_what_cannot_be_planned(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        problem(**settings)


# --- mixtures -----------------------------------------------------------------------------------


def test_a_mixture_is_held_whole_and_charged_for_the_experts_in_use() -> None:
    of = Architecture(4, 2048, 768, 32, 4, 1000, head_dim=128, experts=128, active=8)
    mixture = PlannedModel("mixture", of, QUANTISATIONS["int4"]).costs
    assert mixture.layer_bytes == of.layer_bytes(QUANTISATIONS["int4"])
    assert mixture.experts_of(1) == pytest.approx(8)
    assert mixture.experts_of(2) == pytest.approx(128 * (1 - (15 / 16) ** 2))
    assert mixture.experts_of(1000) == pytest.approx(128)
    quick = structs.replace(NANO, launch_seconds=Figure(0, "made up"))
    node = NodeCosts(quick, mixture, 1)
    dense = mixture.layer_bytes - mixture.expert_bytes
    one = NANO.layer_seconds.value + (dense + mixture.expert_bytes / 16) / 1e9 * (
        NANO.four_bit.at(1)
    )
    assert node.layer_seconds(1, 0) == pytest.approx(one)
    times = [node.layer_seconds(rows, 0) for rows in range(1, 100)]
    assert times == sorted(times)
    draft = draft_costs_of("mixture", of, QUANTISATIONS["none"], QUANTISATIONS["none"])
    assert draft.held_bytes == 2 * (4 * of.layer_weights + of.head_bytes)
    file = FileBytes(10**9, 10**9 * of.mlp_weights // of.layer_weights)
    packed = draft_costs_of("mixture", of, FILE, QUANTISATIONS["int8"], file)
    assert packed.held_bytes == 4 * 10**9 + of.head_bytes + packed.head.bytes
    assert packed.layer_bytes < 0.2 * 10**9  # 8 of 128 experts, and attention


def test_eight_bits_read_as_many_bytes_and_compute_twice_the_rows() -> None:
    node = NodeCosts(NANO, replace(MODEL, quantisation=QUANTISATIONS["int8"]).costs, 1)
    weights = node.model.layer_bytes / 1e9 * NANO.sixteen_bit.at(32)
    assert node.layer_seconds(16, 0) == pytest.approx(NANO.layer_seconds.value + weights)


# --- refusals -----------------------------------------------------------------------------------


def refused(unfit: Problem) -> str:
    with pytest.raises(CapacityError) as caught:
        plan(unfit)
    return str(caught.value)


def test_two_boards_are_too_few_for_13_billion() -> None:
    assert refused(problem(1)) == (
        "llama-2-13b (int4, 1 request(s) of 4096 tokens) does not fit: stage 1 (nano-1) needs 6.72 "
        "GiB for 23 layer(s), has 6.50 GiB; drop --context to 3648, or use --quant nf4-dq, or "
        "choose a draft of at most 0.41 GiB with its cache, or none, or add 1 device(s) like nano-1"
    )


def test_a_long_context_can_be_dropped() -> None:
    message = refused(problem(2, context=16384))
    assert "stage 1 (nano-1) needs 8.82 GiB for 15 layer(s), has 6.50 GiB" in message
    assert "drop --context to 9600" in message
    assert "add 2 device(s) like nano-1" in message


def test_a_coordinator_without_room_for_its_draft() -> None:
    unfit = Problem(MODEL, with_memory("tiny", 1.5), nanos(4))
    message = refused(unfit)
    assert "the coordinator (tiny) needs 1.53 GiB for the output head and the draft" in message
    assert "choose a draft of at most 0.73 GiB" in message


def test_a_draft_of_the_size_that_the_advice_names_fits() -> None:
    unfit = Problem(MODEL, with_memory("tiny", 1.5), nanos(4))
    room = draft_room(unfit)
    for size, fits in ((room, True), (room + 1, False)):
        draft = replace(NO_DRAFT, name="smaller", ends_bytes=size)
        assert replace(unfit, model=replace(MODEL, draft=draft)).fits() == fits


def test_if_no_single_change_helps_larger_devices_are_named() -> None:
    unfit = Problem(MODEL, with_memory("tiny", 0.2), (with_memory("crumb", 0.3),))
    message = refused(unfit)
    assert "the coordinator (tiny) needs " in message
    assert "stage 1 (crumb) needs " in message
    assert "GiB in place of tiny and one of " in message


def random_problem(seed: int) -> Problem:
    """Any model, draft, devices and settings; most do not fit."""
    rng = random.Random(seed)
    name = rng.choice([name for name in COST_MODELS if not name.endswith("eagle")])
    quantisation = QUANTISATIONS[rng.choice(list(QUANTISATIONS))]
    draft = rng.choice([NO_DRAFT, COST_MODELS[name].draft])
    model = PlannedModel(name, ARCHITECTURES[name], quantisation, draft)
    devices = tuple(
        with_memory(f"d{number}", rng.uniform(0.1, rng.choice([2.0, 8.0, 24.0])))
        for number in range(rng.randint(2, 9))
    )
    context = rng.choice([64, 256, 300, 4096, 8192, 131072])
    return Problem(model, devices[0], devices[1:], context, rng.choice([1, 1, 2, 5]))


@pytest.mark.parametrize("first_seed", tiered(range(0, 200, 50), [0]))
def test_every_refusal_says_where_and_how_much_and_its_advice_works(first_seed: int) -> None:
    unfit = 0
    for seed in range(first_seed, first_seed + 50):
        asked = random_problem(seed)
        if asked.fits():
            check_fits(plan(asked), f"seed {seed}")
            continue
        unfit += 1
        message = refused(asked)
        for shortage in shortages(asked):
            where = f"seed {seed}: {shortage}"
            assert shortage.need > shortage.device.memory, where
            assert str(shortage) in message, where
            assert f"({shortage.device.name}) needs" in str(shortage), where
            assert ("the coordinator" if not shortage.stage else f"stage {shortage.stage}") in (
                str(shortage)
            ), where
        assert shortages(asked), f"seed {seed}"
        ways = remedies(asked)
        assert ways, f"seed {seed}"
        for remedy in ways:
            assert remedy.words in message, f"seed {seed}"
            check_fits(plan(remedy.problem), f"seed {seed}: {remedy.words}")
            assert follows(asked, remedy.words, remedy.problem), f"seed {seed}: {remedy.words}"
    print(f"seeds {first_seed} to {first_seed + 49}: {unfit} refusals")
    assert unfit > 10


def check_fits(made: Plan, where: str) -> None:
    """Every layer has its place, every device the memory."""
    assert sum(made.split) == made.problem.model.of.layers, where
    assert all(node.need.total <= node.device.memory for node in made.nodes), where
    own = made.nodes[0].need.total
    own += made.nodes[made.with_stage].need.total if made.with_stage else 0
    assert own <= made.problem.coordinator.memory, where
    devices = len(made.nodes) - (made.with_stage > 0) + len(made.left_out)
    assert devices == 1 + len(made.problem.others), where


def follows(asked: Problem, words: str, changed: Problem) -> bool:
    """Whether the changed problem is what the words say."""
    number = next((part for part in words.split() if part[0].isdigit()), "")
    if words.startswith("drop --context"):
        return changed == replace(asked, context=int(number))
    if words.startswith("drop --requests"):
        return changed == replace(asked, requests=int(number))
    if words.startswith("use --quant"):
        quantisation = QUANTISATIONS[words.split()[-1]]
        return changed == replace(asked, model=replace(asked.model, quantisation=quantisation))
    if words.startswith("add "):
        like = next(device for device in asked.boards if device.name == words.split()[-1])
        return changed == replace(asked, others=asked.others + (like,) * int(number))
    if words.startswith("choose a draft"):
        return changed == replace(asked, model=replace(asked.model, draft=NO_DRAFT))
    pairs = zip(
        (asked.coordinator, *asked.others), (changed.coordinator, *changed.others), strict=True
    )
    grown = [new for old, new in pairs if old.memory != new.memory]
    return words.startswith("use a device of ") and all(
        f"{new.memory / GIB:.1f} GiB in place of {new.name}" in words for new in grown
    )
