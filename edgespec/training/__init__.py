"""Training of draft heads for a given base model, on a text file."""
