"""Blocks that several processes share, by hash."""
