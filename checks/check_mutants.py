#!/usr/bin/env python
"""Breaks the repository by one line at a time and reports which test notices."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

MUTANTS = Path(__file__).parents[1] / "tests" / "mutants"


def main() -> int:
    """Prints a Markdown table; the status is 1 unless a test caught every mutant."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python checks/check_mutants.py --jobs 2 > mutants.md",
    )
    parser.add_argument(
        "--mutants",
        type=Path,
        default=MUTANTS,
        help="Folder with lists of them in .toml files (default: tests/mutants).",
    )
    parser.add_argument("--only", metavar="WORDS", help="Those whose name contains these words.")
    parser.add_argument(
        "--share", metavar="I/N", default="1/1", help="Every N-th of them, beginning with the I-th."
    )
    parser.add_argument(
        "--tests",
        metavar="NAME",
        nargs="+",
        help="Test files for all, such as modeling/loss, instead of those that the list names.",
    )
    parser.add_argument(
        "--skip-unbroken",
        action="store_true",
        help="Do not run the tests on what is not broken, where they have just passed.",
    )
    parser.add_argument("--jobs", type=int, default=2, help="Processes at once (default: 2).")
    parser.add_argument(
        "--limit", type=float, default=600, help="Seconds for each mutant (default: 600)."
    )
    arguments = parser.parse_args()

    # One thread for each process; read when torch is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    from mutation import Verdict, judge, load_mutants, take_share

    try:
        every = take_share(load_mutants(arguments.mutants), arguments.share)
    except ValueError as error:
        parser.error(str(error))
    mutants = [mutant for mutant in every if not arguments.only or arguments.only in mutant.name]
    trials = [(mutant, arguments.tests or mutant.choose_tests()) for mutant in mutants]
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as folder:
        place, jobs, limit = Path(folder), arguments.jobs, arguments.limit
        if not arguments.skip_unbroken:
            names = sorted({name for _, tests in trials for name in tests})
            for _, unbroken in judge([(None, [name]) for name in names], place, jobs, limit):
                if unbroken.test or unbroken.fault:
                    sys.exit(f"{unbroken.output}\nThe tests must pass before anything is broken.")
        for mutant, verdict in judge(trials, place, jobs, limit):
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
    print(f"\n{caught} of {len(mutants)} caught (share {arguments.share}).")
    return caught < len(mutants)


if __name__ == "__main__":
    sys.exit(main())
