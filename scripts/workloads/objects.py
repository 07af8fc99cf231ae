"""Cases of several calls: the methods of one live object in any order, right and wrong.

After a call that raises the object must be as it was, and usable by the calls that follow.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from every_call import array
from paged_snapshot import pages_of_pool

import kvcupy as kv
from kvcupy.cache.tiered.holds import HeldBlocks
from kvcupy.cache.tiered.leases import Lease

from . import mistakes
from .attempts import Case, Finding
from .audit import Broken, Part, audit, audit_blocks
from .calls import Arguments, memory_of

Makers = Mapping[str, Callable[[], Arguments]]
"""Methods by name, and what makes arguments for each that may fit."""

METHODS = {
    "PageAllocator": "alloc free allocated check_leaks",
    "Pool": "k v k_scale v_scale views layer_number note_written torch_k torch_v",
    "HostDevice": "empty zeros empty_pinned asarray to_numpy stream event synchronize copy",
    "HostStream": "wait synchronize record done call on_launch",
    "HostEvent": "done synchronize error elapsed_us",
    "TransferEngine": "save load",
    "Transfer": "wait done synchronize wait_layer",
    "TieredCache": """
        match acquire prefetch retain release insert hold save evict stats flush
        take_host_pages clear close
    """,
    "Lease": "wait_layer wait release",
    "PagedKVCache": """
        add_sequence begin_forward attention end_forward attention_qkv attention_mla remove_sequence
        sequence_length offload onboard fork_sequence pop_tokens enable_sliding_window get_kv set_kv
        query_positions slot_mapping block_table page_table_csr clear commit_token_tree
        save_sequence load_sequence attach plan state
        state_slots state_slots_of restorable_length abort_forward
    """,
    "FullAttention": "make_pool token_bytes past_token_bytes",
    "SlidingWindow": "make_pool token_bytes pages_kept",
    "Latent": "make_pool token_bytes",
    "Recurrent": "state_bytes",
}
"""What the programs here call, by the class of the object."""


def methods(kind: str, makers: Makers) -> Makers:
    """Return the makers of the methods of a class, each of which must have one."""
    if sorted(makers) != sorted(METHODS[kind].split()):
        raise AssertionError(f"{kind}: expected methods as in METHODS, got {sorted(makers)}")
    return makers


def try_method(
    case: Case, target: Any, name: str, arguments: Arguments, *,
    state: Callable[[], Any] = lambda: None, wrong: float = 0.45, settle: bool = True,
    names: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """Call a method, with wrong arguments now and then; return what it does, or its exception."""
    method = getattr(target, name)
    described = getattr(target if isinstance(target, type) else type(target), name, method)
    try:
        parameters = [p for p in inspect.signature(method).parameters if p not in ("_", "__")]
        if name == "layer_number":
            parameters.remove("name")  # of the argument, in its errors
    except ValueError:
        parameters = list(arguments)
    if parameters and case.chance(wrong):
        arguments, _ = case.break_some(arguments, parameters, case.rng.choice([1, 1, 2]))
    owner = target if isinstance(target, type) else type(target)
    label = f"{owner.__name__}.{name}"
    outputs = ("out", "dst")
    return case.attempt(
        method, arguments, described=described, label=label, state=state, names=names,
        settle=settle, owner=owner,
        writes=lambda: [
            m for n in outputs if (m := memory_of(arguments.get(n))) is not None
        ],
    )  # fmt: skip


def audited(label: str, audit: Callable[..., object], *arguments: Any) -> None:
    """Raise Finding if a page of a cache has a wrong owner now."""
    try:
        audit(*arguments)
    except Broken as error:
        raise Finding(f"{label}: {error}", f"audit {label} {str(error)[:20]}") from error


def drive(
    case: Case, target: Any, makers: Makers, state: Callable[[], Any] = lambda: None, *,
    steps: int = 10, settle: bool = True, names: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Call methods of an object in a random order."""
    for _ in range(case.rng.randrange(1, steps)):
        name = case.rng.choice(list(makers))
        try_method(case, target, name, makers[name](), state=state, settle=settle, names=names)


