"""Boundaries: the positions at which layers that keep a state hold it, of all rows before."""

STRIDE = 16
"""Positions between two boundaries."""
AHEAD = 32
"""How far a boundary is before the rows that read its state, at least: so many guesses in a row may
follow the committed tokens, and none of them is in a state."""


HELD_STATES, HELD_ROWS = AHEAD // STRIDE + 1, 256
"""What a layer holds of a request at most: states, one for each boundary that rows in flight have,
and rows that are not folded yet or of the chunk of a prompt that is being read."""


def boundary_of(position: int) -> int:
    """The boundary whose state a row at this position reads: it follows from that alone."""
    return max(0, (position - AHEAD) // STRIDE * STRIDE)
