#!/usr/bin/env python
"""Breaks the repository by one line at a time and reports which test notices."""

import argparse
import os
import sys
import tempfile
from itertools import groupby
from pathlib import Path

MUTANTS = Path(__file__).parents[1] / "tests" / "mutants"


def parse() -> argparse.Namespace:
    """Reads the options."""
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
        help="Do not check that the tests that caught a mutant pass on what is not broken.",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="Write which test caught each mutant to caught_by.json; it is run first next time.",
    )
    parser.add_argument("--jobs", type=int, default=2, help="Processes at once (default: 2).")
    parser.add_argument(
        "--limit", type=float, default=600, help="Seconds for each mutant (default: 600)."
    )
    return parser.parse_args()


def main() -> int:
    """Prints a Markdown table; the status is 1 unless a test caught every mutant."""
    arguments = parse()
    # One thread for each process, and no Hub; read when the libraries are imported.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    from mutation import Verdict, judge, load_mutants, path_of, record_tests, take_share

    try:
        every = load_mutants(arguments.mutants)
        share = take_share(every, arguments.share)
    except ValueError as error:
        sys.exit(str(error))
    mutants = [mutant for mutant in share if not arguments.only or arguments.only in mutant.name]
    if not mutants:
        sys.exit(f"--only {arguments.only!r} is in no name of share {arguments.share}.")
    given = [[*map(path_of, arguments.tests)]] if arguments.tests else None
    trials = [(mutant, given or mutant.choose_tests()) for mutant in mutants]
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as folder:
        place, jobs, limit = Path(folder), arguments.jobs, arguments.limit
        for mutant, verdict in judge(trials, place, jobs, limit):
            result = verdict.test or verdict.fault or "SURVIVED"
            verdicts[mutant.name] = verdict
            count = f"{len(verdicts)}/{len(mutants)}"
            print(f"{count} {mutant.name} -> {result}, {verdict.seconds:.1f} s", file=sys.stderr)
        caught = {name: verdict.test for name, verdict in verdicts.items() if verdict.test}
        if not arguments.skip_unbroken:
            files = groupby(sorted({*caught.values()}), lambda test: test.partition("::")[0])
            unbroken = [(None, [list(tests)]) for _, tests in files]
            for _, verdict in judge(unbroken, place, jobs, limit):
                if verdict.test or verdict.fault:
                    sys.exit(f"{verdict.output}\nThe tests must pass if nothing is broken.")
    if arguments.record:
        record_tests(arguments.mutants, every, caught)

    print("| file | defect | caught by |\n| --- | --- | --- |")
    # What no test caught stands last, where a long log still has it.
    for mutant in sorted(mutants, key=lambda mutant: mutant.name in caught, reverse=True):
        verdict = verdicts[mutant.name]
        result = f"`{verdict.test.removeprefix('tests/')}`" if verdict.test else "**SURVIVED**"
        print(f"| {mutant.file} | {mutant.name} | {verdict.fault or result} |")
    print(f"\n{len(caught)} of {len(mutants)} caught (share {arguments.share}).")
    return len(caught) < len(mutants)


if __name__ == "__main__":
    sys.exit(main())