def construct(
    case: Case, kind: Any, arguments: Arguments, *, wrong: float = 0.3, names: tuple[str, ...] = ()
) -> Any:
    """Make an object, with wrong arguments now and then; None if that is refused."""
    broken: list[str] = []
    changed = arguments
    parameters = list(inspect.signature(kind).parameters)
    if case.chance(wrong):
        changed, broken = case.break_some(arguments, parameters, case.rng.choice([1, 1, 2]))
    result = case.attempt(
        kind, changed, label=kind.__name__, valid=not broken, settle=False, names=names
    )
    return None if isinstance(result, Exception) else result


# --- Pools and pages ------------------------------------------------------------------------------


def allocator(case: Case) -> None:
    """Allocate and free."""
    pages = construct(case, kv.PageAllocator, {"num_pages": 6}, wrong=0.2)
    if pages is None or pages.num_pages > 1000:
        return
    held: list[int] = []

    def taken() -> Arguments:
        held[:] = pages.allocated().tolist()
        chosen = case.rng.sample(held, case.rng.randrange(len(held) + 1))
        return {"pages": chosen}

    def state() -> Any:
        return pages.num_free, pages.num_allocated, pages.allocated().tolist()

    drive(case, pages, methods("PageAllocator", {
        "alloc": lambda: {"n": case.rng.randrange(4)}, "free": taken, "allocated": dict,
        "check_leaks": dict,
    }), state, steps=20)  # fmt: skip
    held = pages.allocated().tolist()
    pages.free(held)
    rest = pages.alloc(pages.num_pages)
    if sorted(rest.tolist()) != list(range(pages.num_pages)):
        raise AssertionError(f"PageAllocator: lost pages, has {sorted(rest.tolist())}")


_SHAPE: Arguments = {"page_size": 2, "num_layers": 2, "num_kv_heads": 2, "head_dim": 4}


def new_pool(num_pages: int = 6, **changes: Any) -> Any:
    options = {**_SHAPE, "dtype": "fp16", "device": "host", **changes}
    return kv.KVPool(num_pages, **options)


def pool_bytes(*pools: Any) -> list[list[bytes]]:
    return [[part.tobytes() for part in pages_of_pool(pool)] for pool in pools]


def _layers(case: Case, pool: Any) -> Makers:
    layer = {"layer": case.rng.randrange(2)}
    names = METHODS["Pool"].split()
    if "torch" not in sys.modules:
        names = [name for name in names if "torch" not in name]
    return {n: lambda n=n: {"layers": [0]} if n == "note_written" else dict(layer) for n in names}


def pools(case: Case) -> None:
    """Make pools of both kinds, and look at their layers."""
    kind = case.rng.choice([kv.KVPool, kv.MLAPool])
    arguments: Arguments = {
        "num_pages": 5, "page_size": 2, "num_layers": 2, "dtype": case.rng.choice(["bf16", "int8"]),
        "layout": case.rng.choice(["layer_first", "page_first", "page_first_direct", "page_head"]),
        "placement": case.rng.choice(["device", "pinned", "pageable"]), "device": case.device,
    }  # fmt: skip
    arguments |= {"num_kv_heads": 2, "head_dim": 4} if kind is kv.KVPool else {"latent_dim": 8}
    if case.chance(0.3):
        arguments["dtype"] = case.rng.choice(["nvfp4", "mxfp4", "int4"])
        arguments["head_dim" if kind is kv.KVPool else "latent_dim"] = 32
    arguments["scales"] = arguments["dtype"] == "int8" and kind is kv.KVPool
    pool = construct(case, kind, arguments, wrong=0.7)
    if pool is not None and pool.num_bytes < 1 << 20:
        repr(pool)
        drive(case, pool, _layers(case, pool), lambda: pool_bytes(pool))


