"""A model that a page translates with, whatever its readers choose."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Self, cast

from vanilla_transformer_tools.inspection.alignments import encode_source
from vanilla_transformer_tools.inspection.attention_maps import (
    labels_of_tokens,
    read_attention,
)
from vanilla_transformer_tools.inspection.attention_page import attention_page
from vanilla_transformer_tools.page.links import LinkedPair, link_parts
from vanilla_transformer_tools.saved_folder import read_generation_config
from vanilla_transformer_tools.text.languages import offered_languages
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.translation import Translation, Translator
from vanilla_transformer_tools.translation.engines import TorchEngine
from vanilla_transformer_tools.translation.search import Search
from vanilla_transformer_tools.translation.segments import without_surrogates

# A page of more would keep its reader waiting; a file may be longer.
MOST_CHARACTERS = 5_000
# Translations take memory for each of their readers.
WIDEST_BEAM = 10
# Of a file, while other readers wait.
LINES_AT_A_TIME = 64
CHARACTERS_AT_A_TIME = 20_000
# Weights of an attention page of about 10 MB.
MOST_WEIGHTS = 1_500_000
# Directions and searches that a model is kept ready for.
_TRANSLATORS = 16


@dataclass(frozen=True)
class Wanted:
    """What a reader has chosen for a translation.

    Attributes:
        source_language: See `Translator`, as all others; empty: the model's.
        target_language: Empty: the model's.
        num_beams: At least `num_hypotheses` are taken; None: the model's. Samples have none.
        length_penalty: None: the model's.
        num_hypotheses: Number of translations.
        do_sample: Whether they are drawn.
        temperature: Of samples, like all that follow.
        top_k: 0: no limit.
        top_p: 1: no limit.
        seed: Of the draws.
        split_sentences: Whether each sentence is translated alone.
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
    def of(cls, choices: Mapping[str, Any]) -> Self:
        """The choices that a page or a program sends.

        Args:
            choices: By the names above; empty text and None: the default.

        Raises:
            ValueError: If one is unknown, of another type, or out of range.
        """
        if not isinstance(choices, Mapping):
            raise ValueError(
                f"The settings must be an object, such as {{'num_beams': 4}}, got {choices!r:.60}."
            )
        known = {field.name: field.default for field in fields(cls)}
        kinds: dict[str, tuple[type, ...]] = {
            name: (str,) if name.endswith("language") else (type(known[name]),) for name in known
        }
        kinds |= dict.fromkeys(("length_penalty", "temperature", "top_p"), (int, float))
        kinds["num_beams"] = (int,)
        given = {name: value for name, value in choices.items() if value not in (None, "")}
        faults = [
            f"There is no setting {name!r}. Choose from: {', '.join(known)}."
            for name in given.keys() - known.keys()
        ]
        faults += [
            f"`{name}` must be of type {kinds[name][-1].__name__}, got {value!r:.60}."
            for name, value in given.items()
            if name in known and type(value) not in kinds[name]
        ]
        if faults:
            raise ValueError("\n".join(faults))
        wanted = cls(**given)
        for width in (wanted.num_hypotheses, 1 if wanted.num_beams is None else wanted.num_beams):
            if not 1 <= width <= WIDEST_BEAM:
                raise ValueError(
                    "`num_beams` and `num_hypotheses` must be at least 1 and at most "
                    f"{WIDEST_BEAM} here, got {width}."
                )
        return wanted


