"""What a KV-cache kernel must compute, for any implementation of it.

    reference        the float64 references: one NumPy function per operation
    arrays.py        arguments between canaries, poison, and comparisons of every byte
    tolerances.py    how far float32 arithmetic may be from the references, and why
    cases.py         conformance cases of each operation, and the case of each kernel
    conformance.py   runs them: `conform` and `require`
    verification.py  runs them on the machine at hand: `kvcupy.verify`, `python -m kvcupy verify`

`docs/testing_your_own_kernel.md` is the guide. Nothing here needs pytest.
"""

from .. import reference
from .arrays import Argument, Arguments, Buffer, Mismatch, assert_near, compare, torch_tensor
from .cases import OPERATIONS, Case, cases
from .conformance import Outcome, conform, require, run_case
from .tolerances import attention_errors, merge_errors, rotation_errors, ulp

__all__ = [
    "OPERATIONS", "Argument", "Arguments", "Buffer", "Case", "Mismatch", "Outcome", "assert_near",
    "attention_errors", "cases", "compare", "conform", "merge_errors", "reference", "require",
    "rotation_errors", "run_case", "torch_tensor", "ulp",
]  # fmt: skip
