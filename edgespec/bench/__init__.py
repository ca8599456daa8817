"""Plays workloads on rings, simulated and real, and compares the policies."""
