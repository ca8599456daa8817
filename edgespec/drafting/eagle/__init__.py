"""EAGLE heads: one layer that guesses the base's next features from those of committed rows."""
