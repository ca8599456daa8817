"""Decides what to guess next and what to send next, and nothing else."""
