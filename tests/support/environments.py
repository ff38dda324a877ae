"""Virtual environments that have only what somebody says is needed."""

import sysconfig
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def build_environment(folder: Path, requirements: Iterable[str]) -> Path:
    """The Python of an environment as `pip install REQUIREMENTS` makes it, in a new folder.

    Nothing is downloaded: its packages are links to those that are installed here.
    """
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    for name in _with_all_that_they_need(requirements):
        installed = metadata.distribution(name)
        for top in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(installed.locate_file(top)))
    return Path(sysconfig.get_path("scripts", "venv", {"base": str(folder)})) / "python"


def _with_all_that_they_need(requirements: Iterable[str]) -> set[str]:
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(requirement) for requirement in requirements]
    while waiting:
        wanted = waiting.pop()
        found.add(wanted.name)
        for extra in {"", *wanted.extras} - {extra for name, extra in seen if name == wanted.name}:
            seen.add((wanted.name, extra))
            for line in metadata.requires(wanted.name) or []:
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    waiting.append(needed)
    return found
