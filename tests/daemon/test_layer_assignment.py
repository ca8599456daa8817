"""LayerAssignment out a model's layers, at first and anew over other devices."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from edgespec.config import Address, CoordinatorConfig
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.layer_assignment import LayerAssignment
from edgespec.daemon.planning import planned_needs
from edgespec.planning.memory import GIB, Needs
from edgespec.wire.messages import Assign, Join

LIKE = Assign(0, 3, 0, 0, "model", "mark", "float32", "none", 100, 7, "key")
LAYERS = 8


def needs() -> Needs:
    """What the bundled model needs."""
    config = CoordinatorConfig(bundled("base"), "", 3, "float32", Address("127.0.0.1", 0))
    found = planned_needs(config, 1024, "it", with_draft=False)
    assert found is not None
    return found


def devices(*memories: int) -> list[Join]:
    """Devices with so much memory each."""
    return [Join(0, f"d{n}", n, "10.0.0.1", n, "key", memory) for n, memory in enumerate(memories)]


def test_places_at_first_are_as_configured_and_numbered() -> None:
    blocks: list[Assign] = []
    places = LayerAssignment(LAYERS, LIKE, (4, 1, 3), blocks).assigned
    assert [(p.stage, p.first, p.end) for p in places] == [(1, 0, 4), (2, 4, 5), (3, 5, 8)]
    assert [p.block_number for p in places] == [1, 2, 3]
    assert blocks == places


def test_anew_over_two_and_a_block_that_was_planned_keeps_its_number() -> None:
    blocks: list[Assign] = []
    assignment = LayerAssignment(LAYERS, LIKE, (4, 1, 3), blocks)
    places = assignment.repartition(needs(), devices(8 * GIB, 8 * GIB))
    assert places is not None
    assert [(p.stage, p.stages, p.first, p.end) for p in places] == [(1, 2, 0, 4), (2, 2, 4, 8)]
    assert [p.block_number for p in places] == [1, 4]
    assert [(b.first, b.end) for b in blocks] == [(0, 4), (4, 5), (5, 8), (4, 8)]
    assert assignment.repartition(needs(), devices(8 * GIB, 8 * GIB)) == places
    assert len(blocks) == 4


def test_the_output_head_is_with_the_last_stage_whatever_that_is() -> None:
    blocks: list[Assign] = []
    assignment = LayerAssignment(LAYERS, structs.replace(LIKE, head="none"), (4, 1, 3), blocks)
    assert [place.head for place in assignment.assigned] == ["", "", "none"]
    need = replace(needs(), head_last=True)
    places = assignment.repartition(need, devices(8 * GIB, 8 * GIB))
    assert places is not None
    assert [place.head for place in places] == ["", "none"]
    # A stage that has the layers already, but not the head, has to load.
    assert structs.replace(places[1], head="").block != places[1].block
    # Where it needs memory: one layer is too much beside it.
    little = need.stage(2).total
    assert need.stage(2, last=True).total > little
    places = assignment.repartition(need, devices(8 * GIB, little))
    assert places is None or places[1].end - places[1].first < 2


def test_a_device_with_little_memory_gets_fewer_layers_and_one_with_none_no_ring() -> None:
    assignment = LayerAssignment(LAYERS, LIKE, (), [])
    need = needs()
    little = need.stage(2).total
    places = assignment.repartition(need, devices(8 * GIB, little))
    assert places is not None
    assert [(p.first, p.end) for p in places] == [(0, 6), (6, 8)]
    assert assignment.repartition(need, devices(need.stage(2, True).total, little)) is None
    assert assignment.repartition(need, devices(8 * GIB, 1)) is None


def test_a_device_that_does_not_know_its_memory_is_given_an_equal_share() -> None:
    places = LayerAssignment(LAYERS, LIKE, (), []).repartition(needs(), devices(0, 8 * GIB))
    assert places is not None
    assert [(p.first, p.end) for p in places] == [(0, 4), (4, 8)]


def test_no_more_devices_are_used_than_there_are_layers() -> None:
    places = LayerAssignment(LAYERS, LIKE, (), []).repartition(needs(), devices(*[8 * GIB] * 12))
    assert places is not None
    assert [p.stage for p in places] == list(range(1, LAYERS + 1))


def test_as_many_devices_as_at_first_have_the_places_of_then_if_they_have_the_memory() -> None:
    assignment = LayerAssignment(LAYERS, LIKE, (4, 1, 3), [])
    need = needs()
    assert assignment.repartition(need, devices(8 * GIB, 8 * GIB, 0)) == assignment.assigned
    places = assignment.repartition(need, devices(8 * GIB, 8 * GIB, need.stage(2).total))
    assert places is not None
    assert [(p.first, p.end) for p in places] == [(0, 3), (3, 6), (6, 8)]
