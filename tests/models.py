"""The tiny model that the tests share: unequal sizes, so that no swapped axis goes unseen."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)

Model = VanillaTransformerForConditionalGeneration
Batch = dict[str, Tensor]

both_attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])

# Sizes that differ wherever they meet and are small enough for the oracle; no dropout.
TINY: dict[str, Any] = {
    "vocab_size": 37,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 28,
    "decoder_ffn_dim": 36,
    "dropout": 0.0,
}
LEARNED: dict[str, Any] = {"position_embedding_type": "learned", "max_position_embeddings": 9}
CONCATENATED: dict[str, Any] = {"position_embedding_type": "sinusoidal_concatenated"}
ROTARY: dict[str, Any] = {"position_embedding_type": "rotary"}
TWO_TABLES: dict[str, Any] = {"share_encoder_decoder_embeddings": False}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
RECTANGULAR: dict[str, Any] = {"talking_heads": "both", "key_heads": 3, "value_heads": 6}


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
                # A norm's weights are as large as they start.
                scale = parameter.mean() if name.endswith("norm.weight") else 0.3
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def build_redrawn(config: VanillaTransformerConfig) -> Model:
    """A model with random parameters, in eval mode."""
    with pytest.MonkeyPatch.context() as patch:
        # Takes a third of the time, and all parameters are drawn anew.
        patch.setattr(PreTrainedModel, "initialize_weights", lambda _: None)
        model = VanillaTransformerForConditionalGeneration(config).eval()
    redraw_parameters(model)
    return model


def build_variant(**changes: Any) -> Model:
    """The tiny model with changed config fields, also with random parameters and in eval mode."""
    return build_redrawn(VanillaTransformerConfig(**{**TINY, **changes}))


def pad(rows: list[Tensor], side: str, extra: int, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask, `extra` positions wider than the longest row needs."""
    width = max(len(row) for row in rows) + extra
    ids = torch.full((len(rows), width), filler)
    mask = torch.zeros_like(ids)
    for row, (padded, is_real) in zip(rows, zip(ids, mask, strict=True), strict=True):
        where = slice(width - len(row), None) if side == "left" else slice(len(row))
        padded[where], is_real[where] = row, 1
    return ids, mask


def save_small_model(folder: Path, tokenizer: VanillaTransformerTokenizer, **changes: Any) -> Path:
    """A model with random weights and its tokenizer, saved in a folder that is there."""
    sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 16)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    config = VanillaTransformerConfig(**{**sizes, **changes}, vocab_size=len(tokenizer))
    model = VanillaTransformerForConditionalGeneration(config)
    redraw_parameters(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def interrupted_after(lines: int) -> Iterator[None]:
    """Ctrl-C is pressed once a translator has given so many translations."""
    # Not above: the plugin is also tested without what the tools need of it.
    from vanilla_transformer_tools.translation import Translation, Translator

    original = Translator.translate
    given = count(1)

    def translate(self: Translator, *args: Any, **kwargs: Any) -> Iterator[Translation]:
        for translation in original(self, *args, **kwargs):
            yield translation
            if next(given) == lines:
                raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Translator, "translate", translate)
        yield


def source_of(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def without_labels(batch: Batch) -> Batch:
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def assert_loaded(loaded: Model, model: Model, batch: Batch) -> None:
    """`loaded` has the parameters of `model`, tied alike, and computes the same."""
    expected = dict(model.named_parameters())
    assert [name for name, _ in loaded.named_parameters()] == list(expected)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    # Matrix products may round otherwise where the file's tensors lie elsewhere in memory.
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits)


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
