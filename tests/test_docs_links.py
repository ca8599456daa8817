"""Every relative link in the documentation leads to a file that is there, and to a heading in it.

Anchors are made of headings as code hosts do it. Code, in blocks or between backticks, has no
links.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *DOCS.rglob("*.md"),
        REPOSITORY / "profiles" / "README.md",
        REPOSITORY / "edgespec" / "models" / "MODEL_CARD.md",
    ]
)
FENCE = re.compile(r"^(`{3,})[^`]*\n.*?^\1`*[ ]*$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}.*\n+)+")
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(<?([^)>]+)>?\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:")


def links_of(page: str) -> list[str]:
    """Where a page's links and pictures lead, without those to other sites."""
    text = CODE_SPAN.sub("", INDENTED.sub("", FENCE.sub("", page)))
    return [found for found in LINK.findall(text) if not ELSEWHERE.match(found)]


def anchors_of(page: str) -> set[str]:
    """What can stand behind `#` in a link to a page."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", page)):
        words = re.sub(r"\]\([^)]*\)", "", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count, free = 0, slug
        while free in found:
            count, free = count + 1, f"{slug}-{count + 1}"
        found.add(free)
    return found


def problems_of(path: Path, root: Path = REPOSITORY) -> Iterator[str]:
    """The links of a page that lead nowhere below `root`."""
    for link in links_of(path.read_text(encoding="utf-8")):
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        if not target.exists() or not target.is_relative_to(root):
            yield f"{link}: there is no such file"
        elif anchor and anchor not in anchors_of(target.read_text(encoding="utf-8")):
            yield f"{link}: there is no such heading"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_link_leads_somewhere(path: Path) -> None:
    assert list(problems_of(path)) == []


def test_the_index_has_every_page() -> None:
    for folder in (DOCS, DOCS / "results", DOCS / "decisions"):
        listed = links_of((folder / "README.md").read_text(encoding="utf-8"))
        pages = {path.name for path in folder.glob("*.md")} - {"README.md"}
        assert pages - set(listed) == set()


def test_the_site_has_every_page_once() -> None:
    nav = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(
        path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")
    )


def test_links_of_the_site_lead_out_to_the_repository() -> None:
    hook = runpy.run_path(str(REPOSITORY / "tools" / "docs_site.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="results/one.md"))
    config = {"repo_url": "https://host/repo/"}
    text = "[a](../../README.md#b) [c](../other.md#d) [e](f.md)"
    out = "[a](https://host/repo/blob/main/README.md#b) [c](../other.md#d) [e](f.md)"
    assert hook(text, page=page, config=config) == out


def test_every_picture_is_shown() -> None:
    links = {path: links_of(path.read_text(encoding="utf-8")) for path in PAGES}
    shown = {(path.parent / link).resolve() for path, found in links.items() for link in found}
    assert {*(DOCS / "images").iterdir()} - shown == set()


SAMPLE = """# A title: with `code` & [a link](other.md)

See [it](#twice-1), ![a picture](images/none.png) and <https://example.org> or [there](https://example.org).
No links are `[a](b.md)` and

    [c](d.md)

```
# no heading
[e](f.md)
```

## Twice

## Twice
"""


def test_links_and_anchors_are_read_as_code_hosts_do() -> None:
    assert links_of(SAMPLE) == ["other.md", "#twice-1", "images/none.png"]
    assert anchors_of(SAMPLE) == {"a-title-with-code--a-link", "twice", "twice-1"}


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "# Page\n[a](page.md#page) [b](#pages) [c](none.md) [d](/etc)\n"
    )
    assert list(problems_of(tmp_path / "page.md", tmp_path)) == [
        "#pages: there is no such heading",
        "none.md: there is no such file",
        "/etc: there is no such file",
    ]
