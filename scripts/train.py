#!/usr/bin/env python
"""vanilla-transformer train, for `accelerate launch` and for reading."""

from vanilla_transformer_tools.commands.command import run
from vanilla_transformer_tools.commands.train import train

if __name__ == "__main__":
    run(train)
