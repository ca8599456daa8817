"""edgespec: one large language model across a handful of small boards, fast for one person."""

__version__ = "0.2.0"
