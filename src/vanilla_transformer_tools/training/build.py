"""The trainer of a plan: tokenizers, model, batches that fit the memory, and validation pairs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate.utils import find_executable_batch_size, gather_object
from transformers import set_seed

from vanilla_transformer.text_vanilla_transformer import without_blank_ends
from vanilla_transformer_tools.evaluation.training_scores import compute_scores
from vanilla_transformer_tools.search import MAX_EXTRA_TOKENS
from vanilla_transformer_tools.text.filters import Corpus
from vanilla_transformer_tools.text.token_ids import pair_lengths, tokenize_pairs
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.text.training_data import build_data
from vanilla_transformer_tools.training.corpus import validation_sample
from vanilla_transformer_tools.training.optimizer import muon_and_adam
from vanilla_transformer_tools.training.plan import TOKENS, RunPlan, with_tokens
from vanilla_transformer_tools.training.start import Start, build_model
from vanilla_transformer_tools.training.trainer import TokenBatchTrainer, limit_waiting


def build(plan: RunPlan, corpus: Corpus, start: Start) -> TokenBatchTrainer:
    """Makes or loads tokenizers, model and batches of a run.

    The model of `start` is changed in place. The trainer's plan has batches that fit the memory.

    Raises:
        ValueError: If model, tokenizers and checkpoint do not fit together.
    """
    settings, arguments = plan.settings, plan.arguments
    limit_waiting(arguments)
    set_seed(arguments.seed)
    tokenizers, model = build_model(settings, start, plan.config, corpus.filtered.kept)
    validation = _validation(plan, corpus, tokenizers)

    def with_batches(tokens: int) -> TokenBatchTrainer:
        sized = with_tokens(plan, tokens)
        data = build_data(corpus, tokenizers, sized.settings, arguments)
        return TokenBatchTrainer(sized, data, tokenizers, model=model, **validation)

    tokens = settings.max_tokens_per_batch or TOKENS
    is_tried = arguments.device.type == "cuda" and plan.batch_reason
    trainer = fitted(tokens, with_batches) if is_tried else with_batches(tokens)
    if settings.optimizer == "muon":
        trainer.optimizer = muon_and_adam(trainer)
    return trainer


def fitted(tokens: int, with_batches: Callable[[int], TokenBatchTrainer]) -> TokenBatchTrainer:
    """The trainer with the largest batches, up to `tokens`, that fit the memory of all GPUs."""

    @find_executable_batch_size(starting_batch_size=tokens)
    def fitting(batch_size: int) -> TokenBatchTrainer:
        trainer = with_batches(batch_size)
        _try(trainer)
        return trainer

    trainer = fitting()
    own = trainer.plan.settings.max_tokens_per_batch
    # All processes take shares of the same batches, so the fullest GPU decides.
    fits = min(gather_object([own]))
    return trainer if fits == own else with_batches(fits)


def _try(trainer: TokenBatchTrainer) -> None:
    """Trains on a batch, beside tensors as large as the two moments of Adam; keeps nothing."""
    model = trainer.model.train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    moments = [torch.empty_like(weight) for weight in weights for _ in range(2)]
    with torch.random.fork_rng(), trainer.accelerator.autocast():
        batch = next(iter(trainer.get_train_dataloader()))
        inputs = {name: tensor.to(trainer.args.device) for name, tensor in batch.items()}
        loss = trainer.compute_loss(model, inputs)
    loss.backward()
    model.zero_grad()
    del moments


def _validation(plan: RunPlan, corpus: Corpus, tokenizers: TokenizerPair) -> dict[str, Any]:
    """Arguments of a trainer for the validation pairs."""
    if corpus.validation is None:
        return {}
    settings, arguments = plan.settings, plan.arguments
    pairs = validation_sample(corpus.validation, settings.max_validation_pairs)
    tokenized, _ = tokenize_pairs(pairs, tokenizers, max_length=settings.max_length)
    # Sources of similar length are generated together, which saves steps.
    source_lengths = pair_lengths(tokenized)[:, 0]
    tokenized = tokenized.select(np.argsort(-source_lengths, kind="stable"))
    scores = None
    if arguments.predict_with_generate and not arguments.prediction_loss_only and plan.facts.bleu:
        # Outputs have no blank ends either.
        references = list(map(without_blank_ends, tokenized["target"]))
        scores = compute_scores(
            tokenizers.target,
            references,
            metrics=settings.metrics,
            tokenize=plan.facts.bleu,
        )
    longest = min(int(source_lengths.max()) + MAX_EXTRA_TOKENS, plan.config.last_position)
    return {
        "eval_dataset": tokenized,
        "compute_metrics": scores,
        # The start token too.
        "longest_output": 1 + int(longest),
    }
