"""Scores and their softmax: scaled by 1 / sqrt(d_k), in float32 whatever the model's precision."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling.attention_vanilla_transformer import eager_attention_forward

from ..conftest import TINY, Model, build_variant, long_inputs, without_labels

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


@pytest.mark.parametrize("heads", [1, 4, 16])
def test_softmax_inputs_start_with_unit_variance(heads):
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        **{
            **TINY,
            "d_model": 64,
            "encoder_layers": 12,
            "decoder_layers": 12,
            "encoder_attention_heads": heads,
            "decoder_attention_heads": heads,
        }
    )
    model = Model(config).eval()
    model.set_attn_implementation("look_at_scores")

    model(**long_inputs())

    squares, raw = [], []
    for query, key, scaling in handed:
        scores = query @ key.transpose(-2, -1)
        raw.append(scores.square().mean())
        squares.append((scores * scaling).square().mean())
    assert len(squares) == 36
    # Entries that share a matrix are not independent: over seeds the mean spreads by 0.03 to 0.1.
    torch.testing.assert_close(torch.stack(squares).mean().item(), 1.0, rtol=0.25, atol=0)
    torch.testing.assert_close(
        torch.stack(raw).mean().item(), float(64 // heads), rtol=0.25, atol=0
    )


@pytest.mark.parametrize(("d_k", "scaling"), [(None, 6**-0.5), (5, 5**-0.5), (16, 0.25)])
def test_scores_are_divided_by_the_root_of_the_key_size(batch, d_k, scaling):
    model = build_variant(decoder_attention_heads=4, encoder_attention_heads=4, d_k=d_k, d_v=7)
    model.set_attn_implementation("look_at_scores")

    model(**batch)

    assert [used for _, _, used in handed] == pytest.approx([scaling] * 8)


def jacobian_norm(d_k: int, scaling: float) -> float:
    """Mean size of the softmax's derivative, over random queries and keys of unit variance."""
    model = build_variant()
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(1, 1, 400, d_k, generator=generator).double() for _ in range(2))
    attention = model.model.encoder.layers[0].self_attn
    _, weights = eager_attention_forward(
        attention, query, key[:, :, :8], key[:, :, :8], None, scaling
    )
    rows = weights[0, 0]
    jacobians = rows.diag_embed() - rows[:, :, None] * rows[:, None, :]
    return jacobians.flatten(1).norm(dim=1).mean().item()


def test_gradient_of_the_softmax_vanishes_with_the_key_size_unless_scores_are_scaled():
    sizes = [4, 64, 1024]

    scaled = [jacobian_norm(d_k, d_k**-0.5) for d_k in sizes]
    unscaled = [jacobian_norm(d_k, 1.0) for d_k in sizes]

    assert max(scaled) < 1.1 * min(scaled)
    for smaller, larger in itertools.pairwise(unscaled):
        # Alone the odds of a tie of the two best keys are left: they fall as 1 / sqrt(d_k).
        assert larger < 0.5 * smaller
    assert unscaled[-1] < 0.15 * scaled[-1]


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("talking_heads", [None, "logits", "weights", "both"])
def test_softmax_runs_in_float32_under_eager_attention(
    monkeypatch, batch, precision, talking_heads
):
    model = build_variant(talking_heads=talking_heads).to(precision)
    model.set_attn_implementation("eager")
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
