"""Who is in the ring: members, which layers each holds, how they are."""
