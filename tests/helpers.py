"""Call operations of kvcupy with arguments of `kvcupy.testing`, and compare what they left.

A `Case` holds every buffer of one test, between canaries and beside its NumPy mirror
(`kvcupy.testing.Arguments`), and checks the fault record too.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redzones

import kvcupy as kv
from kvcupy import devices, reference, sources, testing
from kvcupy.devices import nvrtc
from kvcupy.devices.host import HostDevice
from kvcupy.errors import CompileError
from kvcupy.ops.by_reference import FAULTS
from kvcupy.ops.spec import OPERATIONS
from kvcupy.testing.arrays import (  # noqa: F401  passed on to the tests
    ALIGNMENT,
    DTYPE,
    GUARD_BYTES,
    INDEX_DTYPE,
    POISON_SLOT,
    UNSIGNED,
    Cut,
    address,
    all_patterns,
    compare,
    from_values,
    random_elements,
    random_finite,
    rounding_boundaries,
    typed_view,
)
from kvcupy.testing.arrays import Argument as Arg

FORMATS = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8")
QUANTISED = ("fp8_e4m3", "fp8_e5m2", "int8")
LAYOUTS = ("NHD", "HND")

full = False
"""Whether ``pytest --full`` runs; conftest.py says so before tests are imported."""


def compile_for_gpu(program: str, arch: str = "sm_90") -> None:
    """Compile CUDA text, which may include files of `kernels_src/`, and discard the result."""
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")
    from cupy_backends.cuda.libs import nvrtc as binding

    folders = [sources.kernels_dir(), *sources.cuda_include_dirs(nvrtc.nvrtc_version()[0])]
    handle = binding.createProgram(program, "program.cu", (), ())
    try:
        options = (*nvrtc.OPTIONS, f"-arch={arch}", *(f"-I{folder}" for folder in folders))
        binding.compileProgram(handle, options)
    except binding.NVRTCError as error:
        raise CompileError("NVRTC", binding.getProgramLog(handle)) from error
    finally:
        binding.destroyProgram(handle)


def name_values(values: dict[str, Any]) -> str:
    """Return the id of a test whose parameter is a dict: arrays by shape, and lists by length."""
    texts = []
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            text = f"{value.dtype}{list(value.shape)}"
        elif isinstance(value, list):
            text = f"[{len(value)}]"
        else:
            text = getattr(value, "__name__", str(value))
        texts.append(f"{name}={text}")
    return ", ".join(texts) or "defaults"


def full_only(*values: Any, id: str | None = None) -> Any:
    """Return a case of `pytest.mark.parametrize` that only ``--full`` runs."""
    return pytest.param(*values, marks=pytest.mark.full, id=id)


def examples(count: int) -> int:
    """How many examples of a property to draw: `count` with ``--full``, a quarter without."""
    return count if full else count // 4


def cache_shape(layout: str, pages: int, size: int, heads: int, width: int) -> tuple[int, ...]:
    """The base shape of a cache: paged in either layout, by slots, or of two dimensions."""
    return {
        "NHD": (pages, size, heads, width),
        "HND": (pages, heads, size, width),
        "slots": (pages * size, heads, width),
        "2-D": (pages * size, width),
    }[layout]


# Device code of a test's own -----------------------------------------------------------------


class KernelSources:
    """A copy of ``kernels_src``; the fixture `kernel_sources` makes one.

    A loaded kernel stays loaded, so what is changed here is seen by the devices made afterwards.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self._monkeypatch = folder, monkeypatch

    def add(self, name: str) -> None:
        """Add a file of ``tests/kernels``."""
        shutil.copy(Path(__file__).parent / "kernels" / name, self.folder / name)

    def replace(self, name: str, old: str, new: str, count: int = 1) -> None:
        """Replace text that must occur exactly `count` times, with whatever white space."""
        path = self.folder / name
        pattern = r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", old)))
        text, found = re.subn(pattern, lambda _: new, path.read_text())
        assert found == count, f"{name} has {found} of {old!r}, not {count}"
        path.write_text(text)

    def device(self, *flags: str) -> Any:
        """Make a host device, and let the operations of kvcupy use it until the test ends.

        It lays kernels out as on a GPU, and a kernel that does not compile is an error. What runs
        once is not worth the time of optimising it: give the compiler "-O0".
        """
        from kvcupy import devices
        from kvcupy.config import config
        from kvcupy.devices.host import HostDevice
        from kvcupy.ops import call as op_call

        device = HostDevice()
        device.warp_lanes, device.extra_flags = 32, flags
        self._monkeypatch.setitem(devices._devices, "host", device)
        self._monkeypatch.setattr(op_call, "_plans", {})
        self._monkeypatch.setattr(config, "_fallback", "error")
        return device


