"""The job of `vanilla-transformer translate`: input lines, and where their translations go."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from select import select
from typing import TYPE_CHECKING, cast

from vanilla_transformer_tools.commands.job_record import CountedLines, JobRecord, record_path
from vanilla_transformer_tools.commands.outputs import (
    Output,
    check_output,
    check_room,
    format_rows,
    open_alone,
    written_lines,
)
from vanilla_transformer_tools.settings import TranslateSettings

if TYPE_CHECKING:
    from vanilla_transformer_tools.translation import Translator

# Seconds for which a pipe is empty before what has come is translated.
_MOMENT = 0.05
# Bytes that are read at once: what a pipe of Linux holds.
_BLOCK = 2**16


@dataclass
class Report:
    """Counts that are reported at the end.

    Attributes:
        limited: Translations that were cut off at the length limit.
        separators: Line separators in translations that were replaced by blanks.
        unknown: Unknown tokens of translations.
    """

    limited: int = 0
    separators: int = 0
    unknown: int = 0


@dataclass(frozen=True)
class TranslationJob:
    """Lines to translate, and how much of them an output already has.

    Attributes:
        settings: Options of the command.
        lines: Lines that are still to be translated.
        has_next: Whether another line is there now; if not, those before it are translated first.
        total: Number of lines of the input, if known.
        record: Record to keep next to the output, of an earlier run if there was one; None: the
            output is not a regular file.
        done: Number of lines that the output already has.
        kept: Size of these lines in bytes.
        found: Size of the output in bytes at planning, with an unfinished last line.
    """

    settings: TranslateSettings
    lines: CountedLines
    has_next: Callable[[], bool]
    total: int | None = None
    record: JobRecord | None = None
    done: int = 0
    kept: int = 0
    found: int = 0

    @property
    def output(self) -> Path | None:
        """File for the translations; None: standard output."""
        return Path(self.settings.output) if self.settings.output else None

    def run(self, translator: "Translator", *, keeps_record: bool = False) -> Report:
        """Translates, and writes each line as soon as it is done.

        Args:
            translator: Translator with the models of the settings.
            keeps_record: Whether the record stays next to the complete output.

        Raises:
            ValueError: If another translation is writing to the output, it has changed since this
                job was planned, or the engine that it was begun with is gone.
            OSError: If the output can no longer be written; a file then ends in a complete line.
        """
        from vanilla_transformer_tools.progress import line_progress

        record = self._record_with_search(translator)
        report, recorded = Report(), 0
        # Translations on a terminal are their own progress.
        is_shown = bool(self.output) or not sys.stdout.isatty()
        progress = line_progress("translate", self.total, self.done, is_shown=is_shown)
        with closing(Output(self.output, self.kept, self.found)) as output, progress as advance:
            number = self.done
            for window in self._windows():
                lines, prefixes = zip(*window, strict=True)
                for translation in translator.translate(lines, prefixes, first_line=number + 1):
                    if self.output and record and recorded != self.lines.count:
                        # The record must cover a line before the output has it.
                        recorded = self.lines.count
                        record = replace(record, lines=recorded, sha256=self.lines.sha256)
                        record.write(record_path(self.output))
                    number += 1
                    rows = format_rows(translation, number, self.settings)
                    output.write("".join(f"{row}\n" for row in rows).encode())
                    for hypothesis in (translation, *translation.alternatives):
                        report.limited += hypothesis.reached_limit
                        report.separators += hypothesis.replaced_separators
                        report.unknown += hypothesis.unknown
                    advance()
        if self.total is not None and self.lines.count != self.total:
            raise ValueError(
                "The input must not change while it is translated, got "
                f"{self.lines.count:,} lines instead of the {self.total:,} at the beginning. "
                "Restore it, and continue with --output and --resume, or translate it again."
            )
        if self.output and record and not keeps_record:
            record_path(self.output).unlink(missing_ok=True)
        return report

    def _record_with_search(self, translator: "Translator") -> JobRecord | None:
        """The record with the search of the translator.

        Raises:
            ValueError: If the job began with another engine.
        """
        if self.record is None:
            return None
        search = {
            "engine": translator.engine.name,
            "num_beams": translator.search.num_beams,
            "length_penalty": translator.search.length_penalty,
        }
        if self.record.search not in ({}, search):
            raise ValueError(
                f"{str(self.output)!r} must be continued with its engine, "
                f"{self.record.search.get('engine')}, got {search['engine']}. Install that engine "
                "again, or delete the output to translate again."
            )
        return replace(self.record, search=search)

    def _windows(self) -> Iterator[list[tuple[str, str]]]:
        """Lines that are translated together; an error is raised after those before it."""
        from vanilla_transformer_tools.translation.translator import WINDOW_LINES

        window: list[tuple[str, str]] = []
        try:
            for line in self.lines:
                window.append(line)
                if len(window) == WINDOW_LINES or not self.has_next():
                    yield window
                    window = []
        except (ValueError, OSError):
            if window:
                yield window
            raise
        if window:
            yield window


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
    job = TranslationJob(settings, CountedLines(_pairs(lines, prefixes)), has_next, total)
    # A job cannot continue in a device or a pipe.
    if job.output and (job.output.is_file() or not job.output.exists()):
        return _after_earlier_run(job, job.output)
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
    from vanilla_transformer_tools.files import decode_lines

    pipe = PipedLines(cast(BufferedReader, sys.stdin.buffer))
    return None, decode_lines(pipe, "standard input"), pipe.has_next


def _pairs(lines: Iterator[str], prefixes: str | Iterator[str]) -> Iterator[tuple[str, str]]:
    # Torch is imported with it: mistakes are reported sooner without.
    from vanilla_transformer_tools.translation.translator import with_prefixes

    yield from with_prefixes(lines, prefixes)


def _after_earlier_run(job: TranslationJob, output: Path) -> TranslationJob:
    """The job with a record, without the lines that an interrupted run has written.

    Raises:
        ValueError: If another job wrote the output.
    """
    from vanilla_transformer_tools.saved_folder import differs

    path = record_path(output)
    earlier = JobRecord.read(path) if path.exists() else None
    record = JobRecord.of(job.settings)
    found = output.stat().st_size if output.exists() else 0
    if not found:
        return replace(job, record=record)
    if earlier is None:
        raise ValueError(
            f"{str(output)!r} must have its record {path.name!r} next to it to be continued, got "
            "none: the output is complete, or an earlier version began it. Delete the output to "
            "translate again, or let that version finish it."
        )
    done, kept, has_more = written_lines(output, 1 if job.settings.details else job.settings.n_best)
    job.lines.skip(done, earlier.lines)
    differences = earlier.differences(record)
    is_complete = bool(earlier.output)
    if job.lines.count < earlier.lines or (is_complete and job.total != earlier.lines):
        count = job.total if is_complete else job.lines.count
        differences.append(f"input of {count:,} lines instead of {earlier.lines:,}")
    elif job.lines.sha256 != earlier.sha256:
        differences.append(f"other text in the first {earlier.lines:,} lines of input or prefixes")
    if done + has_more > earlier.lines:
        differences.append(f"{done + has_more:,} lines in it instead of at most {earlier.lines:,}")
    elif is_complete and differs(output, earlier.output):
        differences.append("other translations in it than were written")
    if differences:
        raise ValueError(
            f"{str(output)!r} must be continued by the job that began it, got "
            f"{'; '.join(differences)}. Give the same ones, or delete it to translate "
            "again."
        )
    return replace(
        job, record=replace(record, search=earlier.search), done=done, kept=kept, found=found
    )


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
        self._lines: deque[bytes] = deque()
        # The beginning of the next line, in the parts in which it came.
        self._rest: list[bytes] = []
        self._size = 0
        self._has_ended = False

    def __next__(self) -> bytes:
        while not (self._lines or self._has_ended):
            self._read()
        if not self._lines:
            raise StopIteration
        return self._lines.popleft()

    def has_next(self) -> bool:
        """Whether a line has arrived, or the end, or does so within a moment."""
        while not (self._lines or self._has_ended):
            if not self._has_bytes():
                return False
            self._read()
        return True

    def _has_bytes(self) -> bool:
        try:
            return bool(select([self._stream], [], [], _MOMENT)[0])
        except (OSError, ValueError):
            # Windows waits for sockets only, and a stream in memory has no number.
            return True

    def _read(self) -> None:
        """Takes the bytes that are there, and waits only if there are none."""
        from vanilla_transformer_tools.files import LONGEST_LINE

        block = self._stream.read1(_BLOCK)
        self._rest.append(block)
        self._size += len(block)
        self._has_ended = not block
        # What is too long for a line is refused as one, instead of read to its end.
        if b"\n" in block or self._has_ended or self._size > LONGEST_LINE:
            *lines, rest = b"".join(self._rest).split(b"\n")
            self._lines.extend(line + b"\n" for line in lines)
            if rest and (self._has_ended or self._size > LONGEST_LINE):
                self._lines.append(rest)
                rest = b""
            self._rest, self._size = [rest], len(rest)


def file_lines(path: str) -> Iterator[str]:
    """Lines of a plain or compressed file, which may be empty."""
    from vanilla_transformer_tools.files import read_lines

    return read_lines(path, may_be_empty=True)
