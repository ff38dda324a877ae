"""What a run will do, decided once: settings, Trainer's arguments, text and machine.

A `RunPlan` is printed, recorded, compared when the run is resumed, and executed. Nothing changes it
afterwards.
"""

import copy
import os
import platform
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.fast_loss_vanilla_transformer import chunk_rows
from vanilla_transformer_tools.evaluation.bleu_tokenizers import (
    BleuTokenizer,
    language_of_file,
    resolve,
)
from vanilla_transformer_tools.evaluation.metrics import METRICS
from vanilla_transformer_tools.files import checksum, checksum_of_all
from vanilla_transformer_tools.saved_folder import RUN_FILE, read_run
from vanilla_transformer_tools.settings import VALIDATION, TrainSettings
from vanilla_transformer_tools.sharing.privacy import clean_record
from vanilla_transformer_tools.text.filters import Corpus
from vanilla_transformer_tools.text.parallel_text import holds_both_sides
from vanilla_transformer_tools.text.sentences import INNER_ENDS, MOST_INNER_ENDS, has_inner_end
from vanilla_transformer_tools.training.auto_settings import (
    Decision,
    decisions_on_record,
    follow,
    run_rules,
)
from vanilla_transformer_tools.training.averaging import metric_of, split_metric
from vanilla_transformer_tools.training.checkpoints import update_of
from vanilla_transformer_tools.training.corpus_stats import measure
from vanilla_transformer_tools.training.recipe import last_checkpoints, schedule
from vanilla_transformer_tools.training.starting_model import NEW, Start, new_config

# Number of lines in which those with several sentences are counted.
_LINES_OF_SENTENCES = 10_000

TOKENS = 8192
# Section 5.1: 25,000 source and 25,000 target tokens an update. The learning rates of these two
# presets are the paper's and belong to it; those of the others were found with smaller batches.
TOKENS_OF_PAPER = 50_000
PRESETS_OF_PAPER = ("base", "big")
# With fewer, such batches would leave few updates, and most of them to the warm-up.
PAIRS_FOR_PAPER = 1_000_000
# Share of the free memory that is planned with. The rest is for gradients of activations, unequal
# batches, and blocks that the allocator cannot use.
PLANNED_SHARE = 0.7


_PACKAGES = (
    "vanilla-transformer",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "sacrebleu",
)

# Length of a run, its reports, what it saves and where: none of these changes an update, or the way
# in which checkpoints are scored.
_SETTINGS_THAT_MAY_CHANGE = {
    "resume",
    "data",
    "minutes",
    "max_minutes",
    "finish_within",
    "metrics",
    "validation_sets",
    "average_last",
    "early_stopping_patience",
    "language",
    "dataset_tags",
    "license",
}

# Names of Trainer's arguments, or how they begin.
_ARGUMENTS_THAT_MAY_CHANGE = (
    "output_dir",
    "max_steps",
    "num_train_epochs",
    "per_device_eval_batch_size",
    "predict",
    "do_",
    "report_to",
    "run_name",
    "project",
    "disable_tqdm",
    "load_best_model_at_end",
    "dataloader_",
    "local_rank",
    "ddp_timeout",
    "ddp_find_unused_parameters",
    "use_cpu",
    "skip_memory_metrics",
    "eval_",
    "include_",
    "log_",
    "logging_",
    "save_",
    "trackio_",
)


class Memory(NamedTuple):
    """What training takes of a GPU, in bytes.

    Attributes:
        fixed: Weights, gradients, Adam's moments, and a chunk of logits.
        per_token: Activations for the backward pass, by token of a batch of which half are sources.
    """

    fixed: int
    per_token: int


