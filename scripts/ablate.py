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
import fnmatch
import shlex
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

from runs import check_options, is_finished, read_plan, slug, table, train


def parse() -> argparse.Namespace:
    """Reads the options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("plan", type=Path, help="YAML file.")
    parser.add_argument("--data", required=True, help="Folder of the corpus.")
    parser.add_argument("--output", type=Path, required=True, help="Folder for the runs.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: 1 2 3)")
    rows = "Rows to run, as patterns such as '6 layers*'. Default: all."
    parser.add_argument("--rows", nargs="+", default=["*"], help=rows)
    parser.add_argument("--metric", default="wer", help="Score of the table (default: wer).")
    parser.add_argument("--table", action="store_true", help="Only print finished runs.")
    return parser.parse_args()


def read_rows(path: Path, patterns: list[str]) -> dict[str, list[str]]:
    """Options of the rows of a plan that match a pattern, by name.

    Raises:
        ValueError: If the plan is wrong, or nothing matches.
        OSError: If it cannot be read.
    """
    plan = read_plan(path)
    rows = plan.get("rows")
    if not isinstance(rows, dict):
        raise ValueError(f"{path} must have `options` and `rows`, see --help.")
    for name, words in {"options": plan.get("options"), **rows}.items():
        if not isinstance(words, str | None):
            raise ValueError(f"{path}: {name} must be options in one string, got {words!r}.")
    if len({slug(str(name)) for name in rows}) < len(rows):
        raise ValueError(f"{path}: two rows would have one folder. Rename one.")
    chosen = {
        str(name): shlex.split(f"{plan.get('options') or ''} {words or ''}")
        for name, words in rows.items()
        if any(fnmatch.fnmatch(str(name), pattern) for pattern in patterns)
    }
    if not chosen:
        names = ", ".join(map(str, rows))
        raise ValueError(f"Rows of the plan must be named, some of {names}, got {patterns}.")
    return chosen


def cells(folders: list[Path], metric: str) -> list[str]:
    """Mean and range over the seeds, on the validation pairs.

    Raises:
        ValueError: If a run has no such score.
    """
    # Imported late: it loads torch.
    from vanilla_transformer_tools.saved_folder import RESULTS_FILE, RUN_FILE, read_object

    runs: list[dict[str, Any]] = []
    for folder in folders:
        results = folder / RESULTS_FILE
        scores = read_object(results).get("validation", {}) if results.exists() else {}
        if metric not in scores:
            raise ValueError(
                f"{folder} has no score {metric!r} of translations of validation pairs. Name "
                "another --metric, or train with --validation and --predict_with_generate true."
            )
        runs.append(read_object(folder / RUN_FILE) | scores)
    score, loss, minutes = (
        statistics.mean(run[name] for run in runs) for name in (metric, "loss", "minutes")
    )
    values = [run[metric] for run in runs]
    spread = f"{min(values):.2f}-{max(values):.2f}"
    sizes = (f"{runs[0]['parameters']:,}", f"{runs[0]['updates']:,}")
    return [f"{score:.2f}", spread, f"{loss:.3f}", str(len(runs)), *sizes, f"{minutes:.1f}"]


def main() -> int:
    """Runs what is missing, then prints the table in Markdown; returns the exit status."""
    options = parse()
    try:
        rows = read_rows(options.plan, options.rows)
        seeds = list(dict.fromkeys(options.seeds))
        folders = {
            (name, seed): options.output / f"{slug(name)}-{seed}"
            for seed, name in product(seeds, rows)
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
            if finished := [folders[name, s] for s in seeds if is_finished(folders[name, s])]:
                lines.append([name, *cells(finished, options.metric)])
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    columns = [options.metric, "range", "loss", "runs", "parameters", "updates", "minutes"]
    print(table(["", *columns], *lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
