"""The record of a translation, kept beside its output: what its lines depend on."""

import json
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from vanilla_transformer_tools.settings import TranslateSettings

if TYPE_CHECKING:
    from vanilla_transformer_tools.translation import Translator

# Settings that change where the translations are, and how fast they come, but not the translations.
_FREE_SETTINGS = {"output", "resume", "max_tokens_per_batch"}
_PACKAGE = "vanilla-transformer"


@dataclass(frozen=True)
class JobRecord:
    """Everything that the lines of an output depend on.

    Attributes:
        facts: Version, settings, and checksums of input and models, by their names in errors.
        search: Engine, beam width and length penalty with which the job began; empty before.
        output: Size and checksum of the output, once it is complete.
    """

    facts: dict[str, Any]
    search: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: TranslateSettings) -> Self:
        """The record of a new job.

        Raises:
            OSError: If a file cannot be read.
        """
        values, models = asdict(settings), settings.model or []
        facts = {f"--{name}": values[name] for name in values if name not in _FREE_SETTINGS}
        # Files may be moved.
        for name in ("input", "prefix_file"):
            facts[f"--{name}"] = _checksum(values[name]) if values[name] else None
        facts["--model"] = len(models)
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
                f"beside its output, got: {error}. Move the file, or choose another --output."
            ) from error

    def write(self, path: Path) -> None:
        """Writes the record, replacing an earlier one as a whole."""
        from vanilla_transformer_tools.files import write_lines

        write_lines(path, [json.dumps(asdict(self), indent=2)])

    def with_search(self, translator: "Translator", output: str) -> Self:
        """The record with the search of a translator.

        Raises:
            ValueError: If the job began with another engine.
        """
        search = {
            "engine": translator.engine.name,
            "num_beams": translator.search.num_beams,
            "length_penalty": translator.search.length_penalty,
        }
        if self.search not in ({}, search):
            raise ValueError(
                f"{output!r} must be continued with its engine, {self.search.get('engine')}, got "
                f"{search['engine']}. Install what it was begun with, or delete it to translate "
                "anew."
            )
        return replace(self, search=search)

    def complete(self, output: Path) -> Self:
        """The record of the job whose complete output this is."""
        from vanilla_transformer_tools.saved_folder import describe_files

        return replace(self, output=describe_files(output.parent, [output.name])[output.name])

    def differences(self, other: Self) -> list[str]:
        """Facts in which another job differs, each with both values.

        What was complete is the same whatever version continues with it.
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


def _checksum(file: str | Path) -> str:
    from vanilla_transformer_tools.files import checksum

    return f"SHA-256 {checksum(file):.16}"


def _checksums(model: str) -> dict[str, str]:
    """Checksum of each file of a model; or its commit on the Hub, if that can be reached."""
    from transformers.utils import CONFIG_NAME

    from vanilla_transformer_tools.saved_folder import find_file, model_files

    folder = Path(model)
    if folder.is_dir():
        files = model_files(folder)
        return {file.relative_to(folder).as_posix(): _checksum(file) for file in files}
    config = find_file(model, CONFIG_NAME)
    # The cache has a folder for each commit.
    return {} if config is None else {"commit": config.parent.name}
