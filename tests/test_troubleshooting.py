"""Every message that docs/troubleshooting*.md quote is one that some line of the source can say.

The pages quote messages in the first column of its tables, with `…` for what differs each time.
Here the packages' texts are read from their syntax trees, with f-strings and concatenation undone
and a hole for each value; a quoted message must fit one of them, hole for hole.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = sorted((REPOSITORY / "docs").glob("troubleshooting*.md"))
PACKAGES = ("cli", "daemon", "edgespec")
HOLE = "…"
LEAST_LETTERS = 10  # of a quoted message beside its holes: less could be found anywhere
LEAST_MESSAGES = 40  # else it is this test that finds no messages any more
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
OF_LOGGING = re.compile(r"%[sdrg]")


def quoted(page: str) -> list[str]:
    """The code spans in the first column of every table."""
    return [
        span[2].strip()
        for line in page.splitlines()
        if line.startswith("|")
        for span in CODE_SPAN.finditer(line.split("|")[1])
    ]


def texts_of(source: str) -> Iterator[str]:
    """Every text of a module but its docstrings, with holes for values."""
    for text in _texts(ast.parse(source), is_part=False):
        yield OF_LOGGING.sub(HOLE, text)


def _texts(node: ast.AST, is_part: bool) -> Iterator[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    text = text_of(node)
    if text is not None and not is_part:
        yield text
    for child in ast.iter_child_nodes(node):
        # What a value in a longer text says is a text by itself, what stands beside it is none.
        yield from _texts(child, text is not None and not isinstance(child, ast.FormattedValue))


def text_of(node: ast.AST) -> str | None:
    """What an expression says, if it is a text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = text_of(node.left), text_of(node.right)
        return None if sides == (None, None) else "".join(side or HOLE for side in sides)
    return None


def fits(message: str, texts: str) -> bool:
    """Whether one of the texts (a line each) has the message's words in its order.

    Only the message's holes may stand for more than is there: its own words must be the text's.
    """
    words = r"[^\n]*".join(re.escape(part) for part in message.split(HOLE))
    return re.search(f"^{words}$", texts, re.MULTILINE) is not None


def letters(message: str) -> int:
    return len(message.replace(HOLE, "").replace(" ", ""))


@pytest.fixture(scope="module")
def texts() -> str:
    """All texts of the packages, a line each."""
    found = {
        text.replace("\n", " ")
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*.py")
        for text in texts_of(path.read_text(encoding="utf-8"))
    }
    return "\n".join(found)


def test_every_quoted_message_is_in_the_source(texts: str) -> None:
    messages = [said for page in PAGES for said in quoted(page.read_text(encoding="utf-8"))]
    assert len(set(messages)) >= LEAST_MESSAGES
    assert len(set(messages)) == len(messages), "a message is there twice"
    assert [m for m in messages if letters(m) < LEAST_LETTERS] == []
    gone = [message for message in messages if not fits(message, texts)]
    assert not gone, "no line of the source says:\n" + "\n".join(gone)


SAMPLE = '''
"""Says that nobody listens at all."""
def run(host, port):
    raise PeerLost(
        f"nobody answers at {host} within {port:.0f} s; is it "
        "running there?" + (" Start it." if host else "")
    )
    log.warning("the key %s counts no more: %s", host, port)
'''


@pytest.mark.parametrize(
    "message",
    [
        "nobody answers at … within … s; is it running there?…",
        "nobody answers at …; is it …",
        " Start it.",
        "the key … counts no more: …",
    ],
)
def test_a_message_of_the_source_is_found(message: str) -> None:
    assert fits(message, "\n".join(texts_of(SAMPLE)))


@pytest.mark.parametrize(
    "message",
    [
        "nobody answers at",  # it goes on, and the page does not say so
        "nobody answers at … after … s; …",  # reworded
        "within … s; is it running there?…",  # something stands before
        "… s; is it running there?… within …",  # other order
        "the key K1 counts no more: …",  # a value is no text of the source
        "Says that nobody listens at all.",  # a docstring is not said
    ],
)
def test_a_message_that_is_no_more_is_found_out(message: str) -> None:
    assert not fits(message, "\n".join(texts_of(SAMPLE)))


def test_messages_are_read_from_first_columns_alone() -> None:
    page = "`a`\n| `b c` and ``d `e` f`` | `g` |\n| --- | --- |\n"
    assert quoted(page) == ["b c", "d `e` f"]
