"""The sources of work that `stress.py` drives: random calls, servers, a trace; and their audit."""
