"""`edgespec train`: what cannot be is refused by a message, before anything is trained."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support.commands import run_here

from edgespec.daemon.bundled_models import bundled

BASE = bundled("base")


@pytest.mark.parametrize("what", ["eagle", "ppd"])
def test_what_cannot_be_is_refused(
    what: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = partial(run_here, capfd, monkeypatch, "train", what)
    out = ("--out", str(tmp_path / "out"))
    train(BASE, str(tmp_path / "none"), *out).assert_refused("cannot read", "none")
    train(str(tmp_path), BASE, *out).assert_refused("config.json is missing")
    (tmp_path / "file").write_text("in the way")
    there = ("--out", str(tmp_path / "file" / "out"))
    train(BASE, "text", *there).assert_refused("cannot be made", "--out")


def test_a_kind_that_is_none_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_here(
        *(capfd, monkeypatch, "train", "eagle", BASE, "text"),
        *("--kind", "x", "--out", str(tmp_path / "out")),
    )
    done.assert_refused("--kind x: give eagle or eagle3")
    assert not (tmp_path / "out").exists()
