"""Functions of a page for its readers and for programs, apart from how it looks."""

import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from math import exp
from pathlib import Path
from typing import Any, Self

from vanilla_transformer_tools.compression import without_suffix
from vanilla_transformer_tools.files import checksum, read_lines, write_lines
from vanilla_transformer_tools.page.served_model import LINES_AT_A_TIME, Choices, ServedModel
from vanilla_transformer_tools.saved_folder import read_card_metadata, read_run
from vanilla_transformer_tools.translation.segments import without_surrogates

# A page of more would keep its reader waiting; a file may be longer.
MOST_CHARACTERS = 5_000
# Bytes of a file, and of its text where it is packed: its lines are read into memory.
LARGEST_FILE = 20 * 2**20
MOST_EXAMPLES = 6
# A longer line would not fit on a button.
_LONGEST_EXAMPLE = 200


class Page:
    """The models of a page and what readers ask of them.

    Args:
        models: Models by the names that readers see.
        examples: Lines to try with each model.
    """

    def __init__(self, models: dict[str, ServedModel], examples: dict[str, list[str]]) -> None:
        self.models = models
        self.examples = examples

    @classmethod
    def load(cls, names: Sequence[str], *, examples: str | None = None, **loading: Any) -> Self:
        """Loads models; readers see the name of a folder without the folders that it is in.

        Args:
            names: Folders or Hub names.
            examples: File with lines to try; None: what `find_examples` finds.
            loading: Arguments of `ServedModel.load`.
        """
        lines = read_examples(examples) if examples else None
        shown = [Path(name).resolve().name if Path(name).is_dir() else name for name in names]
        if len(set(shown)) < len(names):
            shown = list(names)
        by_name = dict(zip(shown, names, strict=True))
        return cls(
            {label: ServedModel.load(name, **loading) for label, name in by_name.items()},
            {label: lines or find_examples(name) for label, name in by_name.items()},
        )

    def model(self, name: str | None) -> ServedModel:
        """The model with a name; the first one if no name is given.

        Raises:
            ValueError: If there is no such model.
        """
        if not name:
            return next(iter(self.models.values()))
        if not isinstance(name, str) or name not in self.models:
            raise ValueError(f"The model must be one of {', '.join(self.models)}, got {name!r}.")
        return self.models[name]

    def names(self) -> list[str]:
        """Names of the models."""
        return list(self.models)

    def translate(
        self, text: str, model: str | None = "", settings: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Translate lines: all translations with scores; tokens and word links of the best one.

        Args:
            text: One line or several.
            model: Name of the model; none: the first.
            settings: Fields of `Choices`.

        Raises:
            ValueError: If the text is too long, or a choice is out of range.
        """
        served, choices = self.model(model), Choices.of(settings or {})
        lines = lines_of(text)
        translations = list(served.translate(lines, choices))
        shown = ("text", "score", "reached_limit")
        return {
            "text": "\n".join(best.text for best in translations),
            "search": str(served.chosen_search(choices)),
            "lines": [
                {
                    "source": line,
                    "translations": [
                        {name: getattr(each, name) for name in shown} for each in best.ranked
                    ],
                    "tokens": list(served.labels(best)),
                    "probabilities": list(map(exp, best.token_scores)),
                    "links": list(map(list, served.links(best))),
                }
                for line, best in zip(lines, translations, strict=True)
            ],
        }

    def attention(
        self,
        text: str,
        model: str | None = "",
        line: int = 1,
        settings: dict[str, Any] | None = None,
    ) -> str:
        """The attention of a model while it translates a line, as an HTML page.

        Args:
            text: One line or several.
            model: Name of the model; none: the first.
            line: Number of the line, counted from 1.
            settings: Fields of `Choices`.

        Raises:
            ValueError: If the line is missing, blank or too long, or a choice is out of range.
        """
        lines = lines_of(text)
        if not isinstance(line, int) or not 1 <= line <= len(lines):
            raise ValueError(f"The line must be between 1 and {len(lines)}, got {line!r:.60}.")
        return self.model(model).attention(lines[line - 1], Choices.of(settings or {}))

    def translate_file(
        self, path: Path, name: str | None, settings: dict[str, Any]
    ) -> Iterator[tuple[int, int, Path | None]]:
        """Translates a file into one next to it; yields lines done, all lines, at last the file.

        Raises:
            ValueError: If the file is not text or too large, or a choice is out of range.
        """
        model, choices = self.model(name), Choices.of(settings)
        try:
            # In a text a line may end as on Windows, too.
            lines = [line.removesuffix("\r") for line in read_lines(path, max_bytes=LARGEST_FILE)]
        except ValueError as error:
            # Readers know the file without the folder where the server keeps it.
            raise ValueError(str(error).replace(str(path), path.name)) from error
        for number, line in enumerate(lines, start=1):
            if len(line) > MOST_CHARACTERS:
                raise ValueError(
                    f"A line of a file has at most {MOST_CHARACTERS:,} characters here, got "
                    f"{len(line):,} in line {number:,}. Give each sentence a line of its own."
                )
        texts: list[str] = []
        for translation in model.translate(lines, choices, details=False):
            if len(texts) % LINES_AT_A_TIME == 0:
                yield len(texts), len(lines), None
            texts.append(translation.text)
        # In a folder of its own: others may translate a file of this name.
        folder = Path(tempfile.mkdtemp(dir=path.parent))
        stem = without_suffix(path.name).removesuffix(".txt")
        yield len(lines), len(lines), write_lines(folder / f"{stem}.translated.txt", texts)


def lines_of(text: str) -> list[str]:
    """The lines that a reader typed, without lone surrogates, which no answer could hold.

    Raises:
        ValueError: If it is too long, or a program sent something else.
    """
    if not isinstance(text, str):
        raise ValueError(f"The text must be a string, got {text!r:.60}.")
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"A text has at most {MOST_CHARACTERS:,} characters here, got {len(text):,}. Shorten "
            "it, or translate it as a file."
        )
    return without_surrogates(text).replace("\r\n", "\n").split("\n")


def find_examples(name: str) -> list[str]:
    """Examples of a model: those of its card, else the first lines of its validation data.

    Args:
        name: Folder or Hub name. Its validation data are found beside it, or in the working folder,
            and recognised by the checksum that its training recorded.
    """
    # Where the Hub looks for examples, too.
    widgets = read_card_metadata(name).get("widget")
    listed = widgets if isinstance(widgets, list) else []
    texts = (widget.get("text") for widget in listed if isinstance(widget, dict))
    if found := [text for text in texts if isinstance(text, str) and text.strip()]:
        return found[:MOST_EXAMPLES]
    run = read_run(name)
    source, *_ = (run.get("settings") or {}).get("validation") or [""]
    recorded = (run.get("sha256") or {}).get(source)
    for place in (Path(), Path(name), Path(name).parent):
        file = place / source
        if recorded and file.is_file() and checksum(file) == recorded:
            return read_examples(str(file))
    return []


def read_examples(path: str) -> list[str]:
    """The first lines of a file that are neither blank nor long.

    Raises:
        ValueError: If it cannot be read as text.
        OSError: If it is not there.
    """
    lines = (line for line in read_lines(path) if line.strip() and len(line) <= _LONGEST_EXAMPLE)
    return list(islice(lines, MOST_EXAMPLES))
