"""Bounds on the speed of kernels, read from their machine code."""
