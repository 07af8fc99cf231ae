"""Pages as callers give them: lists of numbers, or arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..ops import checks

Pages = np.ndarray[Any, Any]


def page_array(pages: Any) -> Pages:
    """Return pages as an array (n,) of an integer type, whatever the numbers are.

    Raises
    ------
    TypeError : `pages` is no list and no array that NumPy reads
    ValueError : it holds something else than integers, or has several dimensions

    Examples
    --------
    >>> page_array([3, 1])
    array([3, 1])
    """
    if isinstance(pages, np.ndarray):
        array: Pages = pages
    elif hasattr(pages, "__array__"):
        array = _exported(pages)
    else:
        array = _listed(pages)
    if array.ndim != 1:
        raise ValueError(f"pages: expected one dimension, got {array.ndim}")
    if array.size == 0:  # an empty list is one of floats, to NumPy
        return np.empty(0, np.int64)
    if array is pages and array.dtype.kind == "O":
        return _listed(array)
    if array.dtype.kind not in "iuO":
        raise ValueError(f"pages: expected integers, got {array[0]!r}")
    return array


def _exported(pages: Any) -> Pages:
    try:
        return np.asarray(pages)
    except TypeError as error:  # it is on a GPU
        raise TypeError(f"pages: expected an array of the host, {error}") from None


def _listed(pages: Iterable[Any]) -> Pages:
    try:
        numbers = list(pages)
    except TypeError:
        kind = type(pages).__name__
        raise TypeError(f"pages: expected a list or a NumPy array, got {kind}") from None
    for page in numbers:
        try:
            checks.require_int(page, "pages")
        except TypeError:
            raise ValueError(f"pages: expected integers, got {page!r}") from None
    try:
        return np.array(numbers, np.int64)
    except OverflowError:  # left as they are, for the error that names one
        return np.array(numbers, object)
