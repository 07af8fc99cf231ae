"""The benchmarks of `bench.py`, one module each."""
