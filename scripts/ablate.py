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
import json
import shlex
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

# Beside the files of a run from its beginning to its successful end.
UNFINISHED_FILE = ".unfinished"


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
    try:
        plan = yaml.safe_load(options.plan.read_text(encoding="utf-8"))
        rows = check(plan, options)
        for seed, (name, words) in () if options.table else product(options.seeds, rows.items()):
            folder = options.output / f"{slug(name)}-{seed}"
            given = ["--data", options.data, "--seed", str(seed), "--output_dir", str(folder)]
            if not is_finished(folder) and (status := train(folder, [*words, *given])):
                print(f"{folder}: training ended with status {status}.", file=sys.stderr)
                return status
        lines = []
        for name in rows:
            folders = [options.output / f"{slug(name)}-{seed}" for seed in options.seeds]
            if finished := [folder for folder in folders if is_finished(folder)]:
                lines.append(f"| {name} | {row(finished, options.metric)} |")
    except yaml.YAMLError as error:
        print(f"{options.plan} must be YAML: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"| | {options.metric} | range | loss | runs | parameters | updates | minutes |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for line in lines:
        print(line)
    return 0


def check(plan: Any, options: argparse.Namespace) -> dict[str, list[str]]:
    """Options of the rows that are asked for, by name.

    Raises:
        ValueError: If plan or options are not as they must be.
    """
    if not isinstance(plan, dict) or not isinstance(plan.get("rows"), dict):
        raise ValueError(f"{options.plan} must have `options` and `rows`, see --help.")
    repeated = [seed for seed, times in Counter(options.seeds).items() if times > 1]
    if repeated:
        raise ValueError(f"--seeds must name each seed once, got several {repeated[0]}.")
    folders: dict[str, str] = {}
    for name in map(str, plan["rows"]):
        other = folders.setdefault(slug(name), name)
        if other != name:
            raise ValueError(f"{other!r} and {name!r} would have one folder. Rename a row.")
    rows = {
        str(name): shlex.split(plan.get("options") or "") + shlex.split(words or "")
        for name, words in plan["rows"].items()
        if any(fnmatch.fnmatch(str(name), pattern) for pattern in options.rows)
    }
    if not rows:
        known = ", ".join(map(str, plan["rows"]))
        raise ValueError(f"--rows must name some of {known}, got {options.rows}.")
    return rows


def is_finished(folder: Path) -> bool:
    """Whether a run got to its end; one that is stopped by a signal leaves results, too."""
    return (folder / "results.json").exists() and not (folder / UNFINISHED_FILE).exists()


def train(folder: Path, words: list[str]) -> int:
    """Runs the command, in a folder of its own, and returns its exit status.

    Raises:
        ValueError: If the folder holds something else than an unfinished run of this script, or
            the run goes on.
    """
    if folder.exists():
        if not (folder / UNFINISHED_FILE).exists():
            raise ValueError(
                f"{folder} must hold a finished run or one that this script began, got neither. "
                "Move it away, or choose another --output."
            )
        # Imported late: it loads torch.
        from vanilla_transformer.training.legs import claimed

        with claimed(folder):
            shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / UNFINISHED_FILE).touch()
    print("train", *words, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "vanilla_transformer_cli", "train", *words]
    status = subprocess.run(command, check=False, stdout=sys.stderr).returncode
    if status == 0:
        (folder / UNFINISHED_FILE).unlink()
    # As a shell tells the number of a signal.
    return status if status >= 0 else 128 - status


def row(folders: list[Path], metric: str) -> str:
    """Mean and range over the seeds, on the validation pairs."""
    runs = [
        json.loads((folder / "run.json").read_text(encoding="utf-8"))
        | json.loads((folder / "results.json").read_text(encoding="utf-8")).get("validation", {})
        for folder in folders
    ]
    for folder, run in zip(folders, runs, strict=True):
        if metric not in run:
            raise ValueError(f"{folder} has no score {metric!r}. Name another --metric.")
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
