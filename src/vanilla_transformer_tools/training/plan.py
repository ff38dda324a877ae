"""The inputs and steps of a run, decided once: settings, Trainer's arguments, text and machine.

A `RunPlan` is printed, recorded, compared when the run is resumed, and executed. Nothing changes it
afterwards.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets
from transformers import Seq2SeqTrainingArguments

from vanilla_transformer_tools.evaluation.bleu_tokenizers import (
    BleuTokenizer,
    language_of_file,
    resolve,
)
from vanilla_transformer_tools.evaluation.metrics import METRICS
from vanilla_transformer_tools.settings import VALIDATION, TrainSettings
from vanilla_transformer_tools.text.filters import FilteredPairs, Rule, drop_rules, filter_pairs
from vanilla_transformer_tools.text.parallel_text import (
    ParallelText,
    holds_both_sides,
    load_pairs,
    read_pairs,
)
from vanilla_transformer_tools.training.auto_settings import Decision, auto_settings
from vanilla_transformer_tools.training.averaging import metric_of, split_metric
from vanilla_transformer_tools.training.batch_size import BatchSize, choose_batch_size
from vanilla_transformer_tools.training.checkpoints import update_of
from vanilla_transformer_tools.training.recipe import in_step, recipe, schedule
from vanilla_transformer_tools.training.resume import continued_record, previous_record
from vanilla_transformer_tools.training.run_record import describe_run
from vanilla_transformer_tools.translation.sentences import has_inner_end
from vanilla_transformer_tools.translation.translator import INNER_ENDS, MOST_INNER_ENDS

# Number of lines in which those with several sentences are counted.
_LINES_OF_SENTENCES = 10_000


@dataclass(frozen=True)
class Corpus:
    """The text of a run.

    Attributes:
        filtered: Training pairs; of a stream only the first ones.
        validation: Pairs of each validation set by name; the set of `--validation` comes first.
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


@dataclass(frozen=True)
class RunPlan:
    """A run that is decided.

    Attributes:
        settings: Our settings, with what `--minutes` chose and the size of the batches.
        arguments: Trainer's arguments, as they are executed.
        corpus: The text of the run.
        checkpoint: Folder to resume from; None for a new run.
        decisions: What `--minutes` chose, and why.
        batch_size: Size of the batches, and why.
        bleu_tokenizers: BLEU's tokenizer of each validation set, by name.
        record: What `run.json` says before the first update.
    """

    settings: TrainSettings
    arguments: Seq2SeqTrainingArguments
    corpus: Corpus
    checkpoint: Path | None
    decisions: tuple[Decision, ...]
    batch_size: BatchSize
    bleu_tokenizers: dict[str, BleuTokenizer]
    record: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.arguments.output_dir)

    def describe(self) -> Iterator[str]:
        """The lines that are printed of filters and choices, without those that the user made."""
        yield from self.corpus.filtered.summary()
        yield from map(str, self.decisions)
        if self.settings.init_from:
            rate, warmup = self.arguments.learning_rate, self.arguments.warmup_steps
            defaults = {"learning_rate": rate, "warmup_steps": warmup} == schedule(self.settings)
            source = ", the defaults with --init_from" if defaults else ""
            yield f"rate        {rate:g} after {warmup:g} updates of warm-up{source}"
        yield from self.batch_size.describe()
        share = self.record[INNER_ENDS]
        cut = f"translate cuts lines by sentence{'' if share <= MOST_INNER_ENDS else ' if told to'}"
        yield f"sentences   {share:.1%} of the sources have more than one; {cut}"
        if "bleu" in self.settings.metrics:
            for name, tokenizer in self.bleu_tokenizers.items():
                of_set = f"{name}, " if name != VALIDATION else ""
                yield f"BLEU        {of_set}tokenizer {tokenizer}"


