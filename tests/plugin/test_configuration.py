"""Fields, defaults and checks of the config; sizes follow table 3 of the paper."""

import json
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

# Every field away from its default, so that none can be lost unseen.
CHANGED: dict[str, Any] = {
    "fast": False,
    "vocab_size": 53,
    "decoder_vocab_size": 51,
    "share_encoder_decoder_embeddings": False,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 28,
    "decoder_ffn_dim": 36,
    "d_k": 5,
    "d_v": 7,
    "attention_bias": False,
    "talking_heads": "both",
    "key_heads": 3,
    "value_heads": 6,
    "activation_function": "gelu",
    "dropout": 0.3,
    "attention_dropout": 0.2,
    "activation_dropout": 0.15,
    "pre_norm": False,
    "add_final_layer_norm": False,
    "embedding_layer_norm": True,
    "norm_type": "rms_norm",
    "layer_norm_eps": 0.001,
    "position_embedding_type": "learned",
    "position_base": 100,
    "position_offset": 2,
    "init_std": 0.02,
    "depth_scaled_init": True,
    "scale_embedding": False,
    "label_smoothing": 0.05,
    "max_position_embeddings": 77,
    "tie_word_embeddings": False,
    "lm_head_bias": True,
    "use_cache": False,
    "pad_token_id": 9,
    "bos_token_id": 10,
    "eos_token_id": [11, 12],
    "decoder_start_token_id": 13,
}
# Table 3 of the paper, row "big".
BIG: dict[str, Any] = {
    "d_model": 1024,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
}


def count_parameters(config: VanillaTransformerConfig) -> int:
    """What the built model holds, tied tensors once; nothing is allocated."""
    with torch.device("meta"):
        return VanillaTransformerForConditionalGeneration(config).num_parameters()


def test_defaults_are_the_base_model_of_the_paper():
    config = VanillaTransformerConfig()

    assert (config.encoder_layers, config.decoder_layers) == (6, 6)
    assert (config.d_model, config.encoder_ffn_dim, config.decoder_ffn_dim) == (512, 2048, 2048)
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (8, 8)
    assert (config.vocab_size, config.activation_function) == (37_000, "relu")
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.1, 0, 0)
    assert (config.position_embedding_type, config.position_base) == ("sinusoidal", 10_000)
    assert (config.position_offset, config.talking_heads) == (0, None)
    assert config.share_encoder_decoder_embeddings
    assert config.scale_embedding
    assert config.tie_word_embeddings
    assert config.use_cache
    assert config.is_encoder_decoder
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert config.decoder_start_token_id == config.bos_token_id


@pytest.mark.parametrize(("sizes", "millions"), [({}, 63.1), (BIG, 214.2)], ids=["base", "big"])
def test_parameter_count_is_that_of_the_paper(sizes, millions):
    # The paper says 65 and 213 million, rounded, and leaves its exact vocabulary open.
    assert round(count_parameters(VanillaTransformerConfig(**sizes)) / 1e6, 1) == millions


SIZES = [
    "vocab_size",
    "decoder_vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "d_k",
    "d_v",
    "key_heads",
    "value_heads",
    "max_position_embeddings",
]
RATES = ["dropout", "attention_dropout", "activation_dropout", "label_smoothing"]


def refusal(**changes: Any) -> str:
    """What a config says of fields that break a rule."""
    with pytest.raises(StrictDataclassError) as raised:
        VanillaTransformerConfig(**changes)
    return str(raised.value)


def wrong_numbers() -> Iterator[tuple[str, float, str]]:
    """Name, value and the limit that a message gives."""
    for name in SIZES:
        yield name, 0, "at least 1"
    for name, value in product(RATES, (-0.1, 1.0)):
        yield name, value, "at least 0 and below 1"
    for name, value in product(("position_base", "init_std"), (0.0, -0.02, math.inf, math.nan)):
        yield name, value, "above 0 and finite"
    for value in (0.0, math.nan, 1e30):
        yield "layer_norm_eps", value, "above 0 and below 2"


