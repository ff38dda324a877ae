"""The record of a translation next to its output: model, settings and input of its lines."""

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Self

from vanilla_transformer_tools.settings import TranslateSettings

# Paths, whose content is recorded instead, and settings that change only speed and memory.
_FREE_SETTINGS = {"model", "input", "prefix_file", "output", "resume", "max_tokens_per_batch"}
_PACKAGE = "vanilla-transformer"


class CountedLines(Iterator[tuple[str, str]]):
    """Lines, each with the text that its translation begins with; they are counted and digested.

    Attributes:
        count: Number of lines read so far.

    Args:
        lines: Pairs of texts without line ends.
    """

    def __init__(self, lines: Iterator[tuple[str, str]]) -> None:
        self._lines = lines
        self._ready: deque[tuple[str, str]] = deque()
        self._digest = hashlib.sha256()
        self.count = 0

    def __next__(self) -> tuple[str, str]:
        if self._ready:
            return self._ready.popleft()
        pair = next(self._lines)
        # Text from an argument may contain bytes that are not UTF-8.
        self._digest.update("".join(f"{text}\n" for text in pair).encode(errors="surrogatepass"))
        self.count += 1
        return pair

    def skip(self, done: int, known: int) -> None:
        """Reads the first `known` lines, or as many as there are, and drops the first `done`."""
        # The list is built first, because iterating takes ready lines before new ones.
        self._ready = deque(list(islice(self, known))[done:])

    @property
    def sha256(self) -> str:
        """Checksum of the lines read so far."""
        return self._digest.hexdigest()


@dataclass(frozen=True)
class JobRecord:
    """Everything that the lines of an output depend on.

    Attributes:
        facts: Version, settings and checksums of the models, by the names that errors give them.
        search: Engine, beam width and length penalty with which the job began; empty before.
        lines: Number of input lines that were read; the output has at most as many.
        sha256: Checksum of these lines, and of what their translations begin with.
        output: Size and checksum of the output, once it is complete.
    """

    facts: dict[str, Any]
    search: dict[str, Any] = field(default_factory=dict)
    lines: int = 0
    sha256: str = ""
    output: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: TranslateSettings) -> Self:
        """The record of a new job.

        Raises:
            OSError: If a file of a model cannot be read.
        """
        values, models = asdict(settings), settings.model or []
        facts = {f"--{name}": values[name] for name in values if name not in _FREE_SETTINGS}
        facts["--prefix_file"] = settings.prefix_file is not None
        facts["number of models"] = len(models)
        for number, model in enumerate(models, start=1):
            facts |= {f"{file} of model {number}": sum_ for file, sum_ in _checksums(model).items()}
        return cls({_PACKAGE: version(_PACKAGE), **facts})

    @classmethod
    def read(cls, path: Path) -> Self:
        """The record of an interrupted job.

        Raises:
            ValueError: If the file is not a record.
            OSError: If it cannot be read.
        """
        from vanilla_transformer_tools.saved_folder import read_object

        try:
            return cls(**read_object(path))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{str(path)!r} must be the record of an interrupted translation, which is kept "
                f"next to its output, got: {error}. Move the file, or choose another --output."
            ) from error

    def write(self, path: Path) -> None:
        """Writes the record, replacing an earlier one as a whole."""
        from vanilla_transformer_tools.files import write_lines

        write_lines(path, [json.dumps(asdict(self), indent=2)])

    def complete(self, output: Path) -> Self:
        """The record of the job whose complete output this is."""
        from vanilla_transformer_tools.saved_folder import describe_files

        return replace(self, output=describe_files(output.parent, [output.name])[output.name])

    def differences(self, other: Self) -> list[str]:
        """Facts in which another job differs, each with both values.

        A complete output is the same whatever version continues with it.
        """
        names = sorted(self.facts.keys() | other.facts.keys())
        was_now = {
            name: (self.facts.get(name, "missing"), other.facts.get(name, "missing"))
            for name in names
            if not (self.output and name == _PACKAGE)
        }
        return [
            f"{name} {now} instead of {was}" for name, (was, now) in was_now.items() if was != now
        ]


def record_path(output: Path) -> Path:
    """Path of the record of an output."""
    return output.with_name(f"{output.name}.job.json")


def _checksums(model: str) -> dict[str, str]:
    """Checksum of each file of a model; or its commit on the Hub, if that can be reached."""
    from transformers.utils import CONFIG_NAME

    from vanilla_transformer_tools.files import checksum
    from vanilla_transformer_tools.saved_folder import find_file, model_files

    folder = Path(model)
    if folder.is_dir():
        return {
            file.relative_to(folder).as_posix(): f"SHA-256 {checksum(file):.16}"
            for file in model_files(folder)
        }
    config = find_file(model, CONFIG_NAME)
    # The cache has a folder for each commit.
    return {} if config is None else {"commit": config.parent.name}
