"""A job of `translate`: lines in, rows out, and the record by which `--resume` knows the job."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, cast

from transformers.utils import CONFIG_NAME

from vanilla_transformer_tools import files
from vanilla_transformer_tools.progress import line_progress
from vanilla_transformer_tools.saved_folder import find_file, model_files, read_object
from vanilla_transformer_tools.settings import TranslateSettings
from vanilla_transformer_tools.translation.loading import device, folders_of
from vanilla_transformer_tools.translation.results import Translation
from vanilla_transformer_tools.translation.streams import (
    file_lines,
    opened_output,
    read_texts,
)
from vanilla_transformer_tools.translation.translator import Translator, windows

# Settings that change where the translations are, and how fast they come, but not the translations.
_FREE_SETTINGS = {"output", "resume", "max_tokens_per_batch", "model"}
_PACKAGE = "vanilla-transformer"


@dataclass
class Job:
    """Lines to translate, and how much of them an output already has.

    Attributes:
        settings: Options of the command.
        lines: Lines that are still to be translated.
        prefixes: Text that their translations begin with: one for all, or one for each.
        has_next: Whether another line is there now; if not, those before it are translated first.
        total: Number of lines, if known.
        first: Number of the first line in the input, from 1.
        record: Everything that the output depends on; None: nothing is recorded.
        done: Number of lines that the output already has.
        kept: Size of these lines in bytes.
        is_complete: Whether the output already has all lines, and nothing else.
    """

    settings: TranslateSettings
    lines: Iterator[str]
    prefixes: str | Iterator[str]
    has_next: Callable[[], bool]
    total: int | None = None
    first: int = 1
    record: dict[str, Any] | None = None
    done: int = 0
    kept: int = 0
    is_complete: bool = False

    def run(self, translator: Translator | None, count: Callable[[Translation], None]) -> None:
        """Translates, counts each translation, and writes each line as soon as it is done.

        Without lines no translator is needed.

        Raises:
            ValueError: If the input has changed since this job was planned.
            OSError: If the output can no longer be written; a file then ends in a complete line.
        """
        output = Path(self.settings.output) if self.settings.output else None
        done = self.done
        # Translations on a terminal are their own progress.
        is_shown = bool(output) or not sys.stdout.isatty()
        progress = line_progress("translate", self.total, self.done, is_shown=is_shown)
        with opened_output(output, self.kept) as write, progress as advance:
            if output and self.record is not None:
                files.write_lines(record_path(output), [json.dumps(self.record, indent=2)])
            for translation in self._translations(translator):
                rows = format_rows(translation, self.first + done, self.settings)
                done += 1
                write("".join(f"{row}\n" for row in rows).encode())
                count(translation)
                advance()
        if self.total is not None and done != self.total:
            raise ValueError(
                "The input must not change while it is translated, got "
                f"{done:,} lines instead of the {self.total:,} at the beginning. "
                "Restore it, and continue with --output and --resume, or translate it anew."
            )
        if output and self.record is not None and not self.settings.input:
            record_path(output).unlink(missing_ok=True)

    def first_language(self, column: int) -> str | None:
        """Target language of the first line, which the first translator needs; None: no line."""
        lines = list(islice(self.lines, 1))
        self.lines = chain(lines, self.lines)
        rows = tagged_lines(iter(lines), column, self.first + self.done)
        return next((language for _, _, language in rows), None)

    def _translations(self, translator: Translator | None) -> Iterator[Translation]:
        if translator is None:
            return iter(())
        number = self.first + self.done
        if self.settings.tag_column is None:
            return translator.translate(
                self.lines, self.prefixes, numbers=count(number), has_next=self.has_next
            )
        rows = tagged_lines(self.lines, self.settings.tag_column, number)
        return translate_tagged(translator, rows, self.settings.prefix, self.has_next)


def tagged_lines(lines: Iterator[str], column: int, first: int) -> Iterator[tuple[int, str, str]]:
    """Number, text, in the first column, and target language of lines that are separated by tabs.

    Columns count from 1, and lines from `first`.

    Raises:
        ValueError: If a line has no such column, or nothing in it.
    """
    for number, line in enumerate(lines, start=first):
        columns = line.split("\t")
        tag = columns[column - 1].strip() if column <= len(columns) else ""
        if not tag:
            raise ValueError(
                f"Line {number:,} must have a target language in column {column}, its "
                f"--tag_column, got {line!r:.60} with {len(columns)} columns."
            )
        yield number, columns[0], tag


def translate_tagged(
    translator: Translator,
    rows: Iterator[tuple[int, str, str]],
    prefix: str,
    has_next: Callable[[], bool],
) -> Iterator[Translation]:
    """Translations of the rows of `tagged_lines`, in order; see `Translator.translate`."""
    translators: dict[str, Translator] = {}
    for window in windows(rows, has_next, lambda row: len(row[1])):
        results: dict[str, Iterator[Translation]] = {}
        for _, _, tag in window:
            # An unknown language is an error after the translations of the lines before it.
            if tag not in results:
                if tag not in translators:
                    translators[tag] = translator.changed(target_language=tag)
                own = (row for row in window if row[2] == tag)
                numbers, texts, _ = zip(*own, strict=True)
                results[tag] = translators[tag].translate(texts, prefix, numbers=numbers)
            yield next(results[tag])


@contextmanager
def planned(settings: TranslateSettings, texts: list[str]) -> Iterator[Job]:
    """Opens the input and finds out how much of it is done; writes nothing yet.

    `texts` are lines given as arguments instead of standard input. Until the end of the block, no
    other translation writes to the output.

    Raises:
        ValueError: If a file is not UTF-8, or the output has text that is not of this job, or
            another translation writes to it.
        OSError: If a file cannot be read.
    """
    job = _open_lines(settings, texts)
    output = Path(settings.output) if settings.output else None
    # A job cannot continue in a device or a pipe.
    if output is None or (output.exists() and not output.is_file()):
        yield job
        return
    fault = (
        f"--output {output} is in use by another translation that has not ended. Wait for it, or "
        "choose another file."
    )
    with files.locked(output.with_name(f".{output.name}.lock"), fault):
        job.record = job_record(settings)
        path = record_path(output)
        earlier = _read_record(path) if path.exists() else None
        if output.exists() and (size := output.stat().st_size):
            if not settings.resume:
                raise ValueError(
                    f"--output {output} already holds {size:,} bytes. Pass --resume to continue "
                    "after its last complete line, choose another file, or delete it."
                )
            _continue(job, output, earlier)
        yield job


def _open_lines(settings: TranslateSettings, texts: list[str]) -> Job:
    """A job with its lines and prefixes from the beginning."""
    lines, has_next = read_texts(texts, settings.input)
    total = len(texts) or None
    job = Job(settings, lines, settings.prefix, has_next, total)
    if settings.input:
        # Read once before translating, so that bad bytes are reported now.
        total = sum(1 for _ in file_lines(settings.input))
        part = part_of(total, settings.shard)
        job.lines = islice(lines, part.start, part.stop)
        job.total, job.first = len(part), part.start + 1
    if settings.prefix_file:
        count = sum(1 for _ in file_lines(settings.prefix_file))
        if total is not None and count != total:
            raise ValueError(
                f"There must be as many prefixes as lines, got {count:,} in "
                f"{settings.prefix_file!r} and {total:,}. Give one for each line, or --prefix."
            )
        stop = None if job.total is None else job.first - 1 + job.total
        job.prefixes = islice(file_lines(settings.prefix_file), job.first - 1, stop)
    return job


def part_of(total: int, shard: str | None) -> range:
    """The lines of a shard, such as 3/64, from 0: all shards in order are all lines.

    Raises:
        ValueError: If the shard is not NUMBER/OF with a number from 1.
    """
    if shard is None:
        return range(total)
    number, _, count = shard.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(
            f"--shard must be NUMBER/OF, such as 3/64, with a number from 1 to OF, got {shard!r}."
        )
    first, last = int(number) - 1, int(number)
    return range(total * first // int(count), total * last // int(count))


def job_record(settings: TranslateSettings) -> dict[str, Any]:
    """Everything that the lines of an output depend on, by their names in errors."""
    values = asdict(settings)
    values |= values.pop("search")
    record = {f"--{name}": values[name] for name in sorted(values.keys() - _FREE_SETTINGS)}
    # Files may be moved.
    for name in ("input", "prefix_file"):
        record[f"--{name}"] = f"SHA-256 {files.checksum(values[name])}" if values[name] else None
    models = folders_of(settings.engine, settings.model or [])
    record["--model"] = list(map(_version_of, models))
    return {_PACKAGE: version(_PACKAGE), "device": device().type, **record}


def _version_of(model: str) -> str | None:
    """Checksum of a model's files; or its commit on the Hub, if that can be reached."""
    folder = Path(model)
    if folder.is_dir():
        return f"SHA-256 {files.checksum_of_all(model_files(folder))}"
    config = find_file(model, CONFIG_NAME)
    # The cache has a folder for each commit.
    return config.parent.name if config else None