@dataclass(frozen=True)
class RunPlan:
    """A run that is decided.

    Attributes:
        settings: Our settings, with what `--minutes` chose and the size of the batches.
        arguments: Trainer's arguments, as they are executed.
        corpus: The text of the run.
        start: What the run takes over from a saved model.
        config: The model's config; a vocabulary to be learned is as large as it may become.
        checkpoint: Folder to resume from; None for a new run.
        decisions: What `--minutes` chose, and why.
        batch_reason: Why the batches have their size; empty if the user knows it.
        bleu_tokenizers: BLEU's tokenizer of each validation set, by name.
        record: What `run.json` says before the first update.
    """

    settings: TrainSettings
    arguments: Seq2SeqTrainingArguments
    corpus: Corpus
    start: Start
    config: VanillaTransformerConfig
    checkpoint: Path | None
    decisions: tuple[Decision, ...]
    batch_reason: str
    bleu_tokenizers: dict[str, BleuTokenizer]
    record: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.arguments.output_dir)

    @property
    def averaged(self) -> int:
        """Number of last checkpoints to average; by default one where no scores can compare."""
        is_scored = self.settings.validation and self.arguments.eval_strategy != "no"
        is_averaged = is_scored or self.settings.average_last is not None
        return last_checkpoints(self.settings) if is_averaged else 1

    @property
    def last_evaluations(self) -> int:
        """Number of evaluations after the last update: of its weights, and of both averages."""
        averages = (self.averaged > 1) + (self.settings.moving_average is not None)
        return 1 + averages if self.settings.validation else 1

    def describe(self) -> Iterator[str]:
        """The lines that are printed of filters and choices, without those that the user made."""
        yield from self.corpus.filtered.summary()
        yield from map(str, self.decisions)
        if self.settings.init_from:
            rate, warmup = self.arguments.learning_rate, self.arguments.warmup_steps
            defaults = {"learning_rate": rate, "warmup_steps": warmup} == schedule(self.settings)
            source = ", the defaults with --init_from" if defaults else ""
            yield f"rate        {rate:g} after {warmup:g} updates of warm-up{source}"
        if self.batch_reason:
            tokens = self.settings.max_tokens_per_batch
            yield f"batch       {tokens:,} tokens, {self.batch_reason}"
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
    start: Start = NEW,
    checkpoint: Path | None = None,
    given: Collection[str] = (),
) -> RunPlan:
    """Decides a run.

    Args:
        settings: Settings of the user, and defaults; checked.
        arguments: Trainer's arguments, which stay as they are.
        corpus: The text of the run.
        start: What the run takes over from a saved model.
        checkpoint: Folder to resume from; None for a new run.
        given: Names of the options that the user gave, which `--minutes` does not change.

    Raises:
        ValueError: If a run that is resumed has other settings or data than it had, or if the
            model has no positions for the longest pairs.
    """
    previous = read_run(arguments.output_dir) if checkpoint else {}
    pairs, arguments = corpus.filtered.kept, copy.copy(arguments)
    # Pairs from all over the corpus.
    step = -(-len(pairs) // _LINES_OF_SENTENCES)
    lines = pairs.select(range(0, len(pairs), step))["source"]
    share = round(sum(map(has_inner_end, lines)) / len(lines), 4)
    recorded = previous.get("bleu_tokenizers", {})
    tokenizers = _choose_tokenizers(settings, corpus.validation, recorded)
    decisions: tuple[Decision, ...] = ()
    if settings.minutes is not None and not checkpoint:
        stats = measure(settings.minutes, arguments, pairs)
        decisions = run_rules(stats, settings, start.tokenizers, given)
    elif settings.minutes is not None:
        decisions = decisions_on_record(previous, settings, given)
    settings = follow(decisions, settings, arguments, given)
    config = start.config if start.model and start.config else new_config(settings, start.config)
    if settings.max_length > config.last_position:
        raise ValueError(
            f"--max_length {settings.max_length} is longer than the learned positions, which end "
            f"after {config.last_position} tokens. Give --max_length {config.last_position}, or, "
            "for a new model, more positions: --config max_position_embeddings=N."
        )
    _choose_metric(arguments, tokenizers)
    known = previous.get("settings", {}).get("max_tokens_per_batch")
    tokens, reason = settings.max_tokens_per_batch or known, ""
    if not tokens:
        number = None if settings.streaming else len(pairs)
        chosen = {decision.option: decision.value for decision in decisions}
        planned = chosen.get("max_tokens_per_batch")
        tokens, reason = choose_batch_size(settings, arguments, config, number, planned)
    settings = replace(settings, max_tokens_per_batch=tokens)
    run = describe_run(settings, arguments, update_of(checkpoint.name) if checkpoint else 0)
    if checkpoint:
        run = continued_record(previous, run)
    elif decisions:
        run["decisions"] = [asdict(decision) for decision in decisions]
    run["bleu_tokenizers"] = {name: asdict(tokenizer) for name, tokenizer in tokenizers.items()}
    run[INNER_ENDS] = share
    return RunPlan(
        settings, arguments, corpus, start, config, checkpoint, decisions, reason, tokenizers, run
    )


def _choose_tokenizers(
    settings: TrainSettings, sets: Mapping[str, Dataset], recorded: Mapping[str, Any]
) -> dict[str, BleuTokenizer]:
    """BLEU's tokenizer of each validation set; those on record of a resumed run stay."""
    chosen = {}
    for name, pairs in sets.items():
        if name in recorded:
            chosen[name] = BleuTokenizer(**recorded[name])
            continue
        *_, file = settings.paths_of_validation[name]
        of_file = None if holds_both_sides(file) else language_of_file(file)
        languages = [settings.target_language, of_file, *settings.language[1:2]]
        references = pairs["target"][:]
        chosen[name] = resolve(settings.bleu_tokenize, references, languages, settings.pretokenized)
    return chosen


def _choose_metric(
    arguments: Seq2SeqTrainingArguments, tokenizers: Mapping[str, BleuTokenizer]
) -> None:
    """Sets the score that chooses checkpoints, chrF where no BLEU fits, and its direction."""
    prefix, score = split_metric(metric_of(arguments))
    tokenizer = tokenizers.get(prefix.rstrip("_") or VALIDATION)
    if score == "bleu" and tokenizer and not tokenizer.fits:
        score = "chrf"
        arguments.metric_for_best_model = f"{prefix}{score}"
    if kind := METRICS.get(score):
        arguments.greater_is_better = not kind.is_error_rate


def choose_batch_size(
    settings: TrainSettings,
    arguments: TrainingArguments,
    config: VanillaTransformerConfig,
    pairs: int | None,
    planned: int | None = None,
) -> tuple[int, str]:
    """Tokens of a batch that the user did not choose: of the rule or the device, if they fit.

    Args:
        settings: Settings of the run.
        arguments: Trainer's arguments.
        config: The model's config.
        pairs: Number of training pairs; None for a stream.
        planned: Tokens that a rule of --minutes chose; None: none did.

    Returns:
        Source plus target tokens of a batch, over all processes together, and the reason, which is
        empty where there is nothing to explain.
    """
    free = free_memory(arguments.device)
    if free is None:
        return planned or TOKENS, ""
    reason = ""
    if planned is None:
        accumulated = arguments.gradient_accumulation_steps
        planned, reason = _default_of_gpu(settings, accumulated, pairs)
    processes = arguments.world_size
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config)
    memory = estimated_memory(
        # Frozen weights count as trained ones, but those beside an adapter do not.
        model.requires_grad_(settings.peft is None),
        arguments.device,
        is_half=arguments.bf16 or arguments.fp16,
        passes=2 if settings.r_drop else 1,
        # Of processes each has another copy of the gradients, to be summed.
        copies=(settings.moving_average is not None) + (processes > 1),
    )
    # All processes take shares of the same batches, so the fullest GPU decides.
    free = min(gather_object([free]))
    room = processes * (int(PLANNED_SHARE * free - memory.fixed) // memory.per_token)
    if room >= planned:
        return planned, reason and f"{reason}; about {room:,} fit the GPU's memory"
    # Enough for two pairs of any length in each process.
    fewest = min(planned, 4 * processes * settings.max_length)
    tokens = max(fewest, room // 1000 * 1000)
    return tokens, f"because {planned:,} do not fit {free / 1e9:.1f} GB of free memory, by estimate"


def _default_of_gpu(
    settings: TrainSettings, accumulated: int, pairs: int | None
) -> tuple[int, str]:
    """Tokens of one of `accumulated` batches, and why."""
    if settings.init_from:
        return TOKENS, "the default with --init_from"
    per_batch = TOKENS_OF_PAPER // accumulated
    if settings.preset not in PRESETS_OF_PAPER or per_batch <= TOKENS:
        return TOKENS, f"the default of {settings.preset}"
    if pairs is not None and pairs < PAIRS_FOR_PAPER:
        return TOKENS, f"the default of {settings.preset} with fewer than {PAIRS_FOR_PAPER:,} pairs"
    return per_batch, f"{TOKENS_OF_PAPER:,} an update as in the paper"


def free_memory(device: torch.device) -> int | None:
    """Bytes of a GPU that neither this nor another program holds; None for other devices."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def estimated_memory(
    model: PreTrainedModel, device: torch.device, is_half: bool, passes: int = 1, copies: int = 0
) -> Memory:
    """Estimate for training a model in float32, with or without autocast.

    Kernels that form attention weights, which talking heads need, take more; checkpoints of
    activations, and a model that is divided among processes, less.

    Args:
        model: A model of this package.
        device: Decides on the rows of a chunk of logits.
        is_half: Whether matrix products run in half precision.
        passes: Two with R-Drop.
        copies: Further numbers for each trained weight, such as those of a moving average.
    """
    config = model.config
    # The weight, and autocast's copy; gradient and two moments.
    fixed = (4 + 2 * is_half) * model.num_parameters()
    fixed += 4 * (3 + copies) * model.num_parameters(only_trainable=True)
    vocabulary = config.target_vocab_size
    # Logits, their gradient, and a difference of logits.
    fixed += 3 * 4 * vocabulary * chunk_rows(device, vocabulary)
    width = 2 if is_half else 4
    d_model = config.d_model
    # What a product reads, in its dtype; what a norm reads, in float32; a mask of dropout.
    around = d_model * (width + 4 + 1)
    # Queries, keys, values, and two layouts of the heads' outputs.
    self_attention = around + 5 * d_model * width
    cross_attention = around + 3 * d_model * width
    keys_and_values = 3 * d_model * width
    source = config.encoder_layers * (self_attention + around + 2 * width * config.encoder_ffn_dim)
    source += config.decoder_layers * keys_and_values
    target = config.decoder_layers * (
        self_attention + cross_attention + around + 2 * width * config.decoder_ffn_dim
    )
    # Embeddings of both sides; hidden states of targets and their gradient in the loss.
    ends = 2 * 5 * d_model + 10 * d_model
    return Memory(fixed, passes * (source + target + ends) // 2)


def hardware(device: torch.device) -> str:
    """Human-readable name of the devices that a run on `device` uses."""
    if device.type == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    if device.type == "mps":
        return f"Apple GPU, {platform.processor()}"
    return f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"


def describe_run(
    settings: TrainSettings, arguments: TrainingArguments, first_update: int
) -> dict[str, Any]:
    """Settings, data, versions and hardware of a run, as JSON that may be published.

    It holds no secrets, and only the last part of each path; `sha256` identifies the data, and
    `first_update` is the number of updates before it, in a run that is resumed.
    """
    record = {
        "first_update": first_update,
        "command": sys.argv,
        "hardware": hardware(arguments.device),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in _PACKAGES},
        "commit": _commit(),
        "sha256": _checksums(settings),
        "settings": asdict(settings),
        "arguments": arguments.to_dict(),
    }
    return clean_record(record)


def continued_record(previous: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a resumed run, which keeps what each previous run was made from.

    Args:
        previous: Record of the run so far; empty if there is none.
        run: Description of the run that is about to begin.

    Raises:
        ValueError: If there is no record, or if anything differs that changes an update; the
            message names all.
    """
    if not previous:
        raise ValueError(
            f"--resume needs the {RUN_FILE} of the run in --output_dir, got none. Restore it, or "
            "train in another folder, with --init_from a checkpoint."
        )
    # Fields that one release lacks are ignored.
    settings, arguments, sums = (
        [
            (name, before, run[part][name])
            for name, before in previous.get(part, {}).items()
            if run[part].get(name, before) != before
        ]
        for part in ("settings", "arguments", "sha256")
    )
    changed = [each for each in settings if each[0] not in _SETTINGS_THAT_MAY_CHANGE]
    changed += [each for each in arguments if not each[0].startswith(_ARGUMENTS_THAT_MAY_CHANGE)]
    faults = [f"--{name} was {before!r}, got {now!r}" for name, before, now in changed]
    faults += [
        f"{name} has other content than it had (SHA-256 {before[:12]}..., got {now[:12]}...)"
        for name, before, now in sums
    ]
    if faults:
        raise ValueError(
            "--resume continues a run with its own settings and data, got others:\n"
            + "\n".join(faults)
            + "\nGive the same ones, or train in another folder, with --init_from this one."
        )
    kept = {name: previous[name] for name in run if name in previous}
    return {**previous, **run, "previous_runs": [*previous.get("previous_runs", []), kept]}


def _checksums(settings: TrainSettings) -> dict[str, str]:
    """SHA-256 by path of the files and folders that a run learns from; the Hub's are left out."""
    validation = chain.from_iterable(settings.paths_of_validation.values())
    paths = [*settings.train, *validation, *(settings.filter_overlap or ())]
    paths += [settings.symbols] if settings.symbols else []
    checksums = {path: checksum(path) for path in paths if Path(path).is_file()}
    for path in filter(os.path.isdir, paths):
        # Those are copies that `datasets` computed from the dataset.
        files = [file for file in Path(path).rglob("*") if not file.name.startswith("cache-")]
        checksums[path] = checksum_of_all(files)
    if settings.init_from and os.path.isdir(settings.init_from):
        weights = Path(settings.init_from).glob("*.safetensors")
        checksums[settings.init_from] = checksum_of_all(weights)
    return checksums


def _commit() -> str | None:
    """Commit of the source tree that this package runs from; None for an installed wheel."""
    # A wheel may be installed inside of another repository, which does not list its files.
    git = ["git", "-C", str(Path(__file__).parent)]
    commands = ["ls-files", "--error-unmatch", __file__], ["describe", "--always", "--dirty"]
    try:
        for command in commands:
            done = subprocess.run([*git, *command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
