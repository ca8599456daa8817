"""Text of others as a terminal may show it."""

from __future__ import annotations

BIDI = {
    code: f"\\u{code:04x}"
    for code in (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
"""Marks that let a terminal show characters in another order, which hides what is there: shown as
escapes."""

_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
_CONTROL[13] = ""
_REPLACED = _CONTROL | BIDI


def shown(text: str) -> str:
    """The text without codes that change a terminal, or the order of what it shows."""
    return text.translate(_REPLACED)
