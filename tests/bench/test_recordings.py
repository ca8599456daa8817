"""The recorded sessions say what their page says of them, and can be made again."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("recordings")


def test_the_page_has_every_session_with_the_words_that_matter(recordings: ModuleType) -> None:
    page = recordings.PAGE.read_text(encoding="utf-8")
    assert len(recordings.SESSIONS) == 7
    for name, (_, words) in recordings.SESSIONS.items():
        text = recordings.block_of(name).search(page)[2]
        assert "$ edgespec " in text, name
        assert [word for word in words if word not in text] == [], name


def test_what_is_shown_has_no_folder_token_or_line_that_comes_by_the_clock(
    recordings: ModuleType, tmp_path: Path
) -> None:
    terminal = recordings.Terminal({"board-b": tmp_path})
    terminal.typed("edgespec join edge-…", "board-b")
    token = f"edge-{'x' * 40}"
    terminal.printed(f"made {tmp_path}/home/x, {tmp_path}/cache/y\n\nstill loading\n{token} \n")
    terminal.note("off")
    assert terminal.text().splitlines() == [
        "    # on board-b",
        "    $ edgespec join edge-…",
        "    made ~/x, ~/.cache/y",
        "    edge-…",
        "    # off",
    ]
    page = "a\n<!-- recorded find -->\nold<!-- end -->\nb<!-- recorded lost -->\n<!-- end -->"
    assert recordings.put(page, "find", "    new\n") == page.replace("old", "\n    new\n\n")


@pytest.mark.slow
def test_all_sessions_are_made_again(recordings: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    shutil.copyfile(recordings.PAGE, page)
    recordings.main(["--page", str(page)])
