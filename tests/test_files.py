"""Files: what a name stands for is on the disk before it has the name, and one place sees to it."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from edgespec.files import kept, replacing, sound, write_whole

REPOSITORY = Path(__file__).parents[1]
RENAMES = re.compile(
    r"os\.re(place|name)\(|\.(rename|replace)\((self\.)?_?\w*(path|whole|target)\)"
)


def test_content_and_name_are_on_the_disk_in_that_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        done.append(("sync", Path(path).name))
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            assert Path(path).read_bytes() == b"new"  # nothing waits in a buffer of ours
        real_sync(descriptor)

    def replace(part: Path, path: Path) -> None:
        done.append(("replace", path.name))
        real_replace(part, path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    write_whole(tmp_path / "file", "new")
    assert done == [("sync", "file.part"), ("replace", "file"), ("sync", tmp_path.name)]


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    (tmp_path / "file.part").write_text("of a process that was killed")
    with pytest.raises(TypeError), replacing(file) as part:
        part.write("no bytes")  # type: ignore[arg-type]
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_has_its_permissions_from_the_start(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        for mode, expected in ((None, 0o640), (0o600, 0o600), (0o644, 0o644)):
            with replacing(tmp_path / "file", mode) as part:
                assert stat.S_IMODE(os.fstat(part.fileno()).st_mode) == expected
            assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == expected
    finally:
        os.umask(before)


def test_what_is_kept_is_made_once_and_a_part_of_it_is_not_enough(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, bytes]:
        made.append(1)
        return {"one": b"1", "two": b"2"}

    for _ in range(2):
        assert kept(tmp_path, "seal", make) == {"one", "two"}
    assert len(made) == 1
    (tmp_path / "two").unlink()
    assert sound(tmp_path, "seal") == set()
    assert kept(tmp_path, "seal", make) == {"one", "two"}
    assert (len(made), sound(tmp_path, "seal")) == (2, {"one", "two"})


def test_no_other_place_gives_a_file_its_name() -> None:
    found = {
        str(file.relative_to(REPOSITORY))
        for room in ("edgespec", "daemon", "cli")
        for file in (REPOSITORY / room).rglob("*.py")
        if RENAMES.search(file.read_text(encoding="utf-8"))
    }
    # A block's folder is renamed whole, with files that are on the disk.
    assert found == {"edgespec/files.py", "daemon/blocks.py"}
