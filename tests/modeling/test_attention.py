"""Attention weights: asked for under any kernel, they are there, and nothing else changes."""

import pytest
import torch
from torch import Tensor

from ..conftest import both_attentions, source_of


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


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_returns_attention_weights_under_sdpa(tiny_model, batch, num_beams, use_cache):
    source = source_of(batch)

    output = tiny_model.generate(
        **source,
        num_beams=num_beams,
        max_new_tokens=4,
        min_new_tokens=4,
        use_cache=use_cache,
        output_attentions=True,
        return_dict_in_generate=True,
    )

    assert [len(step) for step in output.cross_attentions] == [3] * 4
    assert [len(step) for step in output.decoder_attentions] == [3] * 4
    assert_is_distribution(output.encoder_attentions[0], (3, 2, 7, 7))
    for step in range(4):
        queries = 1 if use_cache else step + 1
        rows = 3 * num_beams
        assert_is_distribution(output.cross_attentions[step][0], (rows, 4, queries, 7))
        assert_is_distribution(output.decoder_attentions[step][0], (rows, 4, queries, step + 1))
    assert tiny_model.config._attn_implementation == "sdpa"


def test_attention_flag_of_the_config_is_refused_under_sdpa(tiny_model):
    with pytest.raises(ValueError, match=r"output_attentions.*sdpa"):
        tiny_model.config.output_attentions = True
