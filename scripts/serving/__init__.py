"""A small Llama with continuous batching: what `serve_demo.py` runs."""
