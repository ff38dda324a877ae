"""Tokens of a training batch that the user did not choose: on a GPU by its memory."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from transformers import (
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.fast_loss_vanilla_transformer import chunk_rows
from vanilla_transformer_tools.saved_folder import load_config
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.starting_model import new_config

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


class BatchSize(NamedTuple):
    """A number of tokens, and where it comes from.

    Attributes:
        tokens: Source plus target tokens of a batch, over all processes together.
        reason: For the plan of a run; empty if the user knows it.
    """

    tokens: int
    reason: str = ""

    def describe(self) -> Iterator[str]:
        """A line of the plan, if there is something to explain."""
        if self.reason:
            yield f"batch       {self.tokens:,} tokens, {self.reason}"


class Memory(NamedTuple):
    """Memory of a GPU that training takes, in bytes.

    Attributes:
        fixed: Weights, gradients, Adam's moments, and a chunk of logits.
        per_token: Activations for the backward pass, by token of a batch of which half are sources.
    """

    fixed: int
    per_token: int


def choose_batch_size(
    settings: TrainSettings,
    arguments: TrainingArguments,
    pairs: int | None,
    planned: int | None = None,
) -> BatchSize:
    """Tokens of a batch that the user did not choose.

    Args:
        settings: Settings of the run.
        arguments: Trainer's arguments.
        pairs: Number of training pairs; None for a stream.
        planned: Number of tokens if the memory holds them; None: the default of the device.
    """
    free = free_memory(arguments.device)
    model = None if free is None else _model_without_values(settings)
    if free is None or model is None:
        return BatchSize(planned or TOKENS)
    reason = ""
    if planned is None:
        accumulated = arguments.gradient_accumulation_steps
        planned, reason = _default_of_gpu(settings, accumulated, pairs)
    processes = arguments.world_size
    memory = estimated_memory(
        model,
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
        return BatchSize(planned, reason and f"{reason}; about {room:,} fit the GPU's memory")
    # Enough for two pairs of any length in each process.
    fewest = min(planned, 4 * processes * settings.max_length)
    return BatchSize(
        max(fewest, room // 1000 * 1000),
        f"because {planned:,} do not fit {free / 1e9:.1f} GB of free memory, by estimate",
    )


def _model_without_values(settings: TrainSettings) -> PreTrainedModel | None:
    """The model of a run on the meta device; None for one of another class.

    A vocabulary is taken to be as large as it may become. Frozen weights count as trained ones, but
    those beside an adapter do not.
    """
    config: PreTrainedConfig
    if settings.init_from:
        config = load_config(settings.init_from)
        if not isinstance(config, VanillaTransformerConfig):
            return None
    else:
        target = settings.target_vocab_size or settings.vocab_size
        config = new_config(
            settings, settings.vocab_size, target if settings.separate_vocabularies else None
        )
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForSeq2SeqLM.from_config(config)
    return model.requires_grad_(settings.peft is None)


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
    model: PreTrainedModel,
    device: torch.device,
    is_half: bool,
    passes: int = 1,
    copies: int = 0,
) -> Memory:
    """Estimate for training a model in float32, with or without autocast.

    Kernels that form attention weights, which talking heads need, take more; checkpoints of
    activations, and a model that is divided among processes, less.

    Args:
        model: A model of this package.
        device: Decides on the rows of a chunk of logits.
        is_half: Whether matrix products run in half precision.
        passes: Two with R-Drop.
        copies: Further numbers for each trained weight, such as a moving average.
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
