"""Ask the driver what its documentation leaves open, each question in a separate process.

A question that hangs or crashes is answered by that. No answer is right or wrong: a report shows
what kvcupy's assumptions about captures, contexts and blocking calls meet on this machine.

    python -m gpu.driver_facts --json build/driver_facts.json
    python -m gpu.driver_facts --ask "destroy a stream"
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvcupy.cuda_api import (
    ATTRIBUTE_REGISTERED_HOST_POINTERS,
    IN_STREAM_ORDER,
    MEMCPY_DEFAULT,
    CopyAttributes,
    CudaApi,
)

GLOBAL, RELAXED = 0, 2  # modes of a capture
NON_BLOCKING = 1
LIMIT_S = 20.0
HELD_S = 3.0  # how long a stream waits while another call is timed: longer than to compile
BYTES = 1 << 20

_KERNEL = 'extern "C" __global__ void note(int* p) { *p = 1; }'


def status_of(api: Any, call: Callable[[], object]) -> str:
    """Return "works", or the error that a call of the runtime or the driver gives."""
    try:
        status = call()
    except (*api.errors, RuntimeError) as error:
        return str(error).partition(":")[0]
    return f"status {status}" if isinstance(status, int) and status else "works"


def in_capture(api: Any, prepare: Callable[[Any], Callable[[], object]], relaxed: bool) -> str:
    """Return what a call gives while a stream is captured in the global mode, and what becomes of
    the capture."""
    runtime = api.runtime
    call = prepare(runtime)
    captured = runtime.streamCreateWithFlags(NON_BLOCKING)
    runtime.streamBeginCapture(captured, GLOBAL)
    if relaxed:
        with api.relaxed():
            answer = status_of(api, call)
    else:
        answer = status_of(api, call)
    end = status_of(api, lambda: runtime.streamEndCapture(captured) and None)
    return f"{answer}; the capture {'survives' if end == 'works' else f'ends with {end}'}"


def _destroy_stream(runtime: Any) -> Callable[[], object]:
    return partial(runtime.streamDestroy, runtime.streamCreateWithFlags(NON_BLOCKING))


def _destroy_event(runtime: Any) -> Callable[[], object]:
    return partial(runtime.eventDestroy, runtime.eventCreateWithFlags(2))


def _destroy_graph(runtime: Any) -> Callable[[], object]:
    stream = runtime.streamCreateWithFlags(NON_BLOCKING)
    runtime.streamBeginCapture(stream, RELAXED)
    runtime.memsetAsync(runtime.malloc(BYTES), 0, BYTES, stream)
    executable = runtime.graphInstantiate(runtime.streamEndCapture(stream))
    return partial(runtime.graphExecDestroy, executable)


def _free(runtime: Any) -> Callable[[], object]:
    return partial(runtime.free, runtime.malloc(BYTES))


def _free_host(runtime: Any) -> Callable[[], object]:
    return partial(runtime.freeHost, runtime.hostAlloc(BYTES, 0))


def _malloc(runtime: Any) -> Callable[[], object]:
    return lambda: runtime.malloc(BYTES) and None


def _register(runtime: Any) -> Callable[[], object]:
    memory = np.ones(BYTES, np.uint8)
    return lambda: runtime.hostRegister(memory.ctypes.data, memory.nbytes, 0)


CALLS = {
    "destroy a stream": _destroy_stream, "destroy an event": _destroy_event,
    "destroy a graph": _destroy_graph, "cudaFree": _free, "cudaFreeHost": _free_host,
    "cudaMalloc": _malloc, "cudaHostRegister": _register,
}  # fmt: skip


def in_fresh_thread(api: Any, call: Callable[[], object]) -> str:
    """Return what a call gives in a thread that has made no other."""
    api.runtime.malloc(1)  # this thread has a context
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(status_of(api, call)))
    thread.start()
    thread.join()
    return answers[0]


def exchange_mode(api: Any) -> str:
    mode = ctypes.c_int(RELAXED)
    exchange = api.library.cuThreadExchangeStreamCaptureMode
    return in_fresh_thread(api, lambda: exchange(ctypes.byref(mode)))


def memory_operation(api: Any, stream: int) -> str:
    """Return what a stream memory operation gives on a stream."""
    word = api.runtime.hostAlloc(4, 2)
    arguments = ctypes.c_uint64(word), ctypes.c_uint32(7), ctypes.c_uint(0)
    answer = status_of(
        api, lambda: api.library.cuStreamWriteValue32_v2(ctypes.c_void_p(stream), *arguments)
    )
    api.runtime.deviceSynchronize()
    written = ctypes.c_uint32.from_address(word).value == 7
    return f"{answer}, {'written' if written else 'not written'}"


def memory_operation_captured(api: Any) -> str:
    runtime = api.runtime
    word, stream = runtime.hostAlloc(4, 2), runtime.streamCreateWithFlags(NON_BLOCKING)
    runtime.streamBeginCapture(stream, RELAXED)
    answer = status_of(api, lambda: api.library.cuStreamWriteValue32_v2(
        ctypes.c_void_p(stream), ctypes.c_uint64(word), ctypes.c_uint32(7), ctypes.c_uint(0)
    ))  # fmt: skip
    executable = runtime.graphInstantiate(runtime.streamEndCapture(stream))
    runtime.graphLaunch(executable, stream)
    runtime.streamSynchronize(stream)
    written = ctypes.c_uint32.from_address(word).value == 7
    return f"{answer}, {'written' if written else 'not written'} by the replay"


def while_held(api: Any, prepare: Callable[[Any], Callable[[int], object]]) -> str:
    """Return what a call gives while a stream waits for the host, and whether it waits too."""
    runtime = api.runtime
    call = prepare(api)
    stream, word = runtime.streamCreateWithFlags(NON_BLOCKING), runtime.hostAlloc(4, 2)
    ctypes.c_uint32.from_address(word).value = 0
    api.driver.check_status(api.library.cuStreamWaitValue32_v2(
        ctypes.c_void_p(stream), ctypes.c_uint64(word), ctypes.c_uint32(1), ctypes.c_uint(1)
    ))  # fmt: skip

    def open_gate() -> None:
        ctypes.c_uint32.from_address(word).value = 1

    gate = threading.Timer(HELD_S, open_gate)
    gate.start()
    start = time.perf_counter()
    answer = status_of(api, lambda: call(stream))
    seconds = time.perf_counter() - start
    gate.join()
    runtime.streamSynchronize(stream)
    return f"{answer}, {'waits' if seconds > 0.9 * HELD_S else 'does not wait'} ({seconds:.2f} s)"


def _load(api: Any) -> Callable[[int], object]:
    module = api.cupy.RawModule(code=_KERNEL)
    return lambda stream: module.get_function("note") and None


def _copy_batch(api: Any) -> Callable[[int], object]:
    batch = api.memcpy_batch
    if batch is None:
        raise SystemExit("this driver has no batched copy")
    source, target = np.arange(BYTES, dtype=np.uint8), api.runtime.malloc(BYTES)
    attributes = CopyAttributes(src_access_order=IN_STREAM_ORDER)
    starts, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)

    def copy(stream: int) -> int:  # keeps `source`, which the driver may read after the call
        runs = [np.array([n], np.uint64) for n in (target, source.ctypes.data, BYTES)]
        pointers = [run.ctypes.data for run in runs]
        about = ctypes.addressof(attributes), ctypes.addressof(starts), 1, ctypes.addressof(failed)
        return int(batch(*pointers, 1, *about, stream))

    return copy


def _allocate(api: Any) -> Callable[[int], object]:
    return lambda stream: api.runtime.malloc(64 << 20) and None


def _release(api: Any) -> Callable[[int], object]:
    memory = api.runtime.malloc(BYTES)
    return lambda stream: api.runtime.free(memory)


def _allocate_pinned(api: Any) -> Callable[[int], object]:
    return lambda stream: api.runtime.hostAlloc(64 << 20, 0) and None


def _release_pinned(api: Any) -> Callable[[int], object]:
    memory = api.runtime.hostAlloc(BYTES, 0)
    return lambda stream: api.runtime.freeHost(memory)


def _copy_pinned(api: Any) -> Callable[[int], object]:
    target, source = (api.runtime.hostAlloc(BYTES, 0) for _ in range(2))
    return lambda stream: api.runtime.memcpyAsync(target, source, BYTES, MEMCPY_DEFAULT, stream)


def registered_host_pointers(api: Any) -> str:
    value = api.runtime.deviceGetAttribute(ATTRIBUTE_REGISTERED_HOST_POINTERS, 0)
    return "yes" if value else "no"


def questions() -> dict[str, Callable[[Any], str]]:
    """Return the questions: each takes a `CudaApi`, and returns its answer."""
    asked: dict[str, Callable[[Any], str]] = {}
    for name, prepare in CALLS.items():
        asked[f"{name} in a global capture"] = partial(in_capture, prepare=prepare, relaxed=False)
        asked[f"{name} in a global capture, relaxed"] = partial(
            in_capture, prepare=prepare, relaxed=True
        )
    asked["kernels find registered memory at its host address"] = registered_host_pointers
    asked["exchange the capture mode in a thread without a context"] = exchange_mode
    asked["stream memory operation on stream 0"] = partial(memory_operation, stream=0)
    asked["stream memory operation on stream 2"] = partial(memory_operation, stream=2)
    asked["stream memory operation in a capture"] = memory_operation_captured
    asked["load a kernel while a stream waits"] = partial(while_held, prepare=_load)
    asked["batched copy of pageable memory, behind a stream that waits"] = partial(
        while_held, prepare=_copy_batch
    )
    for name, call in {
        "cudaMalloc": _allocate, "cudaFree": _release,
        "cudaHostAlloc": _allocate_pinned, "cudaFreeHost": _release_pinned,
    }.items():  # fmt: skip
        asked[f"{name} while a stream waits"] = partial(while_held, prepare=call)
    asked["copy between pinned memory, behind a stream that waits"] = partial(
        while_held, prepare=_copy_pinned
    )
    return asked


def ask(question: str, limit_s: float = LIMIT_S) -> str:
    """Return the answer to a question, asked in a separate process."""
    command = (sys.executable, "-m", "gpu.driver_facts", "--ask", question)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {limit_s:.0f} s"
    if done.returncode < 0:
        return f"died of {signal.Signals(-done.returncode).name}"
    lines = (done.stdout or done.stderr).strip().splitlines() or ["said nothing"]
    return lines[-1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ask", metavar="QUESTION", choices=questions(), help="one, right here")
    parser.add_argument("--json", type=Path, help="write the answers to this file")
    options = parser.parse_args(argv)
    if options.ask:
        print(questions()[options.ask](CudaApi()), flush=True)
        os._exit(0)  # no destructor after an odd call
    answers = {question: ask(question) for question in questions()}
    for question, answer in answers.items():
        print(f"{question}: {answer}")
    if options.json:
        options.json.write_text(json.dumps(answers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
