"""Moves encoded messages between devices."""
