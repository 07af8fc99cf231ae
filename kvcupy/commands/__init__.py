"""The commands of `python -m kvcupy`."""
