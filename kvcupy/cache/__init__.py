"""Pages of KV cache: pools, their allocators, and transfers between them."""
