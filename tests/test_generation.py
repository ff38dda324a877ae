"""Decoding step by step: caches, `generate` and what it may emit."""

import pytest
import torch

from vanilla_transformer import VanillaTransformerForConditionalGeneration

from .conftest import both_attentions, record_calls, redraw_parameters, source_of, without_labels


@both_attentions
@pytest.mark.parametrize("chunks", [(1, 1, 1, 1, 1), (2, 3), (1, 3, 1)])
@pytest.mark.parametrize("left_padding", [0, 2])
def test_decoding_in_chunks_equals_decoding_at_once(
    tiny_model, batch, attention, chunks, left_padding
):
    tiny_model.set_attn_implementation(attention)
    mask = torch.ones_like(batch["decoder_input_ids"])
    mask[2, :left_padding] = 0
    target = batch["decoder_input_ids"].masked_fill(mask == 0, 7)
    expected = tiny_model(
        **source_of(batch), decoder_input_ids=target, decoder_attention_mask=mask
    ).logits

    pieces, cache, start = [], None, 0
    for length in chunks:
        end = start + length
        output = tiny_model(
            **source_of(batch),
            decoder_input_ids=target[:, start:end],
            # Without padding none is given: positions then follow from the cache.
            decoder_attention_mask=mask[:, :end] if left_padding else None,
            past_key_values=cache,
            use_cache=True,
        )
        pieces.append(output.logits)
        cache, start = output.past_key_values, end

    is_real = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, dim=1)[is_real], expected[is_real])


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_is_the_same_without_cache(tiny_model, batch, num_beams):
    cached, uncached = (
        tiny_model.generate(
            **source_of(batch),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=9,
            use_cache=use_cache,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for use_cache in (True, False)
    )

    assert cached.sequences.tolist() == uncached.sequences.tolist()
    torch.testing.assert_close(cached.scores, uncached.scores)
    if num_beams > 1:
        torch.testing.assert_close(cached.sequences_scores, uncached.sequences_scores)


def test_generation_is_the_same_with_a_static_cache(tiny_model, batch):
    dynamic, static = (
        tiny_model.generate(**source_of(batch), max_new_tokens=9, cache_implementation=cache)
        for cache in (None, "static")
    )

    assert static.tolist() == dynamic.tolist()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_projects_the_source_once(tiny_model, batch, num_beams):
    calls = record_calls(tiny_model, ".kv_proj")

    tiny_model.generate(**source_of(batch), num_beams=num_beams, max_new_tokens=6)

    layers = range(tiny_model.config.decoder_layers)
    assert sorted(calls) == [f"model.decoder.layers.{i}.encoder_attn.kv_proj" for i in layers]


def test_fresh_model_generates_greedily_up_to_max_position_embeddings(tiny_config, batch):
    tiny_config.max_position_embeddings = 33
    model = VanillaTransformerForConditionalGeneration(tiny_config).eval()
    redraw_parameters(model)
    with torch.no_grad():
        model.model.shared.weight[2] = 0  # `</s>` is never the best token

    generated = model.generate(**source_of(batch))

    assert generated.shape == (3, 33)
    again = model.generate(**source_of(batch), num_beams=1, do_sample=False)
    assert generated.tolist() == again.tolist()


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_generation_never_emits_padding_or_start_inside_a_sentence(tiny_config, batch, search):
    tiny_config.tie_word_embeddings = False
    model = VanillaTransformerForConditionalGeneration(tiny_config).eval()
    redraw_parameters(model)
    with torch.no_grad():
        # The decoder's output is the norm's bias alone, and tokens are liked in this order.
        model.model.decoder.layer_norm.weight.zero_()
        model.lm_head.weight.zero_()
        for token, liking in ((0, 6.0), (1, 5.0), (9, 2.0), (2, 1.0)):
            bias = model.model.decoder.layer_norm.bias
            model.lm_head.weight[token] = liking * bias / bias.norm() ** 2
    torch.manual_seed(0)

    generated = model.generate(**source_of(batch), max_new_tokens=12, **search)

    for row in generated.tolist():
        sentence = row[1 : row.index(2) if 2 in row else None]
        assert not {0, 1} & set(sentence)


def test_step_with_labels_fills_no_cache(tiny_model, batch):
    with_labels = tiny_model(**batch)
    without = tiny_model(**without_labels(batch))

    assert with_labels.past_key_values is None
    assert without.past_key_values.get_seq_length() == batch["labels"].shape[1]
