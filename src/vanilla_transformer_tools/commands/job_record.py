"""The record of an unfinished translation, kept beside its output for `--resume`."""

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Self

from vanilla_transformer_tools.settings import TranslateSettings

# Paths, whose content is recorded instead, and settings that change only speed and memory.
_FREE_SETTINGS = {"model", "input", "prefix_file", "output", "resume", "max_tokens_per_batch"}


class CountedLines(Iterator[str]):
    """Iterates over lines, and keeps their number and checksum.

    Attributes:
        count: Lines read so far.

    Args:
        lines: Without line ends.
    """

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self._ready: deque[str] = deque()
        self._digest = hashlib.sha256()
        self.count = 0

    def __next__(self) -> str:
        return self._ready.popleft() if self._ready else self._read()

    def skip(self, done: int, known: int) -> None:
        """Reads the first `known` lines, if there are so many, and drops the first `done`."""
        for _ in range(done):
            next(self, None)
        # The list is built first, because iterating takes ready lines before new ones.
        self._ready = deque(list(islice(self, known - done)))

    def _read(self) -> str:
        line = next(self._lines)
        # Text from an argument may contain bytes that are not UTF-8.
        self._digest.update(line.encode(errors="surrogatepass") + b"\n")
        self.count += 1
        return line

    @property
    def sha256(self) -> str:
        """Checksum of the lines read so far."""
        return self._digest.hexdigest()


@dataclass(frozen=True)
class JobRecord:
    """Everything that the lines of an output depend on.

    Attributes:
        version: Of this package.
        settings: Options that may change results.
        models: For each model the checksums of its files, or its commit on the Hub.
        lines: Number of input lines that were read; the output has at most as many.
        input: Checksum of these lines.
        prefix_lines: Number of lines of --prefix_file that were read.
        prefixes: Checksum of these lines; empty without a --prefix_file.
        engine: Name of the engine that translated them; empty if --engine auto had not chosen.
    """

    version: str
    settings: dict[str, Any]
    models: list[dict[str, str]]
    lines: int = 0
    input: str = ""
    prefix_lines: int = 0
    prefixes: str = ""
    engine: str = ""

    @classmethod
    def of(cls, settings: TranslateSettings) -> Self:
        """The record of a new job.

        Raises:
            OSError: If a file of a model cannot be read.
        """
        values = asdict(settings)
        return cls(
            version("vanilla-transformer"),
            {name: values[name] for name in values if name not in _FREE_SETTINGS},
            [_checksums(model) for model in settings.model or []],
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record of an interrupted job.

        Raises:
            ValueError: If the file is not a record.
            OSError: If it cannot be read.
        """
        from vanilla_transformer_tools.saved_folder import read_object

        try:
            values = read_object(path)
            record = cls(**values)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{str(path)!r} must be the record of an interrupted translation, which is kept "
                f"beside its output, got: {error}. Move the file, or choose another --output."
            ) from error
        return record

    def write(self, path: Path) -> None:
        """Writes the record, replacing an earlier one as a whole."""
        from vanilla_transformer_tools.files import write_lines

        write_lines(path, [json.dumps(asdict(self), indent=2)])

    def differences(self, other: Self) -> list[str]:
        """Differences from another job, apart from the input, each with both values."""
        faults = []
        if self.version != other.version:
            faults.append(f"vanilla-transformer {other.version} instead of {self.version}")
        for name in sorted(self.settings.keys() | other.settings.keys()):
            was, now = self.settings.get(name), other.settings.get(name)
            if was != now:
                faults.append(f"--{name} {now} instead of {was}")
        if len(self.models) != len(other.models):
            faults.append(f"{len(other.models)} models instead of {len(self.models)}")
        for old, new in zip(self.models, other.models, strict=False):
            for name in sorted(old.keys() | new.keys()):
                was, now = old.get(name, "missing"), new.get(name, "missing")
                if was != now:
                    faults.append(f"{name} of --model with SHA-256 {now:.12} instead of {was:.12}")
        return faults


def record_path(output: Path) -> Path:
    """Path of the record of an output."""
    return output.with_name(f"{output.name}.job.json")


def _checksums(model: str) -> dict[str, str]:
    from vanilla_transformer_tools.files import checksum
    from vanilla_transformer_tools.saved_folder import model_files

    folder = Path(model)
    if not folder.is_dir():
        return _commit(model)
    return {file.relative_to(folder).as_posix(): checksum(file) for file in model_files(folder)}


def _commit(model: str) -> dict[str, str]:
    """Commit of a model on the Hub; empty if the Hub cannot be reached."""
    from transformers.utils import CONFIG_NAME

    from vanilla_transformer_tools.saved_folder import find_file

    config = find_file(model, CONFIG_NAME)
    # The cache has a folder for each commit.
    return {} if config is None else {"commit": config.parent.name}
