"""Parallel prompt decoding: trained prompt tokens guess what follows, on the base itself."""
