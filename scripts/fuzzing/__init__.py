"""Random calls of everything public, most of them wrong: what `scripts/fuzz.py` runs."""
