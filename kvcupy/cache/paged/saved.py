"""A saved sequence as a file: tensors bit for bit, and what they are, in the safetensors format."""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ... import formats as dtypes

Tensor = tuple[str, tuple[int, ...], Any]  # format, shape, and bits: an array or other memory
PathLike = str | os.PathLike[str]

KIND = {"kvcupy": "1", "kind": "sequence"}  # what every file says of itself

# What the format calls the formats, in files; in calls of the package they have NumPy's names.
_TAGS = {
    "F32": "fp32",
    "F16": "fp16",
    "BF16": "bf16",
    "F8_E4M3": "fp8_e4m3",
    "F8_E5M2": "fp8_e5m2",
    "I8": "int8",
}


def write(path: PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> None:
    """Write a file, which is there whole or not at all.

    Parameters
    ----------
    path : of the file; one that exists is replaced
    tensors : by name, the format, the shape, and the bits: a NumPy array of any dtype, or other
        memory of the host, of as many bytes
    metadata : what `check` compares; values are written as `str` gives them

    Raises
    ------
    ValueError : a format is unknown, the bytes are not as many as the shape says, or `path` is
        something else than a file
    OSError : the file cannot be written; what was there before stays
    ImportError : safetensors is missing: `pip install 'safetensors>=0.8'`

    Notes
    -----
    Bytes: all are written once, to a file beside `path` that takes its name when all are on disk;
    what is contiguous is not copied before.
    """
    package = _package()
    path = Path(path)
    if path.exists() and not path.is_file():  # a device, say, which the new file would replace
        raise ValueError(f"path: expected the name of a file, got {path}")
    bits = {name: _bits(name, *tensor) for name, tensor in tensors.items()}
    specs = {
        name: package.TensorSpec(
            dtype=dtypes.numpy_dtype(tensors[name][0]).name,
            shape=tensors[name][1],
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in bits.items()
    }
    described = {**{name: str(value) for name, value in metadata.items()}, **KIND}
    temporary = path.with_name(f".kvcupy-{secrets.token_hex(8)}")
    with temporary.open("xb"):  # also tells the permissions that new files get here
        permissions = temporary.stat().st_mode & 0o777
    try:
        try:
            package.serialize_file(specs, temporary, described)
        except package.SafetensorError as error:
            raise _system_error(error, path) from error
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(permissions)  # the package's are 0600
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: PathLike) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Returns
    -------
    tensors : by name, the format, the shape, and a read-only NumPy array of that format and shape
    metadata : as in the file; `check` says whether it fits

    Raises
    ------
    ValueError : `path` is no safetensors file, a part of one, or has other formats than kvcupy
    OSError : it cannot be read
    ImportError : safetensors is missing: `pip install 'safetensors>=0.8'`

    Notes
    -----
    Bytes: those of the header. The arrays are the file itself, mapped; what is read of them is
    loaded then. A file that is replaced, as `write` does, stays as it was for them; one that is
    cut short meanwhile takes the process down.
    """
    package = _package()
    path = Path(path)
    with path.open("rb") as file:
        try:
            with package.safe_open(path, framework="np"):
                pass  # checks that the header fits the file and itself, to the last byte
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except package.SafetensorError as error:
            raise ValueError(f"path: expected a safetensors file, got {path}: {error}") from None
    metadata = header.pop("__metadata__", None) or {}
    start = 8 + header_bytes
    tensors = {name: _mapped(path, name, entry, mapped, start) for name, entry in header.items()}
    return tensors, metadata


def check(metadata: Mapping[str, str], expected: Mapping[str, object]) -> None:
    """Refuse metadata of something else than a saved sequence, or of one with other fields.

    Parameters
    ----------
    metadata : of a file, from `read`
    expected : fields that there must be, with values as given to `write`; others are not looked at

    Raises
    ------
    ValueError : names `path`, the first field that differs, and what it is on either side

    Examples
    --------
    >>> check({"kvcupy": "1", "kind": "sequence", "num_layers": "32"}, {"num_layers": 32})
    >>> check({"kvcupy": "1", "kind": "sequence", "num_layers": "32"}, {"num_layers": 28})
    Traceback (most recent call last):
    ValueError: path: expected a saved sequence with num_layers 28, got 32
    """
    for field, value in {**KIND, **expected}.items():
        if metadata.get(field) != str(value):
            got = metadata.get(field, "none")
            raise ValueError(f"path: expected a saved sequence with {field} {value}, got {got}")


def _package() -> Any:
    """Return the safetensors package."""
    try:
        import safetensors
        from safetensors import TensorSpec  # noqa: F401 - since 0.8
    except ImportError as error:
        raise ImportError(
            "saved sequences need safetensors 0.8 or newer: pip install 'safetensors>=0.8'"
        ) from error
    return safetensors


def _bits(name: str, format: str, shape: tuple[int, ...], data: Any) -> np.ndarray[Any, Any]:
    """Return the bits of a tensor as one contiguous array, of as many bytes as its shape says."""
    if format not in dtypes.FORMATS:
        known = ", ".join(dtypes.FORMATS)
        raise ValueError(f"tensors: expected one of {known} for {name}, got {format!r}")
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    num_bytes = dtypes.FORMATS[format].itemsize
    for n in shape:
        num_bytes *= n
    if array.nbytes != num_bytes:  # the package reads them by address
        raise ValueError(f"tensors: expected {num_bytes} bytes of {name}, got {array.nbytes}")
    return np.ascontiguousarray(array)


def _mapped(path: Path, name: str, entry: Any, mapped: mmap.mmap, start: int) -> Tensor:
    """Return a tensor of a file as part of its mapping."""
    format = _TAGS.get(entry["dtype"])
    if format is None:
        raise ValueError(
            f"path: expected tensors of {', '.join(_TAGS)}, got {entry['dtype']} for {name} "
            f"in {path}"
        )
    first, last = entry["data_offsets"]
    dtype, shape = dtypes.numpy_dtype(format), tuple(entry["shape"])
    bits = np.frombuffer(mapped, np.uint8, last - first, start + first)
    return format, shape, bits.view(dtype).reshape(shape)


def _system_error(error: Exception, path: Path) -> Exception:
    """Return the OSError that the package wraps in an error of its own, if it is one."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is None:
        return error
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path))
