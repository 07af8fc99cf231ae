"""The targets of the fuzzer: operations as declared, other functions, methods of live objects.

A valid call of an operation is one of its conformance cases, or made from its declaration. A method
gets its arguments by the names of its parameters, from what fits the object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import valid_calls
from paged_cases import pages_of_pool

import kvcupy as kv
from kvcupy import testing
from kvcupy.ops.spec import OPERATIONS

from .attempts import Case, Finding
from .audit import Broken, Part, audit, audit_blocks

Array = np.ndarray[Any, Any]
Arguments = dict[str, Any]

# --- Operations -----------------------------------------------------------------------------------


def operation(case: Case, name: str) -> None:
    """Call an operation, twice now and then, so that a kept plan is used."""
    function = getattr(kv, name)
    arguments, valid = valid_arguments(case, name)
    changed, broken = case.break_some(arguments, function, case.rng.choice([0, 1, 1, 1, 2, 2, 3]))
    case.say(f"  wrong: {', '.join(broken) or 'nothing'}")
    valid = valid and not broken
    for _ in range(1 + case.chance(0.2)):
        result = case.attempt(
            function, changed, valid=valid, writes=lambda: written(name, changed)
        )  # fmt: skip
        if valid and isinstance(result, Exception):
            raise Finding(f"{name}: a valid call recorded a fault: {result}")


def valid_arguments(case: Case, name: str) -> tuple[Arguments, bool]:
    """Return arguments in guarded memory, and whether none of their indices is past the end."""
    cases = testing.cases([name]) if name in testing.OPERATIONS else []
    if not cases or case.chance(0.2):
        arguments = valid_calls.example(OPERATIONS[name], case.device)
        is_array = {n: isinstance(value, np.ndarray) for n, value in arguments.items()}
        return {n: case.place(v) if is_array[n] else v for n, v in arguments.items()}, True
    chosen = case.rng.choice(cases)

    def array_of(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(array_of, value))
        return getattr(value, "array", value)

    call = chosen.build(testing.Arguments(case.arena, case.rng.randrange(2**31)))
    arguments = {n: array_of(v) for n, v in call.arguments.items()}
    if case.chance(0.3):
        arguments["stream"] = case.device.stream()
    return arguments, chosen.name != "past the end"


def parts_of(value: Any) -> list[Array]:
    """Return the bytes of an argument that are on the host, of four-bit rows as codes and scales,
    of several arrays together."""
    if isinstance(value, (tuple, list)):
        return [part for each in value for part in parts_of(each)]
    try:
        v = kv.arrays.view(value, "argument")
        return [
            kv.arrays.array_at(
                part.owner, part.pointer, part.shape, np.dtype((np.void, part.itemsize)),
                part.strides,
            )
            for part in ((v,) if v.scales is None else (v.codes, v.scales)) if v.device == "host"
        ]  # fmt: skip
    except (TypeError, ValueError, kv.KvcupyError):
        return []


def written(name: str, arguments: Arguments) -> list[Array]:
    """Return the arguments that an operation may write; `tests/ops` compare which rows of them."""
    return parts_of([arguments.get(key) for key in OPERATIONS[name].written(arguments)])


# --- Other functions, and classes -----------------------------------------------------------------

_SHAPE: Arguments = {"page_size": 2, "num_layers": 2, "num_kv_heads": 2, "head_dim": 4}
_GROUP: Arguments = {"layers": [0], "num_kv_heads": 2, "head_dim": 8, "dtype": "fp32"}


def new_pool(num_pages: int = 6, **changes: Any) -> Any:
    return kv.KVPool(num_pages, **{**_SHAPE, "dtype": "fp16", "device": "host", **changes})


def host_pool(num_pages: int = 8, **changes: Any) -> Any:
    return new_pool(num_pages, layout="page_first", placement="pinned", **changes)


def pool_bytes(*pools: Any) -> list[list[int]]:
    return [[hash(part.tobytes()) for part in pages_of_pool(pool)] for pool in pools]


def rope_scaling(case: Case) -> dict[str, Any]:
    scaling: dict[str, Any] = case.rng.choice([
        {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default"},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
         "max_position_embeddings": 16, "original_max_position_embeddings": 8},
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    ])  # fmt: skip
    wrong = case.rng.choice([None, -1, 0, "x", [], float("nan"), 1e308, 10**400, True])
    name = case.rng.choice([*scaling, "attention_factor", "beta_fast", "mscale", "x"])
    return scaling | {name: wrong} if case.chance(0.5) else scaling


def _program(device: Any) -> Any:
    stream, array = device.stream(), device.zeros((2,), "fp32")
    stream.call(lambda: array.fill(1))
    stream.synchronize()
    return array


VALID: dict[str, Callable[[Case], Arguments]] = {
    "rope_table": lambda case: {
        "max_positions": 16, "rotary_dim": 8, "scaling": rope_scaling(case), "device": case.device,
    },
    "transfer_pages": lambda case: {
        "src_pool": new_pool(), "dst_pool": host_pool(),
        "src_pages": case.place(np.array([0, 3, -1])), "dst_pages": [4, 1, 2],
        "method": case.rng.choice(["auto", "kernel", "copy", "staged"]),
    },
    "block_hashes": lambda case: {
        "token_ids": [1, 2, 3, 4, 5], "block_tokens": 2, "parent": 7,
        "bits": case.rng.choice([64, 128]),
    },
    "view_as": lambda case: {
        "array": case.place(np.zeros((3, 9 * 17 * 32), np.uint8)),
        "dtype": case.rng.choice(["int8", "nvfp4", "mxfp4", "int4+hadamard"]),
    },
    "Encoding": lambda case: {"format": "nvfp4", "hadamard": True, "scale_rule": "four_over_six"},
    "Demotion": lambda case: {"encoding": "nvfp4", "recent": 6, "first": 2, "num_pages": 8},
    "device": lambda case: {"name": "host"},
    "check_faults": lambda case: {"device": "host"},
    "keep_alive": lambda case: {
        "arrays": [case.place(np.zeros(4, np.float32))], "stream": case.device.stream(),
    },
    "explore": lambda case: {"program": _program, "schedules": 3, "seed": 1},
    "KVPool": lambda case: {
        "num_pages": 5, **_SHAPE, "dtype": "int8", "scales": True, "device": case.device,
        "layout": case.rng.choice(["layer_first", "page_first", "page_first_direct", "page_head"]),
        "placement": case.rng.choice(["device", "pinned", "pageable"]),
    },
    "MLAPool": lambda case: {
        "num_pages": 5, "page_size": 2, "num_layers": 2, "latent_dim": 8, "dtype": "bf16",
        "device": case.device,
    },
    "PageAllocator": lambda case: {"num_pages": 6},
    "TransferEngine": lambda case: {"device_pool": new_pool(), "host_pool": host_pool()},
    "TieredCache": lambda case: {
        "device_pool": new_pool(), "host_pool": host_pool(),
        "write": case.rng.choice(["through", "back"]),
    },
    "FullAttention": lambda case: dict(_GROUP),
    "SlidingWindow": lambda case: {**_GROUP, "window": 5, "sink_tokens": 1},
    "Latent": lambda case: {"layers": [2], "latent_dim": 8, "rope_dim": 4, "dtype": "fp32"},
    "Recurrent": lambda case: {
        "layers": [4], "state": {"ssm": ((2, 3), "fp32")}, "checkpoint_tokens": 4,
    },
    "PagedKVCache": lambda case: {
        "num_q_heads": 4, "page_size": 4, "device": case.device, "max_batch_tokens": 64,
        **case.rng.choice([
            {"num_layers": 2, "num_pages": 10, "num_kv_heads": 2, "head_dim": 16,
             "dtype": case.rng.choice(["fp32", "int8", "nvfp4", "nvfp4+hadamard+four_over_six"])},
            {"num_layers": 2, "num_pages": 10, "latent_dim": 8, "rope_dim": 4, "dtype": "fp32"},
            {"num_layers": 2, "num_pages": 10, "num_kv_heads": 2, "head_dim": 16, "dtype": "fp32",
             "demotion": kv.Demotion("nvfp4", recent=4, first=2, num_pages=8)},
            {"memory_bytes": 1 << 16, "num_tokens": 64, "groups": [
                kv.FullAttention(**_GROUP),
                kv.Recurrent(layers=[1], state={"ssm": ((2, 3), "fp32")}, checkpoint_tokens=4),
            ]},
        ]),
    },
}  # fmt: skip
"""By name, arguments of a call that is valid; of `rope_table`, one whose scaling may not be."""

_NAMED: dict[str, tuple[str, ...]] = {
    "Encoding": ("format",), "device": ("device",), "TieredCache": ("host_bytes",),
    "PagedKVCache": ("hadamard", "num_kv_heads", "head_dim", "layers"),
}  # fmt: skip
"""What errors name instead of a parameter."""


def function(case: Case, name: str) -> Any:
    """Call a function, or make an object; return the result or the exception."""
    arguments, called = VALID[name](case), getattr(kv, name)
    changed, broken = case.break_some(arguments, called, case.rng.choice([0, 1, 1, 1, 2]))
    pool = changed.get("dst_pool")
    parts = pool.parts if isinstance(pool, (kv.KVPool, kv.MLAPool)) else ()
    result = case.attempt(
        called, changed, valid=not broken and name != "rope_table", names=_NAMED.get(name, ()),
        label=name, writes=lambda: parts_of(parts),
    )  # fmt: skip
    if not isinstance(result, Exception):
        repr(result)
    return result


# --- Methods of live objects ----------------------------------------------------------------------

Values = Mapping[str, Callable[[], Any]]
"""By the name of a parameter, what makes a value of it that may fit."""


class Live:
    """An object whose methods are called in any order.

    Attributes
    ----------
    target, values : the object, and what fits its methods
    names : what errors name besides parameters
    """

    names: tuple[str, ...] = ("pages", "hashes", "sequence", "tokens", "k", "v")
    target: Any
    values: Values

    def __init__(self, case: Case) -> None:
        self.case = case

    def state(self) -> Any:
        """Return what a call that raises may not change."""

    def check(self, name: str, arguments: Arguments, result: Any) -> None:
        """Check what must hold after each call."""

    def close(self) -> None:
        """End everything; nothing may be left."""


class LivePages(Live):
    """An allocator, some of whose pages are allocated."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.target = kv.PageAllocator(6)
        self.values = {"n": lambda: case.rng.randrange(4), "pages": self._some}

    def _some(self) -> list[int]:
        held = self.target.allocated().tolist()
        return case_sample(self.case, held, len(held))

    def state(self) -> Any:
        return self.target.num_free, self.target.allocated().tolist()

    def close(self) -> None:
        self.target.free(self.target.allocated().tolist())
        if sorted(self.target.alloc(6).tolist()) != list(range(6)):
            raise AssertionError("PageAllocator: pages are lost")


