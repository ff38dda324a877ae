"""What a run reads: training pairs that no filter drops, and its validation sets."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from datasets import Dataset, concatenate_datasets

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.filters import FilteredPairs, Rule, drop_rules, filter_pairs
from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs, read_pairs
from vanilla_transformer_tools.translation.sentences import has_inner_end

# Number of lines in which those with several sentences are counted.
_LINES_OF_SENTENCES = 10_000


@dataclass(frozen=True)
class Corpus:
    """The text of a run.

    Attributes:
        filtered: Training pairs; of a stream only the first ones.
        validation: Pairs of each validation set by name; that of `--validation` comes first.
        read: Begins a pass over the training pairs, which a stream does again and again.
    """

    filtered: FilteredPairs
    validation: dict[str, Dataset]
    read: Callable[[], Iterator[tuple[str, ...]]]

    @property
    def several_sentences(self) -> float:
        """Share of the sources with more than one sentence, of pairs from all over the corpus."""
        pairs = self.filtered.kept
        step = -(-len(pairs) // _LINES_OF_SENTENCES)
        lines = pairs.select(range(0, len(pairs), step))["source"]
        return round(sum(map(has_inner_end, lines)) / len(lines), 4)


def read_corpus(settings: TrainSettings) -> Corpus:
    """Reads and filters the pairs of a run.

    Raises:
        ValueError: If the pairs cannot be read, or the filters drop all.
        OSError: If a file cannot be read.
    """
    validation = {
        name: load_pairs(parallel_text(settings, paths, settings.validation_split))
        for name, paths in settings.paths_of_validation().items()
    }
    joined = concatenate_datasets(list(validation.values())) if validation else None
    rules = drop_rules(settings, joined)
    text = parallel_text(settings, settings.train, settings.train_split)
    # Of a stream only what the tokenizer learns from is stored.
    pairs = load_pairs(text, settings.tokenizer_pairs if settings.streaming else None)
    return Corpus(filter_pairs(pairs, rules), validation, partial(_read_kept, text, rules))


def parallel_text(settings: TrainSettings, paths: list[str], split: str) -> ParallelText:
    """Where the pairs of one split are found."""
    return ParallelText(
        tuple(paths),
        settings.source_column,
        settings.target_column,
        settings.dataset_config,
        split,
        settings.streaming,
        settings.tag_column,
    )


def _read_kept(text: ParallelText, rules: Mapping[str, Rule]) -> Iterator[tuple[str, ...]]:
    """One pass over the pairs that no filter drops, with their tags if there are any."""
    for pair in read_pairs(text):
        if not any(drops(*pair) for drops in rules.values()):
            yield pair
