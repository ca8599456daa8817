"""Cache rows: what the memory of devices has room for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from edgespec.config import HEADS, Address, CoordinatorConfig
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.cache_rows import (
    cache_rows,
    live_requests,
    planned_rows,
    stage_rows,
    state_rows,
)
from edgespec.daemon.planning import Quants, model_to_plan, planned_needs
from edgespec.daemon.profiles import profile_named
from edgespec.decoding.row_account import CachedPrefix, RowAccount
from edgespec.model.kv_cache import RowForm, SharedCaches, TwoRegionCache
from edgespec.planning.memory import GIB, Device, Needs
from edgespec.planning.plan import plan
from edgespec.planning.problem import Problem
from edgespec.wire.messages import Assign, Join

ONE = 1024 + 256
ASSIGN = Assign(2, 3, 3, 6, "model", "mark", "bfloat16", "none", 1024, 7, "key", rows=ONE)
CONFIG = CoordinatorConfig(
    bundled("base"), bundled("draft"), 3, "float32", Address("127.0.0.1", 0), live=8
)


def needs() -> Needs:
    found = planned_needs(CONFIG, 1024, "it", with_draft=False)
    assert found is not None
    return found


def device(memory: int, host: str = "10.0.0.1") -> Join:
    return Join(0, "d", 1, host, 1, "key", memory)


def test_half_of_the_memory_beyond_the_plan_is_for_further_rows() -> None:
    plan = needs()
    row = 3 * plan.model.costs.kv_bytes
    planned = plan.stage(3).total
    room = 2 * 9 * row * 100  # twice, for 800 rows and the eighth that a cache spares

    def rows(memory: int, **changes: object) -> int:
        return stage_rows(plan, 8, None, structs.replace(ASSIGN, **changes), device(memory))

    assert [rows(memory) for memory in (0, planned // 2, planned)] == [ONE] * 3
    assert rows(planned + room) == ONE + 800
    assert rows(planned + room, dtype="float64") == ONE + 200
    assert rows(planned + room, first=0, end=3) == ONE + 800, "its embedding stays in its file"
    assert rows(64 * GIB) == 8 * ONE, "as many as the live requests can use"


def test_what_layers_fold_of_each_request_has_room_too() -> None:
    """However short requests are: some hundred MiB each, where a token takes some KiB."""
    model = model_to_plan("granite-4-h-micro", Quants("int4"), "").model
    plan, layers = Needs(model, 1024, 1, False), 10
    states = state_rows(model.of, "bfloat16")
    one = structs.replace(ASSIGN, first=0, end=layers, rows=ONE + states)
    for room in range(4):
        spare = 2 * room * layers * model.of.request_bytes + 2 * 10**8
        rows = stage_rows(plan, 8, None, one, device(plan.stage(layers).total + spare))
        assert live_requests(rows, 2, states) == 1 + room, "10 ** 8 bytes are for their tokens"
        assert stage_rows(plan, 8, ONE * room, one, device(64 * GIB)) == (1 + room) * one.rows


def test_layers_that_all_fold_take_no_memory_for_a_row() -> None:
    of = replace(model_to_plan("granite-4-h-micro", Quants("int4"), "").model.of, states=40)
    assert of.kv_bytes == 0
    assert state_rows(of, "bfloat16") == of.request_bytes


@pytest.mark.parametrize(("boards", "quantised"), [(2, "int4"), (4, "int4"), (5, "int8")])
def test_a_plan_has_the_rows_that_its_devices_will_be_given(boards: int, quantised: str) -> None:
    nano = profile_named("jetson-orin-nano-8gb")
    board, *others = [Device(f"d{n}", nano) for n in range(boards)]
    asked = model_to_plan("llama-2-13b", Quants(quantised), "tinyllama-1.1b")
    made = plan(Problem(asked.model, board, tuple(others), 1024), HEADS)
    found = Needs(asked.model, 1024, 1, made.problem.head_last)
    own = found.coordinator().total
    assigns = [
        structs.replace(
            ASSIGN, stage=node.stage, stages=len(made.split), first=node.first, end=node.end
        )
        for node in made.nodes[1:]
    ]
    given = [
        stage_rows(
            *(found, 64, None, one),
            device(board.memory - (own if one.stage == made.with_stage else 0)),
        )
        for one in assigns
    ]
    rows = planned_rows(made, "bfloat16")
    assert ONE <= rows <= min(given)
    draft = asked.model.draft
    d0 = (board.memory - own) // (1 + (made.with_stage > 0)) // 2
    assert rows == min(*given, ONE + d0 * 8 // (9 * draft.layers * draft.kv_bytes), 64 * ONE)
    assert planned_rows(made, "float64") < rows
    assert live_requests(rows, 1024) == rows // ONE >= 1
    assert live_requests(10**9, 1) == 64


def test_d0_has_to_hold_its_drafts_rows() -> None:
    assert stage_rows(needs(), 8, 300, ASSIGN, device(64 * GIB)) == ONE + 300


def test_stages_on_one_machine_share_its_memory() -> None:
    plan = needs()
    planned = plan.stage(3).total
    apart = stage_rows(plan, 8, None, ASSIGN, device(planned + 10**7))
    for host in ("127.0.0.1", "::1"):
        assert stage_rows(plan, 8, None, ASSIGN, device(4 * (planned + 10**7), host)) == apart
        assert stage_rows(plan, 8, None, ASSIGN, device(planned + 10**7, host)) == ONE


def test_the_rows_of_a_ring_with_room_are_those_of_live_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edgespec.daemon.cache_rows.available_memory", lambda _: Room(64 * GIB))
    rows, row_bytes = cache_rows(CONFIG, 1024, "cpu")
    assert rows is not None
    assert rows(ASSIGN, device(64 * GIB)) == 8 * ONE
    assert row_bytes == 2 * needs().model.costs.kv_bytes * 9 // 8, "of 32 bits, with its spare"
    half = cache_rows(replace(CONFIG, cache_dtype="float16"), 1024, "cpu")[1]
    assert half == needs().model.costs.kv_bytes * 9 // 8, "as stages hold them"
    coded = cache_rows(replace(CONFIG, cache_dtype="int8"), 1024, "cpu")[1]
    of = needs().model.of
    row = TwoRegionCache(
        first_layer=0,
        forms=[RowForm(of.kv_heads, of.hidden // of.heads)],
        reserve=64,
        dtype=torch.int8,
    )
    assert coded == row.own_bytes // 64 * 9 // 8, "with their scales"
    monkeypatch.setattr("edgespec.daemon.cache_rows.available_memory", lambda _: Room(0))
    rows, _ = cache_rows(CONFIG, 1024, "cpu")
    assert rows is not None
    assert rows(ASSIGN, device(64 * GIB)) == ONE, "D0 has no room for more of its draft"
    assert cache_rows(replace(CONFIG, model="/nowhere"), 1024, "cpu") == (None, 0)


@pytest.mark.parametrize("lengths", [(17,), (65, 70), (20, 300, 900)])
def test_what_is_kept_takes_no_more_memory_than_the_room_says(lengths: tuple[int, ...]) -> None:
    """However short the answered requests are: a cache has whole steps of slots, and spares some.
    It ends there: as much is held after 300 answers as after 150."""
    limit, chance, sizes = 4000, random.Random(1), []
    account = RowAccount(limit)
    caches = SharedCaches(
        lambda reserve: TwoRegionCache(
            first_layer=0,
            forms=[RowForm(1, 8)],
            reserve=reserve,
            dtype=torch.float32,
        )
    )
    for number in range(1, 301):
        rows = chance.choice(lengths)
        tokens = (number,) * rows
        account.begin(number, tokens, "", {})
        account.opens(number)
        caches.open(number, rows // 2)
        for _ in range(rows):  # an answer grows row by row
            caches[number].advance(1)
        for gone in account.keep(number, CachedPrefix(tokens, tuple(range(rows)), ""), 0):
            caches.close(gone)
        sizes.append(caches.nbytes)
    row = 2 * 8 * 4
    assert max(sizes) <= limit * row * 9 // 8
    assert max(sizes[150:]) <= max(sizes[:150]) * 1.05 >= limit * row // 4


class Room:
    """What is available."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = nbytes
