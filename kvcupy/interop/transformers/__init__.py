"""A paged KV cache and an attention function for models of Hugging Face transformers.

Importing this registers the attention implementation `"kvcupy"`.
"""

from .attention import attention_forward
from .cache import PagedCache

__all__ = ["PagedCache", "attention_forward"]
