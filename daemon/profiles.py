"""Reads device profiles: the installed ones by name, any other by its path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from edgespec.config import MOST_STAGES
from edgespec.errors import ConfigError
from edgespec.planning.cost_model import DEFAULT_COST_MODEL
from edgespec.planning.profile import KERNELS, Profile
from edgespec.schema import parse_json

_PACKAGE = "edgespec.profiles"
_SUFFIX = ".json"


def profile_names() -> list[str]:
    """The names of the installed profiles, sorted."""
    files = resources.files(_PACKAGE).iterdir()
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))


def unproven(profiles: Iterable[Profile]) -> Iterator[str]:
    """What a reader of predicted speeds must know of each device whose kernels nobody has timed."""
    for profile in dict.fromkeys(profiles):
        if not profile.has_timed_kernel:
            others = profile.launches_ahead and profile.least_row_seconds is not None
            yield (
                f"{profile.name}: no kernel of edgespec was timed on it, so what a further row "
                "costs is an estimate"
                + ", by other engines' published steps; edgespec's own are predicted to be shorter"
                * others
                + "; see what it decides: edgespec simulate --row-price 0.24"
            )
        elif profile.kernels != (runs := "triton" if profile.launches_ahead else "compiled"):
            timed = KERNELS.get(profile.kernels, "kernels that its file does not name")
            yield (
                f"{profile.name}: its rows were timed with {timed}; if {KERNELS[runs]} run there "
                "now (its log would say if not), measure it again: edgespec profile"
            )


def profile_named(name_or_path: str) -> Profile:
    """The installed profile of this name, or the one in a file.

    Whatever holds a "/" or ends in ".json" is a path. Raises ConfigError for an unknown name
    (with the known ones), a file that cannot be read, and a file that is no profile.
    """
    if "/" in name_or_path or name_or_path.endswith(_SUFFIX):
        path = name_or_path
    elif name_or_path in profile_names():
        path = str(resources.files(_PACKAGE) / f"{name_or_path}{_SUFFIX}")
    else:
        raise ConfigError(
            f"there is no profile {name_or_path!r}; choose one of: {', '.join(profile_names())}; "
            "or give the path of a JSON file"
        )
    try:
        content = Path(path).read_bytes()
    except OSError as problem:
        raise ConfigError(f"cannot read the profile {path}: {problem.strerror}") from None
    return Profile.from_dict(parse_json(content, path), path)


def ring_of(profiles: Sequence[str], stages: int) -> tuple[str, ...]:
    """The names of the profiles of D0, V1 … VN; one name stands for all.

    Raises ConfigError for a wrong number of them.
    """
    if not 1 <= stages <= MOST_STAGES:
        raise ConfigError(f"{stages} stages; a ring has 1 to {MOST_STAGES}")
    if len(profiles) == 1:
        return (*profiles,) * (stages + 1)
    if len(profiles) != stages + 1:
        raise ConfigError(
            f"{len(profiles)} profiles for a coordinator and {stages} stage(s); name one for all "
            f"devices, or {stages + 1}: D0's first, then those of the stages"
        )
    return tuple(profiles)


def fitted_model(profiles: Iterable[Profile]) -> str:
    """The cost model that these profiles were fitted with, or the default. Raises ConfigError for
    several."""
    wanted = list(dict.fromkeys(one.cost_model for one in profiles if one.cost_model))
    if len(wanted) > 1:
        raise ConfigError(
            f"the profiles name several cost models ({', '.join(wanted)}); choose with --cost-model"
        )
    return wanted[0] if wanted else DEFAULT_COST_MODEL
