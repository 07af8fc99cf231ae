"""Pages of KV cache: the pools that hold them, and who has which."""
