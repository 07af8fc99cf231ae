"""The parts of `gpu_report.sh`."""
