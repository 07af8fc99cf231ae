"""kv.declare: work that is not kvcupy's own."""

from __future__ import annotations

import pytest

import kvcupy as kv


@pytest.fixture
def streams(device):
    return device.stream(), device.stream()


@pytest.fixture
def arrays(device):
    return [device.zeros((4, 2), "fp32") for _ in range(3)]


def kinds(checker):
    return [report.kind for report in checker.reports]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_block(streams, arrays, ordered):
    (main, other), (x, y, z) = streams, arrays
    with kv.order_checker("record") as checker:
        with kv.declare(reads=x, writes=(y, z), stream=other):
            other.call(lambda: None)
        if ordered:
            main.wait(other)
        with kv.declare(reads=(x, z), stream=main):
            pass
    assert kinds(checker) == ["RAW"] * (not ordered)
    if not ordered:
        (report,) = checker.reports
        assert report.what.startswith("z (4, 2) fp32") and report.edge == "main.wait(other)"
        assert report.second.operation == "declared work"
        assert report.second.site.startswith(__file__)


def test_it_meets_operations(device, streams, arrays):
    (main, other), (x, y, _) = streams, arrays
    with kv.order_checker("record") as checker:
        device.copy(x, y, stream=main)
        with kv.declare(writes=y[2:], stream=other):
            pass
    assert kinds(checker) == ["WAR"]
    device.synchronize()


def test_it_raises_at_the_start(streams, arrays):
    """What is declared of a block that fails has not been done."""
    (main, other), (x, *_) = streams, arrays
    entered = []
    with kv.order_checker():
        with pytest.raises(ZeroDivisionError), kv.declare(writes=x, stream=main):
            raise ZeroDivisionError
        with kv.declare(reads=x, stream=other):
            entered.append("after the failure")
        with pytest.raises(kv.OrderError), kv.declare(writes=x, stream=main):
            entered.append("too early")
    assert entered == ["after the failure"]


def test_a_decorator(streams, arrays):
    (main, other), (x, y, z) = streams, arrays

    @kv.declare(reads=("source", "scale"), writes=("targets",), stream="on")
    def add(source, targets, scale=None, *, on=None):
        """Add."""
        return source, targets, scale, on

    assert add.__name__ == "add" and add.__doc__ == "Add."
    with kv.order_checker("record") as checker:
        assert add(x, [y, z], on=main) == (x, [y, z], None, main)
        assert checker.reports == []
        add(z, [x], on=other)
    assert kinds(checker) == ["RAW", "WAR"]
    assert [r.second.operation for r in checker.reports] == ["add"] * 2
    assert all(r.second.site.startswith(__file__) for r in checker.reports)


def test_the_calling_thread(device, streams):
    """Without a stream, NumPy arrays are read and written by the host."""
    main, _ = streams
    pinned, target = device.empty_pinned((4, 2), "fp32"), device.zeros((4, 2), "fp32")
    pinned[...] = 0
    with kv.order_checker("record") as checker:
        device.copy(target, pinned, stream=main)
        with kv.declare(reads=pinned):
            pass
        assert checker.reports == []
        with kv.declare(writes=pinned):
            pass
        main.synchronize()
        with kv.declare(writes=pinned):
            pass
    (report,) = checker.reports
    assert report.kind == "WAR" and report.edge == "main.synchronize()"
    assert report.second.stream == "the host"


@pytest.mark.parametrize("call", ["reads", "writes"])
def test_arguments(streams, arrays, call):
    with kv.order_checker():
        with pytest.raises(TypeError, match="expected an array"):
            kv.declare(**{call: [1, 2]}, stream=streams[0]).__enter__()
        with pytest.raises(TypeError, match=f"{call}: expected arrays, got 'x'"):
            kv.declare(**{call: "x"}, stream=streams[0]).__enter__()
        with pytest.raises(TypeError, match="stream"):
            kv.declare(reads=arrays[0], stream=7).__enter__()
    with pytest.raises(ValueError, match=f"{call}: expected a parameter of f, got 'y'"):
        kv.declare(**{call: ("x", "y")})(lambda_named_f)
    with pytest.raises(ValueError, match="stream: expected a parameter of f, got 's'"):
        kv.declare(**{call: "x"}, stream="s")(lambda_named_f)


def lambda_named_f(x):
    """A function of one parameter."""


lambda_named_f.__name__ = "f"
