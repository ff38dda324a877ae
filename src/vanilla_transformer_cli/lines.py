"""Lines in and rows out of `vanilla-transformer translate`."""

import codecs
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vanilla_transformer_cli.settings import TranslateSettings

if TYPE_CHECKING:
    from vanilla_transformer.translation import Translation, Translator


@dataclass
class Report:
    """What users are told at the end.

    Attributes:
        limited: Translations that were cut off at the longest output allowed.
        separators: Line separators in translations that became blanks.
    """

    limited: int = 0
    separators: int = 0


@dataclass(frozen=True)
class TranslationJob:
    """Lines to translate, and where their translations go.

    Attributes:
        lines: Those that are still to be translated.
        prefixes: What their translations begin with.
        is_typed: Somebody types the lines and waits for each translation; otherwise they are
            sorted and batched.
        output: File for the translations; None: standard output.
        done: Lines that the output already holds.
        size: Bytes that these take there.
        total: Lines of the input, where that is known.
        scores: See `format_rows`.
        details: See `format_rows`.
    """

    lines: Iterator[str]
    prefixes: str | Iterator[str]
    is_typed: bool
    output: Path | None
    done: int
    size: int
    total: int | None
    scores: bool
    details: bool

    def run(self, translator: "Translator") -> Report:
        """Translates, and writes line after line."""
        from tqdm import tqdm

        report = Report()
        destination = (
            nullcontext(sys.stdout.buffer)
            if self.output is None
            else open_output(self.output, self.size)
        )
        shows_progress = sys.stderr.isatty() and (self.output or not sys.stdout.isatty())
        with destination as file:
            translations = tqdm(
                self._translations(translator),
                "translate",
                self.total,
                initial=self.done,
                unit=" lines",
                disable=not shows_progress,
            )
            for number, translation in enumerate(translations, start=self.done + 1):
                rows = format_rows(translation, number, scores=self.scores, details=self.details)
                file.write("".join(f"{row}\n" for row in rows).encode())
                # Whatever happens next, this line is there.
                file.flush()
                for hypothesis in (translation, *translation.alternatives):
                    report.limited += hypothesis.reached_limit
                    report.separators += hypothesis.replaced_separators
        return report

    def _translations(self, translator: "Translator") -> Iterator["Translation"]:
        if not self.is_typed:
            yield from translator.translate(self.lines, self.prefixes, first_line=self.done + 1)
            return
        for line in self.lines:
            is_one = isinstance(self.prefixes, str)
            prefixes = self.prefixes if is_one else islice(self.prefixes, 1)
            yield from translator.translate([line], prefixes)


def plan_translation(settings: TranslateSettings, texts: list[str]) -> TranslationJob:
    """Opens what is to be read, and finds out how much of it is done; writes nothing yet.

    Args:
        settings: Where lines come from and go to.
        texts: Lines given as arguments, which take the place of standard input.

    Raises:
        ValueError: If settings do not go together, a file is not UTF-8, or the output holds what
            must not be lost or what does not fit to the input.
        OSError: If a file cannot be read.
    """
    _check(settings, texts)
    output = Path(settings.output) if settings.output else None
    total = None
    lines: Iterator[str]
    if settings.input:
        # Read to its end before anything is translated: a bad line is told now.
        total = sum(1 for _ in file_lines(Path(settings.input)))
        lines = file_lines(Path(settings.input))
    elif texts:
        lines = iter(texts)
    else:
        lines = typed_lines() if sys.stdin.isatty() else piped_lines()
    prefixes = file_lines(Path(settings.prefix_file)) if settings.prefix_file else settings.prefix
    done = size = 0
    if settings.resume and output:
        rows_per_line = 1 if settings.details else settings.n_best
        done, size, has_more = written_lines(output, rows_per_line)
        lines = _skip(lines, done, has_more, output)
        if not isinstance(prefixes, str):
            prefixes = _skip(prefixes, done, has_more, output)
    return TranslationJob(
        lines,
        prefixes,
        not (texts or settings.input) and sys.stdin.isatty(),
        output,
        done,
        size,
        total,
        settings.scores or settings.n_best > 1,
        settings.details,
    )


def _check(settings: TranslateSettings, texts: list[str]) -> None:
    faults = []
    if settings.input and texts:
        faults.append(f"--input takes the place of text in the arguments, got {texts[0]!r} too.")
    if settings.prefix and settings.prefix_file:
        faults.append("--prefix and --prefix_file exclude each other; give one of them.")
    if settings.resume and not settings.output:
        faults.append("--resume needs the --output to go on with.")
    output = Path(settings.output or "")
    if output.is_file() and output.stat().st_size and not settings.resume:
        faults.append(
            f"--output {settings.output} already holds {output.stat().st_size:,} bytes. Pass "
            "--resume to go on behind its last whole line, choose another file, or delete it."
        )
    if faults:
        raise ValueError("\n".join(faults))


def _skip(lines: Iterator[str], done: int, has_more: bool, output: Path) -> Iterator[str]:
    """The lines behind the first `done`.

    Raises:
        ValueError: If there are fewer lines than the output holds.
    """
    skipped = sum(1 for _ in islice(lines, done))
    following = list(islice(lines, 1))
    if skipped < done or (has_more and not following):
        raise ValueError(
            f"--resume: {str(output)!r} must hold no more lines than the input, got "
            f"{done + has_more:,} and {skipped:,}. Check that both belong together."
        )
    return chain(following, lines)


def typed_lines() -> Iterator[str]:
    """What somebody types, line by line."""
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


def piped_lines() -> Iterator[str]:
    """Lines of standard input; a byte order mark is dropped."""
    from vanilla_transformer.files import decode_line

    for number, line in enumerate(sys.stdin.buffer, start=1):
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        yield decode_line(content.removesuffix(b"\n"), "standard input", number)


def file_lines(path: Path) -> Iterator[str]:
    """Lines of a plain or gzipped file, of which there may be none."""
    from vanilla_transformer.files import read_lines

    return read_lines(path) if path.stat().st_size else iter(())


def written_lines(path: Path, rows_per_line: int) -> tuple[int, int, bool]:
    """What an interrupted run has left in its output.

    Args:
        path: The output; it need not exist.
        rows_per_line: Rows that each line of the input has there.

    Returns:
        Lines that are there with all their rows, the bytes that these take, and whether more bytes
        follow.
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


def open_output(path: Path, size: int) -> BinaryIO:
    """Opens an output behind its first `size` bytes; what follows them is cut off."""
    if not path.is_file():
        return path.open("wb")
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file


def format_rows(
    translation: "Translation", number: int, *, scores: bool, details: bool
) -> Iterator[str]:
    """Rows of one line of the input, without their line ends.

    Args:
        translation: The best one, with its alternatives.
        number: Of the line in the input, from 1.
        scores: One row for each translation: number, score, text, with tabs between them.
        details: One row, a JSON object with everything that is known.
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
        # As Pharaoh and fast_align write it.
        "alignment": " ".join(f"{source}-{target}" for source, target in hypothesis.alignment),
    }
