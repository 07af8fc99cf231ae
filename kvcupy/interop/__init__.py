"""Adapters to other libraries. Each module imports its library, and is imported by who asks."""
