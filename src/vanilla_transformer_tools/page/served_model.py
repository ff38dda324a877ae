"""A model that a page translates with, whatever its readers choose, and its word links."""

import re
import threading
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import isqrt
from typing import Any, Self, cast, get_args

from transformers import PreTrainedTokenizerBase

from vanilla_transformer_tools.inspection.attention_maps import (
    BLANK,
    attention_page,
    labels_of_tokens,
    read_attention,
)
from vanilla_transformer_tools.saved_folder import read_generation_config
from vanilla_transformer_tools.text.blanks import UNBLANKED
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
# Label of a byte of a character after the first.
_LATER_BYTE = re.compile(r" [2-4]/[2-4]$")


def runs_from_right(text: str) -> bool:
    """Whether the first letter is of a script that runs from right to left."""
    kinds = map(unicodedata.bidirectional, text)
    return next((kind for kind in kinds if kind in ("L", "R", "AL")), "L") != "L"


def parts_of(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]
) -> tuple[list[str], dict[int, int]]:
    """Words of a text, and the number of the word of each token, by the place of the token.

    Text of a single word, or in a script without blanks, is taken by its tokens.

    Args:
        tokenizer: The one that made the tokens.
        tokens: Tokens of one text; special ones belong to no word.
    """
    special = {str(one) for one in tokenizer.added_tokens_decoder.values() if one.special}
    special -= {tokenizer.unk_token}
    labels = labels_of_tokens(tokenizer, tokens)

    def grouped(by_words: bool) -> list[list[int]]:
        groups: list[list[int]] = []
        is_inside = False
        for place, label in enumerate(labels):
            goes_on = not label.startswith(BLANK) if by_words else _LATER_BYTE.search(label)
            is_text = tokens[place] not in special and label.strip(BLANK)
            if is_text and is_inside and goes_on:
                groups[-1].append(place)
            elif is_text:
                groups.append([place])
            is_inside = bool(is_text)
        return groups

    groups = grouped(by_words=True)
    if len(groups) == 1 or _UNBLANKED.search("".join(labels)):
        groups = grouped(by_words=False)
    spelled = ([tokens[place] for place in group] for group in groups)
    parts = [tokenizer.convert_tokens_to_string(part).strip() for part in spelled]
    return parts, {place: number for number, group in enumerate(groups) for place in group}


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

    def links(self, translation: Translation) -> list[tuple[str, str | None]]:
        """Words of a translation, each with the words of its line that it attended to, if any."""
        sources, source_of = parts_of(self.tokenizers.source, translation.source_tokens)
        targets, target_of = parts_of(self.tokenizers.target, translation.tokens)
        linked: dict[int, set[int]] = defaultdict(set)
        for source, target in translation.alignment:
            if source in source_of and target in target_of:
                linked[target_of[target]].add(source_of[source])
        return [
            (part, " ".join(sources[source] for source in sorted(linked[number])) or None)
            for number, part in enumerate(targets)
        ]

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
