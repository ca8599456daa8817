"""Charged time: its boundaries, and how heads in between move its end."""

from __future__ import annotations

import pytest

from edgespec.backends.charged_time import ChargedTime

PARTS = (1.0, 1.0, 6.0)  # two layers and a matrix, of 0.8 s together
START = 1000.0


@pytest.mark.parametrize(
    ("asked", "starts"),
    [(-5.0, 0.0), (0.0, 0.0), (0.01, 0.1), (0.1, 0.1), (0.15, 0.2), (0.2, 0.2)],
)
def test_a_head_starts_at_the_next_boundary(asked: float, starts: float) -> None:
    charged = ChargedTime(START, 0.8)
    assert charged.boundary(START + asked, PARTS) == pytest.approx(START + starts)


@pytest.mark.parametrize("asked", [0.21, 0.5, 0.8, 3.0])
def test_in_the_last_part_it_ends_first(asked: float) -> None:
    assert ChargedTime(START, 0.8).boundary(START + asked, PARTS) is None


def test_the_end_moves_by_the_time_of_the_heads_alone() -> None:
    charged = ChargedTime(START, 0.8)
    for asked, boundary, end in ((0.05, 0.1, 0.4), (0.3, 0.4, 0.5), (0.55, 0.6, 1.6)):
        found = charged.boundary(START + asked, PARTS)
        assert found == pytest.approx(START + boundary)
        assert found is not None
        charged.pause(found)
        charged.go_on(START + end)
    assert charged.end == pytest.approx(START + 0.8 + 0.3 + 0.1 + 1.0)
    assert charged.boundary(START + 1.7, PARTS) is None
    assert ChargedTime(START, 0.8).end == START + 0.8


@pytest.mark.parametrize("parts", [(), (1.0,), (0.0, 0.0)])
def test_what_takes_no_time_or_has_no_parts_has_a_boundary_at_most_before_it(
    parts: tuple[float, ...],
) -> None:
    charged = ChargedTime(START, 0.0)
    assert charged.boundary(START, parts) == (START if parts else None)


def test_a_block_that_goes_on_with_less_takes_its_share_from_the_boundary_on() -> None:
    charged, layers = ChargedTime(START, 0.8), (1.0,) * 4
    found = charged.boundary(START + 0.15, layers)
    assert found == pytest.approx(START + 0.2)
    assert found is not None
    charged.change(found, 0.4)  # 0.1 s a layer
    assert charged.end == pytest.approx(START + 0.2 + 0.3)
    assert charged.boundary(START + 0.16, layers) == pytest.approx(START + 0.2), (
        "it is in the first"
    )
    assert charged.boundary(START + 0.21, layers) == pytest.approx(START + 0.3)
    charged.pause(START + 0.3)
    charged.go_on(START + 1.0)
    assert charged.end == pytest.approx(START + 1.2)
    assert charged.boundary(START + 1.11, layers) is None
    nothing = ChargedTime(START, 0.0)
    nothing.change(START, 0.4)
    assert nothing.end == START, "it was over"
