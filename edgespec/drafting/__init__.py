"""Draft sources: where guessed tokens come from."""
