"""The operations on KV caches, one family a module.

Stream: every operation takes `stream`, a CuPy, torch or kvcupy stream, or anything that has
`__cuda_stream__`. Its work is ordered there like a kernel, and waits for nothing else. None
is the current stream of the library that the arrays come from; on the host device that is the
calling thread, and the call returns when the work is done. Arguments are kept alive until then.
"""

from __future__ import annotations

from ..formats import FORMATS
from ..kernels import Specialisation


def specialisations() -> list[Specialisation]:
    """Return every kernel specialisation that any operation can ask for."""
    from . import (
        attention_kernels,
        indexing,
        merge,
        pages,
        rope,
        states,
        store,
        transfer_kernels,
    )

    return [
        specialisation
        for module in (
            store,
            rope,
            pages,
            states,
            indexing,
            transfer_kernels,
            attention_kernels,
            merge,
        )
        for specialisation in module.specialisations()
    ]


def is_reachable(specialisation: Specialisation, arch: str) -> bool:
    """Return whether a call on an architecture such as "sm_90" can ask for a specialisation."""
    from . import attention_kernels

    return attention_kernels.is_reachable(specialisation, arch)


def promises_128_bits(specialisation: Specialisation) -> bool:
    """Return whether a kernel must move 16 bytes per access, in and out.

    That is so for copies of 16-byte words, and for kernels whose packs have as many bytes or more.
    """
    arguments = specialisation.arguments
    if arguments[:1] == ("16",):
        return True
    sizes = {f.ctype: f.itemsize for f in FORMATS.values()}
    formats, count = arguments[:2], "".join(arguments[2:3])
    packed = len(formats) == 2 and sizes.keys() >= set(formats) and count.isdigit()
    return packed and int(count) * min(sizes[name] for name in formats) >= 16
