"""Limits the threads of NumPy's BLAS to one, so that one core computes while another copies.

Import it before NumPy, which loads its BLAS.
"""

import os

for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")
