"""What a fresh model starts from."""

import math

import pytest
import torch
from torch import nn

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.modeling.attention_vanilla_transformer import FusedLinear

from ..conftest import Model
from ..support import reference


@pytest.fixture
def fresh_model() -> Model:
    """Large enough for statistics, with sizes that give each kind of matrix its own bound."""
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            vocab_size=1000,
            d_model=64,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=160,
            tie_word_embeddings=False,
        )
    )


def test_logical_matrices_start_xavier_uniform(fresh_model):
    linears = {
        name: module
        for name, module in fresh_model.model.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert sum(isinstance(module, FusedLinear) for module in linears.values()) == 3

    for name, module in linears.items():
        # Every attention matrix is D x D; a bound over a fused one would be 0.7 times as wide.
        rows = module.out_features if name.endswith(("fc1", "fc2")) else 64
        bound = math.sqrt(6 / (rows + module.in_features))
        for matrix in module.weight.split(rows):
            assert 0.98 * bound < matrix.abs().max() <= bound, name
            # A uniform distribution; 4096 entries or more leave 3 % of play.
            torch.testing.assert_close(matrix.std().item(), bound / math.sqrt(3), rtol=0.03, atol=0)


def test_biases_start_at_zero_and_norms_at_one(fresh_model):
    for name, parameter in fresh_model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name


@pytest.mark.parametrize("name", ["model.shared", "lm_head"])
def test_tables_start_with_lookups_of_unit_variance_and_no_padding(fresh_model, name):
    weight = fresh_model.get_submodule(name).weight

    # 64,000 entries leave 1 % of play.
    torch.testing.assert_close(weight[1:].std().item(), 64**-0.5, rtol=0.02, atol=0)
    assert not weight[0].any()


@pytest.mark.parametrize("tied", [True, False])
def test_tables_start_without_padding_when_its_id_is_not_zero(tiny_config, tied):
    tiny_config.pad_token_id, tiny_config.tie_word_embeddings = 9, tied
    model = VanillaTransformerForConditionalGeneration(tiny_config)

    for table in (model.model.shared, model.lm_head):
        assert [row for row in range(37) if not table.weight[row].any()] == [9]


def test_embedding_sum_is_the_scaled_lookup_plus_positions(fresh_model):
    input_ids = torch.arange(1, 1000)[None]

    hidden = fresh_model.eval().model.encoder(input_ids, output_hidden_states=True).hidden_states

    positions = torch.stack([reference.sinusoid(i, 64) for i in range(999)]).float()
    lookups = hidden[0][0] - positions
    torch.testing.assert_close(
        lookups, 8 * fresh_model.model.shared.weight[1:], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(lookups.var().item(), 1.0, rtol=0.05, atol=0)


def test_matrices_start_smaller_with_depth_when_asked_to(tiny_config):
    tiny_config.depth_scaled_init = True
    tiny_config.d_model, tiny_config.encoder_layers = 64, 4
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(tiny_config)

    for layers in (model.model.encoder.layers, model.model.decoder.layers):
        for depth, layer in enumerate(layers, start=1):
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear):
                    rows = module.out_features if name in ("fc1", "fc2") else 64
                    bound = math.sqrt(6 / (rows + module.in_features))
                    largest = module.weight.abs().max()
                    assert 0.97 * bound < largest * math.sqrt(depth) <= bound, (depth, name)
    assert model.model.shared.weight.std().item() == pytest.approx(64**-0.5, rel=0.1)


def test_loaded_matrices_keep_their_values_whatever_their_depth(tiny_config, tmp_path):
    tiny_config.depth_scaled_init = True
    model = VanillaTransformerForConditionalGeneration(tiny_config)
    model.save_pretrained(tmp_path)

    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)

    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
