"""Loop times: made-up ones come back as figures; real ones are only looked at for their form."""

from __future__ import annotations

import pytest

from edgespec.daemon.coordinator_times import fit, machine_times, measure_loop


def test_the_line_gives_back_what_all_events_took() -> None:
    line = [(0.25 + rows * 0.125, rows) for rows in (0, 0, 1, 3, 8)]
    assert fit(line) == pytest.approx((0.25, 0.125))
    outlier = [*line, (9.0, 0)]
    event, row = fit(outlier)
    assert row == 0.0, "more rows take no less"
    assert event * len(outlier) == pytest.approx(sum(seconds for seconds, _ in outlier))


def test_two_runs_have_the_same_events_and_trees_have_rows() -> None:
    one, two = (machine_times("flowspec", 4) for _ in range(2))
    assert [rows for _, rows in one] == [rows for _, rows in two]
    assert max(rows for _, rows in one) > max(
        rows for _, rows in machine_times("autoregressive", 4)
    )


def test_this_machine_takes_some_time_for_an_event() -> None:
    found = measure_loop("here", 0.0)
    assert 0 < found.event < 1
    assert 0 <= found.row < 1
    assert found.origin.startswith("here, times of the thread: a line through the ")