def record_path(output: Path) -> Path:
    """Path of the record of an output."""
    return output.with_name(f"{output.name}.job.json")


def _continue(job: Job, output: Path, earlier: dict[str, Any] | None) -> None:
    """Leaves out the lines that an interrupted run of the job has written, if it was this job."""
    if earlier is None:
        raise ValueError(
            f"{str(output)!r} must have its record {record_path(output).name!r} next to it to be "
            "continued, got none. Delete the output to translate again, or choose another file."
        )
    record = cast(dict[str, Any], job.record)
    job.done, job.kept = written_lines(output, job.settings)
    job.is_complete = job.done == job.total and job.kept == output.stat().st_size
    if job.is_complete:
        # It is the same whatever version and device look at it.
        earlier |= {name: record[name] for name in (_PACKAGE, "device")}
    differences = [
        f"{name} {record.get(name, 'missing')} instead of {earlier.get(name, 'missing')}"
        for name in sorted(record.keys() | earlier.keys())
        if record.get(name) != earlier.get(name)
    ]
    if job.done > (job.total or 0):
        differences.append(f"{job.done:,} lines in it instead of at most {job.total or 0:,}")
    if differences:
        raise ValueError(
            f"{str(output)!r} must be continued by the job that began it, got "
            f"{'; '.join(differences)}. Give the same ones, or delete it to translate again."
        )
    job.lines = islice(job.lines, job.done, None)
    if not isinstance(job.prefixes, str):
        job.prefixes = islice(job.prefixes, job.done, None)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = read_object(path)
        if _PACKAGE not in record:
            raise ValueError(f"no `{_PACKAGE}` in it")
        return record
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} must be the record of a translation, which is kept beside its output, "
            f"got: {error}. Move the file, or choose another --output."
        ) from error


def written_lines(path: Path, settings: TranslateSettings) -> tuple[int, int]:
    """Number of input lines of which an output has all rows, and their bytes."""
    rows_per_line = 1 if settings.details else settings.n_best
    lines = size = rows_size = 0
    with path.open("rb") as file:
        for number, row in enumerate(file, start=1):
            if not row.endswith(b"\n"):
                break
            rows_size += len(row)
            if number % rows_per_line == 0:
                lines, size = lines + 1, rows_size
    return lines, size


def format_rows(
    translation: Translation, number: int, settings: TranslateSettings
) -> Iterator[str]:
    """Output rows for line `number` of the input, counted from 1, without line ends.

    With `scores` or several translations, a row has number, score and text, separated by tabs, and
    blanks for the tabs of the text; with `details` it is one JSON object with all translations.
    """
    if settings.details:
        hypotheses = list(map(_describe, translation.ranked))
        yield json.dumps({"line": number, "hypotheses": hypotheses}, ensure_ascii=False)
        return
    scores = settings.scores or settings.n_best > 1
    for one in translation.ranked:
        text = one.text.replace("\t", " ")
        yield f"{number}\t{one.score:.4f}\t{text}" if scores else one.text


def _describe(hypothesis: Translation) -> dict[str, object]:
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
