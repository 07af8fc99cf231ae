"""ArrayViews as torch tensors, without a copy."""

from __future__ import annotations

from typing import Any

from . import formats
from .arrays import ArrayView


def tensor_of(v: ArrayView) -> Any:
    """Return the memory of a view as a torch tensor that shares it, and keeps its owner alive.

    Parameters
    ----------
    v : what is a tensor's, tagged or not, gives a view of that tensor

    Raises
    ------
    ImportError : torch is missing
    ValueError : a stride is negative, which torch has none of
    """
    import torch

    if any(step < 0 for step in v.strides):  # its importer of DLPack ends the process
        raise ValueError(f"array: expected strides that torch has, got {v.strides} bytes")
    dtype = getattr(torch, formats.numpy_dtype(v.format).name)
    if isinstance(v.owner, torch.Tensor) and v.owner.element_size() == v.itemsize:
        first = v.owner.storage_offset() + (v.pointer - v.owner.data_ptr()) // v.itemsize
        strides = [step // v.itemsize for step in v.strides]
        with torch.inference_mode(False):  # whoever asks first; others get the same tensor
            return v.owner.detach().as_strided(v.shape, strides, first).view(dtype)
    try:
        return torch.from_dlpack(v)
    except (RuntimeError, BufferError):  # a format that this version of torch does not import
        bits = ArrayView(
            v.pointer, v.shape, v.strides, f"int{8 * v.itemsize}", v.device,
            library=v.library, owner=v.owner,
        )  # fmt: skip
        return torch.from_dlpack(bits).view(dtype)
