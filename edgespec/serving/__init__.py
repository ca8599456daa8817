"""Serving: the OpenAI-compatible HTTP API, as a client of the coordinator."""
