"""The ring: its members, the layers of each, their health."""
