"""Options: values that belong together, and paths that are completed."""

from dataclasses import replace

import pytest

from vanilla_transformer_tools.settings import PRESETS, SearchSettings, TrainSettings


@pytest.mark.parametrize(
    ("name", "layers", "d_model", "ffn_dim", "heads", "dropout"),
    [
        # Table 3 of the paper.
        ("base", 6, 512, 2048, 8, 0.1),
        ("big", 6, 1024, 4096, 16, 0.3),
    ],
)
def test_presets_of_the_paper_have_its_sizes_and_schedule(
    name, layers, d_model, ffn_dim, heads, dropout
):
    preset = PRESETS[name]

    sizes = {"layers": layers, "ffn_dim": ffn_dim, "attention_heads": heads}
    assert preset.config() == {
        "d_model": d_model,
        "dropout": dropout,
        **{
            f"{side}_{size}": value
            for side in ("encoder", "decoder")
            for size, value in sizes.items()
        },
    }
    # The peak of equation (3).
    assert preset.learning_rate == pytest.approx((d_model * preset.warmup_steps) ** -0.5, rel=0.02)


def test_longest_translation_is_that_of_the_paper():
    # Section 6.1: 50 tokens more than the source.
    assert SearchSettings().max_extra_tokens == 50


def test_data_is_the_folder_of_training_and_validation_files():
    settings = TrainSettings(
        data="corpus", train=["a.de", "/b/a.en"], validation=["v.de", "../v.en"]
    )

    # A copy has them as they are.
    for same in (settings, replace(settings, tokenizer="x")):
        assert same.train == ["corpus/a.de", "/b/a.en"]
        assert same.validation == ["corpus/v.de", "corpus/../v.en"]