def case_sample(case: Case, items: Any, most: int) -> list[Any]:
    return case.rng.sample(list(items), case.rng.randrange(most + 1))


class LivePool(Live):
    """A pool of either kind, and its layers."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.target = case.rng.choice([
            new_pool(dtype="int8", scales=True), host_pool(),
            kv.MLAPool(5, 2, 2, 8, dtype="bf16", device="host"),
        ])  # fmt: skip
        self.values = {"layer": lambda: 1, "layers": lambda: [0]}

    def state(self) -> Any:
        return pool_bytes(self.target)


class LiveEngine(Live):
    """An engine between two pools, whose transfers are waited for."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.pools = new_pool(), host_pool()
        self.target = kv.TransferEngine(*self.pools)
        self.values = {
            "device_pages": lambda: case.rng.sample(range(6), 2),
            "host_pages": lambda: case.rng.sample(range(8), 2), "after": case.device.stream,
        }  # fmt: skip

    names = ("pages", "src_pages", "dst_pages")

    def state(self) -> Any:
        self.target._send()
        self.case.settle()
        return pool_bytes(*self.pools)

    def check(self, name: str, arguments: Arguments, result: Any) -> None:
        if isinstance(result, kv.Transfer):
            layer = {"layer": self.case.rng.choice([0, 1, 2, -1, "x"])}
            self.case.attempt(
                result.wait_layer, layer, owner=kv.Transfer, described=kv.Transfer.wait_layer
            )
            result.synchronize()
            if not result.done():
                raise AssertionError("Transfer: not done after synchronize")


