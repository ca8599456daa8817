"""Catalogue: the models that are known by a short name, and the draft weights that fit them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Annotated

from msgspec import Meta

from edgespec.planning.architecture import Architecture
from edgespec.schema import FileStruct, Text, read_as

_FILE = "catalogue.json"
_VERSION = ("catalogue", 1)
_Count = Annotated[int, Meta(gt=0)]


class FittingDraft(FileStruct, frozen=True):
    """Draft weights for a base. `source`: see drafting.choice; `weights`: a short name or a hub id.

    `page`: the published page that names this pair, or one of the same two families.
    """

    source: Text
    weights: Text
    page: Text


class KnownModel(FileStruct, frozen=True):
    """A model by its short name.

    `hub`: its hub id; `gguf`: a file of it on the hub that is packed already, "" if none is known;
    `package`: MODULE/FILE of an installed Python package that holds such a file. `family`: its
    `model_type`. `licence`: as the hub abbreviates it; `gated`: whether one must accept it there
    before a download. `tried`: whether this model itself was run with edgespec.
    """

    hub: Text
    family: Text
    parameters: _Count
    licence: Text
    context: _Count
    sizes: Architecture
    gguf: str = ""
    package: str = ""
    gated: bool = False
    tried: bool = False
    drafts: tuple[FittingDraft, ...] = ()

    def draft_of(self, source: str) -> str:
        """The weights for this draft source; "" if none are known."""
        return next((one.weights for one in self.drafts if one.source == source), "")


class _Catalogue(FileStruct, frozen=True):
    models: dict[str, KnownModel]


def _read() -> Mapping[str, KnownModel]:
    file = resources.files(__package__) / _FILE
    return read_as(_Catalogue, file.read_bytes(), _FILE, "install edgespec again", _VERSION).models


MODELS = _read()
"""Every known model by its short name, of one family together, small ones first."""