# Placing on a device -------------------------------------------------------------------------


def to_device(device: Any, array: np.ndarray, cut: Cut | None = None) -> Any:
    """Upload a whole base array, and `cut` the wanted view from it there.

    `cut` uses only what NumPy and CuPy arrays have in common (indexing, reshape, transpose and
    `np.broadcast_to`), so that the strides on the device are those that NumPy would have. A format
    that the device's array library has no dtype for travels as bytes, tagged with `kv.view_as`.
    """
    fmt = reference.FORMAT_OF_DTYPE.get(array.dtype.name, "")
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
    uploaded = device.asarray(flat)
    return typed_view(
        device,
        uploaded,
        array.dtype,
        fmt,
        lambda a: (cut or (lambda whole: whole))(a.reshape(array.shape)),
    )


def as_numpy(device, array, fmt):
    """An output as a NumPy array of the format's own dtype, whatever carries it."""
    if isinstance(array, kv.ArrayView):
        array = device.carrier(array)
    got = np.ascontiguousarray(device.to_numpy(array))
    assert got.dtype.itemsize == DTYPE[fmt].itemsize
    return got.view(DTYPE[fmt])


def repeat_rows(array: Any, count: int) -> Any:
    """View axis 0, of length one, as `count` writable rows at stride zero."""
    if isinstance(array, np.ndarray):
        strides = (0, *array.strides[1:])
        return np.lib.stride_tricks.as_strided(array, (count, *array.shape[1:]), strides)
    return np.broadcast_to(array, (count, *array.shape[1:]))


class Buffer(testing.Buffer):
    """A buffer whose canaries are redzones under sanitizers."""

    def opened(self) -> AbstractContextManager[None]:
        inside = self.start, self.stop
        return redzones.opened(address(self.raw), self.want.size, but=inside)


CONVERTED = {
    "store_kv": (("key", "k_cache"), ("value", "v_cache")),
    "store_mla": (("latent", "cache"), ("rope_key", "cache")),
    "gather_kv": (("k_cache", "k_out"), ("v_cache", "v_out")),
}  # fmt: skip
"""By operation, what is written from what: where formats differ, a NaN is any NaN."""


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def mirrored(value: Any) -> Any:
    """Return an argument as the reference gets it."""
    if isinstance(value, tuple):
        return tuple(map(mirrored, value))
    return value.view if isinstance(value, Arg) else value


