"""Plays whole rings in virtual time: exact timing, any network, every run repeatable."""
