"""The `translate` command: text in, text out; its lines, its output, and a record beside that."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from io import BufferedReader
from itertools import islice
from pathlib import Path
from select import select
from typing import TYPE_CHECKING, Any, Self, cast

from vanilla_transformer_tools import files
from vanilla_transformer_tools.commands.command import (
    Report,
    build_parser,
    check_model,
    load_translator,
    parse_with_texts,
)
from vanilla_transformer_tools.commands.outputs import (
    check_output,
    check_room,
    format_rows,
    open_alone,
    opened_output,
    written_lines,
)
from vanilla_transformer_tools.progress import line_progress
from vanilla_transformer_tools.settings import TranslateSettings

if TYPE_CHECKING:
    from vanilla_transformer_tools.translation import Translator

# Seconds for which a pipe is empty before what has come is translated.
_MOMENT = 0.05
# Bytes that are read at once: what a pipe of Linux holds.
_BLOCK = 2**16

# Settings that change where the translations are, and how fast they come, but not the translations.
_FREE_SETTINGS = {"output", "resume", "max_tokens_per_batch"}
_PACKAGE = "vanilla-transformer"

_EXAMPLE = """Text is read from the arguments, or line by line from --input or standard
input.

example:
  vanilla-transformer translate --model runs/de-en < in.de > out.en
  vanilla-transformer translate --model runs/de-en --input in.de --output out.en --resume
"""


def translate(argv: list[str]) -> None:
    """Translate files, arguments, standard input or typed text."""
    parser = build_parser(translate, TranslateSettings, _EXAMPLE)
    parser.add_argument("text", nargs="*", help="Lines to translate instead of standard input.")
    values = parse_with_texts(parser, argv)
    texts = values.pop("text")
    settings = TranslateSettings(**values)
    check_model(parser, settings.model)
    job = plan_translation(settings, texts)
    if job.is_complete:
        print(f"{settings.output} is complete: {job.done:,} lines", file=sys.stderr)
        return
    if settings.engine == "auto" and (settings.prefix or settings.prefix_file):
        print("torch translates: CTranslate2 ends no output right after a prefix.", file=sys.stderr)
        settings = replace(settings, engine="torch")
    translator = load_translator(
        settings,
        num_hypotheses=settings.n_best,
        scores=settings.scores or settings.details or settings.n_best > 1,
        details=settings.details,
        markup=settings.markup,
    )
    job.run(translator).show(are_replaced=settings.replace_unknown)


@dataclass(frozen=True)
class JobRecord:
    """Everything that the lines of an output depend on.

    Attributes:
        facts: Version, settings, and checksums of input and models, by their names in errors.
        search: Engine, beam width and length penalty with which the job began; empty before.
    """

    facts: dict[str, Any]
    search: dict[str, Any] = field(default_factory=dict)

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
        """The record of an earlier job.

        Raises:
            ValueError: If the file is not a record.
            OSError: If it cannot be read.
        """
        from vanilla_transformer_tools.saved_folder import read_object

        try:
            return cls(**read_object(path))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{str(path)!r} must be the record of a translation, which is kept beside its "
                f"output, got: {error}. Move the file, or choose another --output."
            ) from error

    def write(self, path: Path) -> None:
        """Writes the record, replacing an earlier one as a whole."""
        files.write_lines(path, [json.dumps(asdict(self), indent=2)])

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

    def differences(self, other: Self) -> list[str]:
        """Facts in which another job differs, each with both values."""
        names = sorted(self.facts.keys() | other.facts.keys())
        was_now = {
            name: (self.facts.get(name, "missing"), other.facts.get(name, "missing"))
            for name in names
        }
        return [
            f"{name} {now} instead of {was}" for name, (was, now) in was_now.items() if was != now
        ]


def record_path(output: Path) -> Path:
    """Path of the record of an output."""
    return output.with_name(f"{output.name}.job.json")


def _checksum(file: str | Path) -> str:
    return f"SHA-256 {files.checksum(file):.16}"


def _checksums(model: str) -> dict[str, str]:
    """Checksum of each file of a model; or its commit on the Hub, if that can be reached."""
    from transformers.utils import CONFIG_NAME

    from vanilla_transformer_tools.saved_folder import find_file, model_files

    folder = Path(model)
    if folder.is_dir():
        return {
            file.relative_to(folder).as_posix(): _checksum(file) for file in model_files(folder)
        }
    config = find_file(model, CONFIG_NAME)
    # The cache has a folder for each commit.
    return {} if config is None else {"commit": config.parent.name}


@dataclass(frozen=True)
class TranslationJob:
    """Lines to translate, and how much of them an output already has.

    Attributes:
        settings: Options of the command.
        lines: Lines that are still to be translated.
        prefixes: Text that their translations begin with: one for all, or one for each.
        has_next: Whether another line is there now; if not, those before it are translated first.
        total: Number of lines of the input, if known.
        record: Record to keep beside the output; None: the output is not a regular file.
        done: Number of lines that the output already has.
        kept: Size of these lines in bytes.
        found: Size of the output in bytes at planning, with an unfinished last line.
    """

    settings: TranslateSettings
    lines: Iterator[str]
    prefixes: str | Iterator[str]
    has_next: Callable[[], bool]
    total: int | None = None
    record: JobRecord | None = None
    done: int = 0
    kept: int = 0
    found: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether the output already has all lines, and nothing else."""
        return 0 < self.kept == self.found and self.done == self.total

    def run(self, translator: "Translator") -> Report:
        """Translates, and writes each line as soon as it is done.

        Args:
            translator: Translator with the models of the settings.

        Raises:
            ValueError: If another translation is writing to the output, it has changed since this
                job was planned, or the engine that it was begun with is gone.
            OSError: If the output can no longer be written; a file then ends in a complete line.
        """
        path = Path(self.settings.output) if self.settings.output else None
        record = self.record and self.record.with_search(translator, str(path))
        report, number = Report(), self.done
        # Translations on a terminal are their own progress.
        is_shown = bool(path) or not sys.stdout.isatty()
        progress = line_progress("translate", self.total, self.done, is_shown=is_shown)
        with opened_output(path, self.kept, self.found) as write, progress as advance:
            if path and record:
                record.write(record_path(path))
            for translation in translator.translate(
                self.lines, self.prefixes, first_line=number + 1, has_next=self.has_next
            ):
                number += 1
                rows = format_rows(translation, number, self.settings)
                write("".join(f"{row}\n" for row in rows).encode())
                report.count(translation)
                advance()
        if self.total is not None and number != self.total:
            raise ValueError(
                "The input must not change while it is translated, got "
                f"{number:,} lines instead of the {self.total:,} at the beginning. "
                "Restore it, and continue with --output and --resume, or translate it anew."
            )
        if path and record and not self.settings.input:
            record_path(path).unlink(missing_ok=True)
        return report


