"""The door for programs: a ring, its clients, and the simulator as Python objects."""