@pytest.mark.parametrize(("name", "value", "limit"), list(wrong_numbers()))
def test_number_outside_its_range_is_refused(name, value, limit):
    # With talking heads, numbers of heads may be chosen.
    message = refusal(**{"talking_heads": "both", name: value})

    assert f"`{name}` must be {limit}, got {value}" in message


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        (
            {"encoder_attention_heads": 7, "decoder_attention_heads": 9, "d_k": 64}
            | {"position_offset": -1, "position_embedding_type": "spiral", "talking_heads": "on"}
            | {"norm_type": "batch_norm"}
            | {"activation_function": "rleu", "decoder_vocab_size": 99, "pad_token_id": -1}
            | {"bos_token_id": 37_000, "eos_token_id": [2, 37_001], "is_encoder_decoder": False}
            | {"decoder_start_token_id": 37_002},
            [
                "`d_model` must be a multiple of `encoder_attention_heads`, got 512 and 7. Change "
                "either one, or set `d_v`.",
                "`d_model` must be a multiple of `decoder_attention_heads`, got 512 and 9.",
                "`position_offset` must be at least 0, got -1.",
                "`position_embedding_type` must be one of 'sinusoidal', ",
                "got 'spiral'.",
                "`norm_type` must be one of 'layer_norm', ",
                "got 'batch_norm'.",
                "`talking_heads` must be one of None, 'logits', 'weights', 'both', got 'on'.",
                "`activation_function` must be one of ",
                "got 'rleu'.",
                "`decoder_vocab_size` must be `vocab_size` where source and target share",
                "got 99 and 37000.",
                "`pad_token_id` must be at least 0 and below `vocab_size`, got -1 and 37000.",
                "`bos_token_id` must be at least 0 and below `vocab_size`, got 37000 and 37000.",
                "`bos_token_id` must be at least 0 and below `decoder_vocab_size`, got 37000 and",
                "`eos_token_id` must be at least 0 and below `vocab_size`, got 37001 and 37000.",
                "`decoder_start_token_id` must be at least 0 and below `vocab_size`, got 37002",
                "`is_encoder_decoder` must be True, got False.",
            ],
        ),
        (
            {"key_heads": 7, "value_heads": 9, "talking_heads": "both", "eos_token_id": [2, 0]},
            [
                "`d_model` must be a multiple of `key_heads`, got 512 and 7. Change either one, or "
                "set `d_k`.",
                "`d_model` must be a multiple of `value_heads`, got 512 and 9. Change either one, "
                "or set `d_v`.",
                "`eos_token_id` must differ from `pad_token_id`, which is never generated, got "
                "[2, 0] and 0.",
            ],
        ),
        (
            {"key_heads": 16},
            ["`key_heads` must be `encoder_attention_heads`", "got 16, 8 and None", "'logits'"],
        ),
        (
            {"value_heads": 4, "talking_heads": "logits"},
            ["`value_heads` must be `encoder_attention_heads`", "got 4, 8 and 'logits'"],
        ),
        (
            {"d_model": 21, "encoder_attention_heads": 7, "decoder_attention_heads": 3},
            ["`d_model` must be even, for pairs of sine and cosine, got 21."],
        ),
        (
            {"position_embedding_type": "rotary", "d_k": 5},
            ["turn pairs of columns, so keys must have an even size, got 5 for each head."],
        ),
        (
            {"position_embedding_type": "rotary", "d_model": 24, "encoder_attention_heads": 8},
            ["got 3 for each head"],
        ),
    ],
    ids=[
        "all at once",
        "heads that talk",
        "key_heads",
        "value_heads",
        "odd width",
        "odd d_k",
        "odd heads",
    ],
)
def test_config_names_each_fault_and_value(changes, faults):
    message = refusal(**changes)

    assert [fault for fault in faults if fault not in message] == []


def test_misspelt_keyword_warns_with_the_nearest_field(caplog):
    VanillaTransformerConfig(encoder_layer=2)

    assert "`encoder_layer` is not a field" in caplog.text
    assert "did you mean `encoder_layers`?" in caplog.text


def test_keyword_of_a_newer_release_stays_loadable_and_warns(caplog, tmp_path):
    VanillaTransformerConfig(**CHANGED).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    saved["zzz_from_the_future"] = 3
    (tmp_path / "config.json").write_text(json.dumps(saved), encoding="utf-8")

    loaded, _ = (AutoConfig.from_pretrained(tmp_path) for _ in range(2))

    assert loaded.zzz_from_the_future == 3
    assert loaded.d_model == CHANGED["d_model"]
    assert "`zzz_from_the_future` is not a field" in caplog.text
    assert caplog.text.count("zzz_from_the_future") == 1
    assert "did you mean" not in caplog.text


def test_known_keywords_do_not_warn(caplog):
    # Fields, aliases, what Transformers itself passes, and generation settings of old configs.
    VanillaTransformerConfig(
        **{**CHANGED, "hidden_size": 24},
        num_labels=3,
        attn_implementation="eager",
        dtype="float32",
        num_beams=4,
    )

    assert caplog.text == ""


def test_config_survives_saving_and_loading_without_a_warning(caplog, tmp_path):
    config = VanillaTransformerConfig(**CHANGED)
    VanillaTransformerForConditionalGeneration(config).save_pretrained(tmp_path)

    loaded = AutoConfig.from_pretrained(tmp_path)

    assert caplog.text == ""
    assert type(loaded) is VanillaTransformerConfig
    assert {name: getattr(loaded, name) for name in CHANGED} == CHANGED
    assert loaded.to_diff_dict() == config.to_diff_dict()


def test_changed_values_differ_from_all_defaults():
    defaults = VanillaTransformerConfig()

    # Otherwise the round trip above says nothing about a field.
    own = set(VanillaTransformerConfig.__annotations__)
    assert own - CHANGED.keys() <= {"is_encoder_decoder", "model_type"}
    assert [name for name, value in CHANGED.items() if getattr(defaults, name) == value] == []


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("hidden_size", "d_model"),
        ("num_hidden_layers", "encoder_layers"),
        ("num_attention_heads", "encoder_attention_heads"),
    ],
)
def test_alias_reads_and_sets_its_field(alias, name):
    config = VanillaTransformerConfig(**{alias: 16})
    assert getattr(config, name) == 16

    setattr(config, alias, 32)

    assert getattr(config, name) == getattr(config, alias) == 32
