"""Whole training pipelines of several families on one corpus, for benchmarks/pipeline.py."""

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)

from corpora import encode, learn_and_encode
from neighbours import build
from vanilla_transformer_tools.settings import PRESETS, TrainSettings
from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs
from vanilla_transformer_tools.text.token_ids import pair_lengths
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.text.training_data import in_epochs
from vanilla_transformer_tools.training.recipe import recipe
from vanilla_transformer_tools.training.trainer import TokenBatchTrainer

VOCABULARY = 10_000


@dataclass(frozen=True)
class Corpus:
    """Token ids that all contenders share.

    Attributes:
        tokenizer: Of both sides.
        train: Columns `input_ids` and `labels`.
        validation: The same columns, longest source first.
        sampler: Token-budget batches of an epoch.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    validation: Dataset
    sampler: TokenBatchSampler

    @classmethod
    def load(cls, train: list[str], validation: list[str], max_tokens: int) -> "Corpus":
        """Reads the files, learns a joint vocabulary, and cuts batches."""
        tokenizer, ids = learn_and_encode(train, VOCABULARY)
        held_out = encode(load_pairs(ParallelText(tuple(validation))), tokenizer)
        order = np.argsort(-pair_lengths(held_out)[:, 0], kind="stable")
        sampler = TokenBatchSampler(pair_lengths(ids), max_tokens, seed=0)
        return cls(tokenizer, ids, held_out.select(order), sampler)


class Clock(TrainerCallback):
    """Counts the minutes of training, without evaluations, and stops when they are over."""

    def __init__(self, minutes: float, evaluations: int) -> None:
        self.limit, self.interval = minutes, minutes / evaluations
        self.minutes = 0.0
        self.losses: list[tuple[float, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock at the first update and after an evaluation."""
        if not hasattr(self, "since"):
            self.since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Asks for an evaluation whenever one is due."""
        now = self.minutes + (time.perf_counter() - self.since) / 60
        if now >= self.interval * (len(self.losses) + 1):
            self.minutes = now
            control.should_evaluate = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records the loss, and stops if the time is over."""
        self.losses.append((self.minutes, kwargs["metrics"]["eval_loss"]))
        control.should_training_stop = self.minutes >= self.limit
        self.since = time.perf_counter()


def losses_over_time(
    family: str, corpus: Corpus, folder: str, options: argparse.Namespace
) -> list[tuple[float, float]]:
    """Minutes of training and validation loss, at each evaluation of a run."""
    settings = TrainSettings(train=options.train, preset=options.preset)
    updates = len(corpus.sampler)
    arguments = Seq2SeqTrainingArguments(
        **recipe(settings)
        | {
            "output_dir": folder,
            "num_train_epochs": 1000,
            "label_smoothing_factor": 0.0,
            "save_strategy": "no",
            "disable_tqdm": True,
            "per_device_eval_batch_size": 64,
            "per_device_train_batch_size": max(1, round(len(corpus.train) / updates)),
            "train_sampling_strategy": "group_by_length",
        }
    )
    set_seed(0)
    model = build(family, vocab_size=len(corpus.tokenizer), **PRESETS[options.preset].config())
    shared: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "eval_dataset": corpus.validation,
    }
    if family == "vanilla":
        data = in_epochs(corpus.train, corpus.sampler, truncated_pairs=0)
        trainer: Seq2SeqTrainer = TokenBatchTrainer(
            data, TokenizerPair.joint(corpus.tokenizer), **shared
        )
    else:
        collator = DataCollatorForSeq2Seq(corpus.tokenizer)
        trainer = Seq2SeqTrainer(data_collator=collator, train_dataset=corpus.train, **shared)
    clock = Clock(options.minutes, options.evaluations)
    trainer.add_callback(clock)
    trainer.train()
    return clock.losses


def minutes_to(loss: float, run: list[tuple[float, float]]) -> float:
    """When a run reached a loss, interpolated between its evaluations."""
    reached = next(index for index, (_, value) in enumerate(run) if value <= loss)
    if reached == 0:
        return run[0][0]
    (start, above), (end, below) = run[reached - 1], run[reached]
    return start + (end - start) * (above - loss) / (above - below)
