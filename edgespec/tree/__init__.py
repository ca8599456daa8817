"""The draft tree: which guesses exist, which rows travel, which are kept, which row sees which."""
