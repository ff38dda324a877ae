"""Attention maps: which weights they hold, how tokens read, and their figures."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.inspection.attention_figures import plot_attention, plot_positions
from vanilla_transformer_tools.inspection.attention_maps import (
    AttentionMap,
    read_attention,
    token_labels,
)
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

from ..models import both_attentions, build_variant
from ..support.pretrained import bart

SOURCE, TARGET = "ein hund rennt", "a dog"


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer.train([SOURCE, TARGET] * 3, vocab_size=300)


@pytest.fixture
def translator(tiny_model, tokenizer):
    tiny_model.resize_token_embeddings(len(tokenizer))
    return Translator(tiny_model, tokenizer)


def attention_map(rows, columns, kind="cross", layers=1, heads=2, **others):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(layers, heads, len(rows), len(columns), generator=generator)
    return AttentionMap(
        kind, tuple(rows), tuple(columns), weights, **{"sums_to_one": True, **others}
    )


@both_attentions
def test_maps_hold_the_weights_of_the_model(translator, tokenizer, attention):
    model = translator.engine.model
    source_ids, target_ids = tokenizer(SOURCE).input_ids, tokenizer(text_target=TARGET).input_ids
    output = model(
        input_ids=torch.tensor([source_ids]),
        labels=torch.tensor([target_ids]),
        output_attentions=True,
    )
    model.set_attn_implementation(attention)

    maps = read_attention(translator, SOURCE, TARGET)

    assert (maps.source, maps.target) == (SOURCE, TARGET)
    for found, expected, sizes in [
        (maps.encoder, output.encoder_attentions, (2, 2)),
        (maps.decoder, output.decoder_attentions, (3, 4)),
        (maps.cross, output.cross_attentions, (3, 4)),
    ]:
        assert found.weights.shape == (*sizes, len(found.rows), len(found.columns))
        torch.testing.assert_close(found.weights, torch.cat(expected), rtol=1e-5, atol=1e-6)


def test_model_of_another_class_shows_its_weights(tmp_path):
    model, tokenizer = bart(tmp_path)
    model.eval().set_attn_implementation("eager")
    inputs = {"input_ids": tokenizer([SOURCE], return_tensors="pt").input_ids}
    target_ids = tokenizer([TARGET], return_tensors="pt").input_ids
    # The first token that is read is `</s>`.
    read_ids = torch.cat([torch.tensor([[2]]), target_ids[:, :-1]], dim=1)
    output = model(**inputs, decoder_input_ids=read_ids, output_attentions=True)
    model.set_attn_implementation("sdpa")
    translator = Translator(model, tokenizer, num_beams=1, details=True)

    maps = read_attention(translator, SOURCE, TARGET)
    (translation,) = translator.translate([SOURCE])

    for found, expected in [
        (maps.encoder, output.encoder_attentions),
        (maps.decoder, output.decoder_attentions),
        (maps.cross, output.cross_attentions),
    ]:
        torch.testing.assert_close(found.weights, torch.cat(expected), rtol=1e-5, atol=1e-6)
    assert len(translation.alignment) >= len(translation.tokens) - 1 > 0
    assert model.config._attn_implementation == "sdpa"


def test_maps_show_the_own_translation_in_its_own_tokens(translator, tokenizer):
    engine = translator.engine
    translator.tokenizers = replace(translator.tokenizers, source_prefix=(7,))
    source_ids = [7, *tokenizer(SOURCE).input_ids]
    ((best, *_),) = engine.translate_batch(
        [source_ids], [[]], [len(source_ids) + 50], translator.search
    )

    maps = read_attention(translator, SOURCE)

    assert maps.cross.rows == token_labels(tokenizer, best.ended)
    assert maps.encoder.rows == token_labels(tokenizer, source_ids)
    assert maps.target == next(translator.translate([SOURCE])).text


def test_maps_are_of_one_model(tiny_model, translator):
    translator.engine = TorchEngine(tiny_model, tiny_model)

    with pytest.raises(ValueError, match=r"from one model, .* got 2 models"):
        read_attention(translator, SOURCE)


def test_each_side_is_spelled_by_its_own_tokenizer(tokenizer):
    target_tokenizer = VanillaTransformerTokenizer.train(["a dog"], vocab_size=20, kind="word")
    model = build_variant(
        vocab_size=len(tokenizer),
        decoder_vocab_size=len(target_tokenizer),
        share_encoder_decoder_embeddings=False,
    )

    maps = read_attention(
        Translator(model, tokenizer, target_tokenizer=target_tokenizer), SOURCE, TARGET
    )

    heard = token_labels(tokenizer, tokenizer(SOURCE).input_ids)
    assert maps.encoder.rows == maps.encoder.columns == maps.cross.columns == heard
    assert maps.decoder.rows == maps.cross.rows == ("a", "dog", "</s>")
    # Rows write, and columns are read.
    assert maps.decoder.columns == ("<s>", "a", "dog")


def test_selection_counts_from_one_and_means_heads():
    attention = attention_map("ab", "cde", layers=3)

    assert torch.equal(attention.select(3, 2), attention.weights[2, 1])
    assert torch.equal(attention.select(1), attention.weights[0].mean(0))
    assert torch.equal(attention.select(), attention.weights[1].mean(0))
    assert attention.title() == "cross-attention, layer 2 of 3, mean of 2 heads"
    assert attention.title(1, 2) == "cross-attention, layer 1 of 3, head 2 of 2"


@pytest.mark.parametrize(
    ("layer", "head", "match"),
    [
        (0, None, "`layer` must be between 1 and 3 .* got 0"),
        (4, 3, r"1 and 3 .* got 4\.\n`head` must be between 1 and 2 .* got 3"),
    ],
)
def test_selection_refuses_what_there_is_not(layer, head, match):
    with pytest.raises(ValueError, match=match):
        attention_map("ab", "cde", layers=3).select(layer, head)


def test_maps_of_talking_heads_are_one_for_each_head_of_values(translator):
    changes = {"talking_heads": "both", "key_heads": 3, "value_heads": 6, "vocab_size": 300}
    talking = build_variant(**changes)
    talking_translator = Translator(talking, translator.tokenizer)

    maps = read_attention(talking_translator, "ein", "a")

    assert [one.weights.shape[:2] for one in (maps.encoder, maps.cross)] == [(2, 6), (3, 6)]
    sums = maps.cross.weights.sum(-1)
    assert not torch.allclose(sums, torch.ones_like(sums), atol=0.01)
    assert maps.cross.weights.min() < 0
    assert "rows need not sum to 1" in maps.cross.title()


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("ein rén", "␣ein ␣r é·1/2 é·2/2 n </s>"),
        ("a\t中 </s>", r"␣a \t 中·1/3 中·2/3 中·3/3 ␣ <·1/1 / s > </s>"),
        ("\u202e", r"␣ \u202e·1/3 \u202e·2/3 \u202e·3/3 </s>"),
    ],
)
def test_labels_are_readable(tokenizer, text, labels):
    expected = [label.replace("·1/1", "").replace("·", " ") for label in labels.split()]

    assert list(token_labels(tokenizer, tokenizer(text_target=text).input_ids)) == expected


def test_labels_of_broken_bytes_marks_and_joiners_can_be_seen(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(["<0xE4>", "a", "<0xC3>"])
    marks = VanillaTransformerTokenizer.train(
        ["\u0301", "\u200d", "e\u0301"], vocab_size=20, kind="char"
    )

    assert token_labels(tokenizer, ids) == ("<0xE4>", "a", "<0xC3>")
    shown = token_labels(marks, marks("\u0301\u200d").input_ids)
    assert shown == ("◌\u0301", r"\u200d", "</s>")


def test_labels_of_byte_level_pieces_are_text():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(["hello wörld hello"] * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")

    labels = token_labels(tokenizer, [*tokenizer("hello wörld 中").input_ids, 0])

    assert labels[0] == "hello"
    assert "".join(labels[1:-5]) == "␣wörld"
    assert labels[-5:] == ("␣", "中 1/3", "中 2/3", "中 3/3", "</s>")

    tokenizer.add_tokens(["→", "new york"])
    labels = token_labels(tokenizer, tokenizer("hello→new york").input_ids)
    assert (labels[0], labels[-2:]) == ("hello", ("→", "new␣york"))


def test_figure_has_a_row_for_each_token_that_attends():
    attention = attention_map(["a", "$x_1$"], ["e", "fg", "<b>"], layers=2)

    figure = plot_attention(attention, layer=2, head=1)

    axes = figure.axes[0]
    assert axes.images[0].get_array().tolist() == attention.weights[1, 0].tolist()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "$x_1$"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["e", "fg", "<b>"]
    assert axes.get_title() == attention.title(2, 1)
    figure.canvas.draw()


def test_positions_have_a_row_each_and_zero_is_white(tiny_model):
    image = plot_positions(tiny_model, 5).axes[0].images[0]

    encodings = torch.tensor(image.get_array().tolist())
    angles = torch.arange(5)[:, None] / 10_000 ** (torch.arange(0, 24, 2) / 24)
    torch.testing.assert_close(encodings[:, ::2], angles.sin())
    torch.testing.assert_close(encodings[:, 1::2], angles.cos())
    lowest, highest = image.get_clim()
    assert lowest == -highest
