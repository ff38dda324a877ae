"""Runs of `train` that scripts start, each in a folder of its own, and their plans in YAML."""

import argparse
import fnmatch
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

# Options of a run, in its folder: under the first name until it has ended with success.
UNFINISHED_FILE, OPTIONS_FILE = ".unfinished", ".options"


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Ends the program with the status of `main`, or with the message and status of a mistake."""
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except subprocess.CalledProcessError as error:
        print(error, file=sys.stderr)
        # A signal has the number that shells give it.
        sys.exit(error.returncode if error.returncode >= 0 else 128 - error.returncode)


def plan_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of all scripts that train what a plan names."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    parser.add_argument("plan", type=Path, help="YAML file.")
    parser.add_argument("--data", type=Path, required=True, help="Folder of the data.")
    parser.add_argument("--output", type=Path, required=True, help="Folder for the runs.")
    return parser


def read_plan(path: Path) -> dict[str, Any]:
    """What a plan says.

    Raises:
        ValueError: If it is no mapping in YAML.
        OSError: If it cannot be read.
    """
    import yaml

    try:
        plan = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} must be YAML: {' '.join(str(error).split())}") from error
    if not isinstance(plan, dict):
        raise ValueError(f"{path} must map names to options, see --help, got {plan!r:.60}.")
    return plan


def matching(names: Iterable[str], patterns: list[str], path: Path) -> list[str]:
    """Those names of a plan that match a pattern.

    Raises:
        ValueError: If none does.
    """
    names = list(names)
    found = [name for name in names if any(fnmatch.fnmatch(name, each) for each in patterns)]
    if not found:
        raise ValueError(f"{path} has {', '.join(names)}; one must be named, got {patterns}.")
    return found


def read_rows(path: Path, patterns: list[str]) -> dict[str, list[str]]:
    """Options of the rows of a plan that match a pattern, by name, after those of all rows.

    Raises:
        ValueError: If the plan is wrong, or nothing matches.
        OSError: If it cannot be read.
    """
    plan = read_plan(path)
    rows = plan.get("rows")
    if not isinstance(rows, dict):
        raise ValueError(f"{path} must have `options` and `rows`, see --help.")
    rows = {str(name): words for name, words in rows.items()}
    for name, words in {"options": plan.get("options"), **rows}.items():
        if not isinstance(words, str | None):
            raise ValueError(f"{path}: {name} must be options in one string, got {words!r}.")
    if len({slug(name) for name in rows}) < len(rows):
        raise ValueError(f"{path}: two rows would have one folder. Rename one.")
    return {
        name: shlex.split(f"{plan.get('options') or ''} {rows[name] or ''}")
        for name in matching(rows, patterns, path)
    }


def slug(name: str) -> str:
    """A name of a plan as a folder name."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def is_finished(folder: Path, words: list[str]) -> bool:
    """Whether a run with these options ended with success.

    Raises:
        ValueError: If one with other options did.
    """
    options, asked = folder / OPTIONS_FILE, shlex.join(words)
    if options.exists() and (had := options.read_text(encoding="utf-8")) != asked:
        raise ValueError(
            f"{folder} holds a run with other options: `{had}` instead of `{asked}`. Move it "
            "away, or choose another --output."
        )
    return options.exists()


def train(folder: Path, words: list[str]) -> None:
    """Trains in a folder of its own, unless a run with these options has finished there.

    Args:
        folder: Folder of the run.
        words: Options of `train`, without `--output_dir`.

    Raises:
        ValueError: If the folder holds anything but a run of this script with these options, or an
            unfinished one; or if that run has not ended.
        subprocess.CalledProcessError: If training fails.
    """
    if is_finished(folder, words):
        return
    unfinished = folder / UNFINISHED_FILE
    if folder.exists():
        if not unfinished.exists():
            raise ValueError(
                f"{folder} must hold a finished run or one that this script began, got neither. "
                "Move it away, or choose another --output."
            )
        # Imported late: it loads torch.
        from vanilla_transformer_tools.training.checkpoints import claimed

        with claimed(folder):
            shutil.rmtree(folder)
    folder.mkdir(parents=True)
    unfinished.write_text(shlex.join(words), encoding="utf-8")
    run_command("train", *words, "--output_dir", str(folder))
    unfinished.rename(folder / OPTIONS_FILE)


def run_command(*words: str) -> None:
    """Runs a command of the package, which prints to stderr.

    Raises:
        subprocess.CalledProcessError: If it fails.
    """
    print(*words, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "vanilla_transformer_tools.commands", *words]
    subprocess.run(command, check=True, stdout=sys.stderr)


def scores_of(folder: Path, name: str) -> dict[str, Any]:
    """Scores under that name in the results of a run, with its record; empty if there are none."""
    # Imported late: it loads torch.
    from vanilla_transformer_tools.saved_folder import RESULTS_FILE, RUN_FILE, read_object

    results = folder / RESULTS_FILE
    scores = read_object(results).get(name) if results.exists() else None
    return read_object(folder / RUN_FILE) | scores if scores else {}


def table(*rows: list[str]) -> str:
    """A Markdown table; the first row is its header."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([lines[0], "| --- " * len(rows[0]) + "|", *lines[1:]])