def wrapped(case: Case) -> None:
    """Make pools over arrays."""
    kind = case.rng.choice([kv.KVPool, kv.MLAPool])
    by_layer = case.chance(0.5)
    heads = (2,) if kind is kv.KVPool else ()

    def one() -> Any:
        layers = () if by_layer else (2,)
        return case.place(np.ones((*layers, 5, 2, *heads, 4), np.float16))

    def part() -> Any:
        return [one(), one()] if by_layer else one()

    arguments: Arguments = {"layout": "layer_first", "device": case.device}
    names = ["k", "v"] if kind is kv.KVPool else ["latent"]
    arguments |= {name: part() for name in names}
    if by_layer and case.chance(0.5):  # another layer than is expected
        changed, _ = case.break_some({"k": arguments[names[0]][0]}, ["k"], 1)
        arguments[names[0]] = [arguments[names[0]][1], changed["k"]]
    pool = try_method(case, kind, "wrap", arguments, wrong=0.5)
    if isinstance(pool, kind):
        repr(pool)
        drive(case, pool, _layers(case, pool), lambda: pool_bytes(pool))


# --- Devices and streams --------------------------------------------------------------------------


def device(case: Case) -> None:
    """Allocate on a device, and copy."""
    host = case.device
    x = case.place(np.ones((2, 3), np.float32))
    shape = lambda: {"shape": (2, 3), "dtype": "bf16"}  # noqa: E731
    drive(case, host, methods("HostDevice", {
        "empty": shape, "zeros": shape, "empty_pinned": shape, "asarray": lambda: {"array": x},
        "to_numpy": lambda: {"array": x}, "stream": lambda: {"priority": 0},
        "event": lambda: {"timing": True}, "synchronize": dict,
        "copy": lambda: {"dst": case.place(np.zeros((2, 3), np.float32)), "src": x},
    }))  # fmt: skip


def streams(case: Case) -> None:
    """Use streams, events and graphs in any order."""
    host = case.device
    queues = [host.stream(), host.stream()]
    events = [host.event(timing=True), host.event()]
    graphs: list[Any] = []
    ran: list[int] = []
    choice = case.rng.choice

    def capture() -> None:
        stream = choice(queues)
        if stream.capturing:
            return
        try:
            with stream.capture() as graph:
                for _ in range(choice([0, 1, 3])):
                    step(stream)
        except (kv.CaptureError, kv.DeviceError):
            return
        graphs.append(graph)

    def step(stream: Any) -> None:
        makers = methods("HostStream", {
            "wait": lambda: {"other": choice([*queues, *events])}, "synchronize": dict,
            "record": lambda: {"event": choice([None, *events])}, "done": dict,
            "call": lambda: {"function": choice([lambda: ran.append(1), lambda: 1 / 0])},
            "on_launch": lambda: {"before": lambda s: None, "after": lambda s: None},
        })  # fmt: skip
        name = choice(list(makers))
        arguments, wrong = makers[name](), 0.45
        if name == "on_launch":  # a function of the user's may raise what it likes, at a launch
            wrong = 0.0
            if case.chance(0.45):
                arguments[choice(list(arguments))] = mistakes.no_function(case)
        try_method(case, stream, name, arguments, settle=False, wrong=wrong)

    for _ in range(choice([4, 8, 12])):
        action = choice(["stream", "stream", "stream", "event", "graph", "capture", "kv"])
        if action == "stream":
            step(choice(queues))
        elif action == "event":
            makers = methods("HostEvent", {
                "done": dict, "synchronize": dict, "error": dict,
                "elapsed_us": lambda: {"since": choice(events)},
            })  # fmt: skip
            name = choice(list(makers))
            try_method(case, choice(events), name, makers[name](), settle=False, names=("event",))
        elif action == "graph" and graphs:
            try_method(case, choice(graphs), "launch", {"stream": choice([None, *queues])},
                       settle=False)  # fmt: skip
        elif action == "capture":
            capture()
        elif action == "kv":
            function = choice([kv.fork, kv.join])
            case.attempt(
                lambda main, others, function=function: function(main, *others),
                {"main": choice(queues), "others": [choice([*queues, *events])]},
                described=function, settle=False, label=function.__name__,
                names=["main", "others"],
            )  # fmt: skip
    for stream in queues:
        for _ in range(3):
            try:
                stream.synchronize()
            except kv.DeviceError:
                continue
            break
        last: list[int] = []
        stream.call(lambda: last.append(1))  # noqa: B023
        stream.synchronize()
        if not last:
            raise AssertionError("a stream does not run what it is given")


