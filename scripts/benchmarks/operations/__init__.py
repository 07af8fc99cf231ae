"""Operations in the shapes of real models, beside other projects: `scripts/bench.py models`."""
