"""QR codes for a terminal: a short text as the squares of ISO/IEC 18004.

Bytes, error correction L, the fixed mask 0, versions 1 to 5: what an address with a key needs.
"""

from __future__ import annotations

from edgespec.errors import ConfigError

SIZES = ((19, 7), (34, 10), (55, 15), (80, 20), (108, 26))
"""Bytes of data and of correction of versions 1, 2, ... at L, which are one block."""

_FORMAT = 0b111011111000100
"""What L and mask 0 are written as, with its own correction."""

_QUIET = 4
"""Light squares around."""


def qr_lines(text: str) -> list[str]:
    """The code in half blocks, two squares above each other in one, with its border.

    Raises ConfigError for a text that is too long.
    """
    code = qr_squares(text)
    wide = len(code) + 2 * _QUIET
    light = [[False] * wide]
    rows = light * _QUIET + [[False] * _QUIET + row + [False] * _QUIET for row in code]
    rows += light * (_QUIET + 1)  # one more, as rows are shown in pairs
    pairs = zip(rows[::2], rows[1::2], strict=False)
    return ["".join(" ▀▄█"[a + 2 * b] for a, b in zip(*pair, strict=True)) for pair in pairs]


def qr_squares(text: str) -> list[list[bool]]:
    """The code's rows, dark where True. Raises ConfigError for a text that is too long."""
    data = text.encode()
    version = next((v for v, (room, _) in enumerate(SIZES, 1) if len(data) + 2 <= room), 0)
    if not version:
        most = SIZES[-1][0] - 2
        raise ConfigError(f"{len(data)} bytes do not fit a QR code of this size; {most} do")
    room, extra = SIZES[version - 1]
    number = ((4 << 8 | len(data)) << 8 * len(data) | int.from_bytes(data, "big")) << 4
    filled = number.to_bytes(len(data) + 2, "big")
    filled += (b"\xec\x11" * room)[: room - len(filled)]
    whole = filled + _correction(filled, extra)
    bits = [bool(byte >> place & 1) for byte in whole for place in range(7, -1, -1)]
    squares = _patterns(version)
    size = len(squares)
    free = [(row, column) for row, column in _way(size) if squares[row][column] is None]
    for (row, column), bit in zip(free, bits + [False] * len(free), strict=False):
        squares[row][column] = bit != ((row + column) % 2 == 0)
    return [[bool(square) for square in row] for row in squares]


def _patterns(version: int) -> list[list[bool | None]]:
    """What every code of a version has; None where its data goes."""
    size = 17 + 4 * version
    squares: list[list[bool | None]] = [[None] * size for _ in range(size)]

    def rings(row: int, column: int, reach: int, light: tuple[int, ...]) -> None:
        for y in range(max(row - reach, 0), min(row + reach + 1, size)):
            for x in range(max(column - reach, 0), min(column + reach + 1, size)):
                squares[y][x] = max(abs(y - row), abs(x - column)) not in light

    for row, column in ((3, 3), (3, size - 4), (size - 4, 3)):
        rings(row, column, 4, (2, 4))
    if version > 1:
        rings(size - 7, size - 7, 2, (1,))
    for at in range(8, size - 8):
        squares[6][at] = squares[at][6] = at % 2 == 0
    told = [bool(_FORMAT >> place & 1) for place in range(15)]
    near = [*range(6), 7, 8]
    for place, at in enumerate(near):
        squares[at][8] = told[place]
        squares[8][size - 1 - place] = told[place]
    for place, at in enumerate((7, *range(5, -1, -1)), 8):
        squares[8][at] = told[place]
        squares[size - 15 + place][8] = told[place]
    squares[size - 8][8] = True
    return squares


def _way(size: int) -> list[tuple[int, int]]:
    """Rows and columns in the order of the data: pairs of columns, up and down, from the right."""
    columns = [*range(size - 1, 6, -2), *range(5, 0, -2)]
    way = []
    for turn, right in enumerate(columns):
        rows = range(size) if turn % 2 else range(size - 1, -1, -1)
        way += [(row, column) for row in rows for column in (right, right - 1)]
    return way


def _correction(data: bytes, count: int) -> bytes:
    """Reed-Solomon: the remainder of the data by the generator of that degree, over GF(2^8)."""
    generator = [1]
    for power in range(count):
        root = _power(power)
        shifted = [_times(factor, root) for factor in generator]
        generator = [a ^ b for a, b in zip([*generator, 0], [0, *shifted], strict=True)]
    rest = [*data, *bytes(count)]
    for at in range(len(data)):
        factor = rest[at]
        for place, one in enumerate(generator):
            rest[at + place] ^= _times(factor, one)
    return bytes(rest[len(data) :])


def _times(a: int, b: int) -> int:
    product = 0
    while b:
        product ^= a * (b & 1)
        a = a << 1 ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


def _power(exponent: int) -> int:
    found = 1
    for _ in range(exponent):
        found = _times(found, 2)
    return found
