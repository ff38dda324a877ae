"""A model that a page translates with, whatever its readers choose, and its word links."""

import re
import threading
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import isqrt
from typing import Any, Self, cast, get_args

from transformers import BatchEncoding

from vanilla_transformer_tools.inspection.alignments import Link, align_words
from vanilla_transformer_tools.inspection.attention_maps import (
    attention_page,
    labels_of_tokens,
    read_attention,
)
from vanilla_transformer_tools.saved_folder import read_generation_config
from vanilla_transformer_tools.text.blanks import UNBLANKED, without_blank_ends
from vanilla_transformer_tools.text.panics import is_panic
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair, offered_languages
from vanilla_transformer_tools.translation import Translation, Translator
from vanilla_transformer_tools.translation.engines import TorchEngine
from vanilla_transformer_tools.translation.read_pairs import encode_pair
from vanilla_transformer_tools.translation.search import Search

# Translations take memory for each of their readers.
WIDEST_BEAM = 10
# Lines of a file that are translated while other readers wait.
LINES_AT_A_TIME = 64
# Weights of an attention page of about 10 MB, for a translation as long as its line.
MOST_WEIGHTS = 1_500_000
# Directions and searches that a model is kept ready for.
_TRANSLATORS = 16
_UNBLANKED = re.compile(f"[{UNBLANKED}]")


