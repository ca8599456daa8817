"""Plays whole rings in virtual time: exact timing, any network, any fault, every run repeatable."""
