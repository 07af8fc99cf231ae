"""Shared block stores: `store.py` has the user-facing class, the other modules are backends."""
