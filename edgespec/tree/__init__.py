"""The draft tree: which guesses exist, which rows travel, which are kept, who sees whom."""