def engine(case: Case) -> None:
    """Save and load pages through an engine, and wait for them."""
    on_device, on_host = new_pool(), new_pool(8, layout="page_first", placement="pinned")
    others = [new_pool(page_size=4), new_pool(dtype="fp32"), on_device, None, 3, case.device]
    arguments: Arguments = {"device_pool": on_device, "host_pool": on_host}
    if case.chance(0.2):
        arguments[case.rng.choice(list(arguments))] = case.rng.choice(others)
        case.attempt(kv.TransferEngine, arguments, label="TransferEngine")
        return
    engine = construct(case, kv.TransferEngine, arguments)
    if engine is None or engine.device_pool is not on_device or engine.host_pool is not on_host:
        return
    handles: list[Any] = []
    compute = case.device.stream()

    def pages() -> Arguments:
        count = case.rng.randrange(4)
        return {
            "device_pages": case.rng.sample(range(6), count),
            "host_pages": case.rng.sample(range(8), count),
            **({"after": compute} if case.chance(0.3) else {}),
        }  # fmt: skip

    def state() -> Any:
        engine._send()
        case.settle()
        return pool_bytes(on_device, on_host), on_device.allocator.num_free

    for _ in range(case.rng.randrange(1, 8)):
        if handles and case.chance(0.4):
            handle = case.rng.choice(handles)
            makers = methods("Transfer", {
                "wait": lambda: {"stream": compute}, "done": dict, "synchronize": dict,
                "wait_layer": lambda: {"layer": 1, "stream": case.rng.choice([None, compute])},
            })  # fmt: skip
            name = case.rng.choice(list(makers))
            try_method(case, handle, name, makers[name]())
            handle.elapsed_us, handle.gb_per_s, handle.num_bytes, handle.failure  # noqa: B018
            continue
        name = case.rng.choice(METHODS["TransferEngine"].split())
        result = try_method(
            case, engine, name, pages() if name in ("save", "load") else {}, state=state,
            names=("pages", "src_pages", "dst_pages"),
        )  # fmt: skip
        if hasattr(result, "wait_layer"):
            handles.append(result)
    for handle in handles:
        handle.synchronize()
        if not handle.done():
            raise AssertionError("Transfer: not done after synchronize")


# --- Caches ---------------------------------------------------------------------------------------


