#!/usr/bin/env python
"""Breaks the model by one line at a time and reports which test notices."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

MUTANTS = Path(__file__).parents[1] / "tests" / "mutants.toml"


def main() -> int:
    """Prints a Markdown table; the status is 1 unless a test caught every mutant."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python checks/check_mutants.py --jobs 2 > mutants.md",
    )
    parser.add_argument(
        "--mutants", type=Path, default=MUTANTS, help="List of them (default: tests/mutants.toml)."
    )
    parser.add_argument("--only", metavar="WORDS", help="Those whose name contains these words.")
    parser.add_argument(
        "--tests", metavar="NAME", nargs="+", help="Test files, such as modeling/loss."
    )
    parser.add_argument("--jobs", type=int, default=2, help="Processes at once (default: 2).")
    parser.add_argument(
        "--limit", type=float, default=600, help="Seconds for each mutant (default: 600)."
    )
    arguments = parser.parse_args()

    # One thread for each process; read when torch is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    from mutation import Verdict, choose_tests, judge, load_mutants

    try:
        mutants = load_mutants(arguments.mutants)
    except ValueError as error:
        parser.error(str(error))
    mutants = [mutant for mutant in mutants if not arguments.only or arguments.only in mutant.name]
    tests = arguments.tests or choose_tests(mutants)
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as folder:
        ((_, unbroken),) = judge([None], tests, Path(folder), 1, arguments.limit)
        if unbroken.test or unbroken.fault:
            sys.exit(f"{unbroken.output}\nThe tests must pass before anything is broken.")
        print(f"unbroken: {unbroken.seconds:.0f} s", file=sys.stderr)
        for mutant, verdict in judge(mutants, tests, Path(folder), arguments.jobs, arguments.limit):
            result = verdict.test or verdict.fault or "SURVIVED"
            verdicts[mutant.name] = verdict
            count = f"{len(verdicts)}/{len(mutants)}"
            print(f"{count} {mutant.name} -> {result}, {verdict.seconds:.0f} s", file=sys.stderr)

    print("| file | defect | caught by |\n| --- | --- | --- |")
    for mutant in mutants:
        verdict = verdicts[mutant.name]
        result = f"`{verdict.test.removeprefix('tests/')}`" if verdict.test else "**SURVIVED**"
        print(f"| {mutant.file} | {mutant.name} | {verdict.fault or result} |")
    caught = sum(verdict.test is not None for verdict in verdicts.values())
    print(f"\n{caught} of {len(mutants)} caught.")
    return caught < len(mutants)


if __name__ == "__main__":
    sys.exit(main())
