"""Input lines and output rows of `vanilla-transformer translate`."""

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from io import BufferedReader, FileIO
from itertools import islice
from pathlib import Path
from select import select
from typing import TYPE_CHECKING, cast

from vanilla_transformer_tools.commands.job_record import CountedLines, JobRecord, record_path
from vanilla_transformer_tools.commands.outputs import check_output, check_room
from vanilla_transformer_tools.settings import TranslateSettings

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from vanilla_transformer_tools.translation import Translation, Translator

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
    """Lines to translate, and the destination of their translations.

    Attributes:
        lines: Lines that are still to be translated.
        prefixes: Beginnings of their translations.
        has_next: Whether another line is there now; if not, those before it are translated first.
        output: File for the translations; None: standard output.
        record: Record to keep beside the output, with the engine of an earlier run; None: the
            output is not a regular file.
        done: Number of lines that the output already has.
        size: Size of these lines in bytes.
        found: Size of the output in bytes at planning, with an unfinished last line.
        total: Number of lines of the input, if known.
        scores: See `format_rows`.
        details: See `format_rows`.
    """

    lines: CountedLines
    prefixes: str | CountedLines
    has_next: Callable[[], bool]
    output: Path | None
    record: JobRecord | None
    done: int
    size: int
    found: int
    total: int | None
    scores: bool
    details: bool

    def run(self, translator: "Translator") -> Report:
        """Translates, and writes each line as soon as it is done.

        Raises:
            ValueError: If another translation is writing to the output, it has changed since this
                job was planned, or the engine that it was begun with is gone.
            OSError: If the output can no longer be written; a file then ends in a complete line.
        """
        from vanilla_transformer_tools.progress import line_progress
        from vanilla_transformer_tools.translation.engine_choice import AutomaticEngine

        engine = translator.engine
        if self.record and (begun_with := self.record.engine):
            if isinstance(engine, AutomaticEngine):
                # An automatic choice is made once for a job.
                engine.keep_to(begun_with)
            if engine.name != begun_with:
                raise ValueError(
                    f"--resume must continue the job that began {str(self.output)!r} with its "
                    f"engine, {begun_with}, got {engine.name or 'another one'}. Install what it "
                    f"was begun with, or delete {str(self.output)!r} to translate anew."
                )
        report = Report()
        recorded = 0
        destination = (
            nullcontext(StandardOutput())
            if self.output is None
            else closing(OutputFile(self.output, self.size, self.found))
        )
        # Translations on a terminal are their own progress.
        is_shown = bool(self.output) or not sys.stdout.isatty()
        progress = line_progress("translate", self.total, self.done, is_shown=is_shown)
        with destination as file, progress as advance:
            translations = self._translations(translator)
            for number, translation in enumerate(translations, start=self.done + 1):
                if recorded != self.lines.count:
                    # The record must cover a line before the output has it.
                    recorded = self.lines.count
                    self._keep_record(engine.name)
                rows = format_rows(translation, number, scores=self.scores, details=self.details)
                file.write("".join(f"{row}\n" for row in rows).encode())
                for hypothesis in (translation, *translation.alternatives):
                    report.limited += hypothesis.reached_limit
                    report.separators += hypothesis.replaced_separators
                    report.unknown += hypothesis.unknown
                advance()
        if self.total is not None and self.lines.count != self.total:
            raise ValueError(
                "The input must not change while it is translated, got "
                f"{self.lines.count:,} lines instead of the {self.total:,} at the beginning. "
                "Restore it, and continue with --output and --resume, or translate it anew."
            )
        if self.output and self.record:
            record_path(self.output).unlink(missing_ok=True)
        return report

    def _keep_record(self, engine: str) -> None:
        if self.output and self.record:
            record = replace(
                self.record, engine=engine, lines=self.lines.count, input=self.lines.sha256
            )
            if isinstance(self.prefixes, CountedLines):
                # A line may have been read whose prefix is missing, or the other way round.
                count, checksum = self.prefixes.count, self.prefixes.sha256
                record = replace(record, prefix_lines=count, prefixes=checksum)
            record.write(record_path(self.output))

    def _translations(self, translator: "Translator") -> Iterator["Translation"]:
        done = self.done
        for lines in self._windows():
            prefixes: str | list[str] = ""
            if isinstance(self.prefixes, str):
                prefixes = self.prefixes
            else:
                prefixes = list(islice(self.prefixes, len(lines)))
                if len(prefixes) < len(lines):
                    yield from translator.translate(
                        lines[: len(prefixes)], prefixes, first_line=done + 1
                    )
                    raise _other_count(f"only {done + len(prefixes):,}")
            yield from translator.translate(lines, prefixes, first_line=done + 1)
            done += len(lines)
        if not isinstance(self.prefixes, str) and next(self.prefixes, None) is not None:
            raise _other_count(f"more than the {self.lines.count:,} lines")

    def _windows(self) -> Iterator[list[str]]:
        """Lines that are translated together; an error is raised after those before it."""
        from vanilla_transformer_tools.translation.translator import WINDOW_LINES

        window: list[str] = []
        try:
            for line in self.lines:
                window.append(line)
                if len(window) == WINDOW_LINES or not self.has_next():
                    yield window
                    window = []
        except (ValueError, OSError):
            yield window
            raise
        yield window


