"""libcuda.so.1, as far as kvcupy calls it itself through ctypes."""

from __future__ import annotations

import ctypes

from kvcupy.cuda_api import BATCH_TYPE

from .statuses import IMPLICIT, NOT_SUPPORTED, UNSUPPORTED, CudaError

_NONE, _ACTIVE, _INVALIDATED = 0, 1, 2


class BatchDriver:
    """libcuda.so.1 as far as batched copies go, none of which it makes: `LibCuda` does. The
    function that it gives out is called through C.

    `calls` has every call: (dst, src, sizes), the attributes as the header lays them out, the
    indices from which they hold, and the stream.
    """

    def __init__(self, found=0):
        self.asked = []
        self.calls = []
        self.status, self.fail_index = 0, None
        self._found = found
        self._entry = BATCH_TYPE(self._copy)

    def cuGetProcAddress_v2(self, name, address, version, flags, found):
        self.asked.append((name, version, flags.value))
        found._obj.value = self._found
        if self._found != 1:  # there, though perhaps not for the version that was asked for
            address._obj.value = ctypes.cast(self._entry, ctypes.c_void_p).value
        return 0

    def _copy(self, dst, src, sizes, count, attributes, starts, num_attributes, failed, stream):
        numbers = (ctypes.c_uint64 * count).from_address
        runs = tuple(list(numbers(address)) for address in (dst, src, sizes))
        fields = list((ctypes.c_int32 * (6 * num_attributes)).from_address(attributes))
        where = list((ctypes.c_size_t * num_attributes).from_address(starts))
        self.calls.append((runs, fields, where, stream))
        if self.fail_index is not None:
            ctypes.c_size_t.from_address(failed).value = self.fail_index
        return self.status or self._put_copies(list(zip(*runs, strict=True)), stream)

    def _put_copies(self, runs, stream):
        return NOT_SUPPORTED  # C would take an exception for success


class LibCuda(BatchDriver):
    """libcuda.so.1. Called through ctypes, so none of its functions keeps the interpreter's lock.

    They take what ctypes passes: handles as ints, out parameters by reference.
    """

    def __init__(self, machine, runtime):
        super().__init__()
        self._machine, self._runtime = machine, runtime
        self.memory_operations = 0  # the status of what they answer

    def cuThreadExchangeStreamCaptureMode(self, mode):
        def exchange():
            mode._obj.value = self._machine.exchange_mode(mode._obj.value)

        return self._answer(exchange)

    def cuStreamGetCaptureInfo_v2(self, stream, status, id, graph, dependencies, count):
        def ask():
            where = self._machine.stream(_value(stream))
            if self._machine.implicit_captures(where):
                return IMPLICIT
            capture = self._machine.capturing.get(where)
            if capture is None:
                status._obj.value = _NONE
            elif capture.invalidated:
                status._obj.value = _INVALIDATED
            else:
                status._obj.value = _ACTIVE
                id._obj.value = capture.id
            return 0

        return self._answer(ask)

    def cuLaunchHostFunc(self, stream, function, argument):
        """Call a function of C's, which takes an address."""
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value)

        def call():
            self._machine.call_host(lambda: function(argument.value), needs_gil=False)

        return self._put(stream, call)

    def cuStreamWriteValue32_v2(self, stream, address, value, flags):
        assert flags.value == 0
        word = self._word(address)
        return self._put(stream, lambda: setattr(word, "value", value.value))

    def cuStreamWaitValue32_v2(self, stream, address, value, flags):
        """The GPU looks at a word until it is equal to `value` (flags 1)."""
        assert flags.value == 1
        word = self._word(address)
        return self._put(stream, lambda: None, lambda: word.value == value.value)

    def _put_copies(self, runs, stream):
        def put():
            where = self._machine.stream(stream or 0)
            if self._machine.is_legacy(where) or where in self._machine.capturing:
                return UNSUPPORTED
            return self._runtime._put_copies(stream, runs)

        return self._answer(put)

    def _word(self, address):
        assert self._runtime._is_pinned(address.value), "a word that the GPU cannot reach"
        return ctypes.c_uint32.from_address(address.value)

    def _put(self, stream, function, is_ready=None):
        def put():
            self._machine.submit(self._machine.stream(_value(stream)), function, (), is_ready)
            return self._runtime.fault or self.memory_operations

        return self._answer(put)

    def _answer(self, ask):
        try:
            self._machine.enter_driver()
            return ask() or 0
        except CudaError as error:
            return error.status


def _value(handle):
    return handle if isinstance(handle, int) else handle.value or 0
