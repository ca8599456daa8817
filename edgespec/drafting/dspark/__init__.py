"""DSpark: a head that guesses a whole block of positions in one pass, and its tree by path."""