def tiered(case: Case) -> None:
    """Insert, acquire and evict blocks."""
    dtype = case.rng.choice(["fp16", "fp16", "nvfp4", "int8"])
    shape: Arguments = {"dtype": dtype, "head_dim": 16, "scales": dtype == "int8"}
    on_device = new_pool(5, **shape)
    on_host = new_pool(4, layout="page_first", placement="pinned", **shape)
    arguments: Arguments = {
        "device_pool": on_device, "host_pool": on_host,
        "write": case.rng.choice(["through", "back"]),
    }  # fmt: skip
    known = list(range(1, 9))
    own = ("host_pool", "device_pool", "host_bytes")
    cache = construct(case, kv.TieredCache, arguments, names=own)
    if cache is None or (cache.device_pool, cache.host_pool) != (on_device, on_host):
        return
    leases: list[Lease] = []
    holds: list[HeldBlocks] = []

    def hashes() -> Arguments:
        return {"hashes": case.rng.sample(known, case.rng.randrange(4))}

    def waited() -> Arguments:
        return {
            **hashes(),
            "deadline_s": case.rng.choice([None, 0.0, 5.0]),
        }

    def saved() -> Arguments:
        pages = case.rng.sample(range(on_device.num_pages), 2)
        return {"hashes": case.rng.sample(known, 2), "pages": pages}

    def inserted() -> Arguments:
        free = min(on_device.allocator.num_free, case.rng.randrange(4))
        pages = on_device.allocator.alloc(free)
        return {"hashes": case.rng.sample(known, len(pages)), "pages": pages}

    def state() -> Any:
        case.settle()
        if cache.closed:
            return None
        counts = {n: v for n, v in cache.stats().items() if not n.endswith("_s")}
        matches = [cache.match([hash]) for hash in known]
        return counts, matches, on_device.allocator.num_free, on_host.allocator.num_free

    makers = methods("TieredCache", {
        "match": hashes, "prefetch": hashes, "release": hashes,
        "insert": inserted, "hold": waited, "save": saved,
        "retain": lambda: {
            **hashes(), "priority": case.rng.randint(-1, 1),
            "ttl_s": case.rng.choice([None, 0.0, 5.0]),
        },
        "acquire": waited,
        "evict": lambda: {"num_blocks": case.rng.choice([None, 0, 1, 2])}, "stats": dict,
        "flush": lambda: {"deadline_s": 5.0},
        "take_host_pages": lambda: {"n": case.rng.randrange(3)}, "clear": dict,
        "close": lambda: {"deadline_s": 5.0},
    })  # fmt: skip
    for _ in range(case.rng.randrange(2, 14)):
        name = case.rng.choice([*list(makers)[:-2] * 3, "clear", "close"])
        if leases and case.chance(0.3):
            lease = case.rng.choice(leases)
            method = case.rng.choice(METHODS["Lease"].split())
            try_method(case, lease, method, {"layer": 1} if method == "wait_layer" else {},
                       state=state)  # fmt: skip
            continue
        arguments = makers[name]()
        before = on_device.allocator.allocated().tolist()
        result = try_method(case, cache, name, arguments, state=state, names=("pages", "hashes"))
        if name == "insert":  # what the cache did not take
            if isinstance(result, Exception):
                on_device.allocator.free(arguments["pages"])
            elif isinstance(result, list):
                on_device.allocator.free(result)
                left = [p for p in arguments["pages"].tolist() if p in before and p not in result]
                owned = np.flatnonzero(cache._tiers[0].device.owned).tolist()
                strangers = [p for p in left if p not in owned]
                held = on_device.allocator.allocated().tolist()
                on_device.allocator.free([p for p in strangers if p in held])
        elif isinstance(result, Lease):
            leases.append(result)
        elif isinstance(result, HeldBlocks):
            holds.append(result)
        elif name == "take_host_pages" and isinstance(result, np.ndarray):
            on_host.allocator.free(result)
        if not cache.closed:
            audited(f"TieredCache.{name}", audit_blocks, cache)
    for held in (*leases, *holds):
        held.release()
    cache.close()
    case.settle()
    for pool in (on_device, on_host):
        pool.allocator.check_leaks()


