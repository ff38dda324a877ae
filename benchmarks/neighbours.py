"""Models of one size from three families, and what benchmarks do with them."""

import re
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BatchEncoding,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from lab import Report, best_device, measure_alone, megabytes, seconds_of, speed_cells, take_turns
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer_tools.training.start import compile_layers

FAMILIES = {
    "vanilla": (VanillaTransformerConfig, VanillaTransformerForConditionalGeneration),
    "m2m100": (M2M100Config, M2M100ForConditionalGeneration),
    "marian": (MarianConfig, MarianMTModel),
}


# What all families share: the paper's choices, and this project's special tokens.
COMMON: dict[str, Any] = {
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "scale_embedding": True,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# Fields of a config that all families have.
COMMON_FIELDS = (
    *(COMMON.keys() - {"dropout", "attention_dropout", "activation_dropout"}),
    *("vocab_size", "d_model", "tie_word_embeddings"),
    *("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    *("decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"),
)
TRAINING_COLUMNS = ("model", "tokens/s", "range", "speed", "TFLOP/s", "growth", "growth MB")
TRAINING_COLUMNS += ("state MB", "peak MB", "start MB")
NEIGHBOURS = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "forced_eos_token_id": None}


def build(family: str, **changes: Any) -> PreTrainedModel:
    """A freshly initialised model with ReLU and one shared embedding table.

    Args:
        family: Key of `FAMILIES`.
        changes: Fields of the config, among them its sizes.
    """
    config_class, model_class = FAMILIES[family]
    fields = COMMON if family == "vanilla" else COMMON | NEIGHBOURS
    return model_class(config_class(**fields | changes))


def sinusoids(family: str, length: int, width: int) -> torch.Tensor:
    """Positions `[length, width]` in the family's own layout, in float64.

    Ours alternates sines and cosines, as in the paper's formula. Marian puts all sines before all
    cosines. So does M2M100, which also stretches the frequencies and counts from after the padding
    id.
    """
    first, stretch = (1, width - 2) if family == "m2m100" else (0, width)
    frequencies = 10_000 ** (-torch.arange(0, width, 2, dtype=torch.float64) / stretch)
    angles = torch.arange(first, first + length)[:, None] * frequencies
    if family == "vanilla":
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def copy_into_m2m100(model: PreTrainedModel) -> M2M100ForConditionalGeneration:
    """M2M100 of our model's size, with our weights and positions: the same function."""
    other = build("m2m100", **{name: getattr(model.config, name) for name in COMMON_FIELDS})
    weights = {}
    for name, value in model.state_dict().items():
        fused = re.search(r"\.(qkv|kv)_proj\.", name)
        letters = fused[1] if fused else "-"
        # Rows are ordered query, key, value.
        for letter, part in zip(letters, value.chunk(len(letters)), strict=True):
            weights[name.replace(f".{letters}_proj.", f".{letter}_proj.")] = part
    other.load_state_dict(weights)
    use_our_positions(other)
    return other.eval()


def use_our_positions(model: M2M100ForConditionalGeneration) -> None:
    """Overwrites M2M100's tables, which are not saved, with the paper's positions."""
    for stack in (model.model.encoder, model.model.decoder):
        # Padding has the row of the padding id.
        rows = stack.embed_positions.weights[stack.embed_positions.padding_idx + 1 :]
        rows.copy_(sinusoids("vanilla", *rows.shape))


def random_batches(
    lengths: np.ndarray, rows: Iterable[Iterable[int]], vocab_size: int, pad: int = 0, end: int = 2
) -> list[BatchEncoding]:
    """Batches of random tokens, the same at each call.

    Args:
        lengths: Tokens of both sides of each pair, the end counted, `[pairs, 2]`.
        rows: Pairs of each batch.
        vocab_size: Entries of the vocabulary.
        pad: Padding of sources; targets have -100.
        end: Last token of a sentence.
    """
    generator = torch.Generator().manual_seed(0)

    def side(sizes: Iterable[int], filler: int) -> torch.Tensor:
        # The last id is Marian's padding.
        bounds = (4, vocab_size - 1)
        words = [torch.randint(*bounds, (int(n),), generator=generator) for n in sizes]
        for word in words:
            word[-1] = end
        return pad_sequence(words, batch_first=True, padding_value=filler)

    cut = []
    for indices in rows:
        input_ids, labels = (side(lengths[indices, i], (pad, -100)[i]) for i in (0, 1))
        mask = (input_ids != pad).long()
        batch = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
        cut.append(BatchEncoding(batch))
    return cut


def padding_of(cut: list[BatchEncoding]) -> float:
    """Share of padding in batches, 0 to 1."""
    return 1 - tokens_of(cut) / sum(b["input_ids"].numel() + b["labels"].numel() for b in cut)


def tokens_of(cut: list[BatchEncoding]) -> int:
    """Source and target tokens, padding not counted."""
    return sum(int(b["attention_mask"].sum() + (b["labels"] != -100).sum()) for b in cut)


class Training:
    """A model that trains: forward, backward and Adam over given batches.

    Args:
        model: A model of any family.
        cut: The batches.
        dtype: "float32", or the dtype of matrix products under autocast.
        compiler: Backend that compiles the layers, once for all shapes; None: none does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cut: list[BatchEncoding],
        dtype: str = "float32",
        compiler: str | None = None,
    ) -> None:
        device = best_device()
        self.model = model.to(device).train()
        if compiler:
            compile_layers(self.model, compiler)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.dtype = getattr(torch, dtype)
        # The batches stay where they are, for other processes.
        self.cut = [BatchEncoding(dict(batch)).to(device) for batch in cut]

    def run(self) -> float:
        """Seconds for one round over all batches."""
        return seconds_of(lambda: [self.update(batch) for batch in self.cut])

    def update(self, batch: BatchEncoding) -> None:
        """Forward pass, backward pass and Adam."""
        device = self.model.device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32):
            loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _run_steps(make: Callable[..., Training], *setting: Any) -> int:
    """Runs a round; returns the bytes of weights, gradients and Adam's moments."""
    contender = make(*setting)
    contender.run()
    return 16 * contender.model.num_parameters(only_trainable=True)


def compare_training(
    report: Report,
    note: str,
    rounds: int,
    make: Callable[..., Training],
    settings: dict[str, tuple[Any, ...]],
) -> None:
    """Adds a table of models that train in turn, and then each in a process for its memory.

    Speed and growth are also relative to those of the first. The growth is what a round adds to
    the state, which is weights, gradients and Adam's moments: activations, logits and buffers.
    Memory is that of the GPU, if there is one.

    Args:
        report: Receives the table.
        note: First words of the note above it.
        rounds: Rounds that count.
        make: Function of a module that builds a contender; all have the same batches.
        settings: Its arguments, by the name of the contender.
    """
    # After eight graphs of one function torch would compile no more.
    torch.compiler.reset()
    contenders = {name: make(*setting) for name, setting in settings.items()}
    cut = next(iter(contenders.values())).cut
    runs = {name: contender.run for name, contender in contenders.items()}
    seconds = take_turns(runs, rounds, warm_ups=1)
    flops = {name: training_flops(each.model.config, cut) for name, each in contenders.items()}
    # The processes need their memory.
    contenders.clear()
    runs.clear()
    tokens, padding = tokens_of(cut), 100 * padding_of(cut)
    note += f", {tokens:,} tokens in {len(cut)} batches, {padding:.1f} % padding"
    report.table(note, *TRAINING_COLUMNS)
    first, growths = next(iter(seconds)), {}
    for name, times in seconds.items():
        used = measure_alone(_run_steps, make, *settings[name])
        growths[name] = used.growth - used.result
        speeds = speed_cells(tokens, times, seconds[first])
        speeds += [f"{flops[name] / median(times) / 1e12:.3g}"]
        sizes = megabytes(growths[name], used.result, used.peak, used.start)
        report.row(name, *speeds, f"{growths[name] / growths[first]:.2f}", *sizes)


def training_flops(config: PreTrainedConfig, cut: list[BatchEncoding]) -> int:
    """Floating-point operations of matrix products in a forward and a backward pass.

    Only real tokens count. A product of a row with a matrix of n parameters costs 2 n operations
    forward and 4 n backward. With S and T tokens a sentence, widths D and F, and V entries:

    - encoder, a layer: S (4 D^2 + 2 D F) parameters' products and two products [S, S, D];
    - decoder, a layer: T (4 D^2 + 2 D F) and two products [T, T, D] of self-attention; T 2 D^2 and
      S 2 D^2 (keys and values) and two products [T, S, D] of cross-attention;
    - output projection: T D V.

    As is usual, the causal mask is not deducted, and neither softmax, norms, dropout, the gather of
    embeddings nor the optimizer count.
    """
    width, total = config.d_model, 0
    for batch in cut:
        source = batch["attention_mask"].sum(1).double()
        target = (batch["labels"] != -100).sum(1).double()
        encoder = source * (4 * width**2 + 2 * width * config.encoder_ffn_dim)
        encoder += 2 * source**2 * width
        decoder = target * (4 * width**2 + 2 * width * config.decoder_ffn_dim)
        decoder += 2 * target**2 * width
        decoder += 2 * width**2 * (source + target) + 2 * source * target * width
        products = config.encoder_layers * encoder + config.decoder_layers * decoder
        total += round(float((products + target * width * config.vocab_size).sum()))
    # A multiplication and an addition; the backward pass has two products for each.
    return 3 * 2 * total
