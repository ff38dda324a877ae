#!/usr/bin/env python
"""Exact match on the number corpus, by number of digits."""

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Prints a row for each number of digits; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python scripts/score_numbers.py runs/numbers runs/demo/test.en",
    )
    parser.add_argument("corpus", type=Path, help="Folder that make_number_corpus.py wrote.")
    parser.add_argument(
        "translations", type=Path, help="Translations of its test.de, one per line."
    )
    arguments = parser.parse_args()

    from number_words import exact_match_by_digits
    from vanilla_transformer_tools.files import read_lines

    try:
        scores = exact_match_by_digits(
            [int(line) for line in read_lines(arguments.corpus / "test.numbers")],
            list(read_lines(arguments.translations)),
            list(read_lines(arguments.corpus / "test.en")),
        )
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print("digits  exact  lines")
    for score in scores:
        print(f"{score.digits:6}  {score.exact:5}  {score.lines:5}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