class LiveTiers(Live):
    """A tiered cache, its leases and its held blocks."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        shape: Arguments = case.rng.choice([
            {}, {"dtype": "nvfp4", "head_dim": 16}, {"dtype": "int8", "scales": True},
        ])  # fmt: skip
        self.pools = self.device, self.host = new_pool(5, **shape), host_pool(4, **shape)
        self.target = kv.TieredCache(*self.pools, write=case.rng.choice(["through", "back"]))
        self.leases: list[Any] = []
        self.values = {
            "hashes": lambda: case_sample(case, range(1, 9), 3), "pages": self._pages,
            "n": lambda: case.rng.randrange(3), "num_blocks": lambda: case.rng.randrange(3),
            "deadline_s": lambda: 5.0, "priority": lambda: case.rng.randint(-1, 1),
            "ttl_s": lambda: case.rng.choice([None, 0.0, 5.0]),
        }  # fmt: skip

    def _pages(self) -> Any:
        free = self.device.allocator.num_free
        return self.device.allocator.alloc(min(free, self.case.rng.randrange(4)))

    def state(self) -> Any:
        self.case.settle()
        if self.target.closed:
            return None
        counts = {n: v for n, v in self.target.stats().items() if not n.endswith("_s")}
        return counts, [self.target.match([n]) for n in range(1, 9)], self.host.allocator.num_free

    def check(self, name: str, arguments: Arguments, result: Any) -> None:
        if hasattr(result, "release"):
            self.leases.append(result)
        if name == "take_host_pages" and isinstance(result, np.ndarray):
            self.host.allocator.free(result)
        if self.target.closed:
            return
        if name in ("insert", "save"):  # pages that the cache has not taken over
            self.case.settle()
            owned = self.target._tiers[0].device.owned
            pages = self.device.allocator.allocated()
            self.device.allocator.free(pages[~owned[pages]])
        audit_blocks(self.target)

    def close(self) -> None:
        for held in self.leases:
            held.release()
        self.target.close()
        self.case.settle()
        for pool in self.pools:
            pool.allocator.check_leaks()


class LivePaged(Live):
    """A paged cache with two sequences, which may have tiers or demoted tokens."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        rng, path = case.rng, case.folder / "saved"
        while True:
            self.target = cache = kv.PagedKVCache(**VALID["PagedKVCache"](case))
            if isinstance(cache.pool, kv.KVPool) and cache.pool.head_dim == 16:
                break
        if case.chance(0.3) and cache.demoted_pool is None:
            shape = {"num_kv_heads": 2, "head_dim": 16, "page_size": 4}
            shape["dtype"] = cache.pool.encoding
            scales = bool(cache.pool.scale_parts)
            self.tiers = kv.TieredCache(cache.pool, host_pool(4, scales=scales, **shape))
            cache.attach(self.tiers)
        else:
            self.tiers = None
        for name, tokens in (("a", 5), ("b", 1)):
            cache.add_sequence(name)
            self._step(name, tokens)
        self.tokens = 0
        names = lambda: rng.choice(["a", "b", "c"])  # noqa: E731
        self.values = {
            "seq": names, "parent": lambda: "a", "child": lambda: "c", "layer": lambda: 1,
            "seqs": lambda: ["a", "b"], "append_lens": lambda: rng.choice([[1, 1], [2, 5]]),
            "query": lambda: self._rows(4), "key": lambda: self._rows(2), "start": lambda: 0,
            "value": lambda: self._rows(2), "qkv": lambda: self._rows(8), "n": lambda: 1,
            "k": lambda: self._rows(2, 1), "v": lambda: self._rows(2, 1), "stop": lambda: 1,
            "at": lambda: 1, "window": lambda: rng.choice([None, 5]), "leaves": lambda: [0, -1],
            "path": lambda: path, "keep_step": lambda: rng.random() < 0.2, "name": lambda: "ssm",
            "latent": lambda: self._rows(1), "rope_key": lambda: self._rows(1),
            "sm_scale": lambda: 0.5, "tiers": lambda: None,
        }  # fmt: skip

    def _rows(self, heads: int, count: int | None = None) -> Any:
        shape = (self.tokens if count is None else count, heads, 16)
        return self.case.place(np.ones(shape, np.float32))

    def _step(self, name: str, tokens: int) -> None:
        self.tokens = tokens
        with self.target.forward([name], [tokens]):
            for layer in range(2):
                self.target.attention(layer, *map(self._rows, (4, 2, 2)))

    def state(self) -> Any:
        cache = self.target
        self.case.settle()
        lengths = {n: cache.sequence_length(n) for n in "abc" if n in cache}
        pools = [pool for pool in (cache.pool, cache.demoted_pool) if pool is not None]
        available = cache.num_available_pages, cache.num_available_demoted_pages
        return pool_bytes(*pools), lengths, available, cache.total_length

    def check(self, name: str, arguments: Arguments, result: Any) -> None:
        cache = self.target
        if name == "begin_forward" and not isinstance(result, Exception):
            self.tokens = len(cache.query_positions())
        if cache._steps.running is None:
            tiers = None if self.tiers is None else self.tiers._tiers[0]
            audit(Part(cache._sequences, cache.pool, cache.demoted_pool, tiers))

    def close(self) -> None:
        self.target.clear()
        self.case.settle()
        if self.target.total_length or any(name in self.target for name in "abc"):
            raise AssertionError("PagedKVCache: sequences are left after clear")
        self.target.add_sequence("last")
        self.target.remove_sequence("last")


