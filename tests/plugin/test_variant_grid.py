"""Switches of the config against each other: the guarantees of the default hold where they meet.

All combinations of the choices below are too many to build. There are a few models in which any
choices of any two axes meet.
"""

import itertools
import random
from operator import itemgetter
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.configuration_vanilla_transformer import CHOICES
from vanilla_transformer.layers_vanilla_transformer import NORMS
from vanilla_transformer.stacks_vanilla_transformer import POSITIONS

from ..models import TWO_TABLES, Model, assert_loaded, build_redrawn
from .test_parity import assert_logits_equal_the_oracle, check_of_training

# Small, and yet no two sizes that meet are equal; 12 is a multiple of all numbers of heads.
SIZES: dict[str, Any] = {
    "vocab_size": 17,
    "d_model": 12,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 7,
    "decoder_ffn_dim": 9,
    "max_position_embeddings": 8,
    "dropout": 0.0,
}

# For each axis its choices, by name. Choices that exclude each other stand on the same axis.
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "norm": {
        "pre": {},
        "bare": {"add_final_layer_norm": False},
        "post": {"pre_norm": False},
        "both": {"pre_norm": False, "add_final_layer_norm": True},
    },
    "norm_type": {"centred": {}, "rms": {"norm_type": "rms_norm"}},
    "eps": {"eps": {}, "eps0.01": {"layer_norm_eps": 0.01}},
    "embedding_norm": {"unnormed": {}, "normed": {"embedding_layer_norm": True}},
    "positions": {
        "sinusoidal": {},
        "concatenated": {"position_embedding_type": "sinusoidal_concatenated"},
        "learned": {"position_embedding_type": "learned"},
        "rotary": {"position_embedding_type": "rotary"},
    },
    "base": {"10000": {}, "50": {"position_base": 50.0}},
    "offset": {"from0": {}, "from2": {"position_offset": 2}},
    "tables": {
        "shared": {},
        "two": TWO_TABLES,
        "larger": {**TWO_TABLES, "decoder_vocab_size": 19},
        "smaller": {**TWO_TABLES, "decoder_vocab_size": 13},
    },
    "projection": {"tied": {}, "untied": {"tie_word_embeddings": False}},
    "projection_bias": {"plain": {}, "biased": {"lm_head_bias": True}},
    "d_k": {"dk": {}, "dk10": {"d_k": 10}},
    "d_v": {"dv": {}, "dv7": {"d_v": 7}},
    "heads": {
        "silent": {},
        "logits": {"talking_heads": "logits"},
        "weights": {"talking_heads": "weights"},
        "both": {"talking_heads": "both"},
        "keys1": {"talking_heads": "logits", "key_heads": 1},
        "values1": {"talking_heads": "weights", "value_heads": 1},
        "keys6values4": {"talking_heads": "both", "key_heads": 6, "value_heads": 4},
    },
    "attention_bias": {"bias": {}, "nobias": {"attention_bias": False}},
    "scale": {"scaled": {}, "unscaled": {"scale_embedding": False}},
    "activation": {"relu": {}, "gelu": {"activation_function": "gelu"}},
    "init": {"xavier": {}, "normal": {"init_std": 0.02}, "deep": {"depth_scaled_init": True}},
}
Combination = tuple[str, ...]  # a choice for each axis


def draw_choices(draw: random.Random, chosen: dict[str, str]) -> dict[str, str]:
    """Adds choices for the axes that have none."""
    return {axis: chosen.get(axis) or draw.choice(list(AXES[axis])) for axis in AXES}


def combinations_of_pairs() -> list[Combination]:
    """Combinations such that any choices of any two axes meet in one of them.

    Each is the best of some that are drawn around choices that have not met yet.
    """
    draw = random.Random(0)
    missing = {
        choices: None
        for axes in itertools.combinations(AXES, 2)
        for choices in itertools.product(*([(axis, name) for name in AXES[axis]] for axis in axes))
    }
    found = []
    while missing:
        drawn = [draw_choices(draw, dict(next(iter(missing)))) for _ in range(12)]
        met = [missing.keys() & set(itertools.combinations(one.items(), 2)) for one in drawn]
        best = max(range(len(drawn)), key=lambda index: len(met[index]))
        found.append(tuple(drawn[best].values()))
        for choices in met[best]:
            del missing[choices]
    return found


def build_config(combination: Combination) -> VanillaTransformerConfig:
    changes: dict[str, Any] = {}
    for axis, choice in zip(AXES, combination, strict=True):
        changes |= AXES[axis][choice]
    return VanillaTransformerConfig(**{**SIZES, **changes})


