"""Cases of one call: each function of the package, from a valid call with one to three mistakes."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import numpy as np
import valid_calls
from helpers import from_values
from paged_snapshot import pages_of_pool

import kvcupy as kv
from kvcupy import __main__ as command
from kvcupy import formats
from kvcupy.ops.spec import OPERATIONS

from .attempts import Case, Finding, origin

Arguments = dict[str, Any]
_SLOTTED = ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache", "cache")

# Other valid values of options, drawn now and then.
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "skip_slot": (5, 0, 100), "interleaved": (True,), "write_key": (False,), "eps": (1e-5, 0.0),
    "sm_scale": (0.5, -1.0, 0.0), "causal": (True,), "window": (3,), "sink_tokens": (1,),
    "logits_soft_cap": (30.0,), "lse_base": ("2",), "dtype": ("fp32", np.float32),
    "batch_invariant": (True, False),
}  # fmt: skip


def operation(case: Case, name: str) -> None:
    """Call an operation on arrays."""
    function = getattr(kv, name)
    parameters = inspect.signature(function).parameters
    arguments = valid_arguments(case, name, parameters)
    count = case.rng.choice([0, 1, 1, 1, 2, 2, 3])
    changed, broken = case.break_some(arguments, parameters, count)
    case.say(f"  wrong: {', '.join(broken) or 'nothing'}")
    attempt_operation(case, function, changed, valid=not broken)
    if case.chance(0.2):  # again, so that a plan that was kept is used
        attempt_operation(case, function, changed, valid=not broken)


def attempt_operation(
    case: Case, function: Any, arguments: Arguments, *, valid: bool = False, **options: Any
) -> Any:
    name = function.__name__
    result = case.attempt(
        function, arguments, valid=valid, writes=lambda: written(name, arguments), **options
    )
    if valid and isinstance(result, Exception):
        raise AssertionError(f"{name}: a valid call recorded a fault: {result}")
    return result


def valid_arguments(case: Case, name: str, parameters: Iterable[str]) -> Arguments:
    """Return arguments that fit, in guarded memory, in one of the ways in which they may."""
    if name in _FOUR_BIT and case.chance(0.3):
        arguments = four_bit_arguments(case, name)
    else:
        arguments = arguments_of_elements(case, name, parameters)
    optional = [a.name for a in OPERATIONS[name].public_arguments.values() if a.fresh]
    optional += ["query_norm", "key_norm"]
    for key in optional:
        if key in arguments and case.chance(0.3):
            del arguments[key]
    if name in ("store_state", "gather_state") and case.chance(0.4):
        for key in OPERATIONS[name].several:
            if key in arguments:
                arguments[key] = (arguments[key], case.place(arguments[key][:, :1]))
    for key, choices in _OPTIONS.items():
        if key in parameters and case.chance(0.15):
            arguments[key] = case.rng.choice(choices)
    if arguments.get("sink_tokens") is not None and "window" not in arguments:
        del arguments["sink_tokens"]
    if "logits_soft_cap" in arguments and name != "paged_attention":
        del arguments["logits_soft_cap"]
    if name == "paged_attention" and case.chance(0.4):
        width, v_width = (arguments[n].shape[-1] for n in ("k_cache", "v_cache"))
        arguments["query"] = case.place(valid_calls.array(case.device, 4, 4, width))
        arguments["query_lens"] = case.place(np.array([3, 1]))
        arguments["seq_lens"] = case.place(np.array([7, 2]))
        for key, shape in (("out", (4, 4, v_width)), ("lse_out", (4, 4))):
            if key in arguments:
                arguments[key] = case.place(np.zeros(shape, np.float32))
        if case.chance(0.3):
            arguments["tree_mask"] = case.place(np.tril(np.ones((4, 3), bool)))
    if case.chance(0.3):
        arguments["stream"] = case.device.stream()
    if "alt_stream" in parameters and case.chance(0.2):
        arguments["alt_stream"] = case.device.stream()
    return arguments


def arguments_of_elements(case: Case, name: str, parameters: Iterable[str]) -> Arguments:
    """Return arguments with caches of whole bytes per element."""
    examples = valid_calls.EXAMPLES[name](case.device)
    if "k_cache" in examples and case.chance(0.3):
        scales = {n for n in examples if "scale" in n}
        examples = {n: v for n, v in examples.items() if n not in scales}
        examples |= {n: from_values(examples[n], "fp32") for n in ("k_cache", "v_cache")}
    hnd = "layout" in parameters and case.chance(0.3)
    by_slots = not hnd and "k_cache" in examples and name != "paged_attention" and case.chance(0.3)
    arguments: Arguments = {}
    for key, value in examples.items():
        if not isinstance(value, np.ndarray):
            arguments[key] = value
            continue
        if hnd and key in ("k_cache", "v_cache"):
            value = value.swapaxes(1, 2)
        if by_slots and key in ("k_cache", "v_cache"):
            value = value.reshape(-1, *value.shape[2:])
        if value.dtype == np.int64 and key != "out" and case.chance(0.4):
            value = value.astype(np.int32)
        arguments[key] = case.place(value)
    if hnd:
        arguments["layout"] = "HND"
    return arguments


_FOUR_BIT = (
    "store_kv", "store_mla", "rope_store_kv", "rope_store_mla", "gather_kv", "copy_pages",
    "shift_pages", "paged_attention",
)  # fmt: skip


def four_bit_arguments(case: Case, name: str) -> Arguments:
    """Return arguments with caches of four bits, whose scales lie in their rows or apart."""
    rng, declaration = case.rng, OPERATIONS[name]
    fmt = rng.choice(list(formats.FOUR_BIT))
    group = formats.FOUR_BIT[fmt].group
    hnd = "kv" in name and case.chance(0.3)
    hadamard = "mla" not in name and case.chance(0.3)
    indices, scaled = rng.choice([np.int32, np.int64]), case.chance(0.4)
    arguments: Arguments = {"layout": "HND"} if hnd else {}
    examples = valid_calls.example(
        declaration, case.device, head_dim=2 * group, v_head_dim=group, latent_dim=2 * group,
        rope_dim=group, latent_width=3 * group,
    )  # fmt: skip
    for key, value in examples.items():
        if key in ("k_cache", "v_cache", "cache", "pool"):
            shape = value.swapaxes(1, 2).shape if hnd else value.shape
            arguments[key] = four_bit_view(case, fmt, shape, hadamard, apart=key != "pool")
        elif "scale" in key:
            if scaled and not key.endswith("scale_cache"):
                arguments[key] = case.place(value)
        elif isinstance(value, np.ndarray):
            arguments[key] = case.place(value.astype(indices) if value.dtype.kind == "i" else value)
    return arguments


def four_bit_view(
    case: Case, fmt: str, shape: tuple[int, ...], hadamard: bool = False, *, apart: bool = True
) -> kv.ArrayView:
    """Return rows of a four-bit format in guarded memory, with their scales behind or `apart`."""
    form, encoding = formats.FOUR_BIT[fmt], kv.Encoding(fmt, hadamard=hadamard)
    *before, width = shape
    if not apart or case.chance(0.6):
        rows = case.place(np.zeros((*before, form.row_bytes(width)), np.uint8))
        return kv.view_as(rows, encoding)
    codes = case.place(np.zeros((*before, width // 2), np.uint8))
    scales = case.place(np.zeros((*before, width // form.group), f"u{form.scale_bytes}"))
    return kv.view_as(codes, encoding, scales=scales)


def memory_of(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the bytes of an argument, as far as they lie on the host, whatever its type."""
    parts = parts_of(value)
    return parts[0] if parts else None


