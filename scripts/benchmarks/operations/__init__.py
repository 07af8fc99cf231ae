"""Operations in the shapes of real models, and of other projects: `scripts/bench.py models`."""
