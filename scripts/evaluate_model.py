#!/usr/bin/env python
"""vanilla-transformer evaluate, for `accelerate launch` and for reading."""

from vanilla_transformer_cli import evaluate, run

if __name__ == "__main__":
    run(evaluate)
