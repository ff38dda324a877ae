#!/usr/bin/env python
"""Which contracts this model keeps, and which M2M100 and Marian of the same size: one table.

Runs the same checks, those in checks/contracts/, on tiny models of the three classes with random
weights, in about a minute on one CPU core. A broken contract shows the first line of its error.

Example:
  python checks/compare_contracts.py > contracts.md
"""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers.utils import logging

# The folder of `lab` and `neighbours`.
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from contracts import CHECKS, Candidate, Check
from lab import Report

TITLES = {"vanilla": "this model", "m2m100": "M2M100", "marian": "Marian"}


def main() -> None:
    """Prints the table, a line as soon as it is known, and how many contracts each class keeps."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report, kept = Report(), dict.fromkeys(TITLES, 0)
    report.table("Contracts", "area", "check", *TITLES.values())
    for area, checks in CHECKS.items():
        for check in checks:
            verdicts = {family: verdict(check, family) for family in TITLES}
            report.row(area, check.__doc__.removesuffix("."), *verdicts.values())
            for family in TITLES:
                kept[family] += verdicts[family] == "kept"
    report.row("", f"kept of {sum(map(len, CHECKS.values()))}", *kept.values())


def verdict(check: Check, family: str) -> str:
    """What a cell of the table says."""
    # Trainer prints its log.
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        try:
            check(Candidate(family, Path(folder)))
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}, "
            first_line = str(error).strip().split("\n")[0].replace("|", "\\|")
            return f"broken: {kind}{first_line}"
    return "kept"


if __name__ == "__main__":
    main()
