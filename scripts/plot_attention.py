#!/usr/bin/env python
"""vanilla-transformer attention, for reading and for use without installation."""

from vanilla_transformer_cli import attention, run

if __name__ == "__main__":
    run(attention)
