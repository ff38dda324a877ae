#!/usr/bin/env python
"""Trains each row of an ablation with several seeds and prints a table of means and ranges.

The plan is YAML: `options` are those of `vanilla-transformer train` that all runs share, and `rows`
maps names to the options in which each run differs. Finished runs are not repeated, so a plan can
be stopped, continued and extended. Options of a row follow the shared ones; if those end in
`--config`, the row continues its list.

Example:
  python scripts/ablate.py ablations/norms.yaml --data data/dut --output runs/norms --seeds 1 2 3
"""

import argparse
import fnmatch
import json
import shlex
import shutil
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path


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
    import yaml

    options = parse()
    plan = yaml.safe_load(options.plan.read_text(encoding="utf-8"))
    shared = shlex.split(plan["options"])
    names = [name for name in plan["rows"] if any(fnmatch.fnmatch(name, p) for p in options.rows)]
    if not names:
        known = ", ".join(plan["rows"])
        print(f"--rows must name some of {known}, got {options.rows}.", file=sys.stderr)
        return 2
    for seed, name in () if options.table else product(options.seeds, names):
        folder = options.output / f"{slug(name)}-{seed}"
        if (folder / "results.json").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        words = [*shared, *shlex.split(plan["rows"][name] or ""), "--data", options.data]
        words += ["--seed", str(seed), "--output_dir", str(folder)]
        print("train", *words, file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "vanilla_transformer_cli", "train", *words]
        subprocess.run(command, check=True, stdout=sys.stderr)
    print(f"| | {options.metric} | range | loss | runs | parameters | updates | minutes |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in names:
        folders = [options.output / f"{slug(name)}-{seed}" for seed in options.seeds]
        if ended := [folder for folder in folders if (folder / "results.json").exists()]:
            print(f"| {name} | {row(ended, options.metric)} |")
    return 0


def row(folders: list[Path], metric: str) -> str:
    """Mean and range over the seeds, on the validation pairs."""
    runs = [
        json.loads((folder / "run.json").read_text(encoding="utf-8"))
        | json.loads((folder / "results.json").read_text(encoding="utf-8"))["validation"]
        for folder in folders
    ]
    score, loss, minutes = (
        statistics.mean(run[name] for run in runs) for name in (metric, "loss", "minutes")
    )
    scores = [run[metric] for run in runs]
    return (
        f"{score:.2f} | {min(scores):.2f}-{max(scores):.2f} | {loss:.3f} | {len(runs)} | "
        f"{runs[0]['parameters']:,} | {runs[0]['updates']:,} | {minutes:.1f}"
    )


def slug(name: str) -> str:
    """The name of a row as a folder name."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


if __name__ == "__main__":
    sys.exit(main())
