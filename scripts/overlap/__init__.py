"""The demos of `overlap_demo.py`: their workloads, and what they report."""
