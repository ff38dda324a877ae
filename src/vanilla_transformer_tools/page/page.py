"""What a page does for its readers, apart from how it looks."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import exp
from pathlib import Path
from typing import Any, NamedTuple, Self

from vanilla_transformer_tools.compression import without_suffix
from vanilla_transformer_tools.files import read_lines, write_lines
from vanilla_transformer_tools.page import fragments
from vanilla_transformer_tools.page.examples import find_examples, read_examples
from vanilla_transformer_tools.page.served_model import (
    LINES_AT_A_TIME,
    MOST_CHARACTERS,
    ServedModel,
    Wanted,
    lines_of,
)
from vanilla_transformer_tools.translation import Translation

_NOTHING = "Type or paste a text: a sentence, or several lines."
# Bytes of a file, and of its text where it is packed: its lines are read into memory.
LARGEST_FILE = 20 * 2**20
# Characters of a line by which a reader recognises it.
_SHOWN = 60

Choices = Mapping[str, Any]


class Views(NamedTuple):
    """What the page shows of a translation; all but the first and the last are HTML.

    Attributes:
        text: The best translations.
        status: How they were found, or why there are none.
        hypotheses: All translations with their scores.
        tokens: The tokens of the best ones with their probabilities.
        links: Which words belong together.
        attention: Nothing, so that no picture of another text stays.
        lines: The lines that attention can be shown of, each with its number.
    """

    text: str
    status: str
    hypotheses: str
    tokens: str
    links: str
    attention: str
    lines: list[tuple[str, int]]


class Page:
    """The models of a page and what readers ask of them.

    Args:
        models: By the names that readers see.
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
        given = read_examples(examples) if examples else None
        shown = [Path(name).resolve().name if Path(name).is_dir() else name for name in names]
        if len(set(shown)) < len(names):
            shown = list(names)
        return cls(
            {
                one: ServedModel.load(name, **loading)
                for one, name in zip(shown, names, strict=True)
            },
            {one: given or find_examples(name) for one, name in zip(shown, names, strict=True)},
        )

    def model(self, name: str | None) -> ServedModel:
        """One of the models; the first one if no name is given.

        Raises:
            ValueError: If there is no such model.
        """
        if not name:
            return next(iter(self.models.values()))
        if not isinstance(name, str) or name not in self.models:
            raise ValueError(f"The model must be one of {', '.join(self.models)}, got {name!r}.")
        return self.models[name]

    def translate(self, text: str, name: str, choices: Choices) -> dict[str, Any]:
        """Translations of a text line by line, with scores and the probability of each token.

        Args:
            text: One line or several.
            name: Of the model.
            choices: See `Wanted`.

        Raises:
            ValueError: If the text is too long, or a choice is out of range.
        """
        model, wanted = self.model(name), Wanted.of(choices)
        lines = lines_of(text)
        translations = model.translate(lines, wanted)
        return {
            "text": _joined(translations),
            "search": model.describe_search(wanted),
            "lines": [
                {
                    "source": line,
                    "translations": [
                        {"text": each.text, "score": each.score}
                        for each in (best, *best.alternatives)
                    ],
                    "tokens": list(model.labels(best)),
                    "probabilities": list(map(exp, best.token_scores)),
                    "reached_limit": best.reached_limit,
                }
                for line, best in zip(lines, translations, strict=True)
            ],
        }

    def view(self, text: str, name: str, choices: Choices) -> Views:
        """What the page shows of a text; a mistake of the reader becomes a message."""
        if not text.strip():
            return _no_views(_NOTHING)
        try:
            model, wanted = self.model(name), Wanted.of(choices)
            lines = lines_of(text)
            translations = model.translate(lines, wanted)
            pairs = [
                (line, one) for line, one in zip(lines, translations, strict=True) if line.strip()
            ]
            shown = pairs[: fragments.MOST_LINES]
            links = self._links(model, wanted, shown, len(pairs) - len(shown))
        except ValueError as error:
            return _no_views(str(error))
        status = f"<p>{escape(model.describe_search(wanted))}</p>"
        if any(one.reached_limit for one in translations):
            status += fragments.message("A translation was cut off at the length limit.")
        return Views(
            text=_joined(translations),
            status=status,
            hypotheses=fragments.hypotheses_table(list(zip(lines, translations, strict=True))),
            tokens=fragments.token_lines(
                [(model.labels(one), list(map(exp, one.token_scores))) for _, one in shown],
                len(pairs) - len(shown),
            ),
            links=links,
            attention="",
            lines=[
                (f"{number}: {line[:_SHOWN]}", number)
                for number, line in enumerate(lines, start=1)
                if line.strip()
            ],
        )

    @staticmethod
    def _links(
        model: ServedModel, wanted: Wanted, shown: Sequence[tuple[str, Translation]], omitted: int
    ) -> str:
        try:
            linked = model.link([(line, one.text) for line, one in shown], wanted)
        except ValueError as error:
            # Only fast tokenizers know the places of their tokens.
            return fragments.message(str(error))
        return fragments.alignment(linked, len(shown) - len(linked) + omitted)

    def attention(self, text: str, name: str, line: int, choices: Choices) -> str:
        """The HTML page of the attention while the model translates one line.

        Args:
            text: One line or several.
            name: Of the model.
            line: Number of the line, counted from 1.
            choices: See `Wanted`.

        Raises:
            ValueError: If there is no such line, it is blank or too long, or a choice is out of
                range.
        """
        lines = lines_of(text)
        if not isinstance(line, int) or not 1 <= line <= len(lines):
            raise ValueError(f"The line must be between 1 and {len(lines)}, got {line!r:.60}.")
        return self.model(name).attention(lines[line - 1], Wanted.of(choices))

    def compare(self, text: str, names: tuple[str, str], choices: Choices) -> str:
        """Translations of two models side by side, as HTML with their differences marked.

        Raises:
            ValueError: If the text is empty or too long, or a choice is out of range.
        """
        if not text.strip():
            raise ValueError(_NOTHING)
        lines = lines_of(text)
        texts, notes = [], []
        for model in map(self.model, names):
            wanted = model.without_foreign_languages(Wanted.of(choices))
            translations = model.translate(lines, wanted)
            scores = [
                one.score or 0
                for line, one in zip(lines, translations, strict=True)
                if line.strip()
            ]
            texts.append(_joined(translations))
            mean = "mean score" if len(scores) > 1 else "score"
            notes.append(f"{mean} {sum(scores) / len(scores):.3f}, {model.describe_search(wanted)}")
        return fragments.comparison(names, (texts[0], texts[1]), (notes[0], notes[1]))

    def translate_file(
        self, path: Path, name: str, choices: Choices
    ) -> Iterator[tuple[int, int, Path | None]]:
        """Translates a file into one beside it; yields lines done, all lines, and the file at last.

        Raises:
            ValueError: If the file is not text or too large, or a choice is out of range.
        """
        model, wanted = self.model(name), Wanted.of(choices)
        # As in a text: a line may end as on Windows.
        lines = [line.removesuffix("\r") for line in read_lines(path, max_bytes=LARGEST_FILE)]
        for number, line in enumerate(lines, start=1):
            if len(line) > MOST_CHARACTERS:
                raise ValueError(
                    f"A line of a file has at most {MOST_CHARACTERS:,} characters here, got "
                    f"{len(line):,} in line {number:,}. Give each sentence a line of its own."
                )
        texts: list[str] = []
        for translation in model.translate_lines(lines, wanted):
            if len(texts) % LINES_AT_A_TIME == 0:
                yield len(texts), len(lines), None
            texts.append(translation.text)
        # In a folder of its own: others may translate a file of this name.
        folder = Path(tempfile.mkdtemp(dir=path.parent))
        stem = without_suffix(path.name).removesuffix(".txt")
        yield len(lines), len(lines), write_lines(folder / f"{stem}.translated.txt", texts)


def _joined(translations: Sequence[Translation]) -> str:
    return "\n".join(one.text for one in translations)


def _no_views(reason: str) -> Views:
    return Views("", fragments.message(reason), "", "", "", "", [])
