"""Attention weights and scores: scaled by 1 / sqrt(d_k), in float32, and returned on request."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.layers_vanilla_transformer import eager_attention_forward

from ..conftest import (
    TINY,
    Model,
    both_attentions,
    build_variant,
    long_inputs,
    without_labels,
)

handed: list[tuple[Tensor, Tensor, float]] = []


def look_at_scores(
    module: nn.Module, query: Tensor, key: Tensor, *args: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Eager attention that keeps what it is handed."""
    handed.append((query.detach(), key.detach(), scaling))
    return eager_attention_forward(module, query, key, *args, scaling=scaling, **kwargs)


AttentionInterface.register("look_at_scores", look_at_scores)
AttentionMaskInterface.register("look_at_scores", eager_mask)


@pytest.fixture(autouse=True)
def nothing_handed() -> Iterator[None]:
    """Every test begins with an empty list."""
    handed.clear()
    yield
    handed.clear()


@pytest.mark.parametrize("heads", [1, 16])
def test_softmax_inputs_start_with_unit_variance(heads):
    torch.manual_seed(0)
    sizes = {"d_model": 64, "encoder_layers": 12, "decoder_layers": 12}
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads)
    model = Model(VanillaTransformerConfig(**{**TINY, **sizes})).eval()
    model.set_attn_implementation("look_at_scores")

    model(**long_inputs())

    raw = torch.stack([(query @ key.transpose(-2, -1)).square().mean() for query, key, _ in handed])
    scaled = raw * torch.tensor([scaling**2 for *_, scaling in handed])
    assert len(raw) == 36
    # Entries that share a matrix are not independent: over seeds the mean spreads by 0.03 to 0.1.
    torch.testing.assert_close(scaled.mean().item(), 1.0, rtol=0.25, atol=0)
    torch.testing.assert_close(raw.mean().item(), float(64 // heads), rtol=0.25, atol=0)


@pytest.mark.parametrize(("d_k", "scaling"), [(None, 6**-0.5), (5, 5**-0.5), (16, 0.25)])
def test_scores_are_divided_by_the_root_of_the_key_size(batch, d_k, scaling):
    model = build_variant(encoder_attention_heads=4, d_k=d_k, d_v=7)
    model.set_attn_implementation("look_at_scores")

    model(**batch)

    assert [used for _, _, used in handed] == pytest.approx([scaling] * 8)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("talking_heads", [None, "logits", "weights", "both"])
def test_softmax_runs_in_float32_under_eager_attention(
    monkeypatch, batch, precision, talking_heads
):
    model = build_variant(talking_heads=talking_heads, attn_implementation="eager").to(precision)
    dtypes = []
    softmax = Tensor.softmax

    def look(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        probabilities = softmax(scores, *args, **kwargs)
        dtypes.append(probabilities.dtype)
        return probabilities

    monkeypatch.setattr(Tensor, "softmax", look)
    with torch.no_grad():
        model(**without_labels(batch))

    assert dtypes == [torch.float32] * 8


@torch.no_grad()
def test_attention_weights_in_bfloat16_are_those_of_a_float32_softmax():
    attention = build_variant().bfloat16().model.encoder.layers[0].self_attn
    generator = torch.Generator().manual_seed(5)
    query, key, value = torch.randn(3, 1, 2, 16, 12, generator=generator).bfloat16()

    _, weights = eager_attention_forward(attention, query, key, value, None, 12**-0.5)

    scores = query @ key.transpose(-2, -1) * 12**-0.5
    assert scores.dtype == torch.bfloat16
    assert torch.equal(weights, scores.float().softmax(dim=-1).bfloat16())


def assert_is_distribution(weights: Tensor, shape: tuple[int, ...]) -> None:
    assert weights.shape == shape
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(shape[:-1]))


@both_attentions
def test_attention_weights_are_distributions_over_real_tokens(tiny_model, batch, attention):
    tiny_model.set_attn_implementation(attention)

    output = tiny_model(**batch, output_attentions=True)

    assert len(output.encoder_attentions) == 2
    assert len(output.decoder_attentions) == len(output.cross_attentions) == 3
    is_padding = batch["attention_mask"] == 0
    for weights in output.encoder_attentions:
        assert_is_distribution(weights, (3, 2, 7, 7))
        assert not weights.permute(0, 3, 1, 2)[is_padding].any()
    for weights in output.decoder_attentions:
        assert_is_distribution(weights, (3, 4, 5, 5))
        assert not weights.triu(diagonal=1).any()
    for weights in output.cross_attentions:
        assert_is_distribution(weights, (3, 4, 5, 7))
        assert not weights.permute(0, 3, 1, 2)[is_padding].any()


def test_asking_for_attention_weights_changes_nothing_else(tiny_model, batch):
    expected = tiny_model(**batch).logits
    configs = [m.config for m in tiny_model.modules() if hasattr(m, "config")]
    before = [config.to_dict() for config in configs]

    asked = tiny_model(**batch, output_attentions=True).logits
    afterwards = tiny_model(**batch)

    torch.testing.assert_close(asked, expected)
    assert torch.equal(afterwards.logits, expected)
    assert afterwards.encoder_attentions is None
    assert [config.to_dict() for config in configs] == before
    assert {config._attn_implementation for config in configs} == {"sdpa"}
