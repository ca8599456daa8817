"""Reading: whatever is wrong with a file of a model becomes one error that names it.

Libraries raise many kinds for what they cannot use, and so does Python for values of another kind
than a file should hold. This is for code that reads files, not for what computes with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError, ModelError


@contextmanager
def reading(what: Path | str, remedy: str = "download the model again") -> Iterator[None]:
    """Raise ModelError with the reason and the remedy for anything that is raised inside, but for
    errors that say so themselves."""
    try:
        yield
    except (EdgespecError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if isinstance(error, FileNotFoundError) and error.filename:
            folder = Path(error.filename).parent
            raise ModelError(
                f"{error.filename} is missing: {folder} is not a complete model folder; {remedy}"
            ) from error
        raise ModelError(f"cannot read {what} ({_reason(error)}); {remedy}") from error


def read_object(file: Path, remedy: str = "download the model again") -> dict[str, Any]:
    """The JSON object in a file of a model. Raises ModelError that says what to do: `remedy`."""
    with reading(file, remedy):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ModelError(f"{file} does not hold a JSON object; {remedy}")
    return content


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    told = text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"
    return told.removesuffix(": ")