class ServedModel:
    """A model in memory, for one reader at a time.

    Attributes:
        source_languages: Those that a reader may choose from; none for most models.
        target_languages: The same.
        search: The model's own search.

    Args:
        name: Folder or Hub name.
        translator: Of the model, with the torch engine.
        source_language: That of a reader who chooses none; None: that of the tokenizer.
        target_language: The same.
    """

    def __init__(
        self,
        name: str,
        translator: Translator,
        source_language: str | None = None,
        target_language: str | None = None,
    ) -> None:
        self.name = name
        self.source_language = source_language
        self.target_language = target_language
        self.engine = cast(TorchEngine, translator.engine)
        search = translator.search
        self.search = replace(search, num_beams=min(search.num_beams, WIDEST_BEAM))
        self.max_source_length = translator.max_source_length
        self.tokenizers = translator.tokenizers
        self.source_languages, self.target_languages = offered_languages(
            self.tokenizers.source, self.engine.model.generation_config
        )
        self._lock = threading.Lock()
        self._translator = lru_cache(_TRANSLATORS)(self._new_translator)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        dtype: str = "auto",
        trust_remote_code: bool = False,
    ) -> Self:
        """Loads a model from a folder or the Hub.

        Args:
            name: Folder or Hub name.
            source_language: With which the page begins; None: the model's, or the first one.
            target_language: The same.
            dtype: Of the weights in memory; see `Translator.from_pretrained`.
            trust_remote_code: Runs the code in the folder of a model of another architecture.
        """
        tokenizers = TokenizerPair.from_pretrained(name, trust_remote_code=trust_remote_code)
        sources, targets = offered_languages(tokenizers.source, read_generation_config(name))
        if targets and not sources:
            target_language = target_language or targets[0]
        choices = [(source_language, target_language)]
        if sources:
            # Only some of these models were saved with languages.
            choices.append((source_language or sources[0], target_language or targets[-1]))
        for place, (source, target) in enumerate(choices):
            try:
                translator = Translator.from_pretrained(
                    name,
                    engine="torch",
                    dtype=dtype,
                    trust_remote_code=trust_remote_code,
                    source_language=source,
                    target_language=target,
                )
            except ValueError:
                if place == len(choices) - 1:
                    raise
            else:
                break
        if sources:
            chosen = translator.tokenizer.init_kwargs
            source, target = chosen["src_lang"], chosen["tgt_lang"]
        return cls(name, translator, source, target)

    def translate(self, lines: Sequence[str], wanted: Wanted) -> list[Translation]:
        """Translations of lines, with tokens, their scores and alignments.

        Raises:
            ValueError: If a choice is out of range.
        """
        return list(self.translate_lines(lines, wanted, details=True))

    def translate_lines(
        self, lines: Sequence[str], wanted: Wanted, *, details: bool = False
    ) -> Iterator[Translation]:
        """Translations of lines, in order; other readers get their turn between parts of a file.

        Raises:
            ValueError: If a choice is out of range.
        """
        translator = self._translator(wanted, details)
        first = 0
        for part in _parts(lines):
            with self._turn():
                translations = list(translator.translate(part, first_line=first + 1))
            yield from translations
            first += len(part)

    def link(self, pairs: Sequence[tuple[str, str]], wanted: Wanted) -> list[LinkedPair]:
        """What belongs together in lines and their translations, blank ones left out.

        Raises:
            ValueError: If the tokenizer does not know the places of its tokens.
        """
        translator = self._translator(wanted, False)
        with self._turn():
            kept = [pair for pair in pairs if all(map(str.strip, pair)) and self._fits(pair)]
            return link_parts(translator, [line for line, _ in kept], [text for _, text in kept])

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A reader's turn with the model.

        Raises:
            ValueError: If a tokenizer panics at a text. Its exception is no `Exception`, and would
                end the queue of the page.
        """
        with self._lock:
            try:
                yield
            except BaseException as error:
                if type(error).__name__ != "PanicException":
                    raise
                raise ValueError(f"The tokenizer of {self.name!r} failed: {error}") from error

    def _fits(self, pair: tuple[str, str]) -> bool:
        """Whether a pair is read at once; longer lines are translated in pieces."""
        sides = zip((self.tokenizers.source, self.tokenizers.target), pair, strict=True)
        lengths = [len(side(text, verbose=False)["input_ids"]) for side, text in sides]
        return max(lengths) <= self.max_source_length

    def without_foreign_languages(self, wanted: Wanted) -> Wanted:
        """A choice that was made for another model, without languages if this one has none."""
        return replace(
            wanted,
            source_language=wanted.source_language if self.source_languages else None,
            target_language=wanted.target_language if self.target_languages else None,
        )

    def describe_search(self, wanted: Wanted) -> str:
        """The search of a choice, such as `beam 4, length penalty 0.6`."""
        return str(self._search(wanted))

    def attention(self, line: str, wanted: Wanted) -> str:
        """The HTML page of the attention while the model translates a line.

        Raises:
            ValueError: If the line is blank or too long, or a choice is out of range.
        """
        if not line.strip():
            raise ValueError("There is nothing to attend to: the line is blank.")
        translator = self._translator(wanted, False)
        with self._turn():
            length = len(encode_source(translator, line)["input_ids"])
            if length > self.max_source_length:
                raise ValueError(
                    f"Attention is read from lines of at most {self.max_source_length:,} tokens, "
                    f"got {length:,}. Choose a shorter one."
                )
            maps = read_attention(translator, line)
        weights = sum(one.weights.numel() for one in (maps.encoder, maps.decoder, maps.cross))
        if weights > MOST_WEIGHTS:
            raise ValueError(
                f"A page of attention has at most {MOST_WEIGHTS:,} weights, got {weights:,}. "
                "Choose a shorter line."
            )
        return attention_page(maps)

    def labels(self, translation: Translation) -> tuple[str, ...]:
        """Human-readable tokens of a translation."""
        return labels_of_tokens(self.tokenizers.target, translation.tokens)

    def _search(self, wanted: Wanted) -> Search:
        beams = 1 if wanted.do_sample else wanted.num_beams or self.search.num_beams
        sampling = {}
        if wanted.do_sample:
            sampling = {
                "do_sample": True,
                "temperature": wanted.temperature,
                "top_k": wanted.top_k,
                "top_p": wanted.top_p,
                "seed": wanted.seed,
            }
        return Search.of(
            self.engine.model.generation_config,
            num_beams=beams if wanted.do_sample else max(beams, wanted.num_hypotheses),
            length_penalty=1.0 if wanted.do_sample else wanted.length_penalty,
            num_hypotheses=wanted.num_hypotheses,
            scores=True,
            **sampling,
        )

    def _new_translator(self, wanted: Wanted, details: bool) -> Translator:
        return Translator(
            self.engine,
            self.tokenizers.source,
            search=self._search(wanted),
            target_tokenizer=self.tokenizers.target,
            source_language=wanted.source_language or self.source_language,
            target_language=wanted.target_language or self.target_language,
            generation_config=self.engine.model.generation_config,
            max_source_length=self.max_source_length,
            split_sentences=wanted.split_sentences,
            details=details,
        )


def _parts(lines: Iterable[str]) -> Iterator[list[str]]:
    """The lines in parts that do not take long."""
    part: list[str] = []
    characters = 0
    for line in lines:
        characters += len(line)
        if part and (len(part) == LINES_AT_A_TIME or characters > CHARACTERS_AT_A_TIME):
            yield part
            part, characters = [], len(line)
        part.append(line)
    if part:
        yield part


def lines_of(text: str) -> list[str]:
    """The lines of what a reader typed, without lone surrogates, which no answer could hold.

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
