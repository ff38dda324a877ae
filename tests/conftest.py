"""The tiny model that the tests share: unequal sizes, so that no swapped axis goes unseen."""

import os
from collections.abc import Callable
from pathlib import Path

# Before any library reads it: no test reaches the Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor, nn

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)

Model = VanillaTransformerForConditionalGeneration
Batch = dict[str, Tensor]

both_attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@pytest.fixture
def tiny_config() -> VanillaTransformerConfig:
    """Sizes that differ wherever they meet and are small enough for the oracle; no dropout."""
    return VanillaTransformerConfig(
        vocab_size=37,
        d_model=24,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=28,
        decoder_ffn_dim=36,
        dropout=0.0,
    )


def redraw_parameters(model: nn.Module) -> None:
    """Draws every parameter anew: in a fresh model each bias is 0 and each norm's weight is 1.

    Such values hide that one of them is left out, and norms of one sign let a tied decoder repeat
    its input for ever.
    """
    # With this seed greedy translations of `batch` differ in tokens and in length, two of them end,
    # and both `<pad>` and `<s>` would sometimes win if generation did not forbid them.
    generator = torch.Generator().manual_seed(522)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 2:
                scale = parameter.shape[1] ** -0.5
            else:
                scale = 1.0 if name.endswith("norm.weight") else 0.3
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def tiny_model(
    tiny_config: VanillaTransformerConfig,
) -> VanillaTransformerForConditionalGeneration:
    """A model of `tiny_config` with random parameters, in float32 and eval mode."""
    model = VanillaTransformerForConditionalGeneration(tiny_config).eval()
    redraw_parameters(model)
    return model


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Three sentence pairs, B=3, S=7, T=5, padded on the right; each sentence ends in `</s>`."""
    input_ids = torch.tensor(
        [
            [17, 5, 9, 30, 2, 0, 0],
            [8, 21, 36, 4, 11, 26, 2],
            [13, 2, 0, 0, 0, 0, 0],
        ]
    )
    labels = torch.tensor(
        [
            [6, 33, 19, 12, 2],
            [25, 7, 2, -100, -100],
            [10, 28, 14, 2, -100],
        ]
    )
    decoder_input_ids = torch.tensor(
        [
            [1, 6, 33, 19, 12],
            [1, 25, 7, 2, 0],
            [1, 10, 28, 14, 2],
        ]
    )
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != 0).long(),
        "decoder_input_ids": decoder_input_ids,
        "labels": labels,
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a text file, given its name and lines, and tells its path."""

    def write_file(name: str, *lines: str) -> str:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
        return str(path)

    return write_file


def real_rows(ids: Tensor, is_real: Tensor) -> list[Tensor]:
    return [row[real] for row, real in zip(ids, is_real.bool(), strict=True)]


def pad(rows: list[Tensor], side: str, extra: int, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask, `extra` positions wider than the longest row needs."""
    width = max(len(row) for row in rows) + extra
    ids = torch.full((len(rows), width), filler)
    mask = torch.zeros_like(ids)
    for row, (padded, is_real) in zip(rows, zip(ids, mask, strict=True), strict=True):
        where = slice(width - len(row), None) if side == "left" else slice(len(row))
        padded[where], is_real[where] = row, 1
    return ids, mask


def source_of(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def without_labels(batch: Batch) -> Batch:
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def gradients(model: Model, batch: Batch) -> dict[str, Tensor]:
    model.train()(**batch).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def record_calls(model: nn.Module, suffix: str) -> list[str]:
    """Names of the submodules ending in `suffix`, appended each time that one is called."""
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(suffix):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls
