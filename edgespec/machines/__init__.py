"""The protocol as state machines: events and the time in, effects out, no I/O."""
