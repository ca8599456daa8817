"""Blocks of layers on their way from the coordinator to the stages."""