def _other_count(got: str) -> ValueError:
    return ValueError(f"There must be as many prefixes as lines, got {got} in --prefix_file.")


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
    output = Path(settings.output) if settings.output else None
    total, lines, has_next = _open_lines(settings, texts)
    prefixes: str | CountedLines = settings.prefix
    if settings.prefix_file:
        count = sum(1 for _ in file_lines(Path(settings.prefix_file)))
        if total is not None and count != total:
            raise ValueError(
                f"There must be as many prefixes as lines, got {count:,} in "
                f"{settings.prefix_file!r} and {total:,}. Give one for each line, or --prefix."
            )
        prefixes = CountedLines(file_lines(Path(settings.prefix_file)))
    record = None
    done = size = found = 0
    # A job cannot continue in a device or a pipe.
    if output and (output.is_file() or not output.exists()):
        record = JobRecord.of(settings)
        found = output.stat().st_size if output.exists() else 0
        record, done, size = _find_done(settings, output, record, lines, prefixes)
    return TranslationJob(
        lines,
        prefixes,
        has_next,
        output,
        record,
        done,
        size,
        found,
        total,
        settings.scores or settings.n_best > 1,
        settings.details,
    )


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
) -> tuple[int | None, CountedLines, Callable[[], bool]]:
    """Number of lines, if known, the lines, and whether another one is there now."""
    if settings.input:
        # Read once before translating, so that bad bytes are reported now.
        total = sum(1 for _ in file_lines(Path(settings.input)))
        return total, CountedLines(file_lines(Path(settings.input))), lambda: True
    if texts:
        return len(texts), CountedLines(iter(texts)), lambda: True
    if sys.stdin.isatty():
        return None, CountedLines(typed_lines()), lambda: False
    from vanilla_transformer_tools.files import decode_lines

    pipe = PipedLines(cast(BufferedReader, sys.stdin.buffer))
    return None, CountedLines(decode_lines(pipe, "standard input")), pipe.has_next


def _find_done(
    settings: TranslateSettings,
    output: Path,
    record: JobRecord,
    lines: CountedLines,
    prefixes: str | CountedLines,
) -> tuple[JobRecord, int, int]:
    """Finds the lines that an interrupted run of this job has written, and skips them.

    Returns:
        The record, with the engine of that run; number of these lines, and their size in bytes.

    Raises:
        ValueError: If another job wrote the output.
    """
    path = record_path(output)
    earlier = JobRecord.read(path) if path.exists() else None
    if not output.exists() or not output.stat().st_size:
        return record, 0, 0
    if earlier is None:
        raise ValueError(
            f"--resume needs {str(path)!r}, the record of the job that began {str(output)!r}, got "
            "no such file: the output is complete, or an earlier version began it. Delete the "
            "output to translate anew, or let that version finish it."
        )
    faults = earlier.differences(record)
    if earlier.prefixes and isinstance(prefixes, str):
        faults.append("no --prefix_file")
    done, size, has_more = written_lines(output, 1 if settings.details else settings.n_best)
    read = {"input": (lines, earlier.lines, earlier.input)}
    if isinstance(prefixes, CountedLines):
        read["--prefix_file"] = prefixes, earlier.prefix_lines, earlier.prefixes
    for name, (side, count, checksum) in read.items():
        side.skip(min(done, count), count)
        if side.count < count:
            faults.append(f"{name} of {side.count:,} lines instead of {count:,} or more")
        elif side.sha256 != checksum:
            faults.append(f"{name} with other text in its first {count:,} lines")
    if faults:
        raise ValueError(
            f"--resume must continue the job that began {str(output)!r}, got "
            f"{'; '.join(faults)}. Give what it was begun with, or delete {str(output)!r} to "
            "translate anew."
        )
    if done + has_more > earlier.lines:
        raise ValueError(
            f"--resume: {str(output)!r} must hold no more lines than its job has read, got "
            f"{done + has_more:,} and {earlier.lines:,}. Something else has written to it: delete "
            "it to translate anew."
        )
    return replace(record, engine=earlier.engine), done, size


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
        """Takes what is there, and waits only if there is nothing."""
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


