#!/usr/bin/env python
"""vanilla-transformer export, for reading and for use without installation."""

from vanilla_transformer_cli import export, run

if __name__ == "__main__":
    run(export)
