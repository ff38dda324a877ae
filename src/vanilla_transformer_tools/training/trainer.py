"""`Seq2SeqTrainer` on batches of a token budget, and its scores.

Steps between updates are callbacks; this file has what needs overriding. A release of Transformers
that changes one of these methods fails the tests in `test_token_batch_trainer.py`.
"""

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object, reduce
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    TrainerControl,
    TrainingArguments,
)
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.trainer import FSDP_MODEL_NAME
from transformers.trainer_utils import EvalLoopOutput, IntervalStrategy, SaveStrategy

from vanilla_transformer_tools.evaluation.bleu_tokenizers import BleuTokenizer
from vanilla_transformer_tools.evaluation.metrics import score
from vanilla_transformer_tools.saved_folder import FILES_FILE, align_weights, nonfinite_tensors
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.text.training_data import TrainingData
from vanilla_transformer_tools.training.averaging import (
    MovingAverage,
    average_checkpoints,
    evaluations,
    evaluations_since_best,
    metric_of,
    scores_of_update,
)
from vanilla_transformer_tools.training.checkpoints import (
    INTERIM_FILE,
    checkpoint_folder,
    close_checkpoint,
    delete_oldest,
    failed_writes_named,
    read_state,
    update_of,
    with_intact_weights,
)
from vanilla_transformer_tools.training.processes import is_sharded, put_weights

# Losses on a GPU or of several processes are checked this seldom, because reading them waits.
UPDATES_BETWEEN_LOOKS = 8

TrainingPass = Callable[..., Seq2SeqLMOutput]
Scorer = Callable[[EvalPrediction], dict[str, Any]]


class DivergedError(ArithmeticError):
    """A loss, a weight or a validation loss is not finite: training would never recover."""


class TokenBatchTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` whose training batches hold a budget of tokens.

    Args:
        data: Training pairs, and the share of each batch that this process gets.
        tokenizers: Saved with each checkpoint.
        training_pass: Takes a model and a training batch, as keyword arguments, and returns the
            model's output; None: the model is called, as in Trainer.
        further_sets: Validation sets besides `eval_dataset`, by name, with which the names of their
            scores begin; each with what `compute_metrics` is for it.
        longest_output: Tokens that a translation of a validation pair may have, unless
            `generation_max_length` says so.
        patience: Number of evaluations without a better one after which training ends; None: it
            continues.
        moving_average: Average of the weights, which is saved with each checkpoint.
        args: Trainer's arguments, which stay as they are.
        settings: Other arguments of `Seq2SeqTrainer`.
    """

    control: TrainerControl
    compute_metrics: Scorer | None

    def __init__(
        self,
        data: TrainingData,
        tokenizers: TokenizerPair,
        training_pass: TrainingPass | None = None,
        further_sets: Mapping[str, tuple[Dataset, Scorer | None]] | None = None,
        longest_output: int | None = None,
        patience: int | None = None,
        moving_average: MovingAverage | None = None,
        *,
        args: TrainingArguments,
        **settings: Any,
    ) -> None:
        # Trainer's own way would delete the best or the last checkpoint: see `delete_oldest`.
        args = copy.copy(args)
        self.kept_checkpoints, args.save_total_limit = args.save_total_limit, None
        super().__init__(
            args=args,
            # It pads labels with -100, so it needs the padding id of the sources only.
            data_collator=DataCollatorForSeq2Seq(tokenizers.source),
            processing_class=tokenizers.source,
            train_dataset=data.dataset,
            **settings,
        )
        self.data = data
        self.tokenizers = tokenizers
        self.is_sharded = is_sharded(self)
        if self.is_sharded:
            # One file for all processes, which any number of them can load.
            plugin = self.accelerator.state.fsdp_plugin
            plugin.state_dict_config = plugin.optim_state_dict_config = None
            plugin.set_state_dict_type("FULL_STATE_DICT")
        self.training_pass = training_pass
        self.further_sets = further_sets or {}
        self.longest_output = longest_output
        self.patience = patience
        # The model smooths its own loss, without the full logits that Trainer's smoother needs.
        self.label_smoother = None
        self.model.config.label_smoothing = self.args.label_smoothing_factor
        self.moving_average = moving_average
        if moving_average:
            self.add_callback(moving_average)
        self.last_checkpoint: Path | None = None
        self.loss_is_finite = torch.tensor(True, device=self.args.device)

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, with the training pass for a model in training, whose losses are watched."""
        if not model.training:
            return super().compute_loss(model, *args, **kwargs)
        called = partial(self.training_pass, model) if self.training_pass else model
        result = super().compute_loss(called, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        self.loss_is_finite = self.loss_is_finite & loss.detach().isfinite()
        return result

    def _prepare_input(self, data: Any) -> Any:
        """Trainer's; tensors are copied to a GPU while it works."""
        if isinstance(data, torch.Tensor):
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Trainer's; the number of targets stays on the CPU unless processes add theirs up."""
        if self.args.world_size == 1:
            device = torch.device("cpu")
        samples: tuple[list[Any], torch.Tensor | int | None] = super().get_batch_samples(
            epoch_iterator, num_batches, device
        )
        return samples

    def evaluation_loop(
        self, dataloader: DataLoader[Any], *args: Any, metric_key_prefix: str = "eval", **kw: Any
    ) -> EvalLoopOutput:
        """Trainer's, on all validation sets.

        The losses are per token; Trainer's own is the mean over batches of any size. With several
        processes, pairs that fill up the last batch count twice.
        """
        output = self._evaluate_set(dataloader, *args, prefix=metric_key_prefix, **kw)
        first_scorer: Scorer | None = self.compute_metrics
        try:
            for name, (pairs, scorer_of_set) in self.further_sets.items():
                self.compute_metrics = scorer_of_set
                loader, prefix = self.get_eval_dataloader(pairs), f"{metric_key_prefix}_{name}"
                further = self._evaluate_set(loader, *args, prefix=prefix, **kw)
                output.metrics.update(further.metrics)
        finally:
            self.compute_metrics = first_scorer
        return output

    def _evaluate_set(
        self, dataloader: DataLoader[Any], *args: Any, prefix: str, **kwargs: Any
    ) -> EvalLoopOutput:
        """Scores of one validation set, whose names begin with a prefix."""
        self.evaluated = torch.zeros(2, device=self.args.device)
        if self.longest_output is not None:
            self._gen_kwargs.setdefault("max_length", self.longest_output)
        # Its batches draw a random number, which would change the dropout of the next updates.
        with torch.random.fork_rng(devices=[]):
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=prefix, **kwargs)
        nats, tokens = self.accelerator.reduce(self.evaluated).tolist()
        output.metrics[f"{prefix}_loss"] = nats / tokens
        return output

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's; sums up losses and tokens for `evaluation_loop`."""
        loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
        tokens = (inputs["labels"] != self.data_collator.label_pad_token_id).sum()
        self.evaluated += torch.stack([loss * tokens, tokens]).to(self.evaluated)
        return loss, *others

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, model: nn.Module, trial: Any, *rest: Any, **kw: Any
    ) -> None:
        """Trainer's, for finite losses; an unplanned last evaluation comes after its checkpoint."""
        self._check_losses()
        unplanned = self.control.should_evaluate and not self._is_planned(
            self.args.eval_strategy, self.state.eval_steps
        )
        if unplanned and self.control.should_save:
            # A resumed run then knows as little of it as one that was not interrupted.
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *rest, **kw)

    def _check_losses(self) -> None:
        """Rejects losses that are not finite, within `UPDATES_BETWEEN_LOOKS`."""
        is_cheap = self.args.device.type == "cpu" and self.args.world_size == 1
        if not is_cheap and self.state.global_step % UPDATES_BETWEEN_LOOKS:
            return
        is_finite = self.loss_is_finite
        if self.args.world_size > 1:
            is_finite = reduce(is_finite.float(), "mean") == 1
        if not is_finite:
            self.log({"loss": math.nan})
            raise DivergedError(f"the loss of update {self.state.global_step:,} is not finite")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Trainer's, for finite weights only; older ones are deleted after this one is closed."""
        # Each trial of a `hyperparameter_search` has a folder of its own.
        run = Path(self._get_output_dir(trial=trial))
        folder = checkpoint_folder(run, self.state.global_step)
        self.check_weights()
        if self.args.should_save:
            (folder / FILES_FILE).unlink(missing_ok=True)
        with failed_writes_named(folder):
            super()._save_checkpoint(model, trial)
        # Each process saves the state of its random numbers.
        self.accelerator.wait_for_everyone()
        if self.moving_average:
            with failed_writes_named(folder):
                self.moving_average.save(folder, self.args.should_save)
        if self.args.should_save:
            self.tokenizers.save_target(folder)
            # Of a sharded model Trainer also saves this, with the weights of model.safetensors.
            (folder / f"{FSDP_MODEL_NAME}.bin").unlink(missing_ok=True)
            if not self._is_planned(self.args.save_strategy, self.state.save_steps):
                (folder / INTERIM_FILE).touch()
            close_checkpoint(folder)
            delete_oldest(folder, self.kept_checkpoints, self.state.best_model_checkpoint)
        self.last_checkpoint = folder

    def _is_planned(self, strategy: str, steps: int) -> bool:
        """Whether a run that was not stopped would save, or evaluate, after this update."""
        if strategy == SaveStrategy.STEPS:
            return self.state.global_step % steps == 0
        return strategy != SaveStrategy.EPOCH or self.state.epoch % 1 == 0

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """In place of Trainer's: see `evaluations_since_best`; the checkpoint may exist already."""
        if not all(math.isfinite(metrics[name]) for name in metrics if name.endswith("_loss")):
            raise DivergedError(
                f"the validation loss after update {self.state.global_step:,} is not finite"
            )
        self.control.should_training_stop |= self._lacks_progress()
        if self.args.metric_for_best_model is None or evaluations_since_best(self.state, self.args):
            return False
        self.state.best_metric = metrics[f"eval_{metric_of(self.args)}"]
        self.state.best_global_step = self.state.global_step
        checkpoint = self.last_checkpoint
        if checkpoint and update_of(checkpoint.name) == self.state.global_step:
            self.state.best_model_checkpoint = str(checkpoint)
        return True

    def _lacks_progress(self) -> bool:
        """Whether the run ends because too many evaluations in a row were no better."""
        if self.patience is None or not evaluations(self.state):
            return False
        return evaluations_since_best(self.state, self.args) >= self.patience

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        """Trainer's; a resumed run scores and saves as often as it is told now.

        Its best checkpoint is looked for in the folder of the run, which may have moved.
        """
        progress: tuple[int, int] = super()._init_training_state(max_steps, *args)
        self.state.compute_steps(self.args, max_steps)
        folder = Path(self.args.output_dir)
        self.last_checkpoint = checkpoint_folder(folder, self.state.global_step)
        if self.last_checkpoint.is_dir():
            saved = read_state(self.last_checkpoint).best_model_checkpoint
            if saved and (best := folder / Path(saved).name).is_dir():
                self.state.best_model_checkpoint = str(best)
        return progress

    def _run_epoch(self, *args: Any, epoch: int, trial: Any, **kwargs: Any) -> None:
        """Trainer's; a resumed run that has already made all its updates is only evaluated."""
        is_over = self.state.global_step >= self.state.max_steps or self._lacks_progress()
        if not (is_over or self.control.should_training_stop):
            # Accelerate announces epochs to its own samplers only.
            self.data.set_epoch(epoch)
            super()._run_epoch(*args, epoch=epoch, trial=trial, **kwargs)
            return
        self.control.should_training_stop = True
        is_scored = scores_of_update(self, self.state.global_step) is not None
        if self.args.eval_strategy != IntervalStrategy.NO and not is_scored:
            metrics = self._evaluate(trial, kwargs["ignore_keys_for_eval"])
            self._determine_best_metric(metrics, trial)

    def _load_from_checkpoint(self, checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """Loads weights; aligned in memory, so that products equal an uninterrupted run's."""
        # Of one checkpoint, the mean is what it holds.
        put_weights(self.model, average_checkpoints([Path(checkpoint)]))
        if not self.is_sharded:
            align_weights(self.model)

    def _load_best_model(self) -> None:
        """Loads the best checkpoint if it is as it was saved; otherwise the last weights stay."""
        best = self.state.best_model_checkpoint
        if with_intact_weights([Path(best)]):
            self._load_from_checkpoint(best)
        else:
            self.state.best_model_checkpoint = None

    def check_weights(self) -> None:
        """Rejects weights that are not finite.

        Raises:
            DivergedError: If one is not.
        """
        names = nonfinite_tensors(self.model)
        if self.is_sharded:
            # Each process knows its parts only, and all must stop.
            names = sorted(set(gather_object(names)))
        if names:
            raise DivergedError(
                f"{len(names)} weights, {names[0]} among them, are not finite after update "
                f"{self.state.global_step:,}"
            )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches of the training data; accelerate must not split their shares further."""
        return DataLoader(
            self.data.dataset,
            **self.data.batching,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=self.args.dataloader_persistent_workers,
        )


def scorer(
    tokenizer: PreTrainedTokenizerBase,
    references: list[str],
    bleu_tokenize: str | BleuTokenizer,
    metrics: list[str],
) -> Scorer:
    """Scores the translations that Trainer generates against references in their original text.

    Args:
        tokenizer: Tokenizer of the target; converts generated ids to text.
        references: One for each pair, in the order of the evaluation set.
        bleu_tokenize: sacreBLEU's tokenizer.
        metrics: Names of the scores.
    """

    def score_ids(prediction: EvalPrediction) -> dict[str, Any]:
        # With several processes, the first pairs fill up the last batch.
        ids = np.asarray(prediction.predictions)[: len(references)]
        # Trainer pads batches of different length with -100.
        ids = np.where(ids < 0, tokenizer.pad_token_id, ids)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        return score(texts, references, tokenize=bleu_tokenize, metrics=metrics)

    return score_ids


def r_drop(
    model: Callable[..., Seq2SeqLMOutput],
    alpha: float,
    *,
    num_items_in_batch: int | Tensor | None = None,
    **inputs: Tensor,
) -> Seq2SeqLMOutput:
    """R-Drop (Wu et al. 2021, arXiv 2106.14448): two passes under dropout should agree.

    The model is called once, on a batch that holds every pair twice. The loss is the mean of both
    cross-entropies plus alpha / 2 times the symmetric Kullback-Leibler divergence
    (KL(p, q) + KL(q, p)) / 2, per target token. That is half the loss of the paper's equation (4),
    which keeps it comparable with the loss of a single pass.

    Args:
        model: A vanilla Transformer in training mode, wrapped or not.
        alpha: Weight of the divergence; the paper uses 5 for translation.
        num_items_in_batch: Divisor of the summed loss, each target counted once; None for the
            targets of this batch.
        inputs: Tensors of the batch, `[B, ...]` each, including `labels`.

    Returns:
        The model's output for 2 B rows, the second pass after the first, with this loss.
    """
    return model(
        **{name: torch.cat([tensor, tensor]) for name, tensor in inputs.items()},
        num_items_in_batch=None if num_items_in_batch is None else 2 * num_items_in_batch,
        r_drop_alpha=alpha,
    )
