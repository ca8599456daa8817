"""Short names of models: what they stand for on this machine, and which draft weights fit."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from edgespec.config import check_path
from edgespec.daemon.bundled_models import HYBRID, bundled, bundled_weights
from edgespec.errors import ModelError
from edgespec.model.hub import GGUF
from edgespec.planning.catalogue import MODELS, NAMES, REFUSED, KnownModel, squeezed

_LIKE_ENOUGH = 0.5
"""Of two names, for difflib: from which on one is suggested for the other."""

_PACKED = re.compile(r"[-._](UD-)?(I?Q\d\w*|BF16|F(16|32)|MXFP4|GGUF)$", re.IGNORECASE)
"""How names of files and repositories end that hold a model in some form."""


def resolved(model: str) -> str:
    """A model as every part of edgespec takes it: a name becomes a hub id or a file.

    NAME, or any other name that the catalogue has for it, stands for the model as it was published,
    or for the file of an installed package, NAME.gguf for its file on the hub that is packed
    already, HYBRID for a bundled folder. Everything else (a folder, a file, a hub id, "") stays as
    it is, and what is here comes before a name. Raises ModelError for what can only be a name and
    is none, and for a model by its name or hub id that does not run; ConfigError for a name that is
    not valid UTF-8.
    """
    check_path("model", model)
    if not model or Path(model).exists():
        return model
    if model.lower() == HYBRID:
        return bundled(HYBRID)
    name = model.lower().removesuffix(GGUF)
    ending = model[len(name) :].lower()
    _require_running(model)
    if "/" in model:
        return model
    names = {one: known.gguf if ending else known.hub for one, known in MODELS.items()}
    found = NAMES.get(squeezed(name), "")
    if names.get(found):
        return names[found] if ending else packaged(MODELS[found]) or names[found]
    close = difflib.get_close_matches(name, filter(names.get, names), n=3, cutoff=_LIKE_ENOUGH)
    meant = f"did you mean {' or '.join(one + ending for one in close)}? " if close else ""
    raise ModelError(
        f"there is no model folder or file {model}, and no model is called so; {meant}"
        "`edgespec models` lists the names"
    )


def _require_running(model: str) -> None:
    """Raise ModelError for a model that is known not to run, by any name or as a file."""
    refused = REFUSED.get(_name_within(model))
    if refused is not None:
        raise ModelError(f"{model} does not run: {refused.refusal} (docs/families.md)")


def _name_within(model: str) -> str:
    """The catalogue's name that a hub id, a folder or a file bears, however it is packed; or ""."""
    last = re.sub(f"{re.escape(GGUF)}$", "", model.rpartition("/")[2], flags=re.IGNORECASE)
    found = (NAMES.get(squeezed(one), "") for one in (last, _PACKED.sub("", last)))
    return next(filter(None, found), "")


def known_name(model: str) -> str:
    """The short name of a resolved model, whatever its form; "" if it has none, as a folder."""
    if not model or Path(model).is_dir():
        return ""
    return next(
        (
            name
            for name, known in MODELS.items()
            if model in (name, known.hub, known.gguf, packaged(known))
        ),
        "",
    )


def spoken(model: str) -> str:
    """A resolved model as a user would name it: by its short name, if it has one."""
    if model == bundled(HYBRID):
        return HYBRID
    name = known_name(model)
    return f"{name}{GGUF}" if name and model == MODELS[name].gguf else name or model


def names_of(model: str) -> tuple[str, ...]:
    """Every name by which a resolved model may be asked for, the one to show first."""
    known = MODELS.get(known_name(model))
    own = Path(model).name, Path(model).resolve().name
    if known is None:
        return tuple(dict.fromkeys(own))
    hub = known.hub.partition("/")[2]
    return tuple(dict.fromkeys((known_name(model), known.hub, hub, *known.also, model, *own)))


def published_sampling(model: str) -> Mapping[str, float]:
    """What the catalogue knows of how a model is to be sampled, by its file's name if need be."""
    name = known_name(model) or _name_within(model)
    return MODELS[name].sampling if name in MODELS else {}


def packaged(known: KnownModel) -> str:
    """Path of the file that an installed Python package holds of this model; "" if none does."""
    module, _, name = known.package.partition("/")
    spec = find_spec(module) if module else None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    paths = (os.path.join(folder, name) for folder in folders)
    return next(filter(os.path.isfile, paths), "")


def weights_at_hand(model: str) -> Callable[[str], str]:
    """For parse_draft: the weights for a base that are bundled (edgespec/models/NAME-SOURCE), or
    that the catalogue names, resolved; "" for none."""
    known = MODELS.get(known_name(model))

    def find(weights: str) -> str:
        here = bundled_weights(f"{known_name(model)}-{weights}")
        if here:
            return here
        name = known.draft_of("independent" if weights == "draft" else weights) if known else ""
        small = MODELS.get(name)
        # Beside a GGUF file one too: their tokenizers are made in the same way.
        return small.gguf if small and small.gguf and model.endswith(GGUF) else resolved(name)

    return find
