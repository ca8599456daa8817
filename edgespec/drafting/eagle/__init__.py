"""EAGLE heads: one decoder layer that guesses the base's next features from those of certain rows."""
