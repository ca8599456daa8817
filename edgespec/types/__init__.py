"""Plain values that several rooms exchange, free of torch."""
