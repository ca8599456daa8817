"""Kernels for GPUs, in Triton: a row's result is the same, to the bit, beside any others."""
