"""Own sampling: the settings that a model comes with, in generation_config.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import ValidationError, convert

from edgespec.decoding.admission import MOST_REPETITION
from edgespec.errors import ConfigError
from edgespec.model.reading import read_object
from edgespec.types.usual_sampling import NAMES, NOTHING_SAID, UsualSampling
from edgespec.verify.sampling import Sampling

FILE = "generation_config.json"

_log = logging.getLogger(__name__)


def own_sampling(folder: Path, published: Mapping[str, float]) -> UsualSampling:
    """What the folder's file says, or where that says nothing what is `published` elsewhere.

    As transformers reads it `do_sample` false is temperature 0, and true without a temperature 1.
    What cannot be used is left out, with a warning: it is no reason not to answer.
    """
    file = folder / FILE
    try:
        said = (_said(read_object(file)) if file.is_file() else {}) or published
        values = [said.get(name, getattr(NOTHING_SAID, name)) for name in NAMES]
        usual = convert(values, UsualSampling)
        Sampling(usual.temperature, usual.top_k, usual.top_p, usual.min_p)
        if not 0 < usual.repetition_penalty <= MOST_REPETITION:
            raise ConfigError(f"repetition_penalty is {usual.repetition_penalty}")
    except (ValidationError, ConfigError) as problem:
        _log.warning("the sampling in %s is left out: %s", file, problem)
        return NOTHING_SAID
    return usual


def _said(content: Mapping[str, Any]) -> dict[str, Any]:
    said = {name: content[name] for name in NAMES if content.get(name) is not None}
    if content.get("do_sample") is False:
        said["temperature"] = 0.0
    elif said or content.get("do_sample"):
        said.setdefault("temperature", 1.0)
    return said
