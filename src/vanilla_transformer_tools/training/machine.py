"""What the machine is and can do, measured once: how fast it trains, and in which precision."""

import copy
import platform
import timeit
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import broadcast
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer_tools.settings import PRESETS

# Pairs of 40 tokens in each batch that is timed; on a GPU two batches show a fixed time.
_TIMED_PAIRS_ON_CPU = (64,)
_TIMED_PAIRS = (64, 1024)


def hardware(device: torch.device) -> str:
    """Human-readable name of the devices that a run on `device` uses."""
    if device.type == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    if device.type == "mps":
        return f"Apple GPU, {platform.processor()}"
    return f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"


def with_precision(
    arguments: Seq2SeqTrainingArguments, previous: Mapping[str, Any], given: Collection[str]
) -> Seq2SeqTrainingArguments:
    """A copy of the arguments; bf16 is on where a CPU multiplies faster in it.

    A run that is resumed keeps what is in its record: a busy machine might measure otherwise.
    """
    arguments = copy.copy(arguments)
    is_chosen = {"bf16", "fp16"} & set(given) or arguments.bf16 or arguments.fp16
    if arguments.device.type == "cpu" and not is_chosen:
        recorded = previous.get("arguments", {}).get("bf16")
        arguments.bf16 = bf16_is_faster_on_cpu() if recorded is None else recorded
        arguments.mixed_precision = "bf16" if arguments.bf16 else arguments.mixed_precision
    return arguments


def dtype_of_products(arguments: TrainingArguments) -> torch.dtype:
    """Type in which a run computes its matrix products."""
    if arguments.bf16:
        return torch.bfloat16
    return torch.float16 if arguments.fp16 else torch.float32


@cache
def bf16_is_faster_on_cpu() -> bool:
    """Whether this CPU multiplies in bfloat16 clearly faster than in float32, measured once."""

    def seconds(dtype: torch.dtype, repeat: int = 10) -> float:
        x, matrix = torch.ones(1024, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        return min(timeit.repeat(lambda: x @ matrix, number=1, repeat=repeat))

    limit = 0.8 * seconds(torch.float32)
    # Emulated, it takes many times as long, which the second product shows; the first one prepares.
    return seconds(torch.bfloat16, 2) < 9 * limit and seconds(torch.bfloat16) < limit


class Speed(NamedTuple):
    """How fast `tiny` trains: seconds of a batch = seconds_per_batch + tokens / tokens_per_second.

    Attributes:
        tokens_per_second: Source and target together.
        seconds_per_batch: Fixed time, for launching kernels on a GPU; 0 on a CPU.
    """

    tokens_per_second: float
    seconds_per_batch: float = 0.0


def training_speed(arguments: TrainingArguments) -> Speed:
    """How fast `tiny` trains here, in all processes together.

    The optimizer is left out. Process 0 decides, so that all choose alike.
    """
    device, dtype = arguments.device, dtype_of_products(arguments)
    with torch.random.fork_rng():
        config = VanillaTransformerConfig(**PRESETS["tiny"].config(), vocab_size=10_000)
        model = VanillaTransformerForConditionalGeneration(config).to(device).train()
        batches = [
            torch.randint(10, 10_000, (pairs, 20), device=device)
            for pairs in (_TIMED_PAIRS_ON_CPU if device.type == "cpu" else _TIMED_PAIRS)
        ]
        seconds = [_seconds_of_batch(model, ids, dtype) for ids in batches]
    if device.type == "cuda":
        # Room for the batches that are tried later.
        del model
        torch.cuda.empty_cache()
    measured = _line_through([2 * ids.numel() for ids in batches], seconds)
    speed = Speed(*broadcast(torch.tensor(measured, device=device)).tolist())
    return speed._replace(tokens_per_second=arguments.world_size * speed.tokens_per_second)


def _seconds_of_batch(
    model: VanillaTransformerForConditionalGeneration, ids: torch.Tensor, dtype: torch.dtype
) -> float:
    """Median time of a forward and backward pass, after one that warms up."""
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def step() -> None:
        with torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
            loss = model(**batch).loss
        loss.backward()
        # Reading the value waits for the device.
        loss.item()

    return float(np.median(timeit.repeat(step, number=1, repeat=6)[1:]))


def _line_through(tokens: Sequence[int], seconds: Sequence[float]) -> Speed:
    """The speed that explains the times of one batch, or of a small and a large one."""
    if len(tokens) == 1:
        return Speed(tokens[0] / seconds[0])
    # At least a tenth of the larger time is for its tokens, whatever the clock says.
    growth = max(seconds[1] - seconds[0], 0.1 * seconds[1])
    per_token = growth / (tokens[1] - tokens[0])
    return Speed(1 / per_token, max(0.0, seconds[0] - per_token * tokens[0]))
