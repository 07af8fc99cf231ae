"""How an operation is called: a plan for each signature, launched with the addresses of a call.

The life of a call, `store_kv` say:

1. The family's module declares the arguments in an `Operation`. The public function passes the
   arrays in the order of the declaration, and the options.
2. `Operation.prepare` probes the arrays. Formats, shapes, strides, devices, alignment and options
   are the *signature*; addresses are not. A known signature gives its plan, the last call's before
   any look-up. Torch tensors that differ from the last call's in addresses alone are recognized
   without a signature (`arrays.TensorMatcher`).
3. For a new signature the family's `make` function, `_plan_store_kv`, gets views of the arrays as
   keyword arguments. It runs every check and returns a `Plan`: kernels, geometry (`spread`), and
   all of the kernels' Params but the addresses (`Launch`). A view has the name of its argument, so
   that `pointers["key"] = key` says which address goes to `p.key` of the kernel.
4. `Plan.run` checks addresses, unless they are the last call's: elements at multiples of their
   size, and no output that shares bytes with another argument (`Aliasing`).
5. `Plan.issue` puts the work on the stream: it waits for streams that still write an argument,
   announces the operation to timelines and checkers, and launches, or runs the reference.

In a paged cache, a `StepOperation` has probed the arrays of a step and of each layer beforehand.

Fallback: where a kernel cannot be compiled, making the plan catches the `CompileError` as
`Plan.cause`. On a GPU each call raises it. On the host device each call warns once or raises, as
`config.fallback` says, and runs the reference (`kvcupy.ops.by_reference`).

Capture: launches are legal in one. Outputs that a call allocates itself are kept by kvcupy's
graphs, but not by graphs of other libraries, so callers pass them there; and torch fills its
tensors on its current stream, which a stream that kvcupy captures cannot wait for.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import lru_cache, partial, reduce
from typing import Any, TypeVar

from .. import devices, faults, formats, observe, scratch
from ..arrays import (
    STREAMED_TYPES,
    ArrayView,
    TensorMatcher,
    address_of,
    four_bit_array,
    noting_written,
    overlap,
    probe_arguments,
    strides_of,
    taking,
    tensor_matcher,
    view,
    wait_for_producers,
    with_rotation,
)
from ..config import calls_logger, config
from ..devices.protocol import Device, Stream
from ..errors import CompileError, DeviceError, process_lock
from . import by_reference, checks, kv_operand
from .launch import Launch, verified
from .spec import Argument, Declaration, Outputs

Views = dict[str, ArrayView]
"""Arguments by name: those that are arrays."""

# --- Operations and their arguments ---------------------------------------------------------------


class Operation(Declaration):
    """A declared operation, and the plan of its last call."""

    def __init__(
        self, name: str, *arguments: Argument, outputs_of: Outputs | None = None,
        waits: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(name, *arguments, outputs_of=outputs_of, waits=waits)
        # Plans, signatures, options, alignment and plan of the last call; most are like it.
        self._last: tuple[Any, ...] = None, None, None, None, None

    def run(
        self, arrays: tuple[Any, ...], options: tuple[Any, ...], make: Callable[..., Any],
        stream: Any, *others: Any,
    ) -> Any:  # fmt: skip
        """Prepare a call, run it, and return the outputs that are `returned`: one, a tuple or None.

        `stream` and `others` are the caller's, for `Plan.run`; the rest is as for `prepare`.
        """
        plan, pointers = self.prepare(arrays, options, make)
        if plan.allocated:
            stream = plan.device.as_stream(stream, plan.library)
            pointers, arrays = plan.allocate(pointers, arrays, stream)
        plan.run(pointers, arrays, stream, *others)
        return None if plan.returned is None else plan.returned(arrays)

    def prepare(
        self, arrays: tuple[Any, ...], options: tuple[Any, ...], make: Callable[..., Any]
    ) -> tuple[Any, tuple[int, ...]]:
        """Return the plan of a call, and the addresses of its arrays.

        `options` are what else decides the plan. For a new signature `make(alignment, *options,
        **arguments)` checks everything and returns a Plan; a word that divides `alignment` divides
        each address.
        """
        signature = None
        try:
            plans, last_signatures, last_options, last_alignment, plan = self._last
            is_last = plans is _plans and options == last_options
            matcher = plan.matcher if is_last else None
            pointers = None if matcher is None else matcher.addresses(arrays)
            if pointers is not None:
                signatures = last_signatures
            else:
                pointers, signatures = probe_arguments(arrays)
                is_last = is_last and signatures == last_signatures
                if is_last and matcher is not None:
                    plan.matcher = tensor_matcher(arrays)  # in another mode of torch's, say
            if is_last and pointers == plan.allowed:
                return plan, plan.allowed
            alignment = 0
            for i in self.words:
                alignment |= pointers[i]
            alignment &= 15
            if is_last and alignment == last_alignment:
                return plan, pointers
            signature = (self, options, alignment, signatures)
            plan = _plans.get(signature)
            if plan is not None:
                self._last = _plans, signatures, options, alignment, plan
                return plan, pointers
        except (TypeError, ValueError, DeviceError):  # no array, or an option that is one
            signature = None
        pointers, plan = self.plan(arrays, options, make)
        if signature is not None and plan.lasting:
            _keep(signature, plan)
        return plan, pointers

    def plan(
        self, arrays: tuple[Any, ...], options: tuple[Any, ...], make: Callable[..., Any]
    ) -> tuple[tuple[int, ...], Any]:
        """Return the addresses of a call and a new plan, which is not kept."""
        described: dict[str, Any] = {}
        views: Views = {}
        pointers, alignment = [0] * len(arrays), 0
        for i, (argument, array) in enumerate(zip(self.arguments, arrays, strict=True)):
            if array is None:
                continue
            if argument.number and not checks.is_array(array):
                described[argument.name] = array
                continue
            v = view(array, argument.name)
            if v is array:  # the caller's view, which must not change
                v = v.without_owner()
            v.owner, v.name = None, argument.name
            pointers[i] = v.pointer
            if argument.words:
                alignment |= v.pointer
            described[argument.name] = views[argument.name] = v
        checks.require_arrays(described, _required(make))
        checks.require_same_device(views)
        try:
            plan = make(alignment & 15, *options, **described)
        except DeviceError:
            for name, v in views.items():
                devices.of(v, name)  # raises, naming what is on a device that cannot be used
            raise
        plan.options = dict(zip(_option_names(make), options, strict=False))
        plan.prepare_checks(views, arrays)
        plan.matcher = tensor_matcher(arrays)
        calls_logger.debug(
            "%s: planned a call of new shapes, strides, formats or options", self.name
        )
        return tuple(pointers), plan


@lru_cache(maxsize=256)
def _option_names(make: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the options of `make`, in order."""
    _, *parameters = inspect.signature(make).parameters.values()  # without the alignment
    return tuple([p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD])


