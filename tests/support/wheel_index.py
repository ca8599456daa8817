"""A package index of wheels that hold nothing but their metadata, for dry runs of pip."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# pip, told that it runs elsewhere: what markers are compared with.
RUNNER = """
import sys
from pip._vendor.packaging import markers
elsewhere = {**markers.default_environment(), **ELSEWHERE}
markers.default_environment = lambda: elsewhere
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """The normal name that a requirement begins with."""
    found = re.match(r"[\w.-]+", requirement.strip())
    assert found, requirement
    return normal(found[0])


def write_wheel(folder: Path, name: str, version: str, requires: Iterable[str] = ()) -> None:
    """A wheel of that name without code. An extra of it needs no declaration: pip warns only."""
    safe = normal(name).replace("-", "_")
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {one}" for one in requires]
    extras = {found for one in requires for found in re.findall(r"extra == ['\"]([\w-]+)", one)}
    lines += [f"Provides-Extra: {extra}" for extra in sorted(extras)]
    info = f"{safe}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{safe}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def requirements() -> list[str]:
    """What setup.cfg declares, as a wheel's metadata has it."""
    cfg = configparser.ConfigParser(interpolation=None)
    cfg.read(REPOSITORY / "setup.cfg", encoding="utf-8")

    def entries(text: str) -> list[str]:
        found = (line.strip() for line in text.splitlines())
        return [line for line in found if line and not line.startswith("#")]

    found = entries(cfg["options"]["install_requires"])
    for extra, text in cfg["options.extras_require"].items():
        for entry in entries(text):
            name, _, marker = (part.strip() for part in entry.partition(";"))
            both = f"({marker}) and " if marker else ""
            found.append(f'{name} ; {both}extra == "{extra}"')
    return found


def write_index(folder: Path, torches: dict[str, tuple[str, ...]]) -> None:
    """Wheels of edgespec and of all that is installed here, as it is declared; of torch instead
    those versions with what each requires. Of what has another pin for an older Python, that too.
    What is required and not here is made up."""
    folder.mkdir()
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    older = dict(re.findall(r"^(\S+)==(\S+) ; python_version <", pins, re.MULTILINE))
    write_wheel(folder, "edgespec", "0", requirements())
    there = {"edgespec", "torch"}
    asked = {one for wanted in torches.values() for one in wanted}
    for version, wanted in torches.items():
        write_wheel(folder, "torch", version, wanted)
    for found in metadata.distributions():
        name = normal(found.metadata["Name"])
        if name in there:
            continue
        there.add(name)
        wanted = [one for one in found.requires or () if "extra ==" not in one]
        asked.update(wanted)
        write_wheel(folder, name, found.version, wanted)
        if name in older:
            any_version = [re.sub(r"==[\w.]+", "", one) for one in wanted]
            write_wheel(folder, name, older[name], any_version)
    for name in older.keys() - there:
        write_wheel(folder, name, older[name])
    there |= older.keys()
    for name in {name_of(one) for one in asked} - there:
        bounds = [one.partition(";")[0] for one in asked if name_of(one) == name]
        least = [found for one in bounds for found in re.findall(r"[=>]=\s*([\d.]+)", one)]
        write_wheel(folder, name, max(least, key=numbers, default="1.0"))


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part]


def would_install(
    index: Path, site: Path, elsewhere: dict[str, str], pins: str, wanted: str
) -> dict[str, str]:
    """Names and versions that `pip install -c PINS WANTED` would install beside what is in the
    folder `site`, on a machine of which `elsewhere` gives markers. AssertionError if pip fails."""
    if not (site / "pip").exists():  # found, not imported: setuptools warns of that in some orders
        (site / "pip").symlink_to(Path(str(metadata.distribution("pip").locate_file("pip"))))
    (site / "pins").write_text(pins, encoding="utf-8")
    report = site / "report"
    code = RUNNER.replace("ELSEWHERE", repr(elsewhere))
    options = ("--isolated", "--dry-run", "--quiet", "--no-index", "--find-links", str(index))
    options += ("-c", str(site / "pins"), "--report", str(report))
    options += ("--no-cache-dir", "--disable-pip-version-check")
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, "install", *options, wanted],
        env={"PYTHONPATH": str(site), "PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = (entry["metadata"] for entry in plan)
    return {normal(entry["name"]): entry["version"] for entry in found}
