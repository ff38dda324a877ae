"""Writes the built-in corpus of German number words and their English translations."""

import argparse
import sys
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    """Command line of this script."""
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        description=(
            "Writes German number words (0 to 999,999) and their English translations as\n"
            "parallel text: train, validation and test, each as .de and .en, and the test numbers\n"
            "as digits in test.numbers, split into parts in test.parts.de and test.parts.en, with\n"
            "the links between these parts in test.alignment. No number occurs in two splits."
        ),
        epilog="Example:\n  python scripts/make_number_corpus.py data/numbers --train 40000",
    )
    parser.add_argument("folder", type=Path, help="where the files go; created if absent")
    for split, size, largest in (
        ("train", 40_000, 700_000),
        ("validation", 500, 100_000),
        ("test", 1_000, 200_000),
    ):
        text = f"size of the {split} split in lines, 1 to {largest} (default: {size})"
        parser.add_argument(f"--{split}", type=int, default=size, metavar="LINES", help=text)
    same = "the same seed and sizes give the same files (default: 0)"
    parser.add_argument("--seed", type=int, default=0, help=same)
    return parser


def main() -> int:
    """Writes the corpus and prints the number of lines of each file; returns the exit status."""
    arguments = build_parser().parse_args()
    # Imported late: the package loads torch, and `--help` should answer at once.
    from number_words import write_corpus

    try:
        paths = write_corpus(**vars(arguments))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for path in paths:
        print(f"{path}\t{getattr(arguments, path.name.partition('.')[0])} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
