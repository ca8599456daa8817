"""Carries out the compute that the machines ask for."""
