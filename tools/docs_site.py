"""A hook of mkdocs (see mkdocs.yml): links that lead out of docs/ go to the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

OUT = re.compile(r"\]\((\.\./[^)\s#]*)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: object) -> str:
    """The page's text, for mkdocs."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def lead(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        inside = target.startswith("docs/")
        return found[0] if inside else f"]({config['repo_url'].rstrip('/')}/blob/main/{target}"

    return OUT.sub(lead, markdown)
