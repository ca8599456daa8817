"""Packed checkpoints: folders whose matrices another program quantised, and whose codes we keep."""
