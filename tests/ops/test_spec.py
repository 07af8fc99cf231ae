"""What is made from the declaration of an operation: operators, fakes, functions, examples."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import valid_calls

import kvcupy as kv
from kvcupy.ops import spec
from kvcupy.ops.call import Operation
from kvcupy.ops.spec import Argument


@pytest.fixture
def append(monkeypatch):
    """A new operation: rows appended after a sequence's rows, and how many there were."""
    with contextlib.suppress(ImportError):
        import kvcupy.interop.torch  # noqa: F401  # registers operators of the other operations
    monkeypatch.setattr(spec, "OPERATIONS", dict(spec.OPERATIONS))
    declaration = Operation(
        "append_rows", Argument("rows", "tokens kv_heads head_dim"),
        Argument("cache", "pages page_size kv_heads head_dim", cache=True, output=True),
        Argument("slots", "tokens", example=(5, -1, 0)), Argument("scale", "one", number=True),
        Argument("count", "tokens", output=True, fresh=True, returned=True),
        outputs_of=lambda arguments, options: {"count": (arguments["slots"].shape, "int64")},
    )  # fmt: skip

    @declaration.public
    def append_rows(
        rows: Any, cache: Any, slots: Any, *, scale: Any = None, skip: int | None = None,
        count: Any = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Append rows.

        Examples
        --------
        >>> 1 / 0
        """

    return declaration


def test_operators_of_torch(append):
    pytest.importorskip("torch")
    from kvcupy.interop.torch import operators

    arguments = (
        "Tensor rows, Tensor(a!) cache, Tensor slots, Tensor? scale=None, "
        "float? scale_number=None, int? skip=None, str? format=None"
    )
    assert {each.name: each.schema for each in operators(append)} == {
        "append_rows": f"({arguments}) -> (Tensor)",
        "append_rows_out": f"({arguments}, *, Tensor(b!) count) -> ()",
    }


def test_new_outputs_have_the_declared_shapes(append):
    torch = pytest.importorskip("torch")
    from kvcupy.interop.torch import new_outputs

    values = {"rows": torch.zeros(3, 2, 8), "slots": torch.zeros(3, dtype=torch.int64)}
    (count,) = new_outputs(append, values).values()
    assert (count.shape, count.dtype) == ((3,), torch.int64)


def test_what_a_call_writes():
    caches = {"k_cache", "v_cache", "k_scale_cache", "v_scale_cache"}
    written = spec.OPERATIONS["rope_store_kv"].written
    assert set(written({})) == {"query", "key", *caches}
    assert set(written({"query_out": 1, "write_key": False})) == {"query_out", *caches}


def test_every_public_parameter_is_an_argument_an_option_or_a_stream():
    """A parameter that is an array has a declared argument; options have other annotations."""
    for declaration in spec.OPERATIONS.values():
        for name, parameter in declaration.parameters.items():
            if name not in declaration.public_arguments and name not in spec.STREAMS:
                assert parameter.annotation != "Any", (declaration.name, name)
        values = valid_calls.example(declaration, kv.device("host"))
        assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in values.values())
