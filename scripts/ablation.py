"""Plans of ablations, their runs and the rows of their tables, for scripts/ablate.py."""

import argparse
import fnmatch
import shlex
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# In the folder of a run from its beginning to its successful end.
UNFINISHED_FILE = ".unfinished"

# Beside it: the options of the run.
OPTIONS_FILE = ".options"


def read_rows(options: argparse.Namespace) -> dict[str, list[str]]:
    """Options of the chosen rows of a plan, by name.

    Raises:
        ValueError: If the plan or the options are wrong.
        OSError: If the plan cannot be read.
    """
    plan = read_plan(options.plan)
    if not isinstance(plan, dict) or not isinstance(plan.get("rows"), dict):
        raise ValueError(f"{options.plan} must have `options` and `rows`, see --help.")
    repeated = [seed for seed, times in Counter(options.seeds).items() if times > 1]
    if repeated:
        raise ValueError(f"--seeds must name each seed once, got several {repeated[0]}.")
    check_folders(map(str, plan["rows"]), "row")
    for name, words in {"options": plan.get("options"), **plan["rows"]}.items():
        if not isinstance(words, str | None):
            raise ValueError(
                f"{options.plan}: {name} must be options in one string, got {words!r}."
            )
    rows = {
        str(name): shlex.split(plan.get("options") or "") + shlex.split(words or "")
        for name, words in plan["rows"].items()
        if any(fnmatch.fnmatch(str(name), pattern) for pattern in options.rows)
    }
    if not rows:
        known = ", ".join(map(str, plan["rows"]))
        raise ValueError(f"--rows must name some of {known}, got {options.rows}.")
    return rows


def read_plan(path: Path) -> Any:
    """What a plan says.

    Raises:
        ValueError: If it is not YAML.
        OSError: If it cannot be read.
    """
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} must be YAML: {' '.join(str(error).split())}") from error


def check_folders(names: Iterable[str], kind: str) -> None:
    """Compares the folders of names.

    Raises:
        ValueError: If two would have one.
    """
    folders: dict[str, str] = {}
    for name in names:
        other = folders.setdefault(slug(name), name)
        if other != name:
            raise ValueError(f"{other!r} and {name!r} would have one folder. Rename a {kind}.")


def slug(name: str) -> str:
    """The name of a row as a folder name."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def is_finished(folder: Path) -> bool:
    """Whether a run ended by itself; one that was stopped by a signal also leaves a record."""
    return (folder / "run.json").exists() and not (folder / UNFINISHED_FILE).exists()


def check_options(folder: Path, words: list[str]) -> None:
    """Compares the options of a finished run with those that are asked for.

    Raises:
        ValueError: If they differ.
    """
    options, asked = folder / OPTIONS_FILE, shlex.join(words)
    # Earlier versions kept none.
    if is_finished(folder) and options.exists():
        had = options.read_text(encoding="utf-8")
        if had != asked:
            raise ValueError(
                f"{folder} holds a run with other options: `{had}` instead of `{asked}`. Move it "
                "away, or choose another --output."
            )


def train(folder: Path, words: list[str]) -> int:
    """Trains in a folder of its own, unless a run with these options has finished there.

    Args:
        folder: Gets the run.
        words: Options of `train`, without `--output_dir`.

    Returns:
        The exit status of the command.

    Raises:
        ValueError: If the folder holds anything but a run of this script with these options, or an
            unfinished one; or if that run has not ended.
    """
    check_options(folder, words)
    if is_finished(folder):
        return 0
    if folder.exists():
        if not (folder / UNFINISHED_FILE).exists():
            raise ValueError(
                f"{folder} must hold a finished run or one that this script began, got neither. "
                "Move it away, or choose another --output."
            )
        # Imported late: it loads torch.
        from vanilla_transformer_tools.training.resume import claimed

        with claimed(folder):
            shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / UNFINISHED_FILE).touch()
    (folder / OPTIONS_FILE).write_text(shlex.join(words), encoding="utf-8")
    words = [*words, "--output_dir", str(folder)]
    print("train", *words, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "vanilla_transformer_tools.commands", "train", *words]
    status = subprocess.run(command, check=False, stdout=sys.stderr).returncode
    if status == 0:
        (folder / UNFINISHED_FILE).unlink()
    # A signal has the number that shells give it.
    return status if status >= 0 else 128 - status


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
