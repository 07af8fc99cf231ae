"""`python -m kvcupy bench`: operations in the shapes of real models, beside other projects.

    models.py       the shapes of models
    store.py  rope.py  pages.py  attention.py  transfer.py       cases: arguments, baselines, checks
    candidates.py   checks and measures the candidates of a case
    baselines.py    torch, FlashInfer, SGLang and vLLM over the same memory
    timers.py       calls from Python, and replays of graphs, over rotated sets of arguments
    checks.py  report.py  command.py                             results, files, the command

The programs in `scripts/benchmarks/` measure other things with the same timers and tables.
"""