@dataclass(frozen=True)
class LinkedPair:
    """A line and its translation in parts, and which of them belong together.

    Attributes:
        source: Parts of the line.
        target: Parts of its translation.
        links: Places of a part of the line and of one of its translation, counted from 0.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    links: tuple[Link, ...]

    def linked(self) -> list[tuple[str, str | None]]:
        """The parts of the translation, each with the parts of the line that it is linked to."""
        of_part: list[list[str]] = [[] for _ in self.target]
        for source, target in self.links:
            of_part[target].append(self.source[source])
        return [
            (part, " ".join(linked)) if linked else (f"{part} ", None)
            for part, linked in zip(self.target, of_part, strict=True)
        ]


def link_parts(
    translator: Translator, sources: Sequence[str], targets: Sequence[str]
) -> list[LinkedPair]:
    """Links words, as `align_words` does; text without blanks is taken by its tokens.

    Args:
        translator: Translator with the torch engine and fast tokenizers.
        sources: Lines, none of them blank.
        targets: Their translations.

    Raises:
        ValueError: If a tokenizer does not know the places of its tokens.
    """
    # `align_words` reads them without blank ends, too.
    sources, targets = (list(map(without_blank_ends, lines)) for lines in (sources, targets))
    pair = translator.tokenizers
    parts = []
    for source, target in zip(sources, targets, strict=True):
        read, written = encode_pair(pair, source, target)
        parts.append((_parts(source, read), _parts(target, written)))
    units = [" ".join(source) for source, _ in parts], [" ".join(target) for _, target in parts]
    alignments = align_words(translator, sources, targets, units)
    return [LinkedPair(*both, one.links) for both, one in zip(parts, alignments, strict=True)]


def runs_from_right(text: str) -> bool:
    """Whether the first letter is of a script that runs from right to left."""
    kinds = map(unicodedata.bidirectional, text)
    return next((kind for kind in kinds if kind in ("L", "R", "AL")), "L") != "L"


def _parts(text: str, encoding: BatchEncoding) -> tuple[str, ...]:
    """Words, or the tokens of a text that is a single word or has words without blanks."""
    words = text.split()
    if len(words) != 1 and not _UNBLANKED.search(text):
        return tuple(words)
    parts: list[str] = []
    last = 0
    for _, end in encoding.get("offset_mapping", []):
        # The bytes of one character have the same place.
        if end > last:
            parts += text[last:end].split()
            last = end
    return (*parts, *text[last:].split())


@dataclass(frozen=True)
class Choices:
    """Settings that a reader chooses for a translation; `Search` explains those not listed here.

    Attributes:
        source_language: Language of the text; None: the model's.
        target_language: Language of the translation; None: the model's.
        num_beams: Width, raised to `num_hypotheses`; None: the model's. Not for sampling.
        length_penalty: Exponent of the length in the score; None: the model's.
        split_sentences: Whether each sentence is translated separately.
    """

    source_language: str | None = None
    target_language: str | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    num_hypotheses: int = 1
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    split_sentences: bool = True

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """The choices that a page or a program sends.

        Args:
            settings: Values by the names above; empty text and None stand for the default.

        Raises:
            ValueError: If one is unknown, of another type, or out of range.
        """
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"The settings must be an object, such as {{'num_beams': 4}}, got {settings!r:.60}."
            )
        types = {field.name: (get_args(field.type) or (field.type,))[0] for field in fields(cls)}
        values = {name: value for name, value in settings.items() if value not in (None, "")}
        faults = []
        for name, value in values.items():
            kind = types.get(name)
            if kind is None:
                faults.append(f"There is no setting {name!r}. Choose from: {', '.join(types)}.")
            elif type(value) is not kind and (type(value), kind) != (int, float):
                faults.append(f"`{name}` must be of type {kind.__name__}, got {value!r:.60}.")
            elif name in ("num_beams", "num_hypotheses") and not 1 <= value <= WIDEST_BEAM:
                faults.append(
                    f"`{name}` must be at least 1 and at most {WIDEST_BEAM} here, got {value}."
                )
        if faults:
            raise ValueError("\n".join(faults))
        return cls(**values)


class ServedModel:
    """A model in memory, for one reader at a time.

    Attributes:
        search: The model's own search.
        languages: Those to choose from, by the field of `Choices`; none for most models.
        begins_with: The one of each side that the page begins with.

    Args:
        name: Folder or Hub name.
        translator: Translator of the model, with the torch engine.
    """

    def __init__(self, name: str, translator: Translator) -> None:
        self.name = name
        search = translator.search
        self.search = replace(search, num_beams=min(search.num_beams, WIDEST_BEAM))
        self.translator = translator
        self.engine = cast(TorchEngine, translator.engine)
        self.tokenizers = translator.tokenizers
        offered = offered_languages(self.tokenizers.source, translator.generation_config)
        self.languages = dict(zip(("source_language", "target_language"), offered, strict=True))
        chosen = translator.source_language, translator.target_language
        if self.languages["source_language"]:
            saved = translator.tokenizer.init_kwargs
            chosen = saved["src_lang"], saved["tgt_lang"]
        self.begins_with = dict(zip(self.languages, chosen, strict=True))
        self._lock = threading.Lock()
        self._translator = lru_cache(_TRANSLATORS)(self._new_translator)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        **loading: Any,
    ) -> Self:
        """Loads a model from a folder or the Hub.

        Args:
            name: Folder or Hub name.
            source_language: Language that the page begins with; None: the model's, or the first.
            target_language: Language to translate into, in the same way.
            loading: Arguments `dtype` and `trust_remote_code` of `Translator.from_pretrained`.
        """
        trusted = loading.get("trust_remote_code", False)
        tokenizer = TokenizerPair.from_pretrained(name, trust_remote_code=trusted).source
        sources, targets = offered_languages(tokenizer, read_generation_config(name))

        def load(source: str | None, target: str | None) -> Translator:
            languages: dict[str, Any] = {"source_language": source, "target_language": target}
            return Translator.from_pretrained(name, engine="torch", **languages, **loading)

        if targets and not sources:
            target_language = target_language or targets[0]
        try:
            return cls(name, load(source_language, target_language))
        except ValueError:
            if not sources:
                raise
        # Only some of these models were saved with languages.
        return cls(name, load(source_language or sources[0], target_language or targets[-1]))

    def translate(
        self, lines: Sequence[str], choices: Choices, *, details: bool = True
    ) -> Iterator[Translation]:
        """Translations of lines, in order; other readers get their turn between parts of a file.

        Args:
            lines: Text.
            choices: Choices of the reader.
            details: Whether tokens and their scores are wanted.

        Raises:
            ValueError: If a choice is out of range.
        """
        translator = self._translator(choices, details)
        for first in range(0, len(lines), LINES_AT_A_TIME):
            part = lines[first : first + LINES_AT_A_TIME]
            with self._turn():
                translations = list(translator.translate(part, first_line=1 + first))
            yield from translations

    def link(self, pairs: Sequence[tuple[str, str]], choices: Choices) -> list[LinkedPair]:
        """Word links of lines and their translations; blank and very long pairs are left out.

        Raises:
            ValueError: If the tokenizer does not know the places of its tokens.
        """
        translator = self._translator(choices, False)
        tokenizers, most = translator.tokenizers, translator.max_source_length
        with self._turn():
            kept = [
                pair
                for pair in pairs
                if all(map(str.strip, pair))
                and all(len(one["input_ids"]) <= most for one in encode_pair(tokenizers, *pair))
            ]
            return link_parts(translator, [line for line, _ in kept], [text for _, text in kept])

    def attention(self, line: str, choices: Choices) -> str:
        """The HTML page of the attention while the model translates a line.

        Raises:
            ValueError: If the line is blank or too long, or a choice is out of range.
        """
        if not line.strip():
            raise ValueError("There is nothing to attend to: the line is blank.")
        translator = self._translator(choices, False)
        config = self.engine.model.config
        # Weights of a pair of lines of equal length, by the square of that length.
        maps = 3 * config.num_hidden_layers * config.num_attention_heads
        longest = min(translator.max_source_length, isqrt(MOST_WEIGHTS // maps))
        with self._turn():
            read, _ = encode_pair(translator.tokenizers, line)
            length = len(read["input_ids"])
            if length > longest:
                raise ValueError(
                    f"The attention of this model is shown for lines of at most {longest:,} "
                    f"tokens, got {length:,}. Choose a shorter one."
                )
            return attention_page(read_attention(translator, line))

    def labels(self, translation: Translation) -> tuple[str, ...]:
        """Human-readable tokens of a translation."""
        return labels_of_tokens(self.tokenizers.target, translation.tokens)

    def chosen_search(self, choices: Choices) -> Search:
        """The search of a reader; samples have no beam and no penalty, and beams no temperature."""
        count = choices.num_hypotheses
        if choices.do_sample:
            names = ("do_sample", "temperature", "top_k", "top_p", "seed")
            searching = {name: getattr(choices, name) for name in names}
            searching |= {"num_beams": 1, "length_penalty": 1.0}
        else:
            width = max(choices.num_beams or self.search.num_beams, count)
            searching = {"num_beams": width, "length_penalty": choices.length_penalty}
        config = self.translator.generation_config
        return Search.of(config, num_hypotheses=count, scores=True, **searching)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A reader's turn with the model; a tokenizer's panic would end the queue of the page."""
        with self._lock:
            try:
                yield
            except BaseException as error:
                if not is_panic(error):
                    raise
                raise ValueError(f"The tokenizer of {self.name!r} failed: {error}") from error

    def _new_translator(self, choices: Choices, details: bool) -> Translator:
        chosen = {
            side: getattr(choices, side) or default for side, default in self.begins_with.items()
        }
        return self.translator.changed(
            **chosen,
            search=self.chosen_search(choices),
            split_sentences=choices.split_sentences,
            details=details,
        )
