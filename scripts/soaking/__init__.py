"""What soak.py runs: random serving traffic, audits of it, and the resources of the process."""
