"""User-defined kernels, on kvcupy's ABI: one struct as the only argument, on any device."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import devices, faults, observe
from ..arrays import STREAMED_TYPES, ArrayView, note_written, view, wait_for_producers
from ..checks import flag, require_int
from ..devices import nvrtc
from ..devices.protocol import Device, Dim3
from ..kernels import Kernel, Specialisation, own_text, zeroed
from . import checks

_RESERVED = ("grid", "block", "smem_bytes", "stream", "self")
_FAULTS, _OPERATION = "faults", "operation"  # fields that a call fills in itself


def kernel(
    source: str | Path,
    name: str,
    params: Any,
    *,
    writes: Iterable[str],
    struct: str = "Params",
    reports: str | None = None,
    barriers: bool = False,
) -> CustomKernel:
    """Make a kernel of CUDA C++ source, which runs on a GPU and on the host device.

    It may include the headers of `kernels_src/`: `common.cuh` (words, strides, faults),
    `numeric.cuh` (number formats), `kv_operand.cuh`. Nothing is compiled before the first call.

    Parameters
    ----------
    source : the program, or a `pathlib.Path` of its file, which is read now. Files next to it
        cannot be included
    name : of the `__global__` function; of a template with its arguments, "scale<half, 8>". It is
        the operation's name in timelines, metrics and reports of the order checker
    params : NumPy's mirror of the struct that is the function's only argument: a dtype made with
        `align=True`, or a list of (field, type). Its first fields, as many as are `numpy.uint64`,
        are addresses of arrays
    writes : which of those arrays the kernel writes; it may read them too. The others it only reads
    struct : the struct's name in the source
    reports : the array of indices that the kernel checks. A field `operation` (int64) is then what
        it passes to `report_fault`, so that `check_faults` names kernel and array
    barriers : whether threads of a block synchronise, or exchange values by shuffles

    Returns
    -------
    CustomKernel : called with grid, block and the struct's fields by name

    Raises
    ------
    TypeError, ValueError : an argument does not fit
    OSError : the file cannot be read

    Notes
    -----
    A field `faults` (uint64, among the addresses) is filled with the device's fault record, for
    `report_fault` of `common.cuh`. When the source is compiled, the compiler compares struct and
    mirror: size, and name, offset and kind of each field. What is compiled is kept on disk, under a
    digest of the source and of all of `kernels_src/`.

    Examples
    --------
    >>> double = kernel(
    ...     '''
    ...     #include "common.cuh"
    ...     struct Params {
    ...       const float* source;
    ...       float* target;
    ...       int count;
    ...     };
    ...     __global__ void twice(const __grid_constant__ Params p) {
    ...       const int i = blockIdx.x * blockDim.x + threadIdx.x;
    ...       if (i < p.count) p.target[i] = 2 * p.source[i];
    ...     }
    ...     ''',
    ...     "twice",
    ...     [("source", np.uint64), ("target", np.uint64), ("count", np.int32)],
    ...     writes=["target"],
    ... )
    >>> x, y = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
    >>> double(1, 128, source=x, target=y, count=3)
    >>> y.tolist()
    [0.0, 2.0, 4.0]
    """
    file_name = "source"
    if isinstance(source, Path):
        file_name = re.sub(r'["\\]', "_", source.name)
        source = source.read_text(encoding="utf-8")
    for what, value in (("source", source), ("name", name), ("struct", struct)):
        if not isinstance(value, str) or not value.strip():
            expected = "CUDA C++ or a pathlib.Path" if what == "source" else "a name"
            raise TypeError(f"{what}: expected {expected}, got {value!r}")
    if not re.fullmatch(r"\w+\s*(<.*>)?", name, re.DOTALL):
        raise ValueError(f"name: expected that of a function, as in source, got {name!r}")
    barriers = flag(barriers, "barriers")
    mirror = Kernel(file_name, name, _mirror(params), struct, barriers)
    return CustomKernel(own_text(mirror, source), writes, reports)


def _mirror(params: Any) -> np.dtype[Any]:
    """Return the dtype of a struct; TypeError or ValueError if it is something else."""
    try:
        dtype = np.dtype(params if isinstance(params, np.dtype) else list(params), align=True)
    except (TypeError, ValueError) as error:
        expected = "a NumPy dtype, or a list of (field, type)"
        raise TypeError(f"params: expected {expected}, got {params!r}: {error}") from None
    if not dtype.names or not dtype.isalignedstruct:
        raise ValueError(f"params: expected fields, laid out with align=True, got {dtype}")
    if reserved := [field for field in dtype.names if field in _RESERVED]:
        raise ValueError(f"params: a call has an argument {reserved[0]} of its own, got that field")
    return dtype


class CustomKernel:
    """A user-defined kernel; `kernel` makes it."""

    def __init__(self, mirror: Kernel, writes: Iterable[str], reports: str | None) -> None:
        fields = mirror.params.names or ()
        addresses, self._values = fields[: mirror.num_pointers], fields[mirror.num_pointers :]
        self._kernel, self._specialisation = mirror, Specialisation(mirror, ())
        self._arrays = tuple(field for field in addresses if field != _FAULTS)
        self._reports_faults = _FAULTS in addresses
        if isinstance(writes, str):
            raise TypeError(f"writes: expected names of arrays, got the one string {writes!r}")
        self._writes = frozenset(writes)
        if wrong := sorted(map(str, self._writes - set(self._arrays))):
            known = ", ".join(self._arrays) or "none, for no field is uint64"
            raise ValueError(f"writes: expected arrays of params ({known}), got {wrong[0]}")
        self._operation: int | None = None
        if reports is not None:
            if reports not in self._arrays:
                raise ValueError(f"reports: expected an array of params, got {reports!r}")
            if not self._reports_faults or _OPERATION not in self._values:
                raise ValueError("reports: expected fields faults and operation in params")
            self._operation = faults.operation_id(mirror.name, reports, None)
            self._values = tuple(field for field in self._values if field != _OPERATION)

    def __repr__(self) -> str:
        arguments = [f"{n}{' (written)' if n in self._writes else ''}" for n in self._arrays]
        return f"<kernel {self._kernel.name}: {', '.join([*arguments, *self._values])}>"

    def compile(self, target: Any = None) -> None:
        """Compile the kernel now, or find it compiled.

        Parameters
        ----------
        target : a device or its name, on which it is also loaded; None: the default device. Or an
            architecture, "sm_90", which NVRTC compiles for on any machine

        Raises
        ------
        CompileError : with the compiler's log
        TypeError, ValueError, DeviceError : there is no such device or architecture
        """
        if isinstance(target, str) and target.startswith("sm_"):
            nvrtc.compile_cubin(self._specialisation, target)
        else:
            devices.get(target).load(self._specialisation)

    def __call__(
        self, grid: Any, block: Any, *, smem_bytes: int = 0, stream: Any = None, **fields: Any
    ) -> None:
        """Launch the kernel.

        Parameters
        ----------
        grid : blocks, one to three numbers. With 0 nothing is launched
        block : threads of a block, one to three numbers
        smem_bytes : of dynamic shared memory for each block (`dynamic_shared<T>()`)
        stream : to run on; None: the current one of the library of the first array
        fields : all fields of the struct but `faults`, and `operation` where the kernel `reports`:
            arrays of any library, or None for a null pointer; numbers; for a struct within it a
            mapping

        Raises
        ------
        TypeError, ValueError : a field is missing or does not fit; arrays are on several devices; a
            written one is read-only, or shares bytes with another; nothing was launched
        CompileError : the kernel does not compile, with the compiler's log
        DeviceError : the launch failed

        Notes
        -----
        Whether indices and shapes fit is for the kernel and its caller to see to: it can write past
        an array. Stream: one kernel, in order; the arrays are kept alive until it has run. Capture:
        legal. Bytes: of all arrays, as far as observers are notified.
        """
        self._require_fields(fields)
        views = {n: view(fields[n], n) for n in self._arrays if fields[n] is not None}
        written = self._check(views)
        first = next(iter(views.values()))
        device = devices.get(first.device)
        shape = _dim3(grid, "grid", 0), _dim3(block, "block", 1)
        require_int(smem_bytes, "smem_bytes")
        if smem_bytes < 0:
            raise ValueError(f"smem_bytes: expected at least 0, got {smem_bytes}")
        params = self._packed(fields, views, device)
        launch_stream = device.as_stream(stream, first.library)
        function = device.load(self._specialisation)
        if 0 in shape[0]:
            return
        arrays = tuple(fields[name] for name in views)
        if STREAMED_TYPES:
            wait_for_producers(arrays, launch_stream)

        def announced() -> observe.Operation:
            accesses = {n: observe.Access(v, name=n) for n, v in views.items()}
            reads = tuple([a for n, a in accesses.items() if n not in self._writes])
            writes = tuple([a for n, a in accesses.items() if n in self._writes])
            return observe.Operation(self._kernel.name, launch_stream, reads, writes)

        observe.issue(
            announced,
            lambda: device.launch(function, *shape, smem_bytes, params, launch_stream, arrays),
        )
        note_written([fields[name] for name, _ in written])

    def _require_fields(self, fields: Mapping[str, Any]) -> None:
        expected = (*self._arrays, *self._values)
        problems = [f"missing {name}" for name in expected if name not in fields]
        problems += [f"no field {name}" for name in fields if name not in expected]
        if problems:
            raise TypeError(
                f"{self._kernel.name}: expected {', '.join(expected)}, got {'; '.join(problems)}"
            )

    def _check(self, views: Mapping[str, ArrayView]) -> list[tuple[str, ArrayView]]:
        """Check the arrays of a call, and return those that are written."""
        if not views:
            raise TypeError(f"{self._arrays[0] if self._arrays else 'params'}: expected an array")
        checks.require_same_device(views)
        checks.require_aligned(list(views.items()))
        written = [(name, v) for name, v in views.items() if name in self._writes]
        for name, v in written:
            checks.require_output(v, name)
        checks.require_disjoint(written, [each for each in views.items() if each not in written])
        return written

    def _packed(
        self, fields: Mapping[str, Any], views: Mapping[str, ArrayView], device: Device
    ) -> bytes:
        record = zeroed(self._kernel.params)
        for name, v in views.items():
            record[name] = v.pointer
        if self._reports_faults:
            record[_FAULTS] = device.fault_pointer
        if self._operation is not None:
            record[_OPERATION] = self._operation
        for name in self._values:
            _assign(record, name, fields[name], name)
        return record.tobytes()


def _assign(record: Any, name: str, value: Any, label: str) -> None:
    """Set a field of a record, which may be a struct; raise where it cannot hold the value."""
    dtype = record.dtype[name]
    if dtype.names:
        if not isinstance(value, Mapping) or value.keys() != set(dtype.names):
            expected = f"a mapping of {', '.join(dtype.names)}"
            raise TypeError(f"{label}: expected {expected}, got {value!r}")
        for inner in dtype.names:
            _assign(record[name], inner, value[inner], f"{label}.{inner}")
        return
    is_integer = dtype.base.kind in "iu"
    try:
        if not dtype.shape:
            value = operator.index(value) if is_integer else float(value)
        elif is_integer and np.asarray(value).dtype.kind not in "biuO":
            raise TypeError
    except (TypeError, ValueError, OverflowError):
        expected = "an integer" if is_integer else "a number"
        plural = "integers" if dtype.shape else expected
        raise TypeError(f"{label}: expected {plural}, got {value!r}") from None
    try:
        if is_integer:  # NumPy would wrap what is too large
            limits, numbers = np.iinfo(dtype.base), np.asarray(value)
            if numbers.size and not limits.min <= numbers.min() <= numbers.max() <= limits.max:
                raise OverflowError
        record[name] = value
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{label}: expected what fits {dtype}, got {value!r}") from error


def _dim3(value: Any, name: str, least: int) -> Dim3:
    """Return one to three numbers as three; raise if they are none."""
    numbers = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for n in numbers:
        require_int(n, name)
    if not 1 <= len(numbers) <= 3 or any(n < least for n in numbers):
        raise ValueError(f"{name}: expected one to three numbers from {least} up, got {value!r}")
    x, y, z = (*map(int, numbers), 1, 1)[:3]
    return x, y, z
