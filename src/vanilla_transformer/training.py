"""Training from parallel text to a saved model: the recipe of section 5 of the paper.

Differs from the paper:
    A run is measured in epochs, and its checkpoints are taken at their ends; the paper fixes the
    number of updates, and takes one every ten minutes. The mean of the last ones is saved, as in
    the paper, if it does as well on the validation pairs as the best one alone.
"""

import difflib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import PartialState
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import vanilla_transformer  # noqa: F401  (registers the Auto classes)
from vanilla_transformer.averaging import (
    Outcome,
    average_weights,
    best_weights,
    metric_of,
    try_weights,
)
from vanilla_transformer.batches import Lengths, TokenBatchSampler
from vanilla_transformer.bpe_dropout import SegmentedPairs
from vanilla_transformer.callbacks import (
    MovingAverage,
    SeedEpochs,
    StopOnRequest,
    interrupts_stop,
)
from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.curves import plot_curves
from vanilla_transformer.data import (
    ParallelText,
    load_pairs,
    pair_lengths,
    read_pairs,
    tokenize_pairs,
)
from vanilla_transformer.filters import Rule, drop_rules, filter_pairs
from vanilla_transformer.metrics import METRICS, TranslationScores
from vanilla_transformer.model_card import record_results, write_model_card
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.r_drop import r_drop
from vanilla_transformer.run_record import (
    LOG_FILE,
    RUN_FILE,
    JsonLinesLog,
    describe_run,
    hardware,
)
from vanilla_transformer.streaming import TokenBatchStream, check_streaming
from vanilla_transformer.tokenization_vanilla_transformer import (
    VanillaTransformerTokenizer,
    language_tags,
    write_lines,
)
from vanilla_transformer_cli.settings import PRESETS, TrainSettings

# Section 6.1: beam 4, length penalty 0.6, output at most 50 tokens longer than its source.
NUM_BEAMS = 4
LENGTH_PENALTY = 0.6
MAX_EXTRA_TOKENS = 50

# Config fields that the command line sets by other options.
_SET_ELSEWHERE = {
    "vocab_size": "--vocab_size",
    "label_smoothing": "--label_smoothing_factor",
    "dtype": "--bf16 or --fp16",
}


def recipe(settings: TrainSettings) -> dict[str, Any]:
    """Defaults of a run for `Seq2SeqTrainingArguments`: section 5 of the paper.

    With Transformers' default timescale, `inverse_sqrt` is equation (3), scaled so that
    `learning_rate` is its peak.
    """
    preset = PRESETS[settings.preset]
    arguments: dict[str, Any] = {
        "output_dir": "runs/model",
        "num_train_epochs": 30,
        "learning_rate": preset.learning_rate,
        "warmup_steps": preset.warmup_steps,
        "lr_scheduler_type": "inverse_sqrt",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-9,
        "weight_decay": 0.0,
        "label_smoothing_factor": 0.1,
        "logging_steps": 50,
        "save_strategy": "epoch",
        # Trainer counts the best checkpoint too.
        "save_total_limit": settings.average_last + bool(settings.validation),
        "report_to": "none",
        "dataloader_pin_memory": torch.cuda.is_available(),
        # Transformers takes bf16 on a CPU only from those who ask for the CPU.
        "use_cpu": not torch.accelerator.is_available(),
        "bf16": _bf16_pays(),
    }
    if settings.validation:
        arguments |= {
            "eval_strategy": "epoch",
            "load_best_model_at_end": True,
            "metric_for_best_model": settings.metrics[0],
            "predict_with_generate": True,
            "generation_num_beams": 1,
            "per_device_eval_batch_size": 64,
        }
    if settings.streaming:
        # A stream has no epochs.
        arguments |= {"save_strategy": "steps", "save_steps": 1000}
        if settings.validation:
            arguments |= {"eval_strategy": "steps", "eval_steps": 1000}
    return arguments


