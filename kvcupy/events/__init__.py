"""KV events: which blocks each tier of a cache has, published for routers in vLLM's format."""

from .publisher import Publisher as Publisher
