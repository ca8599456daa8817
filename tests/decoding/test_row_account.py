"""Row account: what live and answered requests hold, shared rows once, and what may be freed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.decoding.row_account import CachedPrefix, ReusedPrefix, RowAccount


def begun(
    rows: RowAccount, number: int, prompt: Sequence[int], live: Any = None
) -> ReusedPrefix | None:
    """A request of Anna's starts."""
    return rows.begin(number, tuple(prompt), "Anna", live or {})


def prefix(tokens: Sequence[int]) -> CachedPrefix:
    return CachedPrefix(tuple(tokens), tuple(range(len(tokens))), "Anna")


def opened(rows: RowAccount, number: int, prompt: Sequence[int], live: Any = None) -> None:
    """A request starts, and its opening leaves at once."""
    begun(rows, number, prompt, live)
    rows.opens(number)


def test_rows_are_counted_once_and_kept_ones_give_way() -> None:
    rows = RowAccount(1000)
    assert begun(rows, 1, range(300)) is None
    assert rows.opens(1) == 0
    assert (rows.used(300), rows.free(300)) == (300, 700)
    assert rows.keep(1, prefix(range(300)), 0) == []
    assert (rows.used(0), rows.free(0)) == (300, 1000)
    reused = begun(rows, 2, [*range(200), *range(500, 600)])
    assert reused is not None
    assert (reused.request, len(reused.ids), reused.ends) == (1, 200, False)
    assert (rows.saved, rows.used(300)) == (200, 400)
    assert rows.free(300) == 700, "without the kept one nothing of it is shared"
    assert rows.opens(2) == 200
    assert (rows.saved, rows.free(300)) == (200, 700), "as was said before the opening left"
    assert begun(rows, 3, [*range(200), 7], {2: prefix([*range(200), 500])}) is not None
    assert (rows.saved, rows.opens(3), rows.saved) == (400, 200, 400)
    assert rows.free(501) == 1000 - 501 + 200, "what live ones share is there once all the same"
    assert rows.make_room(500) == []
    assert rows.make_room(1101) == [1], "200 of them are there once"
    assert (rows.saved, rows.kept, rows.free(1200)) == (200, [], 0)
    rows.settled([2])
    rows.settled([3])
    assert rows.release([2, 3]) == [2, 3]
    assert rows.saved == len(rows) == 0


def test_of_folded_rows_only_all_are_gone_on_with() -> None:
    """Each kept request counts its states."""
    rows = RowAccount(1000, folds=True, state_rows=200)
    opened(rows, 1, range(300))
    assert rows.keep(1, prefix(range(300)), 0) == []
    assert rows.used(0) == 500
    assert begun(rows, 2, [*range(299), 7, 8]) is None
    whole = begun(rows, 3, range(310))
    assert whole is not None
    assert whole.ends
    opened(rows, 4, range(400, 500))
    assert rows.keep(4, prefix(range(400, 500)), 800) == [4], "its states have no room"


def test_a_base_is_not_freed_before_the_openings_of_all_that_begin_with_it() -> None:
    rows = RowAccount(1000)
    opened(rows, 1, range(300))
    rows.keep(1, prefix(range(300)), 0)
    for number in (2, 3):
        opened(rows, number, [*range(200), number])
    assert rows.make_room(1500) == [1]
    assert rows.release([1]) == [], "both are on their way"
    assert rows.settled([2]) == []
    assert rows.settled([2]) == [], "it came twice"
    assert rows.settled([3]) == [1]
    assert rows.release([1]) == [1]
    assert len(rows) == 2, "two are live"


def test_an_end_that_was_put_off_comes_with_the_end_of_what_it_was_put_off_for() -> None:
    rows = RowAccount(1000)
    opened(rows, 1, range(300))
    assert begun(rows, 2, range(250), {1: prefix(range(280))}) is not None
    assert rows.release([1]) == []
    assert sorted(rows.release([2])) == [1, 2]
    assert rows.saved == len(rows) == 0


def test_a_lost_ring_takes_all_along() -> None:
    rows = RowAccount(1000)
    opened(rows, 1, range(300))
    rows.keep(1, prefix(range(300)), 0)
    opened(rows, 2, range(250))
    opened(rows, 4, range(900, 990))
    assert begun(rows, 3, range(900, 980), {4: prefix(range(900, 985))}) is not None
    assert rows.release([4]) == []
    assert sorted(rows.clear()) == [1, 4]
    assert rows.release([2, 3]) == [2, 3]
    assert rows.saved == len(rows) == 0


def test_what_is_shared_goes_by_the_order_in_which_openings_leave() -> None:
    rows = RowAccount(1000)
    opened(rows, 1, range(300))
    live = {1: prefix(range(290))}
    for number, count in ((2, 60), (3, 32)):
        begun(rows, number, [*range(count), 900 + number], live)
    assert rows.opens(3) == 32
    assert rows.opens(2) == 32, "a second stem would be too short"
    assert (rows.together(1, 2), rows.together(2, 3)) == (32, 32)


def test_a_request_that_ends_before_its_opening_leaves_has_shared_nothing() -> None:
    rows = RowAccount(1000)
    opened(rows, 1, range(300))
    live = {1: prefix(range(290))}
    begun(rows, 2, [*range(60), 902], live)
    assert rows.saved == 60
    assert rows.release([1]) == []
    assert (rows.saved, rows.release([2])) == (0, [2, 1])
    assert rows.saved == len(rows) == 0


def test_an_answered_request_is_not_taken_whole_while_others_are_to_begin_with_it() -> None:
    rows = RowAccount(1000)
    opened(rows, 1, range(300))
    rows.keep(1, prefix(range(300)), 0)
    begun(rows, 2, [*range(60), 902])
    reused = begun(rows, 3, range(310))
    assert reused is not None
    assert not reused.ends
    assert (rows.opens(3), rows.opens(2)) == (300, 60)
    again = begun(rows, 4, range(320))
    assert again is not None
    assert again.ends, "its opening leaves after theirs"
