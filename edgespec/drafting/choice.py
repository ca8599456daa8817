"""Choice: what `--draft` says, as the sources that guess and the folders of their weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from edgespec.config import FREE_SOURCES, HEAD_ON_LAST_STAGE
from edgespec.errors import ConfigError
from edgespec.plugins import DRAFT_GROUP, entry_names

NONE = "none"
HYBRID = "hybrid"
SOURCES = {
    "independent": "draft",
    "ngram": "",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "dspark": "dspark",
    "mtp": "",
    "ppd": "ppd",
    "easyspec": "draft",
}
"""Every source by its name, with the bundled folder that has its weights for the bundled base; ""
if it needs none, or the base's own files have them."""
NEED_ROWS = ("eagle", "eagle3", "dspark", "mtp", "ppd")
"""Of these, the ones that need hidden rows of the base."""
DEFAULT_MEMBERS = ("ngram", "independent")
"""The members of a hybrid that names none."""

_OWN = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Z]\w*(?=[+:]|\Z)"
"""package.module:Class; a class's name begins with a capital."""


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """One source; `folder`: of its weights, or a hub id, "" if it needs none; of a source of
    somebody's own, whose name is not in SOURCES, its argument (see plugins)."""

    name: str
    folder: str

    @property
    def is_own(self) -> bool:
        return self.name not in SOURCES

    @property
    def weights(self) -> str:
        """The folder or hub id; "" if there is none."""
        return "" if self.is_own else self.folder

    def __str__(self) -> str:
        return f"{self.name}:{self.folder}" if self.folder else self.name


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The sources, several for a hybrid, none for no draft at all."""

    members: tuple[SourceChoice, ...] = ()

    @property
    def folders(self) -> tuple[str, ...]:
        return tuple(member.weights for member in self.members if member.weights)

    @property
    def needs_rows(self) -> str:
        """The first of them that guesses from hidden rows of the base; "" if none does."""
        return next((one.name for one in self.members if one.name in NEED_ROWS), "")

    def check_head(self, head: str) -> None:
        """Raise ConfigError if the output head cannot be there (see config.HEADS) for them."""
        needing = self.needs_rows
        if needing and head == HEAD_ON_LAST_STAGE:
            raise ConfigError(
                f"the draft source {needing} guesses from the base's hidden rows, which come "
                "back to the coordinator only if the output head is there: give --head "
                "coordinator, or another --draft"
            )

    def __str__(self) -> str:
        """What says the same to `parse_draft`, without anything bundled; "" for no draft."""
        if len(self.members) == 1:
            (one,) = self.members
            plain = one.name == "independent" and parse_draft(one.folder) == self
            return one.folder if plain else str(one)
        return f"{HYBRID}:{'+'.join(map(str, self.members))}" if self.members else ""


def parse_draft(text: str, at_hand: Callable[[str], str] | None = None) -> DraftChoice:
    """What `--draft` says: none, NAME, NAME:FOLDER, hybrid, hybrid:NAME+NAME:FOLDER or FOLDER.

    A NAME may be package.module:Class or an entry point, with an argument in place of the FOLDER.
    A FOLDER alone is that of an independent draft; instead of one a hub id or the short name of a
    model may stand anywhere. `at_hand`: where weights that fit the base are, by the folders of
    SOURCES, "" for none: then a name finds its weights, and nothing said is an independent draft.
    Without, that is no draft. Raises ConfigError.
    """
    if text == NONE or not (text or at_hand):
        return DraftChoice()
    name, _, rest = (text or "independent").partition(":")
    if name != HYBRID:
        return DraftChoice((_source(text or "independent", at_hand),))
    names = "|".join(map(re.escape, (*SOURCES, *entry_names(DRAFT_GROUP))))
    joint = rf"\+(?=(?:{names})(?:[+:]|\Z)|{_OWN})"
    parts = re.split(joint, rest) if ":" in text else list(DEFAULT_MEMBERS)
    members = tuple(_source(part, at_hand) for part in parts)
    if len(members) < 2 or len({member.name for member in members}) < len(members):
        raise ConfigError(
            f"--draft {text}: a hybrid has two or more different members, such as "
            f"{HYBRID}:{'+'.join(DEFAULT_MEMBERS)}; there are: {', '.join(SOURCES)}, and classes "
            "of your own (package.module:Class)"
        )
    models = [one.name for one in members if not one.is_own and one.name not in FREE_SOURCES]
    if len(models) > 1:
        raise ConfigError(
            f"--draft {text}: a hybrid asks one model, and {' and '.join(models)} are "
            f"{len(models)}; choose one of them, such as {HYBRID}:ngram+{models[0]}"
        )
    return DraftChoice(members)


def _source(text: str, at_hand: Callable[[str], str] | None) -> SourceChoice:
    name, colon, folder = text.partition(":")
    if name not in SOURCES and (own := re.match(_OWN, text)):
        return SourceChoice(own[0], text[own.end() + 1 :])
    if name not in SOURCES and name in entry_names(DRAFT_GROUP):
        return SourceChoice(name, folder)
    if name not in SOURCES:
        name, colon, folder = "independent", ":", text
    weights = SOURCES[name]
    if not weights and colon:
        raise ConfigError(
            f"--draft {text}: {name} has no weights of its own; leave {colon}{folder} out"
        )
    if not weights:
        return SourceChoice(name, "")
    if not colon and at_hand:
        folder = at_hand(weights)
    if not folder:
        raise ConfigError(
            f"--draft {text or name}: where are its weights? Give {name}:FOLDER; "
            "`edgespec models` lists which models have some at hand"
        )
    return SourceChoice(name, folder)
