"""A hook of mkdocs (see mkdocs.yml): links that lead out of docs/ go to the repository."""

from __future__ import annotations

import re
from typing import Any

OUT = re.compile(r"\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, config: Any, **_: object) -> str:
    """The page's text, for mkdocs."""
    return OUT.sub(rf"]({config['repo_url'].rstrip('/')}/blob/main/\1)", markdown)
