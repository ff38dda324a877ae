"""`Seq2SeqTrainer` on batches of a token budget, and what it does between updates.

It overrides public methods alone; whatever comes between updates is a callback.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.trainer_utils import EvalLoopOutput

from vanilla_transformer_tools.saved_folder import FILES_FILE, nonfinite_tensors
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.text.training_data import TrainingData
from vanilla_transformer_tools.training.checkpoints import (
    INTERIM_FILE,
    MovingAverage,
    checkpoint_folder,
    close_checkpoint,
    delete_oldest,
)
from vanilla_transformer_tools.training.plan import RunPlan
from vanilla_transformer_tools.training.ranking import Ranking
from vanilla_transformer_tools.training.schedule import is_planned

# Losses on a GPU or of several processes are checked this seldom, because reading them waits.
UPDATES_BETWEEN_LOOKS = 8


class DivergedError(ArithmeticError):
    """A loss, a weight or a validation loss is not finite: training would never recover."""


class TokenBatchTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` whose training batches hold a budget of tokens.

    Args:
        plan: Plan of the run.
        data: Training pairs, and the share of each batch that this process gets.
        tokenizers: Saved with each checkpoint.
        longest_output: Tokens that a translation of a validation pair may have, unless
            `generation_max_length` says so.
        others: Model, validation pairs and scores: arguments of `Seq2SeqTrainer`.
    """

    def __init__(
        self,
        plan: RunPlan,
        data: TrainingData,
        tokenizers: TokenizerPair,
        longest_output: int | None = None,
        **others: Any,
    ) -> None:
        args = copy.copy(plan.arguments)
        # The weights are chosen after training, and old checkpoints deleted when a new one is
        # whole: see `choose_weights` and `delete_oldest`.
        self.kept_checkpoints, args.save_total_limit = args.save_total_limit, None
        args.load_best_model_at_end = False
        if args.generation_max_length is None:
            args.generation_max_length = longest_output
        super().__init__(
            args=args,
            # It pads labels with -100, so it needs the padding id of the sources only.
            data_collator=DataCollatorForSeq2Seq(tokenizers.source),
            processing_class=tokenizers.source,
            train_dataset=data.dataset,
            **others,
        )
        self.plan = plan
        self.data = data
        self.tokenizers = tokenizers
        # The model smooths its own loss, without the full logits that Trainer's smoother needs.
        self.label_smoother = None
        self.model.config.label_smoothing = self.args.label_smoothing_factor
        self.ranking = Ranking(self.args, plan.with_start)
        decay = plan.settings.moving_average
        self.moving_average = None if decay is None else MovingAverage(decay)
        if self.moving_average:
            self.add_callback(self.moving_average)
        self.loss_is_finite = torch.tensor(True, device=self.args.device)
        self.add_callback(_BetweenUpdates(self))

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, with R-Drop for a model in training, whose losses are watched."""
        if not model.training:
            return super().compute_loss(model, *args, **kwargs)
        alpha = self.plan.settings.r_drop
        called = partial(r_drop, model, alpha=alpha) if alpha else model
        result = super().compute_loss(called, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        self.loss_is_finite = self.loss_is_finite & loss.detach().isfinite()
        return result

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Trainer's; tensors are copied to a GPU while it works."""
        device = self.args.device
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
        return super().training_step(model, inputs, *args, **kwargs)

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
        self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Trainer's, with a loss per token; Trainer's own is the mean over batches of any size.

        With several processes, pairs that fill up the last batch count twice.
        """
        self.evaluated = torch.zeros(2, device=self.args.device)
        # Its batches draw a random number, which would change the dropout of the next updates.
        with torch.random.fork_rng(devices=[]):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        nats, tokens = self.accelerator.reduce(self.evaluated).tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = nats / tokens
        return output

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's; sums up losses and tokens for `evaluation_loop`."""
        loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
        tokens = (inputs["labels"] != self.data_collator.label_pad_token_id).sum()
        self.evaluated += torch.stack([loss * tokens, tokens]).to(self.evaluated)
        return loss, *others

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's, for finite weights only, with all tokenizers and the moving average.

        A checkpoint that is written anew does not count until it is closed again.
        """
        self.check_weights()
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save:
            (folder / FILES_FILE).unlink(missing_ok=True)
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            self.tokenizers.save_target(folder)
            if self.moving_average:
                self.moving_average.save(folder)

    def check_losses(self) -> None:
        """Rejects losses that are not finite, within `UPDATES_BETWEEN_LOOKS`.

        Raises:
            DivergedError: If one is not.
        """
        is_cheap = self.args.device.type == "cpu" and self.args.world_size == 1
        if not is_cheap and self.state.global_step % UPDATES_BETWEEN_LOOKS:
            return
        is_finite = self.loss_is_finite
        if self.args.world_size > 1:
            is_finite = reduce(is_finite.float(), "mean") == 1
        if not is_finite:
            self.log({"loss": math.nan})
            raise DivergedError(f"the loss of update {self.state.global_step:,} is not finite")

    def check_weights(self) -> None:
        """Rejects weights that are not finite.

        Raises:
            DivergedError: If one is not.
        """
        if names := nonfinite_tensors(self.model):
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


class _BetweenUpdates(TrainerCallback):
    """What a trainer does between updates: watches losses, ranks scores, closes checkpoints."""

    def __init__(self, trainer: TokenBatchTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any
    ) -> None:
        """Lets a resumed run score and save as often as it is told now."""
        state.compute_steps(args, state.max_steps)

    def on_epoch_begin(self, _: Any, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        """Chooses the batches of the epoch: accelerate announces it to its own samplers only."""
        self.trainer.data.set_epoch(int(state.epoch or 0))

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        """Checks the loss of an update, before it is saved or scored."""
        self.trainer.check_losses()

    def on_evaluate(
        self, _: Any, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> None:
        """Rejects a validation loss that is not finite, and ends a run without progress."""
        if "eval_loss" not in metrics:
            return
        if not math.isfinite(metrics["eval_loss"]):
            raise DivergedError(
                f"the validation loss after update {state.global_step:,} is not finite"
            )
        patience = self.trainer.plan.settings.early_stopping_patience
        if patience is not None:
            control.should_training_stop |= self.trainer.ranking.since_best(state) >= patience

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Closes a checkpoint, to which each process has written, and deletes older ones."""
        self.trainer.accelerator.wait_for_everyone()
        if not args.should_save:
            return
        checkpoint = checkpoint_folder(Path(args.output_dir), state.global_step)
        if not is_planned(args.save_strategy, state.save_steps, state):
            (checkpoint / INTERIM_FILE).touch()
        close_checkpoint(checkpoint)
        best = self.trainer.ranking.best_saved(state)
        delete_oldest(checkpoint, self.trainer.kept_checkpoints, best)


def limit_waiting(arguments: TrainingArguments) -> None:
    """Makes gloo follow `--ddp_timeout`, which Trainer drops with `--use_cpu`.

    Otherwise processes would wait half an hour for a machine that is gone.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_backend() == "gloo":
        from torch.distributed.distributed_c10d import _set_pg_timeout

        _set_pg_timeout(arguments.ddp_timeout_delta)


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
