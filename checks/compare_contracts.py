#!/usr/bin/env python
"""Which contracts this model keeps, and which M2M100 and Marian of the same size: one table.

Runs the same checks, those in checks/contracts/, on tiny models of the three classes with random
weights, in about a minute on one CPU core. A broken contract shows the first line of its error.

Example:
  python checks/compare_contracts.py > contracts.md
"""

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contracts import Check

TITLES = {"vanilla": "this model", "m2m100": "M2M100", "marian": "Marian"}


def main() -> None:
    """Prints the table, a line as soon as it is known, and how many contracts each class keeps."""
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    # The folder of `lab` and `neighbours`.
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from transformers.utils import logging

    from contracts import CHECKS
    from lab import hardware_line

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(hardware_line() + "\n")
    print_row("area", "check", *TITLES.values())
    print_row(*["---"] * (2 + len(TITLES)))
    kept = dict.fromkeys(TITLES, 0)
    for area, checks in CHECKS.items():
        for check in checks:
            verdicts = {family: verdict(check, family) for family in TITLES}
            print_row(area, check.__doc__.removesuffix("."), *verdicts.values())
            for family in TITLES:
                kept[family] += verdicts[family] == "kept"
    print_row("", f"kept of {sum(map(len, CHECKS.values()))}", *map(str, kept.values()))


def print_row(*cells: str) -> None:
    """Prints a line of a Markdown table."""
    print("|", " | ".join(cells), "|", flush=True)


def verdict(check: "Check", family: str) -> str:
    """What a cell of the table says."""
    from contracts import Candidate

    # Trainer prints its log.
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        try:
            check(Candidate(family, Path(folder)))
        except AssertionError as error:
            return f"broken: {first_line(error)}"
        except Exception as error:
            return f"broken: {type(error).__name__}, {first_line(error)}"
    return "kept"


def first_line(error: Exception) -> str:
    """The error's message, fit for a cell."""
    return str(error).strip().split("\n")[0].replace("|", "\\|")


if __name__ == "__main__":
    main()
