"""Quantised linear layers: how weights are packed, stored and multiplied."""