def parts_of(value: Any) -> list[np.ndarray[Any, Any]]:
    """Return the same as one array; of four-bit rows, as codes and scales."""
    try:
        v = kv.arrays.view(value, "argument")
        if v.device != "host":
            return []
        return [
            kv.arrays.array_at(
                part.owner, part.pointer, part.shape, np.dtype((np.void, part.itemsize)),
                part.strides,
            )
            for part in ((v,) if v.scales is None else (v.codes, v.scales))
        ]  # fmt: skip
    except (TypeError, ValueError, kv.KvcupyError):
        return []


def written(name: str, arguments: Arguments) -> list[np.ndarray[Any, Any]]:
    """Return the parts of the arguments that an operation may write."""
    if name == "copy_pages":
        return _pages_written(arguments["cache"], arguments["dst_pages"])
    if name == "shift_pages":
        targets = arguments.get("out_pages")
        return _pages_written(arguments["pool"], targets if targets is not None
                              else arguments["pages"])  # fmt: skip
    if name in ("store_state", "update_conv_state"):
        target = "caches" if name == "store_state" else "cache"
        return _pages_written(arguments[target], arguments["slots"])
    slots = memory_of(arguments.get("slot_mapping"))
    if slots is not None and slots.itemsize in (4, 8):
        slots = np.unique(np.array(slots).view(f"i{slots.itemsize}"))
    parts = []
    for key in OPERATIONS[name].written(arguments):
        value = arguments.get(key)
        arrays = value if isinstance(value, (tuple, list)) else (value,)
        for array in [part for each in arrays for part in parts_of(each)]:
            if key not in _SLOTTED or slots is None:
                parts.append(array)
                continue
            if array.ndim == 4 and arguments.get("layout") == "HND":
                array = array.swapaxes(1, 2)
            paged = array.ndim == 4 or (key == "cache" and array.ndim == 3)
            size = array.shape[1] if paged else 1
            end = array.shape[0] * size
            for slot in slots[(slots >= 0) & (slots < end)].tolist():
                if slot != arguments.get("skip_slot"):
                    parts.append(array[slot // size, slot % size] if paged else array[slot])
    # A single element is no view of its array any more.
    return [part for part in parts if isinstance(part, np.ndarray)]


def _pages_written(caches: Any, targets: Any) -> list[np.ndarray[Any, Any]]:
    caches = caches if isinstance(caches, (tuple, list)) else (caches,)
    parts: list[np.ndarray[Any, Any]] = []
    pages = memory_of(targets)
    if pages is None or pages.itemsize not in (4, 8):
        return parts
    pages = np.array(pages).view(f"i{pages.itemsize}")
    for cache in caches:
        for array in parts_of(cache):
            chosen = pages[(pages >= 0) & (pages < len(array))]
            parts += [array[page : page + 1] for page in chosen.tolist()]
    return parts


# --- Functions that are called alone --------------------------------------------------------------


def _of_function(function: Callable[..., Any], make: Callable[[Case], Arguments]) -> Any:
    def run(case: Case) -> None:
        arguments = make(case)
        count = case.rng.choice([0, 1, 1, 2, 3])
        positional = function.__name__ in ("fork", "join")
        names = list(arguments) if positional else list(inspect.signature(function).parameters)
        changed, broken = case.break_some(arguments, names, count)
        if positional:
            case.attempt(
                lambda **named: function(*named.values()), changed, valid=not broken,
                names=arguments, described=function, label=function.__name__,
            )  # fmt: skip
            return
        case.attempt(function, changed, valid=not broken)

    return run


def _page_table_csr(case: Case) -> Arguments:
    return {
        "block_table": case.place(np.array([[3, 1], [0, 2]])),
        "seq_lens": case.place(np.array([6, 3])), "page_size": 4,
    }  # fmt: skip


def _rope_table(case: Case) -> Arguments:
    scaling: Any = case.rng.choice([
        None, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default"},
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
         "max_position_embeddings": 16, "original_max_position_embeddings": 8},
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    ])  # fmt: skip
    if scaling and case.chance(0.5):
        name = case.rng.choice([*scaling, "attention_factor", "beta_fast", "mscale", "x"])
        breaker = case.rng.choice([None, -1, 0, "x", [], {}, float("nan"), 1e308, 10**400, True])
        return {"max_positions": 16, "rotary_dim": 8, "scaling": Broken(scaling | {name: breaker})}
    return {"max_positions": 16, "rotary_dim": 8, "scaling": scaling, "device": case.device}


class Broken(dict[str, Any]):
    """A configuration that may not be valid."""


def rope_table(case: Case) -> None:
    arguments = _rope_table(case)
    changed, broken = case.break_some(
        arguments, inspect.signature(kv.rope_table).parameters, case.rng.choice([0, 1, 1, 2])
    )
    for name in ("max_positions", "rotary_dim"):  # what fits in memory takes long, and is no error
        if isinstance(changed.get(name), (int, np.integer)) and 2**16 < changed[name] < 2**60:
            changed[name] = 2**62
    valid = not broken and not isinstance(arguments["scaling"], Broken)
    case.attempt(kv.rope_table, changed, valid=valid)


def _bits(case: Case) -> Arguments:
    return {"array": case.place(np.arange(6, dtype=np.uint16).reshape(2, 3)), "dtype": "bf16"}


def _streams(case: Case) -> Arguments:
    return {name: case.device.stream() for name in ("main", "other", "others")}


def transfer_pages(case: Case) -> None:
    """Move pages between two pools, one of which may be a different kind."""
    converts = case.chance(0.25)
    shape = {"page_size": 2, "num_layers": 2, "num_kv_heads": 2, "head_dim": 32 if converts else 4}

    def pool(**changes: Any) -> Any:
        return kv.KVPool(5, **{**shape, "dtype": "fp16", "device": "host", **changes})

    guarded: dict[int, list[np.ndarray[Any, Any]]] = {}

    def wrapped() -> Any:
        """Make a pool over guarded memory."""
        arrays = [case.place(np.zeros((2, 5, 2, 2, 4), np.float16)) for _ in "kv"]
        wrapped = kv.KVPool.wrap(*arrays)
        guarded[id(wrapped)] = arrays
        return wrapped

    source, target = (
        wrapped() if not converts and case.chance(0.6) else pool(layout=layout)
        for layout in ("layer_first", case.rng.choice(["page_first", "layer_first"]))
    )
    if converts:
        packed = pool(dtype=case.rng.choice(["nvfp4", "mxfp4", "int4"]), layout=target.layout)
        source, target = case.rng.choice([(source, packed), (packed, target), (packed, packed)])
    others = [
        lambda: pool(head_dim=6), lambda: pool(page_size=4), lambda: pool(num_layers=3),
        lambda: pool(dtype="fp32"), lambda: pool(num_kv_heads=1), lambda: kv.PageAllocator(3),
        lambda: kv.MLAPool(5, 2, 2, 4, dtype="fp16", device="host"), lambda: None, lambda: source,
        lambda: source.k(0), lambda: pool(dtype="int8", scales=True),
    ]  # fmt: skip
    arguments: Arguments = {
        "src_pool": source, "dst_pool": target, "src_pages": case.place(np.array([0, 3, -1])),
        "dst_pages": case.place(np.array([4, 1, 2])),
        "method": case.rng.choice(["auto", "kernel", "copy", "staged"]),
    }  # fmt: skip
    if converts:
        arguments |= {"convert": True, "method": case.rng.choice(["auto", "kernel", "staged"])}
    if source is target:
        arguments |= {"src_pages": [0, 3], "dst_pages": [4, 1]}
    names = [*inspect.signature(kv.transfer_pages).parameters]
    changed, broken = case.break_some(arguments, names, case.rng.choice([0, 1, 1, 2, 2, 3]))
    for name in ("src_pool", "dst_pool"):
        if name in broken:
            changed[name] = case.rng.choice(others)()
    for n in range(0 if converts else 2):
        source.k(n)[...], source.v(n)[...] = n + 1, n + 2

    def contents() -> list[bytes]:
        return [part.tobytes() for p in (source, target) for part in pages_of_pool(p)]

    def written() -> list[np.ndarray[Any, Any]]:
        arrays = guarded.get(id(changed["dst_pool"]), [])
        pages = changed["dst_pages"]
        pages = pages if isinstance(pages, (list, tuple, range)) else memory_of(pages)
        if isinstance(pages, np.ndarray):
            pages = np.array(pages).view(f"i{pages.itemsize}").tolist()
        return [a[:, page : page + 1] for a in arrays for page in pages if 0 <= page < 5]

    before = contents()
    case.attempt(kv.transfer_pages, changed, valid=not broken, state=contents, writes=written)
    if changed["dst_pool"] is target is not source and contents()[:4] != before[:4]:
        raise AssertionError("transfer_pages: changed the source")


def _block_hashes(case: Case) -> Arguments:
    bits = case.rng.choice([64, 128])
    return {"token_ids": [1, 2, 3, 4, 5], "block_tokens": 2, "parent": 7, "bits": bits}


def array_view(case: Case) -> None:
    """Make views by address, parts of them, and what consumes them."""
    array = case.place(np.arange(12, dtype=np.float32).reshape(3, 4))
    arguments: Arguments = {
        "pointer": array.ctypes.data, "shape": array.shape, "strides": array.strides,
        "format": "fp32", "device": "host", "owner": array,
    }  # fmt: skip
    view = kv.ArrayView(**arguments)
    indices = [
        0, -1, 3, 2**70, slice(None), slice(None, None, -1), slice(5, 1), slice(0, 2**70), ...,
        None, (0, 0), (0, 0, 0), (..., ...), "x", [0], True, 1.5, np.array([0]), np.int64(1), (),
        slice(1.5), slice(0, 3, 0), object(),
    ]  # fmt: skip
    index = case.rng.choice(indices)
    case.attempt(lambda index: view[index], {"index": index}, names=["index", "shape"],
                 described=kv.ArrayView.__getitem__, label="ArrayView[]")  # fmt: skip
    bits = array if case.chance(0.5) else array.view(case.rng.choice(["u4", "i4", "u2", "u1"]))
    formats = ["bf16", "fp16", "int8", "fp32", "fp8_e4m3", "x", None, 3, [], ""]
    tagged = case.attempt(kv.view_as, {"array": bits, "dtype": case.rng.choice(formats)})
    rows = case.place(np.zeros((3, 146), np.uint8))
    scales = case.place(np.zeros((3, 32), np.uint8))
    own = [None, scales, scales[:, :8], scales[:, ::2], scales[0], array, 3, "x"]
    formats_of_groups = ["nvfp4", "mxfp4", "int4"]
    options = ["", "", "+hadamard", "+four_over_six", "+hadamard:x", "+givens", "+"]
    chosen = case.attempt(kv.view_as, {
        "array": rows[:, : case.rng.choice([0, 16, 64, 68, 72, 136, 144, 146])],
        "dtype": case.rng.choice(formats_of_groups) + case.rng.choice(options),
        "scales": case.rng.choice(own),
    })  # fmt: skip
    encoding = case.attempt(kv.Encoding, {
        "format": case.rng.choice([*formats_of_groups, "bf16", 3]),
        "hadamard": case.rng.choice([True, True, False, 1, None]),
        "scale_rule": case.rng.choice(["absmax", "absmax", "four_over_six", "six", None, 3]),
    }, names=["hadamard", "scale_rule", "format"])  # fmt: skip
    if isinstance(encoding, kv.Encoding):
        assert kv.Encoding.of(str(encoding)) == encoding
    if isinstance(chosen, kv.ArrayView):
        tagged = chosen if case.chance(0.5) else tagged
        case.attempt(lambda index: chosen[index], {"index": index}, names=["index", "shape"],
                     described=kv.ArrayView.__getitem__, label="ArrayView[]")  # fmt: skip
    if isinstance(tagged, kv.ArrayView):
        repr(tagged), tagged.byte_range(), tagged.without_owner(), tagged.size, tagged.pinned
    names = ["stream", "max_version", "dl_device", "copy", "x"]
    choices = [None, 0, -1, 1, 2, (0, 5), (1, 0), (1, 2), (2, 0), (), "x", True, False, 2**70]
    options = {
        case.rng.choice(names): case.rng.choice(choices) for _ in range(case.rng.randrange(3))
    }
    case.attempt(view.__dlpack__, options, names=["stream", "max_version", "dl_device", "copy"],
                 label="ArrayView.__dlpack__", described=kv.ArrayView.__dlpack__)  # fmt: skip


def settings(case: Case) -> None:
    """Set what `config` has and has not."""
    names = ["fallback", "strict", "strict_index_faults", "strict_arch", "strict_seed", "x"]
    name = case.rng.choice(names)
    before = {n: getattr(kv.config, n) for n in names[:-1]}
    choices = [
        "warn", "error", "raise", "record", "sm_86", "sm_1", True, False, 1, -1, 2**70, None, [],
        {}, 1.5, b"warn", np.bool_(True), np.int64(3), float("nan"), "\ud800",
    ]  # fmt: skip
    try:
        case.attempt(
            lambda value: setattr(kv.config, name, value), {"value": case.rng.choice(choices)},
            names=[name, "setting"], described=type(kv.config), label=f"config.{name}",
            state=lambda: {n: getattr(kv.config, n) for n in names[:-1]},
        )  # fmt: skip
    finally:
        for n, value in before.items():
            setattr(kv.config, n, value)


def declared(case: Case) -> None:
    """Declare work, with an order checker on or not."""
    array = case.place(np.zeros(8, np.float32))
    arguments: Arguments = {"reads": [array[:4]], "writes": (array[4:],), "stream": None}
    if case.chance(0.3):
        arguments["stream"] = case.device.stream()
    changed, broken = case.break_some(arguments, arguments, case.rng.choice([0, 1, 2]))
    action = case.rng.choice(["raise", "record", "raise", "x", None, [], 3])

    def run(**options: Any) -> None:
        with kv.declare(**options):
            pass

    def watched(**options: Any) -> None:
        with kv.order_checker(action):
            run(**options)

    case.attempt(run, changed, described=kv.declare, label="declare", valid=not broken,
                 names=inspect.signature(kv.declare).parameters)  # fmt: skip

    def check() -> None:
        with kv.order_checker(action):
            pass

    error = case.attempt(check, {}, described=kv.order_checker, label="order_checker",
                         names=["action"], valid=action in ("raise", "record"))  # fmt: skip
    if not isinstance(error, Exception):
        case.attempt(watched, changed, described=kv.declare, label="declare, checked",
                     names=inspect.signature(kv.declare).parameters, valid=not broken)  # fmt: skip


def explored(case: Case) -> None:
    """Explore a program that may fail."""
    error = case.rng.choice([None, ValueError("x"), KeyError("x"), SystemError()])

    def program(device: Any) -> Any:
        stream, array = device.stream(), device.zeros((2,), "fp32")
        stream.call(lambda: array.fill(1))
        stream.synchronize()
        if error:
            raise error
        return array

    arguments: Arguments = {"program": program, "schedules": 3, "seed": 1}
    changed, broken = case.break_some(
        arguments, inspect.signature(kv.explore).parameters, case.rng.choice([0, 1, 1, 2])
    )
    result = case.attempt(kv.explore, changed, valid=not broken)
    str(result)


def _kept_alive(case: Case) -> Arguments:
    array = case.place(np.zeros(4, np.float32))
    return {"arrays": [array, array], "stream": case.device.stream()}


def timeline(case: Case) -> None:
    """Record a timeline, and save it somewhere."""
    with kv.timeline() as line:
        array = case.place(np.zeros(4, np.float32))
        case.device.copy(array, case.place(np.ones(4, np.float32)), stream=case.device.stream())
    case.device.synchronize()
    case.arena.remember()
    spans = {"spans": [kv.timelines.timeline.Span("other", "lane", 0.0, 1.0)]}
    changed, broken = case.break_some(spans, spans, case.rng.choice([0, 1]))
    case.attempt(line.add, changed, valid=not broken, names=["spans"])
    target = {"path": case.folder / "t.json"}
    changed, broken = case.break_some(target, target, case.rng.choice([0, 1]))
    case.attempt(line.save, changed, valid=not broken, names=["path"])


def device_of(case: Case) -> None:
    """Look devices up, and ask them for faults."""
    for function, name in ((kv.device, "name"), (kv.check_faults, "device")):
        changed, broken = case.break_some({name: "host"}, [name], case.rng.choice([0, 1, 1]))
        case.attempt(function, changed, valid=not broken, names=["device"])
    kv.default_device()


def command_line(case: Case) -> None:
    """Run commands whose arguments are wrong, so that none of them does its work."""
    junk = case.folder / "junk"
    junk.write_bytes(case.rng.randbytes(case.rng.choice([0, 9, 100])))
    word = case.rng.choice(
        ["", "x", "-1", "0", "1e9", "cuda:9", "cuda:²", "\ud800", "9" * 5000, "*"]
    )
    arguments = case.rng.choice([
        [], [word], ["compile", "--arch", word],
        ["compile", "--jobs", f"-{word}"], ["compile", "--update"], ["doctor", word or "x"],
        ["calibrate", "--device", word or "x"], ["calibrate", "--jobs", word],
    ])  # fmt: skip
    case.say(f"  python -m kvcupy {arguments}")
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        try:
            status: Any = command.main(arguments)
        except SystemExit as error:
            status = error.code
        except Exception as error:
            raise Finding(f"main: {arguments} raised {error!r} {origin(error)}") from error
    if not isinstance(status, int) or status == 0:
        raise Finding(f"main: {arguments} came out as {status!r}: {out.getvalue()[-300:]}")
    case.raised.append("SystemExit")


def _repeated_slots(case: Case) -> Arguments:
    return {"slot_mapping": case.place(np.array([3, 1, 3, -1]))}


FUNCTIONS: dict[str, Callable[[Case], None]] = {
    **{name: (lambda case, name=name: operation(case, name)) for name in valid_calls.EXAMPLES},
    "page_table_csr": _of_function(kv.page_table_csr, _page_table_csr),
    "find_duplicate_slots": _of_function(kv.find_duplicate_slots, _repeated_slots),
    "rope_table": rope_table,
    "transfer_pages": transfer_pages,
    "block_hashes": _of_function(kv.block_hashes, _block_hashes),
    "view_as": _of_function(kv.view_as, _bits),
    "ArrayView": array_view,
    "config": settings,
    "declare": declared,
    "explore": explored,
    "fork": _of_function(kv.fork, _streams),
    "join": _of_function(kv.join, _streams),
    "keep_alive": _of_function(kv.keep_alive, _kept_alive),
    "timeline": timeline,
    "device": device_of,
    "main": command_line,
}