def paged(case: Case) -> None:
    """Run steps of a paged cache, and everything between them."""
    latent = case.chance(0.15)
    quantised = not latent and case.chance(0.2)
    arguments: Arguments = {
        "num_layers": 2, "num_q_heads": 4, "num_pages": 10, "page_size": 4, "device": case.device,
        "dtype": "int8" if quantised else "fp32", "max_batch_tokens": 64,
    }  # fmt: skip
    arguments |= {"latent_dim": 12} if latent else {"num_kv_heads": 2, "head_dim": 8}
    if not latent and case.chance(0.2):
        arguments |= {"dtype": "nvfp4", "head_dim": 16}
    elif not latent and case.chance(0.4):
        past = case.rng.choice(["nvfp4"] + ["fp8_e4m3"] * (not quantised))
        if past == "nvfp4" and case.chance(0.5):
            past += "+hadamard+four_over_six"
        arguments["head_dim"] = 16
        options = {
            "encoding": past, "recent": case.rng.randrange(7), "first": case.rng.randrange(6),
            "num_pages": case.rng.choice([2, 8]),
        }  # fmt: skip
        wrong = {case.rng.choice([*options]): case.rng.choice([None, -1, "x", 2.5, True])}
        case.attempt(kv.Demotion, options | wrong, names=[*options])
        arguments["demotion"] = kv.Demotion(**options)
    if arguments["dtype"] == "nvfp4" and case.chance(0.5):
        arguments["dtype"] = "nvfp4+hadamard+four_over_six"
    if not latent and case.chance(0.3):
        table = kv.rope_table(64, arguments["head_dim"], device=case.device)
        demotion = arguments.get("demotion")
        is_rotated = "hadamard" in f"{arguments['dtype']} {demotion and demotion.encoding}"
        modes = ["normal"] if is_rotated else ["normal", "inline"]
        arguments |= {"rope": table, "rope_mode": case.rng.choice(modes)}
    if latent:
        arguments |= {"latent_dim": 8, "rope_dim": 4}
    if latent:
        cache = _latent(case, arguments)
    else:
        cache = construct(case, kv.PagedKVCache, arguments, names=("hadamard",))
    if cache is None or cache.pool.num_bytes > 1 << 22 or cache.pool.num_layers > 8:
        return
    repr(cache)
    Paged(case, cache).run()


def _latent(case: Case, arguments: Arguments) -> Any:
    result = case.attempt(kv.PagedKVCache, arguments, label="PagedKVCache")
    return None if isinstance(result, Exception) else result


NAMED_BY_GROUPS = ("num_kv_heads", "head_dim", "layers")


def grouped(case: Case) -> None:
    """Declare groups of layers, and run a step of a cache of them."""
    shape = {"num_kv_heads": 2, "head_dim": 8, "dtype": "fp32"}
    declared = [
        construct(case, kind, arguments)
        for kind, arguments in (
            (kv.FullAttention, {"layers": [0, 3], **shape}),
            (kv.SlidingWindow, {"layers": [1], "window": 5, "sink_tokens": 1, **shape}),
            (kv.Latent, {"layers": [2], "latent_dim": 8, "rope_dim": 4, "dtype": "fp32"}),
            (kv.Recurrent, {
                "layers": [4], "state": {"ssm": ((2, 3), "fp32")}, "checkpoint_tokens": 4,
            }),
        )
    ]  # fmt: skip
    if any(group is None for group in declared):
        return
    for group in declared[:3]:
        if group.token_bytes() > 1 << 12:
            return
    if declared[3].state_bytes() > 1 << 12:
        return
    arguments: Arguments = {
        "num_q_heads": 4, "page_size": 4, "device": case.device, "groups": declared,
        "memory_bytes": 1 << 16, "num_tokens": 64, "max_batch_tokens": 16,
    }  # fmt: skip
    if case.chance(0.3):
        arguments, _ = case.break_some(arguments, [*arguments], 1)
    cache = case.attempt(kv.PagedKVCache, arguments, label="PagedKVCache", names=NAMED_BY_GROUPS)
    if isinstance(cache, Exception):
        return
    repr(cache)
    with suppress(ValueError):  # wrong arguments that are valid make larger pools
        str(cache.plan())
    cache.add_sequence("a")
    with suppress(kv.CacheFull, ValueError), cache.forward(["a"], [3]):
        cache.state_slots()
    with suppress(kv.CacheFull):
        cache.fork_sequence("a", "b")
    with suppress(kv.CacheFull, ValueError):  # too little host memory for larger pools
        cache.attach(kv.TieredCache(groups=cache, host_bytes=1 << 16))
        cache.offload("a")
        try_method(case, cache, "onboard", {"seq": "a"}, wrong=0.3)
    arguments = {"seq": "b", "start": 0, "stop": 1, "layer": case.rng.randrange(5)}
    try_method(case, cache, "get_kv", arguments, wrong=0.3)
    cache.clear()


