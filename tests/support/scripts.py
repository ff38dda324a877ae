"""Runs a script as `python SCRIPT` would, but in this process: importing torch takes seconds."""

import contextlib
import functools
import io
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finished:
    """A script that has ended; named like the fields of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def run_script(script: Path, *argv: Any, cwd: Path | None = None) -> Finished:
    """Runs a script to its end; `argv` follows its name on the command line."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, [str(script), *map(str, argv)]
    # As Python does: a script imports what lies beside it.
    sys.path.insert(0, str(script.parent))
    status: Any = 0
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            contextlib.chdir(cwd or Path.cwd()),
        ):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=err)
            status = 1
    finally:
        sys.argv = before
        sys.path.remove(str(script.parent))
    return Finished(status or 0, out.getvalue(), err.getvalue())


@functools.cache
def help_of_script(script: Path) -> str:
    return run_script(script, "--help").stdout
