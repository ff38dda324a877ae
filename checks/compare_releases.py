#!/usr/bin/env python
"""Which saved folders load and generate with which release of Transformers: one table.

Each Python given is that of an environment with this package and a release of Transformers, and
saves a folder. These folders, and the one that an earlier commit saved, are loaded by each Python,
with the package and, by `trust_remote_code`, without it. What is computed in each mode (loss,
caches, searches) must equal what was computed when the folder was saved.

Examples:
  python checks/compare_releases.py .venv/bin/python .venv-oldest/bin/python
  python checks/compare_releases.py --save_with 670c2f24 tests/plugin/saved_before
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

HERE = Path(__file__).parent
SCRIPTS = HERE / "saved_folders"
BEFORE = HERE.parent / "tests/plugin/saved_before"
# Releases may draw other tokens, so these only must end without an error.
DRAWN = ("sampling", "sampled beams")
WAYS = {"package": "with the package", "remote": "without"}


class Cell(NamedTuple):
    """A folder that was loaded.

    Attributes:
        saved_by: Who saved it.
        release: Transformers that loaded it.
        way: "package" or "remote".
        faults: Modes that computed something else, and what; empty: the folder works.
        modes: Number of modes that were tried.
    """

    saved_by: str
    release: str
    way: str
    faults: dict[str, str]
    modes: int


def main() -> None:
    """Prints the table, or saves a folder with an earlier commit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="*", help="interpreters of environments to compare")
    parser.add_argument(
        "--save_with", nargs=2, metavar=("COMMIT", "FOLDER"), help="save FOLDER with that commit"
    )
    arguments = parser.parse_args()
    if arguments.save_with:
        save_with(*arguments.save_with)
    else:
        print(table(list(cells(arguments.pythons or [sys.executable]))))


def cells(pythons: Sequence[str]) -> Iterator[Cell]:
    """Loads each folder with each Python, with the package and without."""
    with TemporaryDirectory() as temporary:
        folders = {earlier(): BEFORE}
        for python in pythons:
            folder = Path(temporary) / f"saved-{len(folders)}"
            run([python, str(SCRIPTS / "save.py"), str(folder)])
            folders[f"this commit with {release_of(folder)}"] = folder
        for python in pythons:
            for way in WAYS:
                command = [python, str(SCRIPTS / "load.py"), way, *map(str, folders.values())]
                release, *loaded = json.loads(run(command, HF_HOME=f"{temporary}/hub"))
                for saved_by, found in zip(folders, loaded, strict=True):
                    faults = faults_in(folders[saved_by], found)
                    yield Cell(saved_by, release, way, faults, len(found))


def faults_in(folder: Path, found: dict[str, Any]) -> dict[str, str]:
    """Modes whose results are not those from when a folder was saved: an error, or others."""
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return {
        mode: value if isinstance(value, str) else "other results"
        for mode, value in found.items()
        if isinstance(value, str) or not (mode in DRAWN or agree(value, expected[mode]))
    }


def agree(found: Any, expected: Any) -> bool:
    """Whether nested lists have equal whole numbers and, up to rounding, equal others."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(agree, found, expected))
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-4)
    return bool(found == expected)


def table(found: Sequence[Cell]) -> str:
    """A row for each folder and way of loading, a column for each release."""
    releases = list(dict.fromkeys(cell.release for cell in found))
    lines = [
        f"| saved by | loaded | {' | '.join(f'Transformers {release}' for release in releases)} |",
        "| --- " * (2 + len(releases)) + "|",
    ]
    for saved_by in dict.fromkeys(cell.saved_by for cell in found):
        for way, described in WAYS.items():
            row = {
                cell.release: verdict(cell)
                for cell in found
                if (cell.saved_by, cell.way) == (saved_by, way)
            }
            shown = " | ".join(row[release] for release in releases)
            lines.append(f"| {saved_by} | {described} | {shown} |")
    return "\n".join(lines)


def verdict(cell: Cell) -> str:
    """What the table says of a folder."""
    if not cell.faults:
        return f"all {cell.modes} modes"
    return f"not: {', '.join(cell.faults)}"


def earlier() -> str:
    """How the table names the folder of the earlier commit."""
    return f"{(BEFORE / 'COMMIT').read_text().strip()} with {release_of(BEFORE)}"


def release_of(folder: Path) -> str:
    """Transformers that saved a folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(config["transformers_version"])


def save_with(commit: str, folder: str) -> None:
    """Saves a folder with the code of a commit, which is checked out for it."""
    with TemporaryDirectory() as temporary:
        tree = Path(temporary) / "tree"
        git = ["git", "-C", str(HERE)]
        run([*git, "worktree", "add", "--detach", str(tree), commit])
        try:
            shutil.rmtree(folder, ignore_errors=True)
            command = [sys.executable, str(SCRIPTS / "save.py"), folder]
            run(command, PYTHONPATH=str(tree / "src"))
        finally:
            run([*git, "worktree", "remove", "--force", str(tree)])
    (Path(folder) / "COMMIT").write_text(f"{commit}\n")


def run(command: Sequence[str], **environment: str) -> str:
    """What a command prints.

    Raises:
        RuntimeError: If it fails.
    """
    finished = subprocess.run(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed.\n{finished.stderr}")
    return finished.stdout


if __name__ == "__main__":
    main()