def plan_translation(settings: TranslateSettings, texts: list[str]) -> TranslationJob:
    """Opens the input and finds out how much of it is done; writes nothing yet.

    Args:
        settings: Options of the command.
        texts: Lines given as arguments instead of standard input.

    Raises:
        ValueError: If settings exclude each other, a file is not UTF-8, or the output has text
            that is not of this job.
        OSError: If a file cannot be read, or the output cannot be written.
    """
    _check(settings, texts)
    total, lines, has_next = _open_lines(settings, texts)
    prefixes: str | Iterator[str] = settings.prefix
    if settings.prefix_file:
        count = sum(1 for _ in file_lines(settings.prefix_file))
        if total is not None and count != total:
            raise ValueError(
                f"There must be as many prefixes as lines, got {count:,} in "
                f"{settings.prefix_file!r} and {total:,}. Give one for each line, or --prefix."
            )
        prefixes = file_lines(settings.prefix_file)
    job = TranslationJob(settings, lines, prefixes, has_next, total)
    output = Path(settings.output) if settings.output else None
    # A job cannot continue in a device or a pipe.
    if output and (output.is_file() or not output.exists()):
        return _after_earlier_run(job, output)
    return job


def _check(settings: TranslateSettings, texts: list[str]) -> None:
    faults = []
    if settings.input and texts:
        faults.append(
            f"--input and text in the arguments exclude each other, got the text {texts[0]!r} too."
        )
    if settings.prefix and settings.prefix_file:
        faults.append("--prefix and --prefix_file exclude each other; give one of them.")
    if settings.n_best < 1:
        faults.append(f"--n_best must be at least 1, got {settings.n_best}.")
    if not settings.output and sys.__stdout__ is None:
        faults.append("Standard output is closed, so that --output is needed.")
    if settings.resume and not settings.output:
        faults.append("--resume needs the --output to continue.")
    elif settings.resume and not settings.input:
        faults.append("--resume needs --input, which can be compared with that of the first run.")
    for option in ("input", "prefix_file"):
        path = Path(getattr(settings, option) or "")
        if path.name and path.exists() and not path.is_file():
            faults.append(
                f"--{option} must be a regular file, since it is read twice, got {str(path)!r}. "
                "Text from a pipe goes to standard input."
            )
    if faults:
        raise ValueError("\n".join(faults))
    if not settings.output:
        return
    output = Path(settings.output)
    check_output(output, inputs=[settings.input, settings.prefix_file], models=settings.model or [])
    if output.is_file():
        open_alone(output).close()
    if output.is_file() and output.stat().st_size and not settings.resume:
        raise ValueError(
            f"--output {settings.output} already holds {output.stat().st_size:,} bytes. Pass "
            "--resume to continue after its last complete line, choose another file, or delete it."
        )
    # A device or a pipe gets no record.
    if output.is_file() or not output.exists():
        check_room(record_path(output), "The record of --output")