def build_combination(combination: Combination) -> Model:
    """A model with random parameters, in float64 and eval mode."""
    return build_redrawn(build_config(combination)).double()


# Padded with an ordinary token.
PADDED_ON_THE_RIGHT = {
    "input_ids": torch.tensor([[5, 9, 12, 2], [7, 2, 8, 8]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
}
PADDED_ON_THE_LEFT = {
    "input_ids": torch.tensor([[5, 9, 12, 2], [8, 8, 7, 2]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
}
TARGET_PADDED_ON_THE_LEFT = {
    "decoder_input_ids": torch.tensor([[1, 6, 11], [8, 1, 10]]),
    "decoder_attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
}
LABELS = torch.tensor([[6, 11, 2], [10, 2, -100]])


def assert_beam_searches_find_the_same(model: Model) -> None:
    """This package's search, and Transformers' with each cache and with none."""
    searches: list[dict[str, Any]] = [
        {"use_transformers_search": True},
        {"use_transformers_search": True, "use_cache": False},
    ]
    _, key, value = model.config.head_shapes(model.config.decoder_attention_heads)
    # Transformers' static layers have one number of heads for keys and values.
    if key.heads == value.heads:
        searches.append({"cache_implementation": "static"})
    limits = {"num_beams": 2, "max_new_tokens": 4}
    found = model.generate(**PADDED_ON_THE_LEFT, **limits).tolist()
    for search in searches:
        assert model.generate(**PADDED_ON_THE_LEFT, **limits, **search).tolist() == found, search


COMBINATIONS = combinations_of_pairs()


def hold_each_choice(combinations: list[Combination]) -> bool:
    chosen = [set(choices) for choices in zip(*combinations, strict=True)]
    return chosen == [set(choices) for choices in AXES.values()]


# Elsewhere the first ones are enough: every choice is in one of them.
ENOUGH = next(n for n in itertools.count(1) if hold_each_choice(COMBINATIONS[:n]))
each_choice = pytest.mark.parametrize("combination", COMBINATIONS[:ENOUGH], ids="-".join)


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_any_two_switches_get_on_with_each_other(combination):
    model = build_combination(combination)

    check_of_training(model, PADDED_ON_THE_RIGHT, LABELS)(model)
    # Every sentence has alone what it has between others, whatever pads it.
    assert_logits_equal_the_oracle([model.eval()], PADDED_ON_THE_LEFT, TARGET_PADDED_ON_THE_LEFT)
    assert_beam_searches_find_the_same(model)


# What is tied to what.
TIED = [list(AXES).index(axis) for axis in ("tables", "projection")]
TIES = {itemgetter(*TIED)(one): one for one in COMBINATIONS}


@pytest.mark.parametrize("combination", TIES.values(), ids="-".join)
def test_folder_brings_back_config_weights_and_ties(tmp_path, combination):
    model = build_combination(combination)
    named = model._keys_to_ignore_on_save
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = set(file.keys())

    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64)

    # Tied tensors are stored once, and Trainer warns of lost weights unless the others are named.
    assert saved == {name for name, _ in model.named_parameters()}
    assert named == model._keys_to_ignore_on_save == model.state_dict().keys() - saved
    fields = VanillaTransformerConfig.__annotations__
    assert {name: getattr(loaded.config, name) for name in fields} == {
        name: getattr(model.config, name) for name in fields
    }
    assert_loaded(loaded, model, {**PADDED_ON_THE_LEFT, **TARGET_PADDED_ON_THE_LEFT})


def test_axes_leave_no_switch_out():
    elsewhere = {
        # `test_fast` runs these tests without it.
        "fast",
        "attention_dropout",
        "activation_dropout",
        "label_smoothing",
        "use_cache",
        "is_encoder_decoder",
        *(name for name in VanillaTransformerConfig.__annotations__ if name.endswith("_id")),
    }
    axes = {name for choices in AXES.values() for changes in choices.values() for name in changes}

    assert VanillaTransformerConfig.__annotations__.keys() == axes | SIZES.keys() | elsewhere


@pytest.mark.parametrize(
    ("field", "built"), [("norm_type", NORMS), ("position_embedding_type", POSITIONS)]
)
def test_axes_leave_no_norm_and_no_position_out(field, built):
    default = getattr(VanillaTransformerConfig(), field)
    tried = {one.get(field, default) for choices in AXES.values() for one in choices.values()}

    assert tried == built.keys() == {*CHOICES[field]}, "see `Add a ...` in docs/architecture.md"
