#!/usr/bin/env python
"""vanilla-transformer translate, for `accelerate launch` and for reading."""

from vanilla_transformer_cli import run, translate

if __name__ == "__main__":
    run(translate)
