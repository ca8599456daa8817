"""Drives the machines: one loop owns the sockets, one worker owns the model."""
