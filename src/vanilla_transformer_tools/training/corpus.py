"""What a run must know of its text: samples from all over it, and the facts that they show."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from vanilla_transformer_tools.evaluation.bleu_tokenizers import (
    BleuTokenizer,
    language_of_file,
    resolve,
)
from vanilla_transformer_tools.evaluation.swapped import (
    SOURCE_WORDS,
    frequent_words,
    warning_of_swapped,
)
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.filters import Corpus
from vanilla_transformer_tools.text.parallel_text import holds_both_sides
from vanilla_transformer_tools.text.sentences import (
    INNER_ENDS,
    WITHOUT_LETTER,
    has_inner_end,
    has_letter,
)

# Number of lines in which those with several sentences are counted.
_LINES = 10_000
_BLEU = "bleu_tokenizer"
logger = logging.getLogger(__name__)


def sample(size: int, most: int) -> list[int]:
    """Rows from all over a corpus of `size` rows, in order: one from each of `most` equal parts.

    So each file and each part of a file has its share, also where languages alternate. A corpus of
    a size always has the same sample.
    """
    if size <= most:
        return list(range(size))
    ends = np.linspace(0, size, most + 1).astype(int)
    rows: list[int] = np.random.default_rng(0).integers(ends[:-1], ends[1:]).tolist()
    return rows


def validation_sample(pairs: Dataset, most: int | None) -> Dataset:
    """Validation pairs that are scored: all, or a sample in which each language has its share."""
    if most is None or len(pairs) <= most:
        return pairs
    rows = np.arange(len(pairs))
    if "tag" in pairs.column_names:
        rows = np.argsort(np.array(pairs["tag"][:]), kind="stable")
    # In memory: a selection of rows would be copied, with a bar of its own, before it is tokenised.
    chosen = pairs.select(np.sort(rows[sample(len(pairs), most)]))
    return Dataset.from_dict(chosen.to_dict())


@dataclass(frozen=True)
class Facts:
    """What a plan must know of the text.

    Attributes:
        pairs: Number of training pairs; None for a stream.
        inner_ends: Share of the sources that have more than one sentence.
        without_letter: Share of the sources without any letter.
        validation_pairs: Number of validation pairs.
        source_words: Frequent words of the sources.
        bleu: BLEU's tokenizer for the validation pairs; None without any.
    """

    pairs: int | None
    inner_ends: float
    without_letter: float
    validation_pairs: int = 0
    source_words: tuple[str, ...] = ()
    bleu: BleuTokenizer | None = None

    @property
    def record(self) -> dict[str, Any]:
        """Facts in `run.json`."""
        facts: dict[str, Any] = {INNER_ENDS: self.inner_ends, WITHOUT_LETTER: self.without_letter}
        facts |= {SOURCE_WORDS: list(self.source_words)} if self.source_words else {}
        return facts | ({_BLEU: asdict(self.bleu)} if self.bleu else {})


def look_at(corpus: Corpus, settings: TrainSettings, previous: Mapping[str, Any]) -> Facts:
    """Facts of the text of a run; a stream shows only its first pairs.

    The BLEU tokenizer of a run that is resumed stays.
    """
    pairs = corpus.filtered.kept
    lines = pairs.select(sample(len(pairs), _LINES))["source"][:]
    letters = list(map(has_letter, lines))
    words = frequent_words(lines)
    bleu = None
    if corpus.validation is not None:
        sources, references = corpus.validation["source"][:], corpus.validation["target"][:]
        if warning := warning_of_swapped(sources, references, {SOURCE_WORDS: words}):
            logger.warning("--validation: %s", warning)
        if recorded := previous.get(_BLEU):
            bleu = BleuTokenizer(**recorded)
        else:
            *_, file = settings.validation
            of_file = None if holds_both_sides(file) else language_of_file(file)
            languages = [settings.target_language, of_file, *settings.language[1:2]]
            bleu = resolve(settings.bleu_tokenize, references, languages, settings.pretokenized)
    return Facts(
        None if settings.streaming else len(pairs),
        round(sum(map(has_inner_end, lines)) / len(lines), 4),
        round(1 - sum(letters) / len(lines), 4),
        0 if corpus.validation is None else len(corpus.validation),
        tuple(words),
        bleu,
    )