def file_lines(path: Path) -> Iterator[str]:
    """Lines of a plain or gzipped file, which may be empty."""
    from vanilla_transformer_tools.files import read_lines

    return read_lines(path, may_be_empty=True)


def written_lines(path: Path, rows_per_line: int) -> tuple[int, int, bool]:
    """Measures the complete lines of an output.

    Args:
        path: The output; it need not exist.
        rows_per_line: Number of rows for each line of the input.

    Returns:
        Number of lines with all their rows, their size in bytes, and whether more bytes follow.
    """
    if not path.exists():
        return 0, 0, False
    lines = size = rows = rows_size = 0
    with path.open("rb") as file:
        for row in file:
            if not row.endswith(b"\n"):
                break
            rows += 1
            rows_size += len(row)
            if rows % rows_per_line == 0:
                lines, size = lines + 1, rows_size
    return lines, size, path.stat().st_size > size


def open_alone(path: Path) -> FileIO:
    """Opens a file for writing and locks it until it is closed.

    Raises:
        ValueError: If another translation has locked it.
    """
    # Unbuffered: on a full disk, a buffer would be written again when the file is closed.
    file = path.open("r+b", buffering=0)
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ValueError(
                f"--output {path} is in use by another translation that has not ended. Wait for "
                "it, or choose another file."
            ) from error
        except OSError:
            # A file system without locks.
            pass
    return file


class OutputFile:
    """A locked file that has complete lines at any moment.

    Args:
        path: Path of the file; it need not exist.
        size: Bytes to keep; the rest is cut off.
        found: Bytes that the file must have now.

    Raises:
        ValueError: If another translation has locked or changed it.
        OSError: If it cannot be opened.
    """

    def __init__(self, path: Path, size: int, found: int) -> None:
        is_file = path.is_file() or not path.exists()
        if is_file:
            path.touch()
        self._file = open_alone(path) if is_file else path.open("wb", buffering=0)
        self._path, self._size, self._is_file = path, size, is_file
        self._hint = " Its lines are complete; --resume continues after them." if is_file else ""
        if is_file:
            if (now := path.stat().st_size) != found:
                self._file.close()
                raise ValueError(
                    f"--output {path} was changed while the model was loaded: expected {found:,} "
                    f"bytes, got {now:,}. Pass --resume to continue it, or choose another file."
                )
            self._file.truncate(size)
            self._file.seek(size)

    def write(self, rows: bytes) -> None:
        """Writes all rows or none.

        Raises:
            OSError: If they cannot be written.
        """
        rest = memoryview(rows)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._size)
            raise OSError(
                f"{str(self._path)!r} can no longer be written: {error.strerror}.{self._hint}"
            ) from error
        self._size += len(rows)

    def close(self) -> None:
        """Closes and unlocks the file.

        Raises:
            OSError: If its lines cannot be kept, as on a disk that fails.
        """
        try:
            if self._is_file:
                # On disk, before the record of the job is deleted.
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


class StandardOutput:
    """Standard output, flushed after each line."""

    def write(self, rows: bytes) -> None:
        """Writes all rows.

        Raises:
            OSError: If they cannot be written.
        """
        try:
            sys.stdout.buffer.write(rows)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(f"Standard output can no longer be written: {error.strerror}.") from error


def format_rows(
    translation: "Translation", number: int, *, scores: bool, details: bool
) -> Iterator[str]:
    """Output rows for one line of the input, without line ends.

    Args:
        translation: The best one, with its alternatives.
        number: Number of the line in the input, counted from 1.
        scores: Give number, score and text of each translation, separated by tabs.
        details: Give one JSON object with all translations instead.
    """
    hypotheses = [translation, *translation.alternatives]
    if details:
        yield json.dumps(
            {"line": number, "hypotheses": list(map(_describe, hypotheses))}, ensure_ascii=False
        )
        return
    for hypothesis in hypotheses:
        yield f"{number}\t{hypothesis.score:.4f}\t{hypothesis.text}" if scores else hypothesis.text


def _describe(hypothesis: "Translation") -> dict[str, object]:
    return {
        "text": hypothesis.text,
        "score": None if hypothesis.score is None else round(hypothesis.score, 4),
        "reached_limit": hypothesis.reached_limit,
        "source_tokens": hypothesis.source_tokens,
        "tokens": hypothesis.tokens,
        "token_scores": [round(score, 4) for score in hypothesis.token_scores],
        # The format of Pharaoh and fast_align.
        "alignment": " ".join(f"{source}-{target}" for source, target in hypothesis.alignment),
    }
