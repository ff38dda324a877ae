"""`python -m vanilla_transformer_cli`, the same as the `vanilla-transformer` command."""

from vanilla_transformer_cli import main

if __name__ == "__main__":
    main()
