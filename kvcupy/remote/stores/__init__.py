"""Blocks that processes share: `store.py` is what users hold, the other modules keep the blocks."""