class Paged:
    """A paged cache, and what arguments fit it now."""

    NAMES = ("a", "b", "c", ("d", 1))

    def __init__(self, case: Case, cache: Any) -> None:
        self.case, self.cache = case, cache
        self.tokens: int | None = None
        self.fmt = "fp32"
        self.attached: Any = self.tiers() if case.chance(0.3) else None
        if self.attached is not None:
            cache.attach(self.attached)

    def tiers(self) -> Any:
        """Return a tiered cache over the pool; None if it is of latents."""
        pool = self.cache.pool
        if isinstance(pool, kv.MLAPool):
            return None
        shape = (pool.page_size, pool.num_layers, pool.num_kv_heads, pool.head_dim)
        host = kv.KVPool(
            4, *shape, v_head_dim=pool.v_head_dim, dtype=pool.encoding, layout="page_first",
            placement="pinned", device="host", scales=bool(pool.scale_parts),
        )  # fmt: skip
        return kv.TieredCache(pool, host)

    def present(self) -> Any:
        names = [name for name in self.NAMES if name in self.cache]
        return self.case.rng.choice(names or list(self.NAMES))

    def absent(self) -> Any:
        names = [name for name in self.NAMES if name not in self.cache]
        return self.case.rng.choice(names or list(self.NAMES))

    def rows(self, heads: int, width: int) -> Any:
        count = self.tokens if self.tokens is not None else 2
        return self.case.place(array(self.case.device, count, heads, width))

    def state(self) -> Any:
        cache = self.cache
        self.case.settle()
        names = [name for name in self.NAMES if name in cache]
        lengths = {name: cache.sequence_length(name) for name in names}
        pools = [pool for pool in (cache.pool, cache.past_pool) if pool is not None]
        pages = [hash(part.tobytes()) for pool in pools for part in pages_of_pool(pool)]
        available = cache.num_available_pages, cache.num_available_past_pages
        return pages, lengths, available, cache.total_length

    def makers(self) -> Makers:
        rng, cache = self.case.rng, self.cache
        pool = cache.pool
        width, v_width, heads = pool.head_dim, pool.v_head_dim, pool.num_kv_heads

        def begin() -> Arguments:
            names = [name for name in self.NAMES if name in cache] or [self.NAMES[0]]
            names = rng.sample(names, rng.randrange(1, len(names) + 1))
            counts = [rng.choice([1, 1, 2, 5]) for _ in names]
            arguments: Arguments = {"seqs": names, "append_lens": counts}
            if rng.random() < 0.2:
                arguments["token_tree"] = [
                    [rng.choice([-1, 0, i - 1]) if i else -1 for i in range(n)] for n in counts
                ]
            return arguments

        def attend() -> Arguments:
            arguments: Arguments = {
                "layer": rng.randrange(pool.num_layers), "query": self.rows(4, width),
                "key": self.rows(heads, width), "value": self.rows(heads, v_width),
            }  # fmt: skip
            if rng.random() < 0.3:
                arguments["out"] = self.rows(4, v_width)
            return arguments

        def contents() -> Arguments:
            seq = self.present()
            length = cache.sequence_length(seq) if seq in cache else 0
            count = rng.randrange(length + 1)
            layer = rng.choice([None, 0])
            rows = (*([pool.num_layers] if layer is None else []), count, heads)
            return {
                "seq": seq, "start": rng.randrange(length - count + 1), "layer": layer,
                "k": self.case.place(array(cache.device, *rows, width)),
                "v": self.case.place(array(cache.device, *rows, v_width)),
            }  # fmt: skip

        def part() -> Arguments:
            whole = contents()
            stop = whole["k"].shape[0 if whole["layer"] == 0 else 1]
            return {"seq": whole["seq"], "start": 0, "stop": stop, "layer": whole["layer"]}

        seq = lambda: {"seq": self.present()}  # noqa: E731
        return methods("PagedKVCache", {
            "add_sequence": lambda: {"seq": self.absent()}, "begin_forward": begin,
            "attention": attend,
            "end_forward": lambda: {"keep_step": rng.random() < 0.2},
            "attention_qkv": lambda: {"layer": 0, "qkv": self.rows(4 + 2 * heads, width)},
            "attention_mla": lambda: {
                "layer": 0, "query": self.rows(4, width), "sm_scale": 0.5,
                "latent": self.case.place(array(cache.device, self.tokens or 2, 8)),
                "rope_key": self.case.place(array(cache.device, self.tokens or 2, 4)),
            },
            "remove_sequence": seq, "sequence_length": seq, "offload": seq, "onboard": seq,
            "fork_sequence": lambda: {"parent": self.present(), "child": self.absent(), "at": 1},
            "pop_tokens": lambda: {**seq(), "n": rng.randrange(4)},
            "enable_sliding_window": lambda: {**seq(), "window": 5, "sink_tokens": 1},
            "get_kv": part, "set_kv": contents, "query_positions": dict, "slot_mapping": dict,
            "block_table": dict, "page_table_csr": dict, "clear": dict, "abort_forward": dict,
            "commit_token_tree": lambda: {
                "seqs": [self.present()], "leaves": [rng.choice([-1, 0])],
            },
            "save_sequence": lambda: {**seq(), "path": self.case.folder / "saved"},
            "load_sequence": lambda: {"seq": self.absent(), "path": self.case.folder / "saved"},
            "attach": lambda: {"tiers": self.tiers()},
            "plan": dict, "state": lambda: {"layer": 0, "name": "ssm"}, "state_slots": dict,
            "state_slots_of": lambda: {"seqs": [self.present()]},
            "restorable_length": lambda: {**seq(), "at": rng.randrange(4)},
        })  # fmt: skip

    def run(self) -> None:
        case, cache = self.case, self.cache
        makers = self.makers()
        usual = ["add_sequence", "begin_forward", "attention", "attention", "end_forward"]
        names = ("key", "value", "query", "k", "v", "sequence", "tokens", "pages")
        for step in range(case.rng.randrange(4, 24)):
            name = usual[step % 5] if case.chance(0.6) else case.rng.choice(list(makers))
            arguments = makers[name]()
            result = try_method(
                case, cache, name, arguments, state=self.state, wrong=0.3, names=names
            )
            if name == "attach" and not isinstance(result, Exception):
                self.attached = arguments["tiers"]
            if self.tokens is None and name != "begin_forward":
                tiers = None if self.attached is None else self.attached._tiers[0]
                part = Part(cache._sequences, cache.pool, cache.past_pool, tiers)
                audited(f"PagedKVCache.{name}", audit, part)
            if isinstance(result, Exception):
                continue
            if name == "begin_forward":
                self.tokens = len(cache.query_positions())
            elif name in ("abort_forward", "end_forward", "clear"):
                self.tokens = None
        cache.clear()
        case.settle()
        if cache.total_length or any(name in cache for name in self.NAMES):
            raise AssertionError("PagedKVCache: sequences are left after clear")
        if cache.past_pool is not None and cache.past_pool.allocator.num_allocated:
            raise AssertionError("PagedKVCache: pages of the past are left after clear")
        cache.add_sequence("last")
        cache.remove_sequence("last")


PROGRAMS: dict[str, Callable[[Case], None]] = {
    "PageAllocator": allocator, "pools": pools, "wrap": wrapped, "Device": device,
    "Stream": streams, "TransferEngine": engine, "TieredCache": tiered, "PagedKVCache": paged,
    "groups": grouped,
}  # fmt: skip