class Case(testing.Arguments):
    """The buffers of one test, with calls of kvcupy's operations that check everything."""

    buffer_type = Buffer

    def to_pass(self, value: Any) -> Any:
        """Return an argument as the operation gets it: NumPy arrays on the device."""
        if isinstance(value, tuple):
            return tuple(map(self.to_pass, value))
        if isinstance(value, Arg):
            return value.array
        return self.device.asarray(value) if isinstance(value, np.ndarray) else value

    # Calls

    def bits(
        self, shape: tuple[int, ...], dtype: Any = np.uint8, cut: Cut | None = None, *,
        misalign: int = 0, name: str = "bits",
    ) -> Arg:  # fmt: skip
        """Place an array of any dtype and any bits."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape)) * dtype.itemsize
        content = self.rng.integers(0, 256, count, dtype=np.uint8).view(dtype).reshape(shape)
        return self.place(content, "", cut, misalign=misalign, name=name)

    def call(self, operation: str, *args: Any, stream: Any = None, **options: Any) -> None:
        """Run an operation and its reference, then compare everything.

        Arguments are placed arrays or tuples of them; indices, which may be lists; and options.
        """
        declaration = OPERATIONS[operation]
        call = dict(zip(declaration.parameters, args, strict=False)) | options
        for name, value in call.items():
            argument = declaration.public_arguments.get(name)
            indices = argument is not None and argument.example is not None
            if indices and not isinstance(value, Arg | int) and value is not None:
                call[name] = self.slots(value, name=name)
        for source, target in CONVERTED.get(operation, ()):
            if call.get(target) is not None:
                call[target].buffer.exact &= call[source].fmt == call[target].fmt
        if stream is not None:  # The uploads above went to the current stream.
            self.device.synchronize()
        getattr(kv, operation)(
            **{name: self.to_pass(value) for name, value in call.items()}, stream=stream
        )
        self.device.synchronize()
        faults = getattr(reference, operation)(**{n: mirrored(x) for n, x in call.items()})
        by_name = dict(zip(FAULTS[operation], as_tuple(faults), strict=True))
        arrays = sum(len(x) for x in call.values() if isinstance(x, tuple))
        check_faults(self.device, operation, by_name, repeats=max(2, arrays))
        self.check_buffers()

    def store_kv(
        self, key: Arg, value: Arg, k_cache: Arg, v_cache: Arg, slots: Any, **options: Any
    ) -> None:
        """Check one `kv.store_kv`; `slots` is a placed index array or a list."""
        self.call("store_kv", key, value, k_cache, v_cache, slots, **options)

    def scale_caches(self, num_slots: int, heads: int = 2) -> dict[str, Arg]:
        """Place caches of dynamic scales, each in the middle of a buffer: options of a store."""
        return {
            name: self.output(
                "fp32", (3 * num_slots, heads), lambda a: a[num_slots : 2 * num_slots], name=name
            )
            for name in ("k_scale_cache", "v_scale_cache")
        }

    # Checks

    def check(self, operation: str, faults: list[tuple[int, int]]) -> None:
        """Compare the fault record and every buffer with what they should be."""
        slots = "slots" if operation.startswith("gather") else "slot_mapping"
        check_faults(self.device, operation, {slots: faults})
        self.check_buffers()


def poisoned_table(rng: Any, lengths: Any, page_size: int, *, spare: int = 2) -> np.ndarray:
    """Distinct pages for each sequence, and poison past its last one."""
    used = [-(-int(n) // page_size) for n in lengths]
    pages = rng.permutation(sum(used) + 3)
    table = np.full((len(used), max(used, default=0) + spare), POISON_SLOT, np.int64)
    for row, count in zip(table, used, strict=True):
        row[:count], pages = pages[:count], pages[count:]
    return table


def names_number(text: str, number: int) -> bool:
    """Whether `text` holds `number` as a whole number."""
    return re.search(rf"(?<![\d.]){number}(?![\d]|\.\d)", text) is not None


def check_faults(
    device: Any, operation: str, faults: dict[str, Any], *, repeats: int | None = None
) -> None:
    """Assert that the device recorded faults exactly if `operation` made some, and clear them.

    Parameters
    ----------
    faults : (place, value) by argument, of which the message must name one
    repeats : how often each place may be counted, at most; None: the count is not looked at
    """
    named = [(name, *fault) for name, own in faults.items() for fault in own]
    if named:
        with pytest.raises(kv.IndexFault) as caught:
            kv.check_faults(device)
        text = str(caught.value)
        texts = [
            f"{operation}: {name}[{place}]: expected {caught.value.bound}, got {value};"
            for name, place, value in named
        ]
        assert any(text.startswith(each) for each in texts), f"none of {texts[:5]} in {text!r}"
        assert caught.value.bound
        if repeats is not None:
            more = re.search(r"(\d+) more", text)
            count, places = 1 + int(more[1] if more else 0), len({place for _, place, _ in named})
            assert places <= count <= places * repeats, text
    kv.check_faults(device)


def refused(case: Case, call: Callable[[], Any], error: Any, name: str) -> None:
    """Assert that `call` raises `error`, names the argument, and changed nothing."""
    with pytest.raises(error) as caught:
        call()
    assert re.search(rf"\b({name})\b", str(caught.value)), f"{name} not in {caught.value}"
    case.check("", [])


def again(module, *only):
    """The tests of a module, or only some, under names that say whose they are."""
    subject = module.__name__.removeprefix("test_")
    names = only or [name for name in vars(module) if name.startswith("test_")]
    found = {f"test_{subject}_{name.removeprefix('test_')}": vars(module)[name] for name in names}
    return {name: one for name, one in found.items() if not name.endswith("_on_a_gpu")}


def demoting(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a `PagedKVCache`, in which `past` and similar ones are one demotion."""
    names = ("past", "recent", "sinks", "num_demoted_pages", "hadamard", "scale_rule")
    given = {name: options[name] for name in names if name in options}
    options = {name: value for name, value in options.items() if name not in given}
    past = given.pop("past", None)
    if past is not None:
        encoding = kv.Encoding(
            past, hadamard=given.get("hadamard", False),
            scale_rule=given.get("scale_rule", "absmax"),
        )  # fmt: skip
        options["demotion"] = kv.Demotion(
            encoding, recent=given["recent"], first=given.get("sinks", 0),
            num_pages=given.get("num_demoted_pages"),
        )  # fmt: skip
    return options


def fresh_host(monkeypatch, cache_dir) -> HostDevice:
    """Put a host device in place that has compiled nothing, and whose operations ask it again."""
    host = HostDevice()
    monkeypatch.setitem(devices._devices, "host", host)
    for name, module in list(sys.modules.items()):
        if name.startswith("kvcupy.ops.") and hasattr(module, "_plans"):
            monkeypatch.setattr(module, "_plans", {})
    monkeypatch.setattr(kv.config, "_warned", set())
    monkeypatch.setattr(kv.config, "fallback", "warn")
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(cache_dir))
    return host