class LiveDevice(Live):
    """The host device."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.target, x = case.device, case.place(np.ones((2, 3), np.float32))
        self.values = {
            "shape": lambda: (2, 3), "dtype": lambda: "bf16", "array": lambda: x, "src": lambda: x,
            "dst": lambda: case.place(np.zeros((2, 3), np.float32)), "priority": lambda: 0,
            "timing": lambda: True,
        }  # fmt: skip


class LiveStream(Live):
    """A stream, after other streams and events."""

    names = ("event",)

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.target = case.device.stream()
        events = [case.device.event(timing=True), case.device.stream()]
        self.values = {
            "other": lambda: case.rng.choice(events), "event": lambda: events[0],
            "function": lambda: lambda: None, "before": lambda: lambda stream: None,
            "after": lambda: lambda stream: None,
        }  # fmt: skip

    def close(self) -> None:
        self.case.settle()
        ran: list[int] = []
        self.target.call(lambda: ran.append(1))
        self.target.synchronize()
        if not ran:
            raise AssertionError("a stream does not run what it is given")


class LiveEvent(Live):
    """An event with times."""

    names = ("event",)

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.target, since = (case.device.event(timing=True) for _ in range(2))
        case.device.stream().record(since)
        self.values = {"since": lambda: since}


class LiveView(Live):
    """A view, its parts, and what it lends to other libraries."""

    names = ("index", "shape")

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        rows, rng = case.place(np.zeros((3, 9 * 17 * 32), np.uint8)), case.rng
        self.target = kv.view_as(rows, rng.choice(["int8", "nvfp4", "mxfp4", "int4+hadamard"]))
        self.values = {"index": lambda: rng.choice([
            0, -1, 3, 2**70, slice(None), slice(None, None, -1), slice(5, 1), slice(0, 2**70), ...,
            None, (0, 0), (0, 0, 0), (..., ...), "x", [0], True, 1.5, np.array([0]), np.int64(1),
            (), slice(1.5), slice(0, 3, 0), object(),
        ])}  # fmt: skip


OBJECTS: dict[str, type[Live]] = {
    "PageAllocator": LivePages, "KVPool": LivePool, "TransferEngine": LiveEngine,
    "TieredCache": LiveTiers, "PagedKVCache": LivePaged, "HostDevice": LiveDevice,
    "HostStream": LiveStream, "HostEvent": LiveEvent, "ArrayView": LiveView,
}  # fmt: skip
OMITTED = (
    "wrap", "forward", "attach", "export_sequence", "import_sequence", "close", "capture",
    "layer_number",
)  # fmt: skip
OF_OPERATIONS = (
    "as_stream", "load", "launch", "run", "keep", "copy_runs", "copy_bytes", "address", "carrier",
    "fault_array", "fall_back", "allocate", "release", "fingerprint", "enqueue", "forgive",
)  # fmt: skip
"""Methods that are not called: context managers and ends; of devices, what operations call."""


def methods_of(target: Any) -> list[str]:
    """Return the methods that are called of an object."""
    names = [n for n, _ in inspect.getmembers(type(target), callable) if not n.startswith("_")]
    names += ["__getitem__"] * isinstance(target, kv.ArrayView)
    is_of_device = type(target).__module__.startswith("kvcupy.devices")
    omitted = OMITTED + OF_OPERATIONS * is_of_device
    return [name for name in names if name not in omitted]


def live(case: Case, name: str) -> None:
    """Call methods of an object with valid and invalid arguments, and audit it after each call."""
    held = OBJECTS[name](case)
    owner = type(held.target)
    for _ in range(case.rng.randrange(2, 12)):
        method = case.rng.choice(methods_of(held.target))
        called = getattr(held.target, method)
        arguments = {
            n: held.values[n]() for n, parameter in inspect.signature(called).parameters.items()
            if n in held.values and (parameter.default is parameter.empty or case.chance(0.3))
        }  # fmt: skip
        count = case.rng.choice([1, 1, 2]) if case.chance(0.4) else 0
        arguments, _ = case.break_some(arguments, called, count)
        label = f"{owner.__name__}.{method}"
        result = case.attempt(
            called, arguments, described=getattr(owner, method), label=label, owner=owner,
            state=held.state, names=held.names,
            writes=lambda a=arguments: parts_of([a.get("out"), a.get("dst")]),
        )  # fmt: skip
        try:
            held.check(method, arguments, result)
        except Broken as error:
            raise Finding(f"{label}: {error}", f"audit {label} {str(error)[:20]}") from error
    held.close()


TARGETS: dict[str, Callable[[Case], Any]] = {
    **{name: partial(operation, name=name) for name in OPERATIONS},
    **{name: partial(function, name=name) for name in VALID},
    **{f"{name}.methods": partial(live, name=name) for name in OBJECTS},
}
