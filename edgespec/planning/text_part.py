"""Text part: what a config.json says of the text model within one that reads images too."""

from __future__ import annotations

from collections.abc import Mapping

WRAPPERS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
"""Model types around a text model, and of which type that is unless `text_config` names one."""

OUTER = frozenset(("tie_word_embeddings", "quantization_config"))
"""Fields that count for the text model where only the wrapper has them."""


def text_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings of the text model: `settings` as they are, unless they are a wrapper's."""
    kind, inner = settings.get("model_type"), settings.get("text_config")
    if not isinstance(kind, str) or kind not in WRAPPERS or not isinstance(inner, dict):
        return dict(settings)
    outer = {field: settings[field] for field in OUTER if field in settings}
    return {"model_type": WRAPPERS[kind], **outer, **inner}