def _bf16_pays() -> bool:
    """Whether matrix products are faster in bfloat16 here; some CPUs only emulate them."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    if torch.accelerator.is_available():
        return False

    def seconds(dtype: torch.dtype) -> float:
        x = torch.ones(1024, 512, dtype=dtype)
        matrix = torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(10):
            started = time.perf_counter()
            x @ matrix
            times.append(time.perf_counter() - started)
        return min(times)

    return seconds(torch.bfloat16) < 0.8 * seconds(torch.float32)


def train(settings: TrainSettings, arguments: Seq2SeqTrainingArguments) -> Path:
    """Trains tokenizer and model, or goes on with saved ones, and saves what came out.

    Args:
        settings: Data, sizes, vocabulary, batches.
        arguments: Everything that Trainer knows; `recipe` has our defaults.

    Returns:
        The folder with the model, `arguments.output_dir`.

    Raises:
        ValueError: If settings, data and folder do not fit together; before any training.
        OSError: If a file cannot be read or written.
        KeyboardInterrupt: At the second Ctrl-C, when the model has been saved.
    """
    overrides = config_overrides(settings)
    _check(settings)
    _prefer_better_scores(settings, arguments)
    if settings.streaming:
        check_streaming(settings, arguments)
    checkpoint = _find_checkpoint(settings, arguments)
    set_seed(arguments.seed)
    validation_pairs = None
    if settings.validation:
        validation_pairs = load_pairs(
            _text(settings, settings.validation, settings.validation_split)
        )
        if settings.max_validation_pairs is not None:
            validation_pairs = validation_pairs.take(settings.max_validation_pairs)
    rules = drop_rules(settings, validation_pairs)
    # Of a stream only what the tokenizer learns from is stored.
    first = settings.tokenizer_pairs if settings.streaming else None
    train_text = _text(settings, settings.train, settings.train_split)
    filtered = filter_pairs(load_pairs(train_text, first), rules)
    train_pairs = filtered.kept
    if start := checkpoint or settings.init_from:
        model = AutoModelForSeq2SeqLM.from_pretrained(start)
        tokenizer = AutoTokenizer.from_pretrained(start)
    else:
        tokenizer = _train_tokenizer(settings, train_pairs)
        model = _build_model(settings, overrides, tokenizer)
    # The model smooths its own loss, without the full logits that Trainer's smoother needs.
    model.config.label_smoothing = arguments.label_smoothing_factor
    arguments.label_smoothing_factor = 0.0

    data = partial(_read_kept, train_text, rules) if settings.streaming else train_pairs
    trainer, truncated = _build_trainer(
        settings, arguments, model, tokenizer, data, validation_pairs
    )
    stop = StopOnRequest(settings.max_minutes)
    trainer.add_callback(stop)
    moving_average = None
    if settings.moving_average is not None:
        moving_average = MovingAverage(settings.moving_average)
        trainer.add_callback(moving_average)
    folder = Path(arguments.output_dir)
    say = PartialState().print
    if trainer.is_world_process_zero():
        filtered.write_dropped(folder)
    for line in chain(filtered.summary(), _plan(trainer, truncated)):
        say(line)
    started = time.monotonic()
    interrupt = None
    try:
        with interrupts_stop(stop):
            trainer.train(resume_from_checkpoint=checkpoint)
            outcome = best_weights(trainer)
            if not stop.interrupted:
                outcome = average_weights(trainer, settings.average_last, outcome)
                if moving_average:
                    name = f"exponential moving average, {settings.moving_average}"
                    outcome = try_weights(trainer, moving_average.weights, name, outcome)
    except KeyboardInterrupt as error:
        interrupt, outcome = error, Outcome("last update")
    if trainer.is_world_process_zero():
        run = describe_run(
            settings,
            arguments,
            # Of a stream nobody counts them.
            pairs=None if settings.streaming else len(train_pairs),
            truncated_pairs=None if settings.streaming else truncated,
            dropped_pairs=filtered.dropped,
            target_languages=list(language_tags(tokenizer)),
            parameters=model.num_parameters(),
            epochs=None if settings.streaming else round(trainer.state.epoch or 0, 2),
            updates=trainer.state.global_step,
            weights=outcome.weights,
            minutes=round((time.monotonic() - started) / 60, 1),
        )
        _save(trainer, tokenizer, run, outcome, folder)
        try:
            plot_curves(folder, metric_of(trainer))
        except ImportError as error:
            say(str(error))
    say(f"The model is in {folder}")
    if interrupt:
        raise interrupt
    return folder


def config_overrides(settings: TrainSettings) -> dict[str, Any]:
    """Config fields given as KEY=VALUE, with values as in JSON and plain strings.

    Raises:
        ValueError: If one is no assignment, no field of the config, or set elsewhere, or if
            there is a saved model to start from.
    """
    fields = VanillaTransformerConfig.__dataclass_fields__
    overrides, faults = {}, []
    if settings.config and settings.init_from:
        faults.append(
            f"--config does not apply to the saved model {settings.init_from!r}, whose sizes are "
            "fixed. Leave one of the two out."
        )
    for assignment in settings.config:
        name, equals, text = assignment.partition("=")
        if not equals:
            faults.append(f"--config takes KEY=VALUE, got {assignment!r}.")
        elif name in _SET_ELSEWHERE:
            faults.append(f"--config {name}: use {_SET_ELSEWHERE[name]} instead.")
        elif name not in fields:
            nearest = difflib.get_close_matches(name, fields, n=1)
            hint = f" Did you mean {nearest[0]}?" if nearest else ""
            faults.append(f"--config: VanillaTransformerConfig has no field {name!r}.{hint}")
        else:
            try:
                overrides[name] = json.loads(text)
            except json.JSONDecodeError:
                overrides[name] = text
    if faults:
        raise ValueError("\n".join(faults))
    return overrides


def _check(settings: TrainSettings) -> None:
    """Refuses settings that no run can follow.

    Raises:
        ValueError: If there are any; tells all.
    """
    faults = []
    decay = settings.moving_average
    if decay is not None and not 0 <= decay < 1:
        faults.append(f"--moving_average must be at least 0 and below 1, got {decay}.")
    if settings.r_drop < 0:
        faults.append(f"--r_drop must be at least 0, got {settings.r_drop}.")
    if settings.max_validation_pairs is not None and settings.max_validation_pairs < 1:
        faults.append(
            f"--max_validation_pairs must be at least 1, got {settings.max_validation_pairs}."
        )
    for name in ("moving_average", "early_stopping_patience"):
        if getattr(settings, name) is not None and not settings.validation:
            faults.append(f"--{name} needs --validation pairs to score on, got none.")
    if faults:
        raise ValueError("\n".join(faults))


def _find_checkpoint(settings: TrainSettings, arguments: TrainingArguments) -> str | None:
    """The checkpoint to go on from; without --resume none, and the folder must be free.

    Raises:
        ValueError: If a run would overwrite another, or has nothing to go on from.
    """
    folder = Path(arguments.output_dir)
    checkpoint = get_last_checkpoint(folder) if folder.is_dir() else None
    if settings.resume and checkpoint is None:
        raise ValueError(
            f"--resume needs a checkpoint in --output_dir, got none in {folder}. "
            "Leave --resume out to start from the beginning."
        )
    is_taken = checkpoint is not None or (folder / "config.json").exists()
    if is_taken and not settings.resume:
        raise ValueError(
            f"--output_dir {folder} already holds a run. Pass --resume to go on with it, choose "
            "another folder, or delete it."
        )
    return checkpoint


def _text(settings: TrainSettings, paths: list[str], split: str) -> ParallelText:
    return ParallelText(
        tuple(paths),
        settings.source_column,
        settings.target_column,
        settings.dataset_config,
        split,
        settings.streaming,
        settings.tag_column,
    )


def _read_kept(text: ParallelText, rules: Mapping[str, Rule]) -> Iterator[tuple[str, str]]:
    """One pass over the pairs that no filter drops."""
    for source, target in read_pairs(text):
        if not any(drops(source, target) for drops in rules.values()):
            yield source, target


def _train_tokenizer(settings: TrainSettings, pairs: Dataset) -> VanillaTransformerTokenizer:
    """Learns the joint vocabulary; every process learns the same one."""
    return VanillaTransformerTokenizer.train(
        (text for column in ("source", "target") for text in pairs[column]),
        vocab_size=settings.vocab_size,
        kind=settings.tokenizer_kind,
        pretokenized=settings.pretokenized,
        target_languages=sorted(set(pairs["tag"])) if settings.tag_column else (),
    )


def _build_model(
    settings: TrainSettings, overrides: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> VanillaTransformerForConditionalGeneration:
    config = VanillaTransformerConfig(
        **{**PRESETS[settings.preset].config(), **overrides}, vocab_size=len(tokenizer)
    )
    model = VanillaTransformerForConditionalGeneration(config)
    model.generation_config.update(
        num_beams=NUM_BEAMS,
        length_penalty=LENGTH_PENALTY,
        # The start token, and the longest output that the longest source may have.
        max_length=1 + settings.max_length + MAX_EXTRA_TOKENS,
    )
    return model


def _build_trainer(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_pairs: Dataset | Callable[[], Iterator[tuple[str, str]]],
    validation_pairs: Dataset | None,
) -> tuple["TokenBatchTrainer", int]:
    """Tokenises the pairs and puts the trainer together; tells how many pairs were cut off.

    Training pairs that are a function, which reads them anew for each pass, are streamed.
    """
    share: dict[str, Any] = {
        "max_tokens": settings.max_tokens_per_batch,
        "seed": arguments.seed,
        "num_processes": arguments.world_size,
        "process_index": arguments.process_index,
    }
    train_set: Dataset | SegmentedPairs | TokenBatchStream
    sampler = None
    if callable(train_pairs):
        train_set = TokenBatchStream(
            train_pairs,
            tokenizer,
            max_length=settings.max_length,
            buffer_size=settings.shuffle_buffer,
            **share,
        )
        truncated = train_set.truncated_pairs
    else:
        train_set, lengths, truncated = _tokenize(settings, arguments, train_pairs, tokenizer)
        sampler = TokenBatchSampler(lengths, **share)
    validation_set = score = None
    if validation_pairs is not None:
        validation_set, _ = tokenize_pairs(
            validation_pairs, tokenizer, max_length=settings.max_length
        )
        # Sources of like length are generated together, which saves steps.
        source_lengths = pair_lengths(validation_set)[:, 0]
        validation_set = validation_set.select(np.argsort(-source_lengths, kind="stable"))
        score = scorer(
            tokenizer,
            list(validation_set["target"]),
            settings.bleu_tokenize,
            settings.metrics,
        )
        if arguments.generation_max_length is None:
            arguments.generation_max_length = 1 + int(source_lengths.max()) + MAX_EXTRA_TOKENS
    trainer = TokenBatchTrainer(
        sampler,
        settings.r_drop,
        model=model,
        args=arguments,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        train_dataset=train_set,
        eval_dataset=validation_set,
        processing_class=tokenizer,
        compute_metrics=score,
    )
    trainer.add_callback(JsonLinesLog(Path(arguments.output_dir) / LOG_FILE))
    if settings.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(settings.early_stopping_patience))
    return trainer, truncated


def _tokenize(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    pairs: Dataset,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[Dataset | SegmentedPairs, Lengths | Callable[[int], Lengths], int]:
    """Token ids of the training pairs, their lengths, and how many of them were cut off.

    Under BPE-dropout ids and lengths are those of an epoch.
    """
    if not settings.bpe_dropout:
        tokenized, truncated = tokenize_pairs(pairs, tokenizer, max_length=settings.max_length)
        return tokenized.select_columns(["input_ids", "labels"]), pair_lengths(tokenized), truncated
    if arguments.dataloader_persistent_workers:
        raise ValueError(
            "--bpe_dropout draws each epoch anew, and persistent workers would go on with the "
            "first one. Leave --dataloader_persistent_workers out."
        )
    drawn = SegmentedPairs(
        tokenizer,
        pairs["source"][:],
        pairs["target"][:],
        rate=settings.bpe_dropout,
        seed=arguments.seed,
        max_length=settings.max_length,
        languages=pairs["tag"][:] if settings.tag_column else None,
    )
    return drawn, drawn.draw, drawn.truncated_pairs


def scorer(
    tokenizer: PreTrainedTokenizerBase,
    references: list[str],
    bleu_tokenize: str,
    metrics: list[str],
) -> Callable[[EvalPrediction], dict[str, Any]]:
    """Scores what Trainer generated against the references as they were, not as tokenised.

    Args:
        tokenizer: Turns generated ids into text.
        references: One for each pair, in the order of the evaluation set.
        bleu_tokenize: sacreBLEU's tokenizer.
        metrics: Names of the scores.
    """
    metric = TranslationScores()

    def score(prediction: EvalPrediction) -> dict[str, Any]:
        # Several processes fill up the last batch with pairs from the beginning.
        ids = np.asarray(prediction.predictions)[: len(references)]
        # Batches of unlike length are joined with -100.
        ids = np.where(ids < 0, tokenizer.pad_token_id, ids)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        return metric.compute(
            predictions=texts, references=references, tokenize=bleu_tokenize, metrics=metrics
        )

    return score


def _prefer_better_scores(settings: TrainSettings, arguments: TrainingArguments) -> None:
    """Tells Trainer that lower error rates are better; it knows so of losses only.

    Raises:
        ValueError: If the score that chooses the checkpoint would not be computed.
    """
    name = (arguments.metric_for_best_model or "loss").removeprefix("eval_")
    if name in METRICS and name not in settings.metrics:
        raise ValueError(
            f"--metric_for_best_model must be one of --metrics, got {name} and "
            f"{' '.join(settings.metrics)}. Add it to --metrics."
        )
    if name in METRICS:
        arguments.greater_is_better = not METRICS[name].is_error_rate


class TokenBatchTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` whose training batches hold a budget of tokens.

    Args:
        sampler: Gives this process its share of each batch; None for a `TokenBatchStream`, which
            is made of such shares.
        r_drop_alpha: Weight of the divergence between two passes; 0 for a single pass.
        settings: Arguments of `Seq2SeqTrainer`.
    """

    def __init__(
        self, sampler: TokenBatchSampler | None, r_drop_alpha: float = 0.0, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.sampler = sampler
        self.r_drop_alpha = r_drop_alpha
        if sampler:
            self.add_callback(SeedEpochs(sampler))

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, of two passes where the model trains under R-Drop."""
        takes_two = self.r_drop_alpha and model.training
        called = partial(r_drop, model, self.r_drop_alpha) if takes_two else model
        return super().compute_loss(called, *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches as they were cut; their shares need no further split by accelerate."""
        batches = {"batch_sampler": self.sampler} if self.sampler else {"batch_size": None}
        return DataLoader(
            self.train_dataset,
            **batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
        )


def _plan(trainer: TokenBatchTrainer, truncated: int) -> Iterator[str]:
    """What the run will do, told before its first update; two batches are tried for it."""
    arguments, model = trainer.args, trainer.model
    data, sampler = trainer.train_dataset, trainer.sampler
    if sampler:
        pairs, one, several = f"{len(data):,}", "an epoch", "epochs"
        batches, padding = len(sampler), sampler.padding
    else:
        # Of a stream only the first buffer is known.
        pairs, one, several = f"{data.buffer_size:,} a buffer", "a buffer", "buffers"
        batches, padding = data.batches_per_buffer, data.padding
    seconds, gigabytes = _try_batches(trainer)
    accumulated = arguments.gradient_accumulation_steps
    periods = arguments.num_train_epochs
    if arguments.max_steps > 0:
        periods = arguments.max_steps * accumulated / batches
    minutes = seconds * batches / 60
    end = time.strftime("%H:%M", time.localtime(time.time() + 60 * minutes * periods))
    yield f"device      {hardware()}, {'bf16' if arguments.bf16 else 'float32'}"
    yield f"pairs       {pairs}, {truncated:,} of them cut to the maximal length"
    yield f"parameters  {model.num_parameters():,}, vocabulary {model.config.vocab_size:,}"
    yield f"batches     {batches:,} {one}, {100 * padding:.1f} % padding"
    yield f"memory      about {gigabytes:.1f} GB"
    yield f"time        about {minutes:.1f} minutes {one}; {periods:.3g} {several} end at {end}"
    yield "            (evaluation not counted)"


def _try_batches(trainer: TokenBatchTrainer) -> tuple[float, float]:
    """Seconds for a batch and gigabytes for the run, from forward and backward passes."""
    model, arguments = trainer.model.train(), trainer.args
    # The only batch of a small corpus is tried twice.
    batches = islice(cycle(trainer.get_train_dataloader()), 2)
    with torch.random.fork_rng():
        for timed, batch in enumerate(batches):
            inputs = trainer._prepare_inputs(batch)
            started = time.monotonic()
            with trainer.accelerator.autocast():
                loss = trainer.compute_loss(model, inputs)
            loss.backward()
            if timed:
                # Reading the value waits for the device.
                loss.item()
    seconds = time.monotonic() - started
    model.zero_grad()
    if arguments.device.type == "cuda":
        memory = torch.cuda.max_memory_allocated()
    else:
        memory = psutil.Process().memory_info().rss
    adam_moments = 8 * model.num_parameters()
    return seconds, (memory + adam_moments) / 1e9


def _save(
    trainer: TokenBatchTrainer,
    tokenizer: PreTrainedTokenizerBase,
    run: dict[str, Any],
    outcome: Outcome,
    folder: Path,
) -> None:
    """Writes the model's folder; each file appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as name:
        unfinished = Path(name)
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        write_lines(unfinished / RUN_FILE, [json.dumps(run, indent=2)])
        for file in unfinished.iterdir():
            file.replace(folder / file.name)
    if outcome.scores:
        search = {"search": f"greedy, {outcome.weights}"}
        record_results(folder, "validation", outcome.scores | search)
    else:
        write_model_card(folder)
