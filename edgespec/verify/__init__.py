"""The exact choice of tokens: filters, shared noise and the walk down the tree."""