def plan_run(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    corpus: Corpus,
    checkpoint: Path | None = None,
    given: Collection[str] = (),
) -> RunPlan:
    """Decides a run.

    Args:
        settings: Settings of the user, and defaults; checked.
        arguments: Trainer's arguments, which stay as they are.
        corpus: The text of the run.
        checkpoint: Folder to resume from; None for a new run.
        given: Names of the options that the user gave, which `--minutes` does not change.

    Raises:
        ValueError: If a run that is resumed has other settings or data than it had.
    """
    previous = previous_record(Path(arguments.output_dir)) if checkpoint else {}
    decisions = auto_settings(settings, arguments, corpus.filtered.kept, previous, given)
    settings, arguments = _with_decisions(decisions, settings, arguments, given)
    recorded = previous.get("bleu_tokenizers", {})
    tokenizers = _choose_tokenizers(settings, corpus.validation, recorded)
    arguments = _with_metric(arguments, tokenizers)
    batch_size = _choose_batch_size(settings, arguments, corpus, decisions, previous)
    settings = replace(settings, max_tokens_per_batch=batch_size.tokens)
    run = describe_run(settings, arguments, update_of(checkpoint.name) if checkpoint else 0)
    run["bleu_tokenizers"] = {name: asdict(tokenizer) for name, tokenizer in tokenizers.items()}
    run[INNER_ENDS] = corpus.several_sentences
    if checkpoint:
        run = continued_record(previous, run)
    elif decisions:
        run["decisions"] = [asdict(decision) for decision in decisions]
    return RunPlan(settings, arguments, corpus, checkpoint, decisions, batch_size, tokenizers, run)


def _with_decisions(
    decisions: Collection[Decision],
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    given: Collection[str],
) -> tuple[TrainSettings, Seq2SeqTrainingArguments]:
    """Settings and Trainer's arguments with the decisions, and with the defaults that follow.

    The size of the batches stays open: it has to fit the memory too.
    """
    ours: dict[str, Any] = {}
    trainers: dict[str, Any] = {}
    for decision in decisions:
        if decision.option == "dropout":
            ours["config"] = [*settings.config, f"dropout={decision.value}"]
        elif not hasattr(settings, decision.option):
            trainers[decision.option] = decision.value
        elif decision.option != "max_tokens_per_batch":
            ours[decision.option] = decision.value
    if "eval_steps" in trainers:
        # Each evaluation is of a checkpoint.
        trainers["save_steps"] = trainers["eval_steps"]
    # `data` has been joined with the paths already.
    decided = replace(settings, **ours)
    values = {name: getattr(arguments, name) for name in given if hasattr(arguments, name)}
    before = in_step(recipe(settings), values)
    after = in_step(recipe(decided) | trainers, values)
    arguments = copy.copy(arguments)
    for name, value in after.items():
        if name not in given and value != before.get(name):
            setattr(arguments, name, value)
    return decided, arguments


def _choose_tokenizers(
    settings: TrainSettings, sets: Mapping[str, Dataset], recorded: Mapping[str, Any]
) -> dict[str, BleuTokenizer]:
    """BLEU's tokenizer of each validation set; those on record of a resumed run stay."""
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


def _with_metric(
    arguments: Seq2SeqTrainingArguments, tokenizers: Mapping[str, BleuTokenizer]
) -> Seq2SeqTrainingArguments:
    """Trainer's arguments with the score that chooses checkpoints, and its direction.

    Where no tokenizer of BLEU fits the references, it is chrF. By default, Trainer prefers lower
    values of losses only.
    """
    arguments = copy.copy(arguments)
    prefix, score = split_metric(metric_of(arguments))
    tokenizer = tokenizers.get(prefix.rstrip("_") or VALIDATION)
    if score == "bleu" and tokenizer and not tokenizer.fits:
        score = "chrf"
        arguments.metric_for_best_model = f"{prefix}{score}"
    if kind := METRICS.get(score):
        arguments.greater_is_better = not kind.is_error_rate
    return arguments


def _choose_batch_size(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    corpus: Corpus,
    decisions: Collection[Decision],
    previous: Mapping[str, Any],
) -> BatchSize:
    """The given number of tokens, the previous run's, or what data and memory suggest."""
    recorded = previous.get("settings", {}).get("max_tokens_per_batch")
    if tokens := settings.max_tokens_per_batch or recorded:
        return BatchSize(tokens)
    planned = {decision.option: decision.value for decision in decisions}
    pairs = None if settings.streaming else len(corpus.filtered.kept)
    return choose_batch_size(settings, arguments, pairs, planned.get("max_tokens_per_batch"))
