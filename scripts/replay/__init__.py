"""Traces through a `TieredCache`, and a simulation to compare with: what `replay_trace.py` runs."""
