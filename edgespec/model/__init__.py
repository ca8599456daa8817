"""A device's share of a model: its layers, their cache, their attention, their loading."""
