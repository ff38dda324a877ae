#!/usr/bin/env python
"""vanilla-transformer train, for `accelerate launch` and for reading."""

from vanilla_transformer_cli import train, run

if __name__ == "__main__":
    run(train)