def _open_lines(
    settings: TranslateSettings, texts: list[str]
) -> tuple[int | None, Iterator[str], Callable[[], bool]]:
    """Number of lines, if known, the lines, and whether another one is there now."""
    if settings.input:
        # Read once before translating, so that bad bytes are reported now.
        total = sum(1 for _ in file_lines(settings.input))
        return total, file_lines(settings.input), lambda: True
    if texts:
        return len(texts), iter(texts), lambda: True
    if sys.stdin.isatty():
        return None, typed_lines(), lambda: False
    pipe = PipedLines(cast(BufferedReader, sys.stdin.buffer))
    return None, files.decode_lines(pipe, "standard input"), pipe.has_next


def _after_earlier_run(job: TranslationJob, output: Path) -> TranslationJob:
    """The job with a record, without the lines that an interrupted run of it has written."""
    path = record_path(output)
    earlier = JobRecord.read(path) if path.exists() else None
    record = JobRecord.of(job.settings)
    found = output.stat().st_size if output.exists() else 0
    if not found:
        return replace(job, record=record)
    if earlier is None:
        raise ValueError(
            f"{str(output)!r} must have its record {path.name!r} next to it to be continued, got "
            "none. Delete the output to translate again, or choose another file."
        )
    done, kept = written_lines(output, 1 if job.settings.details else job.settings.n_best)
    prefixes = job.prefixes
    rest = replace(
        job,
        lines=islice(job.lines, done, None),
        prefixes=prefixes if isinstance(prefixes, str) else islice(prefixes, done, None),
        record=replace(record, search=earlier.search),
        done=done,
        kept=kept,
        found=found,
    )
    if rest.is_complete:
        # It is the same whatever version looks at it.
        earlier.facts[_PACKAGE] = record.facts[_PACKAGE]
    differences = earlier.differences(record)
    total = job.total or 0
    if done > total:
        differences.append(f"{done:,} lines in it instead of at most {total:,}")
    if differences:
        raise ValueError(
            f"{str(output)!r} must be continued by the job that began it, got "
            f"{'; '.join(differences)}. Give the same ones, or delete it to translate "
            "again."
        )
    return rest


def typed_lines() -> Iterator[str]:
    """Lines typed at a terminal, with a prompt if standard output is one too."""
    # Where standard output is no terminal, `input` would write the prompt there.
    prompt = "> " if sys.stdout.isatty() else ""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return


class PipedLines(Iterator[bytes]):
    """Lines of a pipe or a file with their ends, and whether another one has arrived.

    Args:
        stream: Binary.
    """

    def __init__(self, stream: BufferedReader) -> None:
        self._stream = stream
        self._ahead = bytearray()
        self._has_ended = False

    def __next__(self) -> bytes:
        while not self._has_line():
            self._read()
        end = self._ahead.find(b"\n") + 1 or len(self._ahead)
        line = bytes(self._ahead[:end])
        del self._ahead[:end]
        if not line:
            raise StopIteration
        return line

    def has_next(self) -> bool:
        """Whether a line has arrived, or the end, or does so within a moment."""
        while not self._has_line():
            try:
                if not select([self._stream], [], [], _MOMENT)[0]:
                    return False
            except (OSError, ValueError):
                # Windows waits for sockets only, and a stream in memory has no number.
                pass
            self._read()
        return True

    def _has_line(self) -> bool:
        # What is too long for a line is refused as one, instead of read to its end.
        is_too_long = len(self._ahead) > files.LONGEST_LINE
        return self._has_ended or is_too_long or b"\n" in self._ahead

    def _read(self) -> None:
        """Takes the bytes that are there, and waits only if there are none."""
        block = self._stream.read1(_BLOCK)
        self._ahead += block
        self._has_ended = not block


def file_lines(path: str) -> Iterator[str]:
    """Lines of a plain or compressed file, which may be empty."""
    return files.read_lines(path, may_be_empty=True)
