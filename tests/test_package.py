"""The package as it is installed: names, version, console script, data, pins, wheel."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.resources
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import edgespec

REPOSITORY = Path(__file__).resolve().parent.parent
DATA_FOLDER = "models"
BESIDE = ("daemon", "cli", "profiles", "systemd")  # folders beside edgespec/, linked into it


def setup_cfg() -> configparser.ConfigParser:
    """The project's declarations."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    return parser


def lines(value: str) -> list[str]:
    """The entries of a multi-line setting, comments left out."""
    found = (line.strip() for line in value.splitlines())
    return [line for line in found if line and not line.startswith("#")]


def required_names() -> set[str]:
    """Every distribution that setup.cfg asks for, extras included, in normal form."""
    cfg = setup_cfg()
    wanted = lines(cfg["options"]["install_requires"])
    for extra in cfg["options.extras_require"].values():
        wanted += lines(extra)
    names = {normal(re.split(r"[<>=!~\[; ]", entry, maxsplit=1)[0]) for entry in wanted}
    return names - {"edgespec"}  # as extras name others


def pinned_names() -> set[str]:
    """Every distribution that constraints.txt pins."""
    text = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    return {normal(line.partition("==")[0]) for line in lines(text)}


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def run_elsewhere(cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command from a folder that is not the checkout."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500)


def test_the_version_is_the_same_everywhere() -> None:
    assert importlib.metadata.version("edgespec") == edgespec.__version__
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{edgespec.__version__}]" in changelog


def test_every_folder_with_code_is_packed_and_has_a_purpose() -> None:
    for top in ("edgespec", *BESIDE):
        for path in (REPOSITORY / top).rglob("*.py"):  # does not follow links
            assert path.with_name("__init__.py").is_file(), f"{path.parent} has no __init__.py"


def test_the_folders_beside_the_package_are_linked_into_it() -> None:
    links = {path.name: path for path in (REPOSITORY / "edgespec").iterdir() if path.is_symlink()}
    assert {name: str(path.readlink()) for name, path in links.items()} == {
        name: f"../{name}" for name in BESIDE
    }


def test_daemon_and_cli_import_from_anywhere(tmp_path: Path) -> None:
    code = "import edgespec.daemon, edgespec.cli; from edgespec.cli.main import main; print(main)"
    done = run_elsewhere(tmp_path, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    code = "import daemon"
    assert run_elsewhere(tmp_path, sys.executable, "-c", code).returncode != 0


def test_the_console_script_is_installed() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="edgespec")
    assert {script.value for script in scripts} == {"edgespec.cli.main:main"}
    assert (Path(sysconfig.get_path("scripts")) / "edgespec").is_file()


def test_the_bundled_models_are_found() -> None:
    models = importlib.resources.files("edgespec") / DATA_FOLDER
    assert (models / "MODEL_CARD.md").read_text(encoding="utf-8").strip()
    json.loads((models / "metrics.json").read_text(encoding="utf-8"))
    for model in ("base", "draft", "toy-hybrid"):
        config = json.loads((models / model / "config.json").read_text(encoding="utf-8"))
        assert config["vocab_size"] > 0
        assert any(entry.name.endswith(".safetensors") for entry in (models / model).iterdir())
    assert not list((REPOSITORY / "edgespec" / DATA_FOLDER).rglob("*.py"))


def test_every_requirement_is_pinned_and_explained() -> None:
    reasons = (REPOSITORY / "docs" / "dependencies.md").read_text(encoding="utf-8")
    explained = {normal(name) for name in re.findall(r"^\| `([^`]+)`", reasons, re.MULTILINE)}
    assert required_names() <= pinned_names()
    assert required_names() == explained


def test_what_is_not_for_python_3_10_has_an_older_pin_there() -> None:
    text = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    newer, older = (
        re.findall(rf'^(\S+)==\S+ ; python_version {sign} "3.11"$', text, re.MULTILINE)
        for sign in (">=", "<")
    )
    assert "starlette" in newer
    assert set(newer) <= set(older)


def test_torch_is_pinned_without_a_local_part() -> None:
    text = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert set(re.findall(r"^torch==(\S+)", text, re.MULTILINE)) == {"2.13.0", "2.10.0"}


def test_a_wheel_holds_every_module_the_models_and_the_profiles(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    for name in ("edgespec", *BESIDE):
        ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, source)
    for weights in (REPOSITORY / "edgespec" / DATA_FOLDER).rglob("*.safetensors"):
        (source / weights.relative_to(REPOSITORY)).write_bytes(b"")  # the real ones are large

    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    done = run_elsewhere(source, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr

    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    for top in ("edgespec", *BESIDE):
        prefix = "edgespec/" if top in BESIDE else ""
        for path in (source / top).rglob("*"):
            if path.is_file() and path != source / "profiles" / "README.md":
                name = prefix + path.relative_to(source).as_posix()
                assert name in packed, f"{name} is not in the wheel"
    assert {name.partition("/")[0] for name in packed if not name.startswith("edgespec-")} == {
        "edgespec"
    }

    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); "
        "from edgespec.daemon import profiles; print(profiles.__file__); "
        "profiles.profile_named('jetson-orin-nano-8gb')"
    )
    done = run_elsewhere(tmp_path, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
