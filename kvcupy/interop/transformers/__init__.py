"""A paged KV cache and an attention function for models of Hugging Face transformers.

Importing this registers the attention implementation `"kvcupy"`.
"""

from transformers import __version__

from ...extras import install

if tuple(map(int, __version__.split(".")[:2])) < (5, 16):
    raise ImportError(
        f"transformers: expected release 5.16 or newer, got {__version__}: "
        f"{install('transformers')}"
    )

from .attention import attention_forward
from .cache import PagedCache

__all__ = ["PagedCache", "attention_forward"]
