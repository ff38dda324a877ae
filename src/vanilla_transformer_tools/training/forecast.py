"""What a run will take, printed before its first update: sizes, memory and time."""

import statistics
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import psutil
import torch

from vanilla_transformer.tokenization_vanilla_transformer import (
    VanillaTransformerTokenizer,
)
from vanilla_transformer_tools.training.checkpoints import read_state
from vanilla_transformer_tools.training.recipe import dtype_of_products
from vanilla_transformer_tools.training.run_record import hardware
from vanilla_transformer_tools.training.time_schedule import TimeSchedule
from vanilla_transformer_tools.training.trainer import TokenBatchTrainer

# Most batches that are tried; fewer if they are slow.
TRIED_BATCHES = 6
SECONDS_OF_TRIAL = 3.0
# Names of the types of products.
_PRODUCTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float32"}
# Unknown tokens that are named.
_NAMED = 5


def forecast(trainer: TokenBatchTrainer, checkpoint: Path | None) -> Iterator[str]:
    """Describes a run before its first update; a model that is not sharded tries some batches.

    Args:
        trainer: Ready to train, with its callbacks.
        checkpoint: Folder from which the run is resumed; None for a new run.
    """
    minutes_left = next(
        (
            callback.minutes_left
            for callback in trainer.callback_handler.callbacks
            if isinstance(callback, TimeSchedule)
        ),
        None,
    )
    yield from _sizes(trainer)
    if trainer.is_sharded:
        yield (
            f"sharded     {trainer.args.world_size} processes divide the model when training "
            "begins, so no batches are tried for memory and time"
        )
        return
    if minutes_left is None:
        yield from _long_warmup(trainer)
    seconds, gigabytes = _try_batches(trainer)
    yield f"memory      about {gigabytes:.1f} GB"
    period, minutes = trainer.data.period, seconds * trainer.data.batches / 60
    if minutes_left is None:
        periods = _periods_left(trainer, checkpoint)
        end = f"{periods:.3g} {period.several} end {_moment(60 * minutes * periods)}"
    else:
        end = f"the run ends {_moment(60 * max(0.0, minutes_left))} (evaluation counted)"
    yield f"time        about {minutes:.1f} minutes {period.one}; {end}"
    if minutes_left is None:
        yield "            (evaluation not counted)"


def _sizes(trainer: TokenBatchTrainer) -> Iterator[str]:
    arguments, model, data = trainer.args, trainer.model, trainer.data
    vocabulary = f"vocabulary {model.config.vocab_size:,}"
    if not trainer.tokenizers.is_joint:
        sizes = f"{model.config.vocab_size:,} and {model.config.target_vocab_size:,}"
        vocabulary = f"vocabularies {sizes}"
    yield f"device      {hardware(arguments.device)}, {_PRODUCTS[dtype_of_products(arguments)]}"
    yield f"pairs       {data.describe_pairs()}"
    yield from _unknown_tokens(trainer)
    trained = model.num_parameters(only_trainable=True)
    of_which = f", of which {trained:,} are trained" * (trained < model.num_parameters())
    yield f"parameters  {model.num_parameters():,}{of_which}, {vocabulary}"
    yield f"batches     {data.describe_batches()}"


def _unknown_tokens(trainer: TokenBatchTrainer) -> Iterator[str]:
    """What the vocabularies lack of the validation pairs: nothing, if they have pieces of words."""
    pairs, tokenizers = trainer.eval_dataset, trainer.tokenizers
    for side, tokenizer in (("source", tokenizers.source), ("target", tokenizers.target)):
        if pairs is None or not isinstance(tokenizer, VanillaTransformerTokenizer):
            continue
        if unknown := tokenizer.unknown_strings(pairs[side]):
            named = ", ".join(f"{string!r} ({n:,})" for string, n in unknown.most_common(_NAMED))
            yield (
                f"unknown     {unknown.total():,} tokens of the validation {side}s: {named}"
                f"{', ...' if len(unknown) > _NAMED else ''}"
            )


def _long_warmup(trainer: TokenBatchTrainer) -> Iterator[str]:
    """A warning, if the warm-up takes more than half of the run."""
    updates = round(_periods(trainer) / _periods_per_update(trainer))
    warmup = trainer.args.get_warmup_steps(updates)
    if 2 * warmup > updates:
        yield (
            f"warm-up     {warmup:,} updates, of {updates:,} in all: train longer, or shorten it "
            "with --warmup_steps"
        )


def _periods_left(trainer: TokenBatchTrainer, checkpoint: Path | None) -> float:
    done = read_state(checkpoint).global_step if checkpoint else 0
    return max(0, _periods(trainer) - done * _periods_per_update(trainer))


def _periods(trainer: TokenBatchTrainer) -> float:
    """Length of the whole run, in epochs or what a stream has in their place."""
    if trainer.args.max_steps > 0:
        return trainer.args.max_steps * _periods_per_update(trainer)
    return trainer.args.num_train_epochs


def _periods_per_update(trainer: TokenBatchTrainer) -> float:
    return trainer.args.gradient_accumulation_steps / trainer.data.batches


def _moment(seconds: float) -> str:
    """The time in `seconds` from now, with its day unless that is today."""
    now = time.time()
    then = time.localtime(now + seconds)
    is_today = then[:3] == time.localtime(now)[:3]
    return time.strftime("at %H:%M" if is_today else "on %A, %Y-%m-%d, at %H:%M", then)


def _try_batches(trainer: TokenBatchTrainer) -> tuple[float, float]:
    """Seconds per batch and gigabytes for the run, measured with forward and backward passes."""
    model, arguments = trainer.model.train(), trainer.args
    # Trainer does this when it begins to train. The first name is that since Transformers 5.21.
    kind = "activation" if hasattr(arguments, "activation_checkpointing") else "gradient"
    if getattr(arguments, f"{kind}_checkpointing"):
        given = dict(getattr(arguments, f"{kind}_checkpointing_kwargs") or {})
        layers = {key: given.pop(key) for key in ("every_n_layers", "offload") if key in given}
        getattr(model, f"{kind}_checkpointing_enable")(given or None, **layers)
    # A small corpus may have a single batch, which is then tried several times.
    batches = cycle(trainer.get_train_dataloader())
    seconds: list[float] = []
    with torch.random.fork_rng():
        # The first one warms up; the others have about as many tokens, but not the same shape.
        while len(seconds) < 2 or (
            sum(seconds[1:]) < SECONDS_OF_TRIAL and len(seconds) < TRIED_BATCHES
        ):
            inputs = trainer._prepare_inputs(next(batches))
            started = time.monotonic()
            with trainer.accelerator.autocast():
                loss = trainer.compute_loss(model, inputs)
            loss.backward()
            # Reading the value waits for the device.
            loss.item()
            seconds.append(time.monotonic() - started)
    model.zero_grad()
    if arguments.device.type == "cuda":
        memory = torch.cuda.max_memory_allocated()
    else:
        memory = psutil.Process().memory_info().rss
    adam_moments = 8 * model.num_parameters(only_trainable=True)
    return statistics.fmean(seconds[1:]), (memory + adam_moments) / 1e9
