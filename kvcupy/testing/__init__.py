"""What a KV-cache kernel must compute, for any implementation of it.

    reference        the float64 references: one NumPy function per operation
    arrays.py        arguments between canaries, poison, and comparisons of every byte
    tolerances.py    how far float32 arithmetic may be from the references, and why
    cases.py         conformance cases of each operation, and the case of each kernel
    conformance.py   runs them: `conform`, `require`, and `python -m kvcupy conformance`
    verification.py  runs them on the machine at hand: `kvcupy.verify`, `python -m kvcupy verify`
    implementations.py   kvcupy, torch and other projects under kvcupy's signatures

`docs/testing_your_own_kernel.md` is the guide. Nothing here needs pytest.
"""

from .. import reference
from .arrays import Argument, Arguments, Buffer, Mismatch, assert_near, compare
from .cases import FEATURES, OPERATIONS, Case, cases
from .conformance import Outcome, conform, require, run_case
from .implementations import Implementation, NotSupported, load
from .tolerances import REASONS, attention_errors, merge_errors, rotation_errors, ulp

__all__ = [
    "FEATURES", "OPERATIONS", "REASONS", "Argument", "Arguments", "Buffer", "Case",
    "Implementation", "Mismatch", "NotSupported", "Outcome", "assert_near", "attention_errors",
    "cases", "compare", "conform", "load", "merge_errors", "reference", "require",
    "rotation_errors", "run_case", "ulp",
]  # fmt: skip
