"""Kernels: arithmetic whose rows do not depend, to the bit, on the rows beside them."""
