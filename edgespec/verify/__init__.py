"""The exact choice of tokens: filters, shared noise, and where an answer stops."""
