"""The validation sets of a run, and how BLEU finds the words of each."""

from collections.abc import Mapping
from typing import Any

from datasets import Dataset, concatenate_datasets
from transformers import TrainingArguments

from vanilla_transformer_tools.evaluation.bleu_tokenizers import (
    BleuTokenizer,
    language_of_file,
    resolve,
)
from vanilla_transformer_tools.settings import VALIDATION, TrainSettings
from vanilla_transformer_tools.text.parallel_text import ParallelText, holds_both_sides, load_pairs
from vanilla_transformer_tools.training.averaging import metric_of, split_metric


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


def load_validation(settings: TrainSettings) -> dict[str, Dataset]:
    """The pairs of all validation sets by name; that of `--validation` comes first."""
    return {
        name: load_pairs(parallel_text(settings, paths, settings.validation_split))
        for name, paths in settings.paths_of_validation().items()
    }


def joined(sets: Mapping[str, Dataset]) -> Dataset | None:
    """The pairs of all sets; None if there is none."""
    return concatenate_datasets(list(sets.values())) if sets else None


def choose_tokenizers(
    settings: TrainSettings, sets: Mapping[str, Dataset], recorded: Mapping[str, Any]
) -> dict[str, BleuTokenizer]:
    """BLEU's tokenizer of each validation set.

    Args:
        settings: Settings of the run.
        sets: Pairs by name.
        recorded: Choices of a run that is resumed, by name; they stay.
    """
    chosen = {}
    for name, pairs in sets.items():
        if name in recorded:
            chosen[name] = BleuTokenizer(**recorded[name])
            continue
        *_, file = settings.paths_of_validation()[name]
        languages = settings.language[1:2]
        language = None if holds_both_sides(file) else language_of_file(file)
        language = settings.target_language or language or next(iter(languages), None)
        references = pairs["target"][:]
        chosen[name] = resolve(settings.bleu_tokenize, references, language, settings.pretokenized)
    return chosen


def let_chrf_decide(arguments: TrainingArguments, tokenizers: Mapping[str, BleuTokenizer]) -> None:
    """Chooses checkpoints by chrF where no tokenizer of BLEU fits the references."""
    prefix, metric = split_metric(metric_of(arguments))
    tokenizer = tokenizers.get(prefix.rstrip("_") or VALIDATION)
    if metric == "bleu" and tokenizer and not tokenizer.fits:
        arguments.metric_for_best_model = f"{prefix}chrf"
