"""Exit statuses of scripts, and runs of `train` that they start, with plans of them in YAML.

Each run has a folder of its own.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# In the folder of a run from its beginning to its successful end.
UNFINISHED_FILE = ".unfinished"
# Beside it: the options of the run.
OPTIONS_FILE = ".options"


def run_main(main: Callable[[], int]) -> NoReturn:
    """Ends the program with the status of `main`, or with 2 and the message of a user's mistake."""
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


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


def slug(name: str) -> str:
    """A name of a plan as a folder name."""
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
        folder: Folder of the run.
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
        from vanilla_transformer_tools.training.checkpoints import claimed

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


def table(*rows: list[str]) -> str:
    """A Markdown table; the first row is its header."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([lines[0], "| --- " * len(rows[0]) + "|", *lines[1:]])