@lru_cache(maxsize=256)
def _required(make: Callable[..., Any]) -> tuple[str, ...]:
    """Return the arguments without which `make` makes no plan."""
    parameters = inspect.signature(make).parameters.values()
    return tuple([p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty])


# --- Operations of a cache, layer by layer --------------------------------------------------------


class Probed:
    """Some arguments of an operation, probed once for many calls."""

    def __init__(self, arguments: tuple[Argument, ...], arrays: tuple[Any, ...]) -> None:
        self.arrays = arrays
        try:
            self.pointers, self.signatures = probe_arguments(arrays)
        except (TypeError, DeviceError):
            for argument, array in zip(arguments, arrays, strict=True):
                if checks.is_array(array):
                    view(array, argument.name)  # raises, naming what is not an array
            raise
        self.alignment = 0
        for argument, pointer in zip(arguments, self.pointers, strict=True):
            if argument.words:
                self.alignment |= pointer


NO_ARGUMENTS = Probed((), ())


class StepOperation(Probed):
    """An operation whose last arguments, `arrays`, are the same in all layers of a step of a cache.

    `num_rows` arguments come with each call; those between are a layer's. Where the arrays outlive
    the step, graphs read them.
    """

    def __init__(
        self, operation: Operation, make: Callable[..., Any], num_rows: int,
        arrays: tuple[Any, ...], options: tuple[Any, ...] = (), *, outlives_step: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(operation.arguments[-len(arrays) :], arrays)
        self._operation, self._make, self._options = operation, make, options
        self._words = [i for i in operation.words if i < num_rows]
        # Of the last call: kind, signatures of the layer, alignment, options and plan.
        self._last: tuple[Any, ...] = None, None, None, None, None
        self._outlives_step = outlives_step
        # Workspaces of plans, which have what the first layer computed for all: with the capture.
        self._prepared: dict[tuple[Stream, Plan], tuple[int | None, ArrayView]] = {}

    def issue(
        self, rows: tuple[Any, ...], pointers: tuple[int, ...], kind: object, layer: Probed,
        stream: Stream, options: tuple[Any, ...] | None = None,
    ) -> None:  # fmt: skip
        """Put a call on a stream of the device.

        `rows` are the first arguments, at `pointers`; rows with one `kind`, an object, have one
        signature.
        """
        if options is None:
            options = self._options
        alignment = self.alignment | layer.alignment
        for i in self._words:
            alignment |= pointers[i]
        alignment &= 15
        arrays = rows + layer.arrays + self.arrays
        last_kind, last_layer, last_alignment, last_options, plan = self._last
        if (
            kind is not last_kind or layer.signatures is not last_layer
            or alignment != last_alignment or options != last_options
        ):  # fmt: skip
            try:
                signatures = probe_arguments(rows)[1] + layer.signatures + self.signatures
            except (TypeError, DeviceError):
                self._operation.plan(arrays, options, self._make)  # raises, naming what is no array
                raise
            plan = planned(
                (self._operation, options, alignment, signatures),
                lambda: self._operation.prepare(arrays, options, self._make)[0],
            )
            if plan.lasting:
                self._last = kind, layer.signatures, alignment, options, plan
        pointers += layer.pointers + self.pointers
        plan.check(pointers, arrays)
        if plan.num_step_launches:
            self._issue_prepared(plan, pointers, arrays, stream)
        else:
            plan.issue(pointers, arrays, stream)

    def _issue_prepared(
        self, plan: Plan, pointers: tuple[int, ...], arrays: tuple[Any, ...], stream: Stream
    ) -> None:
        """Issue a plan, without the launches that another layer of the step has issued before it.

        The layers share a workspace, in the order of the stream. In a capture they do if it has the
        first of them: a graph computes for each replay what the lengths then decide.
        """
        capture = stream.capture_id
        if capture is None and (self._outlives_step or stream.capturing):
            plan.issue(pointers, arrays, stream)
            return
        last_capture, workspace = self._prepared.get((stream, plan), (None, None))
        is_prepared = workspace is not None and last_capture == capture
        if workspace is None or not is_prepared:
            workspace = scratch.borrow(plan.device, plan.workspace_bytes, stream)
        plan.issue(pointers, arrays, stream, workspace, is_prepared=is_prepared)
        self._prepared[stream, plan] = capture, workspace


# --- The plans that are kept ----------------------------------------------------------------------

_MAX_PLANS = 4096


_P = TypeVar("_P", bound=Any)

_plans: dict[Any, Any] = {}  # the oldest first
_lock = process_lock()


def planned(signature: Any, make: Callable[[], _P]) -> _P:
    """Return the plan of a signature, made by its first call.

    For plans whose arrays do not come with the call, such as those between two pools. A signature
    begins with something that no other kind of plan has; the plan needs an attribute `lasting`.
    """
    plan: _P | None = _plans.get(signature)
    if plan is None:
        plan = make()
        if plan.lasting:
            _keep(signature, plan)
    return plan


def _keep(signature: Any, plan: Any) -> None:
    """Keep a plan, and drop the oldest of too many.

    A plan in use is made again once in `_MAX_PLANS` new ones; recording each use would cost every
    call.
    """
    with _lock:
        _plans[signature] = plan
        if len(_plans) > _MAX_PLANS:
            del _plans[next(iter(_plans))]


def forget() -> None:
    """Drop all plans, for a change of devices or kernels."""
    global _plans
    with _lock:
        _plans = {}


# --- Plans ----------------------------------------------------------------------------------------


class Plan:
    """Everything that the signature of a call decides. Keeps no array alive.

    `launches` are in the order of issue, none if there is nothing to do; `cause` says why the
    kernel cannot be used, where the reference must serve. Each call allocates the outputs
    `allocated`, as zeros where a launch may leave elements unwritten (`zeroed`), and borrows
    `workspace_bytes`, whose address follows the arguments'. The first `num_step_launches` compute
    there what equal calls of all layers of a step need. `allowed` are the addresses of the last
    call, `fault_ids` the numbers under which faults in arguments are recorded.
    """

    def __init__(self, operation: Operation, device: Device, library: str) -> None:
        self.operation, self.returned = operation, operation.returned
        self.device = device
        self.library = library
        self.launches: list[Launch] = []
        self.cause: CompileError | None = None
        self.options: dict[str, Any] = {}
        self.provisional = False
        self.fault_ids: dict[str, int] = {}
        self.allocated: Views = {}
        self.zeroed = True
        self.workspace_bytes = self.num_step_launches = 0
        self.allowed: tuple[int, ...] | None = None
        self.matcher: TensorMatcher | None = None
        self._tensors: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None
        self._scales: dict[str, int] = {}  # positions of static scales that are arrays

    def report(self, **bounds: str) -> None:
        """Let faults in arguments be recorded; `bounds` say what is expected of their elements."""
        name = self.operation.name
        self.fault_ids = {a: faults.operation_id(name, a, b) for a, b in bounds.items()}

    def load(self, make: Callable[[int], list[Launch]], alignment: int) -> None:
        """Take the launches that `make` returns for an alignment, of `verified` kernels.

        Where one cannot be compiled, note why.
        """
        try:
            self.launches = verified(self.device, make, alignment)
            self.provisional = any([launch.provisional for launch in self.launches])
        except CompileError as cause:
            self.cause = cause

    @property
    def lasting(self) -> bool:
        """Whether later calls may use it; else the next one loads its kernels again."""
        if self.cause is not None:
            return not self.cause.transient
        return not self.provisional

    # What a family's plan says of itself.

    def touched(self, views: Views) -> Views:
        """Return what is really read or written of each array, which may be less than all."""
        return views

    def access(self, name: str, views: Views) -> observe.Access:
        """Return which bytes are read or written of one of the arrays that `touched` returned."""
        return observe.Access(views[name], name=name)

    def label(self, output: str, accessed: Views) -> str:
        """Return the name that errors give an output."""
        return output

    # The steps of a call.

    def prepare_checks(self, views: Views, arrays: tuple[Any, ...]) -> None:
        """Prepare the checks of addresses, and drop the arrays of the call that made the plan."""
        names = self.operation.names
        tensors = [
            i for i in self.operation.outputs
            if names[i] in views and views[names[i]].library == "torch"
        ]  # fmt: skip
        if tensors:
            self._tensors = taking(tensors)
            self._note_written = noting_written(self._tensors(arrays))
        if self.allocated:
            views = {**views, **self.allocated}
            zeroed = self.zeroed or self.cause is not None
            self._allocators = [
                (names.index(name), _allocator(v, zeroed)) for name, v in self.allocated.items()
            ]
        self._arrays = [(i, name) for i, name in enumerate(names) if name in views]
        self._scales = {
            a.name: i
            for i, a in enumerate(self.operation.arguments)
            if a.number and not a.whole and a.name in views
        }
        touched = self.touched(views)
        self._in_place = [
            (output, source)
            for output, source in self.operation.in_place
            if names[output] in touched
            and _same_layout(views.get(names[output]), views.get(names[source]))
        ]
        words = [i for i in self.operation.words if names[i] in views]
        alignment = reduce(operator.or_, [views[names[i]].pointer for i in words], 0)
        self._aliasing = Aliasing(
            list(map(touched.get, names)), self.operation.outputs, self._in_place, words, alignment
        )
        if self.cause is not None:
            self.cause = copy(self.cause)  # without a traceback, whose frames hold arrays

    def run(self, pointers: tuple[int, ...], arrays: tuple[Any, ...], stream: Any) -> None:
        """Check the addresses and issue the operation on `stream`, of any library."""
        launch_stream = self.device.as_stream(stream, self.library)
        if pointers is not self.allowed and (self.launches or self.cause is not None):
            if not self._aliasing.allows(pointers):
                self._require_apart(pointers, arrays)
            self.allowed = pointers
        self.issue(pointers, arrays, launch_stream)

    def check(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        """Raise ValueError for misaligned elements, and for outputs that share bytes."""
        if pointers != self.allowed and not self._aliasing.allows(pointers):
            self._require_apart(pointers, arrays)
        self.allowed = pointers

    def _require_apart(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        accessed = self.accessed(pointers, arrays)
        written = [n for i, n in self._arrays if i in self.operation.outputs and n in accessed]
        outputs = [(self.label(n, accessed), accessed[n]) for n in written]
        inputs = [(n, v) for n, v in accessed.items() if n not in written]
        checks.require_aligned([*inputs, *outputs])
        checks.require_disjoint(outputs, inputs)

    def issue(
        self, pointers: tuple[int, ...], arrays: tuple[Any, ...], stream: Stream,
        workspace: ArrayView | None = None, *, is_prepared: bool = False,
    ) -> None:  # fmt: skip
        """Put the operation on a stream, its arguments checked.

        `workspace` is None where one is borrowed; `is_prepared`: the launches of the step wrote it.
        """
        if self.cause is not None:
            self.device.fall_back(self.operation.name, self.cause)
        elif not self.launches:
            return
        if STREAMED_TYPES:
            wait_for_producers(arrays, stream)
        if self._scales and config.strict and self.device.kind == "host":
            self.device.run(lambda: self._require_scales(arrays), stream, arrays)
        if observe.observers:
            observe.issue(
                lambda: self._announced(pointers, arrays, stream),
                lambda: self._enqueue(pointers, arrays, stream, workspace, is_prepared),
            )
        elif self.cause is not None or self.workspace_bytes:
            self._enqueue(pointers, arrays, stream, workspace, is_prepared)
        else:
            for launch in self.launches:
                launch.enqueue(pointers, stream, arrays)
        if self._tensors is not None:
            self._note_written(self._tensors(arrays))

    def _require_scales(self, arrays: tuple[Any, ...]) -> None:
        """Raise ValueError for static scales that are refused as numbers."""
        for name, i in self._scales.items():
            kv_operand.require_scales(self.device.carrier(view(arrays[i])), name)

    def _enqueue(
        self, pointers: tuple[int, ...], arrays: tuple[Any, ...], stream: Stream,
        workspace: ArrayView | None, is_prepared: bool,
    ) -> None:  # fmt: skip
        """Launch the kernels, with a workspace if they need one; or run the reference."""
        if self.cause is not None:
            self.run_reference(arrays, stream)
            return
        if self.workspace_bytes:
            if workspace is None:
                workspace = scratch.workspace(self.device, self.workspace_bytes, stream)
            pointers, arrays = (*pointers, workspace.pointer), (*arrays, workspace)
        for launch in self.launches[self.num_step_launches if is_prepared else 0 :]:
            launch.enqueue(pointers, stream, arrays)

    def run_reference(self, arrays: tuple[Any, ...], stream: Stream) -> None:
        """Run the reference on a stream of the host device."""
        name, names = self.operation.name, self.operation.names
        self.device.run(
            lambda: by_reference.run(
                self.device, name, zip(names, arrays, strict=True), self.options, self.fault_ids
            ),
            stream, arrays,
        )  # fmt: skip

    def allocate(
        self, pointers: tuple[int, ...], arrays: tuple[Any, ...], stream: Stream
    ) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """Return addresses and arrays with the outputs that each call allocates for `stream`."""
        addresses, owners = list(pointers), list(arrays)
        for i, allocator in self._allocators:
            owners[i] = array = allocator(stream)
            addresses[i] = address_of(array)
        return tuple(addresses), tuple(owners)

    # Views, which a warm call does not need.

    def views(self, arrays: tuple[Any, ...]) -> Views:
        """Return views of the arrays by name."""
        return {name: view(arrays[i]) for i, name in self._arrays}

    def accessed(self, pointers: tuple[int, ...], arrays: tuple[Any, ...]) -> Views:
        """Return what is accessed; an input that is written in place counts as output only."""
        views = dict(self.touched(self.views(arrays)))
        for output, source in self._in_place:
            if pointers[output] == pointers[source]:
                views.pop(self.operation.names[source], None)
        return views

    def _announced(
        self, pointers: tuple[int, ...], arrays: tuple[Any, ...], stream: Stream
    ) -> observe.Operation:
        return observe.DeferredOperation(
            self.operation.name, stream, lambda: self._accesses(pointers, arrays)
        )

    def _accesses(
        self, pointers: tuple[int, ...], arrays: tuple[Any, ...]
    ) -> tuple[tuple[observe.Access, ...], tuple[observe.Access, ...]]:
        views = self.accessed(pointers, arrays)
        names = self.operation.names
        outputs = {names[i] for i in self.operation.outputs}
        reads = tuple([self.access(name, views) for name in views if name not in outputs])
        writes = tuple([self.access(name, views) for name in views if name in outputs])
        return reads, writes


# --- Aliasing -------------------------------------------------------------------------------------

# Shape, strides and format; of a four-bit format where its scales are, and their strides.
_Layout = tuple[tuple[int, ...], tuple[int, ...], str, tuple[int, tuple[int, ...]] | None]

_ANYWHERE = 1 << 52  # an address, far from those that do not exist


class Aliasing:
    """What the addresses of every call of one signature must satisfy.

    How far an array reaches from its address is part of the signature. So whether two arrays share
    a byte depends on the distance between their addresses alone, and most distances are longer than
    the arrays: two comparisons of integers then decide, for addresses that no call has had before.

    `views` are the arrays of one such call, None for what is no array. The written ones, `outputs`,
    share no byte with one another or with an input; but (output, input) pairs `in_place` may have
    one address. The addresses of `words`, or'd together, end in the four bits of `alignment`.
    """

    def __init__(
        self,
        views: Sequence[ArrayView | None],
        outputs: Collection[int],
        in_place: Collection[tuple[int, int]] = (),
        words: Collection[int] = (),
        alignment: int = 1,
    ) -> None:
        self._in_place = frozenset(in_place)
        self._strides_fit = True
        self._layouts: dict[int, _Layout] = {}
        self._itemsizes: list[tuple[int, int]] = []
        reach: dict[int, tuple[int, int]] = {}  # in bytes from the address; empty arrays have none
        for i, v in enumerate(views):
            if v is None:
                continue
            scales = None
            if v.scales is not None:
                scales = v.scales.pointer - v.pointer, v.scales.strides
            self._layouts[i] = v.shape, v.strides, v.format, scales
            if v.itemsize > 1:
                if i not in words or alignment % v.itemsize:
                    self._itemsizes.append((i, v.itemsize))
                if any(stride % v.itemsize for stride in v.strides):
                    self._strides_fit = False
            low, high = v.byte_range()
            if low < high:
                reach[i] = low - v.pointer, high - v.pointer
        # Two arrays, and the distances between which their byte ranges intersect.
        self._pairs: list[tuple[int, int, int, int]] = []
        for i in outputs:
            if i in reach:
                low, high = reach.pop(i)
                self._pairs += [(i, j, low - to, high - start) for j, (start, to) in reach.items()]

    def allows(self, addresses: Sequence[int]) -> bool:
        """Return whether elements are at multiples of their size, and outputs apart."""
        for i, itemsize in self._itemsizes:
            if addresses[i] % itemsize:
                return False
        for i, j, nearest, farthest in self._pairs:
            distance = addresses[j] - addresses[i]
            if (
                nearest < distance < farthest
                and (distance or (i, j) not in self._in_place)
                and _share_bytes(self._layouts[i], self._layouts[j], distance)
            ):
                return False
        return self._strides_fit


@lru_cache(maxsize=4096)  # interleaved arrays, K and V of one pool say, keep their distance
def _share_bytes(layout: _Layout, other: _Layout, distance: int) -> bool:
    """Return whether two arrays share a byte, the second `distance` bytes after the first."""
    return overlap(_view_at(_ANYWHERE, layout), _view_at(_ANYWHERE + distance, other))


def _view_at(address: int, layout: _Layout) -> ArrayView:
    """Return a view of a layout at an address."""
    shape, strides, format, scales = layout
    if scales is None:
        return ArrayView(address, shape, strides, format, "host")
    start_bytes, scale_strides = scales
    group_scales = kv_operand.GroupScales(start_bytes, scale_strides[:-1])
    whole = ArrayView(address, shape, strides, format, "host")
    whole.scales = group_scales.of(whole, address, shape)
    return whole


def _same_layout(a: ArrayView | None, b: ArrayView | None) -> bool:
    """Return whether two views have each element at the same distance from their addresses."""
    if a is None or b is None or a.shape != b.shape:
        return False
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.strides, b.strides, strict=True))


# --- Outputs that a call allocates ----------------------------------------------------------------


def format_name(dtype: Any, name: str = "dtype") -> str:
    """Return the number format that a dtype argument stands for; `name` is the argument's."""
    return formats.Encoding.of(dtype, name).format


def to_allocate(like: ArrayView, shape: tuple[int, ...], format: str, name: str = "") -> ArrayView:
    """Describe an output for `Plan.allocated`: in the library of `like`, on its device."""
    four_bit = formats.FOUR_BIT.get(format)
    if four_bit is not None:
        formats.require_groups(four_bit, shape[-1], "dtype")
    described = ArrayView(
        0, shape, strides_of(shape, format), format, like.device, library=like.library,
        rotated_width=like.rotated_width if format == like.format else 0,
    )  # fmt: skip
    described.name = name
    return described


def zeros(like: ArrayView, shape: tuple[int, ...], format: str, stream: Stream) -> Any:
    """Return zeros on the device and of the library of `like`, for work on `stream`.

    In the format of `like` rows are rotated as its are.
    """
    return zeros_allocator(like, shape, format)(stream)


def zeros_allocator(
    like: ArrayView, shape: tuple[int, ...], format: str
) -> Callable[[Stream], Any]:
    """Return what makes zeros as `zeros` does, for several calls of one layer after another."""
    return _allocator(to_allocate(like, shape, format), zeroed=True)


def _allocator(described: ArrayView, zeroed: bool) -> Callable[[Stream], Any]:
    """Return what allocates an array of `to_allocate` for a stream."""
    if described.rotated_width:
        plain = _allocator(with_rotation(described, 0), zeroed)
        return lambda stream: with_rotation(plain(stream), described.rotated_width)
    device, shape, format = devices.get(described.device), described.shape, described.format
    if described.library != "torch":
        return partial(device.allocate, shape, format, zeroed=zeroed)
    allocate = _torch_allocator(shape, format, device.torch_name, zeroed)

    def allocate_for(stream: Stream) -> Any:
        tensor = allocate()
        # torch's allocator reuses memory in the order of torch's current stream, which fills it.
        current = device.as_stream(None, "torch")
        if current != stream:
            stream.wait(current)
        return tensor

    return allocate_for


@lru_cache(maxsize=1024)
def _torch_allocator(
    shape: tuple[int, ...], format: str, device_name: str, zeroed: bool
) -> Callable[[], Any]:
    torch = sys.modules["torch"]
    device = torch.device(device_name)
    if format in formats.FOUR_BIT:

        def allocate(shape: Any, dtype: Any) -> Any:
            make = torch.zeros if zeroed else torch.empty
            return make(shape, dtype=torch.uint8, device=device)

        return partial(four_bit_array, allocate, shape, formats.Encoding(format))
    # Like one element, repeated: `empty_like` is twice as fast as `empty`.
    dtype = getattr(torch, formats.numpy_dtype(format).name)
    element = torch.empty((), dtype=dtype, device=device)
    address_of(element)  # raises for a fake tensor, which must not be kept
    return partial(torch.zeros_like if zeroed else torch.empty_like, element.expand(shape))


def in_library(array: Any, like: ArrayView) -> Any:
    """Return an array of the device as one of the library of `like`, without a copy."""
    return sys.modules["torch"].from_dlpack(array) if like.library == "torch" else array
