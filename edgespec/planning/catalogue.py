"""Catalogue: the models that are known by a short name, and the draft weights that fit them; and
those that are asked for by name and do not run, with what to take instead.

Sizes are those of the published config.json files, from which all parameters are counted; names
with ":" are Ollama's. `sampling` is what generation_config.json or the model's card publishes; to
smollm2-135m's card a repetition penalty is added, which is Ollama's default: of 15 everyday answers
3 went round in circles without it, and none with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from typing import Annotated

from msgspec import Meta, field, structs

from edgespec.planning.architecture import FAMILIES, Architecture, gguf_bytes
from edgespec.planning.refused import Refusal, refusal_of
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
    before a download. `tried`: whether this model itself was run with edgespec. `also`: further
    names. `sampling`: see model.own_sampling; for files that do not say it themselves.
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
    also: tuple[Text, ...] = ()
    sampling: dict[str, float] = field(default_factory=dict)

    def file_bytes(self, model: str) -> int:
        """Of its files, by its parameters: of `gguf` if that is the model, else those in 16 bit."""
        if model == self.gguf:
            return gguf_bytes(self.sizes, model, fused=self.family == "phi3")
        return 2 * self.parameters

    def draft_of(self, source: str) -> str:
        """The weights for this draft source; "" if none are known."""
        return next((one.weights for one in self.drafts if one.source == source), "")


class RefusedModel(FileStruct, frozen=True):
    """A model that does not run. `instead`: the name of one of its kind that does. `why`: see
    refused.REASONS, where `family` alone, which other models of run, does not tell."""

    hub: Text
    family: Text
    instead: Text
    why: str = ""
    also: tuple[Text, ...] = ()

    @property
    def refusal(self) -> Refusal:
        known = refusal_of({"model_type": self.family}, FAMILIES)
        return Refusal(self.why or (known.why if known else "other"), self.instead)


class _Catalogue(FileStruct, frozen=True):
    models: dict[str, KnownModel]
    refused: dict[str, RefusedModel]


def _read() -> _Catalogue:
    file = resources.files(__package__) / _FILE
    found = read_as(_Catalogue, file.read_bytes(), _FILE, "install edgespec again", _VERSION)
    for name, model in found.models.items():
        sizes = replace(model.sizes, family=model.family)
        found.models[name] = structs.replace(model, sizes=sizes)
    return found


def squeezed(name: str) -> str:
    """A name without what people write in different ways: qwen3:8b, Qwen3-8B and qwen-3-8b."""
    return re.sub("[-_: ]", "", name.lower().removesuffix(":latest"))


def _by_any_name() -> dict[str, str]:
    listed: list[tuple[str, KnownModel | RefusedModel]] = [*_CATALOGUE.models.items()]
    listed += _CATALOGUE.refused.items()
    return {
        squeezed(one): name
        for name, known in listed
        for one in (name, known.hub.partition("/")[2], *known.also)
    }


_CATALOGUE = _read()
MODELS: Mapping[str, KnownModel] = _CATALOGUE.models
"""Every known model by its short name, of one family together, small ones first."""
REFUSED: Mapping[str, RefusedModel] = _CATALOGUE.refused
"""Models that do not run, by their names."""
NAMES: Mapping[str, str] = _by_any_name()
"""The name in MODELS or REFUSED for every other, as `squeezed` makes it: hub names, Ollama's."""
