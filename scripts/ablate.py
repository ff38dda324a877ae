#!/usr/bin/env python
"""Trains each row of an ablation with several seeds and prints a table of means and ranges.

The plan is YAML: `options` are those of `vanilla-transformer train` that all runs share, and `rows`
maps names to the options in which each run differs. Finished runs are not repeated, so a plan can
be stopped, continued and extended; a run that was stopped begins anew. Options of a row follow the
shared ones; if those end in `--config`, the row continues its list.

Example:
  python scripts/ablate.py ablations/norms.yaml --data data/dut --output runs/norms --seeds 1 2 3
"""

import argparse
import sys
from itertools import product
from pathlib import Path

from ablation import cells, check_options, is_finished, read_rows, slug, train


def parse() -> argparse.Namespace:
    """Reads the options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("plan", type=Path, help="YAML file.")
    parser.add_argument("--data", required=True, help="Folder of the corpus.")
    parser.add_argument("--output", type=Path, required=True, help="Folder for the runs.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument(
        "--rows",
        nargs="+",
        default=["*"],
        help="Rows to run, as patterns such as '6 layers*'. Default: all.",
    )
    parser.add_argument("--metric", default="wer", help="Score of the table (default: wer).")
    parser.add_argument(
        "--table", action="store_true", help="Only print the table of finished runs."
    )
    return parser.parse_args()


def main() -> int:
    """Runs what is missing, then prints the table in Markdown; returns the exit status."""
    options = parse()
    try:
        rows = read_rows(options)
        folders = {
            (name, seed): options.output / f"{slug(name)}-{seed}"
            for seed, name in product(options.seeds, rows)
        }
        for (name, seed), folder in folders.items():
            words = [*rows[name], "--data", options.data, "--seed", str(seed)]
            if options.table:
                check_options(folder, words)
            elif status := train(folder, words):
                print(f"{folder}: training ended with status {status}.", file=sys.stderr)
                return status
        lines = []
        for name in rows:
            seeds = [folders[name, seed] for seed in options.seeds]
            if finished := [folder for folder in seeds if is_finished(folder)]:
                lines.append(f"| {' | '.join([name, *cells(finished, options.metric)])} |")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"| | {options.metric} | range | loss | runs | parameters | updates | minutes |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for line in lines:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
