"""What notices broken kernels (``ops/test_*_mutations.py``) passes on kernels as they are."""

from __future__ import annotations

import attention_checks
import operation_checks
import pytest
from helpers import full_only

CHECKS = operation_checks.CHECKS + attention_checks.CHECKS


@pytest.mark.parametrize("check", CHECKS)
def test_kernels_as_they_are(kernel_sources, check):
    check(kernel_sources.device())


def repeats(check) -> bool:
    """Return whether a check is another one with elements of 16 bits instead of 32."""
    name, _, fmt = check.__name__.rpartition("_")
    return fmt in ("fp16", "bf16") and any(other.__name__ == name for other in CHECKS)


@pytest.mark.parametrize("check", [full_only(c) if repeats(c) else c for c in CHECKS])
def test_kernels_as_users_run_them(kernel_sources, lenient_host, check):
    """Likewise where it is not strict, and one thread has a row: vector code of its own."""
    device = kernel_sources.device()
    device.warp_lanes = 1
    check(device)
