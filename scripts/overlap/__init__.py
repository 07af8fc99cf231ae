"""The workloads of `overlap_demo.py` and `offload_demo.py`."""
