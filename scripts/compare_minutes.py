#!/usr/bin/env python
r"""Compares `train --minutes` with the recipes of corpora that are given as many minutes.

For each corpus of the plan, up to three models are trained and scored on all validation pairs:
rules: by `train --minutes`, with nothing but the files and the metric;
left out: the same, but as the rules would be without the experiments on this corpus;
recipe: by the recipe, which is stopped if it takes longer.

Finished runs are not repeated, and one that was stopped begins anew. Ctrl-C ends all runs. With
--jobs 2, two runs share the machine; give each one thread with OMP_NUM_THREADS.

Example:
  OMP_NUM_THREADS=1 python scripts/compare_minutes.py scripts/corpora.yaml --data data \
      --output runs/minutes --minutes 15 --jobs 2
"""

import argparse
import sys
from pathlib import Path
from subprocess import CalledProcessError

from minutes import Corpus, draw, finish, read_corpora, table


def parse() -> argparse.Namespace:
    """Reads the options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("plan", type=Path, help="YAML file.")
    parser.add_argument("--data", type=Path, required=True, help="Folder of the corpora.")
    parser.add_argument("--output", type=Path, required=True, help="Folder for the runs.")
    parser.add_argument("--minutes", type=float, default=15, help="Of each run (default: 15).")
    parser.add_argument(
        "--corpora", nargs="+", default=["*"], help="Patterns such as 'Multi30k*'. Default: all."
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        default=list(Corpus.RUNS),
        choices=Corpus.RUNS,
        help="Default: all.",
    )
    parser.add_argument("--jobs", type=int, default=1, help="Runs at the same time (default: 1).")
    parser.add_argument("--curves", type=Path, help="Picture of scores and rates over the minutes.")
    parser.add_argument("--table", action="store_true", help="Only print the finished runs.")
    return parser.parse_args()


def main() -> int:
    """Runs what is missing, then prints the table in Markdown; returns the exit status."""
    options = parse()
    try:
        corpora = read_corpora(options.plan, options.corpora, options.data, options.output)
        failed = [] if options.table else finish(corpora, options)
        print(table(corpora))
        if options.curves:
            draw(corpora, options.curves)
    except (ValueError, OSError, ImportError, CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # The status with which shells report Ctrl-C.
        return 130
    for folder, status in failed:
        print(f"{folder}: ended with status {status}.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
