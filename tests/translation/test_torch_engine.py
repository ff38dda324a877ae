"""TorchEngine: scores, prefixes, samples, ensembles and what a teacher-forced pass tells."""

import copy
import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
)

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer_tools.translation import Search, torch_engine
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

from ..models import redraw_parameters

SOURCES = [[17, 5, 9, 30, 2], [8, 21, 36, 4, 11, 26, 2], [13, 2]]
LIMITS = [9, 11, 6]
NO_PREFIXES = [[], [], []]
START, END = 1, 2


@pytest.fixture
def other_model(tiny_model):
    """Another model of the same vocabulary, of other sizes."""
    config = copy.deepcopy(tiny_model.config)
    config.d_model, config.decoder_layers = 16, 1
    model = VanillaTransformerForConditionalGeneration(config).eval()
    redraw_parameters(model)
    return model


def translate(engine, sources=SOURCES, prefixes=NO_PREFIXES, limits=LIMITS, **search):
    return engine.translate_batch(sources, prefixes, limits, Search(**search))


@torch.no_grad()
def log_probs(models, source, target):
    """Log of the mean probability of each target token, by a plain forward pass of each model."""
    inputs = {
        "input_ids": torch.tensor([source]),
        "decoder_input_ids": torch.tensor([[START, *target[:-1]]]),
    }
    probabilities = torch.stack([model(**inputs).logits[0].softmax(-1) for model in models])
    return probabilities.mean(0).log()[range(len(target)), target]


def rank(models, source, hypothesis, length_penalty, prefix_length=0):
    target = hypothesis.tokens + [END] * (not hypothesis.reached_limit)
    generated = log_probs(models, source, target)[prefix_length:]
    return float(generated.sum()) / len(generated) ** length_penalty


@pytest.mark.parametrize(("models", "length_penalty"), [(1, 0.0), (1, 2.0), (2, 2.0)])
def test_hypotheses_are_ranked_by_log_probability_over_length_to_the_penalty(
    tiny_model, other_model, models, length_penalty
):
    search = {"num_beams": 4, "num_hypotheses": 4, "length_penalty": length_penalty}
    parts = [tiny_model, other_model][:models]

    found = translate(TorchEngine(*parts), **search, scores=True)

    for source, hypotheses in zip(SOURCES, found, strict=True):
        scores = [hypothesis.score for hypothesis in hypotheses]
        # Of several models, by the mean of their probabilities.
        assert scores == pytest.approx(
            [rank(parts, source, one, length_penalty) for one in hypotheses], abs=1e-4
        )
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(one.tokens) for one in hypotheses}) == 4


@pytest.mark.parametrize("models", [1, 2])
def test_score_counts_the_end_that_was_generated(tiny_model, other_model, models):
    parts = [tiny_model, other_model][:models]
    ((plain,),) = translate(TorchEngine(*parts), SOURCES[:1], [[]], [9])
    other_end = plain.tokens[3]
    for part in parts:
        part.generation_config.eos_token_id = [END, other_end]

    ((found,),) = translate(TorchEngine(*parts), SOURCES[:1], [[]], [9], scores=True)

    ended = plain.tokens[: plain.tokens.index(other_end) + 1]
    assert (found.ended, found.end) == (ended, other_end)
    expected = log_probs(parts, SOURCES[0], ended).mean()
    assert found.score == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_ids_that_the_generation_config_lacks_are_those_of_the_config(tiny_model, num_beams):
    search = {"num_beams": num_beams, "length_penalty": 0.0, "scores": True}
    expected = translate(TorchEngine(tiny_model), **search)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        setattr(tiny_model.generation_config, name, None)

    found = translate(TorchEngine(tiny_model), **search)

    assert found == expected
    # Some end, so that the id of the end makes a difference.
    assert END in {best.end for (best,) in found}


@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_output_begins_with_its_prefix_and_the_score_leaves_it_out(
    tiny_model, other_model, num_beams, models
):
    prefixes = [[7, 19], [30, 7], [8, 8]]
    parts = [tiny_model, other_model][:models]

    found = translate(TorchEngine(*parts), prefixes=prefixes, num_beams=num_beams, scores=True)

    for source, prefix, limit, (best,) in zip(SOURCES, prefixes, LIMITS, found, strict=True):
        assert best.tokens[:2] == prefix
        assert len(best.tokens) <= limit
        assert best.score == pytest.approx(rank(parts, source, best, 1.0, 2), abs=1e-4)


# Samples


def test_samples_are_sorted_and_depend_on_their_sentence_and_not_on_their_batch(tiny_model):
    engine = TorchEngine(tiny_model)
    settings = {"do_sample": True, "num_hypotheses": 3}

    together = translate(engine, **settings)
    alone = [
        translate(engine, [source], [[]], [limit], **settings)[0]
        for source, limit in zip(SOURCES, LIMITS, strict=True)
    ]

    ids = [[hypothesis.tokens for hypothesis in group] for group in together]
    assert ids == [[hypothesis.tokens for hypothesis in group] for group in alone]
    assert all(len(set(map(tuple, group))) == 3 for group in ids)
    for source, group in zip(SOURCES, together, strict=True):
        scores = [rank([tiny_model], source, one, 1.0) for one in group]
        assert scores == sorted(scores, reverse=True)


def test_sample_depends_on_the_seed(tiny_model):
    outputs = [translate(TorchEngine(tiny_model), do_sample=True, seed=seed) for seed in (0, 0, 1)]

    ids = [[best.tokens for (best,) in found] for found in outputs]
    assert ids[0] == ids[1] != ids[2]


def test_samples_follow_the_models_probabilities(tiny_model):
    engine = TorchEngine(tiny_model)
    # `<pad>` and `<s>` are forbidden; the softmax of the rest is drawn from.
    source = SOURCES[0]
    with torch.no_grad():
        logits = tiny_model(
            input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[START]])
        ).logits[0, -1]
    logits[:2] = -torch.inf
    expected = logits.softmax(-1)

    (drawn,) = translate(engine, [source], [[]], [1], do_sample=True, num_hypotheses=1000)

    counts = Counter(hypothesis.tokens[0] if hypothesis.tokens else END for hypothesis in drawn)
    shares = torch.tensor([counts[token] / 1000 for token in range(37)])
    assert (shares - expected).abs().max() < 0.05
    assert expected.max() < 0.9


@pytest.mark.parametrize(
    ("search", "config"),
    [
        # Ids come back all the same.
        ({}, {"renormalize_logits": True, "return_dict_in_generate": True}),
        ({"num_beams": 4, "num_hypotheses": 3, "length_penalty": 0.6}, {"early_stopping": True}),
        ({"num_beams": 3, "repetition_penalty": 1.7}, {}),
        ({"num_beams": 3, "no_repeat_ngram_size": 1}, {}),
        ({"num_beams": 3, "min_length": 4}, {"renormalize_logits": True}),
        ({"min_length": 4, "first_token": 9}, {"suppress_tokens": [4]}),
        ({"do_sample": True, "num_hypotheses": 2, "top_k": 9, "temperature": 1.3}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("prefixes", [NO_PREFIXES, [[7], [8], [9]]])
def test_own_search_finds_what_generate_finds(tiny_model, monkeypatch, search, config, prefixes):
    tiny_model.generation_config.update(**config)
    engine = TorchEngine(tiny_model)

    with monkeypatch.context() as patch:
        patch.setattr(tiny_model, "generate", None)
        found = translate(engine, prefixes=prefixes, **search)
    # Transformers' own search.
    tiny_model.generation_config.use_transformers_search = True

    assert str(translate(engine, prefixes=prefixes, **search)) == str(found)


def test_generate_searches_where_only_it_follows_the_generation_config(tiny_model, monkeypatch):
    plain = translate(TorchEngine(tiny_model), num_beams=2)
    tiny_model.generation_config.begin_suppress_tokens = [plain[0][0].tokens[0]]
    monkeypatch.setattr(TorchEngine, "_search", None)

    ((first,), *_) = translate(TorchEngine(tiny_model), num_beams=2)

    assert first.tokens[0] != plain[0][0].tokens[0]


# A teacher-forced pass


@pytest.mark.parametrize("largest", [1, 2**24])
def test_forced_pass_tells_the_log_probability_of_each_token(tiny_model, monkeypatch, largest):
    monkeypatch.setattr(torch_engine, "FORCED_LOGITS", largest)
    # Two for each source.
    targets = [[7, 19, 2], [2], [30], [7, 8, 9, 10, 11, 2], [5, 5, 2], [6, 2]]

    passes = list(TorchEngine(tiny_model).force(SOURCES, targets))

    for index, (target, forced) in enumerate(zip(targets, passes, strict=True)):
        expected = log_probs([tiny_model], SOURCES[index // 2], target)
        assert forced.log_probs == pytest.approx(expected.tolist(), abs=1e-4)
        assert forced.alignment == []


def test_alignment_is_the_most_of_the_mean_of_the_heads_of_the_last_layer_but_one(tiny_model):
    target = [7, 19, 30, 4, 2]
    with torch.no_grad():
        attentions = tiny_model(
            input_ids=torch.tensor(SOURCES[:1]),
            decoder_input_ids=torch.tensor([[START, *target[:-1]]]),
            output_attentions=True,
        ).cross_attentions
    # Three layers; the last source position is `</s>`.
    expected = attentions[1][0].mean(0)[:, :-1].argmax(-1).tolist()

    forced, _, _ = TorchEngine(tiny_model).force(SOURCES, [target, [5, 2], [6, 2]], align=True)

    assert forced.alignment == expected
    assert len(set(expected)) > 1


# Ensembles


@pytest.mark.parametrize("search", [{}, {"num_beams": 3, "num_hypotheses": 3}])
def test_ensemble_never_writes_what_the_generation_config_forbids(tiny_model, search):
    config = tiny_model.generation_config
    together = TorchEngine(tiny_model, tiny_model)
    written = [one.tokens for found in translate(together, **search) for one in found]
    pair = written[0][:2]
    single = next(token for token in written[0][2:] if token not in pair)

    # An end token among the bad words stays allowed, as in Transformers.
    config.bad_words_ids = [[0], [1], [END], pair]
    config.suppress_tokens = [single]
    constrained, expected = (
        [one.tokens for found in translate(engine, **search) for one in found]
        for engine in (together, TorchEngine(tiny_model))
    )

    assert constrained == expected
    for tokens in constrained:
        assert tuple(pair) not in pairwise(tokens)
        assert single not in tokens


def test_ensemble_refuses_more_beams_than_it_has_tokens_for(tiny_model):
    tokens = tiny_model.config.vocab_size
    together = TorchEngine(tiny_model, tiny_model)
    message = f"{tokens // 2} beams need {tokens // 2 * 2} target tokens .* got {tokens - 2}"

    # `<pad>` and `<s>` are forbidden.
    assert translate(together, num_beams=tokens // 2 - 1)
    with pytest.raises(ValueError, match=message):
        translate(together, num_beams=tokens // 2)


@pytest.mark.parametrize(
    ("kind", "config", "longest"),
    [
        (MarianMTModel, MarianConfig, 16),
        (BartForConditionalGeneration, BartConfig, 16),
        (M2M100ForConditionalGeneration, M2M100Config, math.inf),
    ],
)
def test_output_of_another_class_ends_with_its_table_of_positions(kind, config, longest):
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": START}
    model = kind(config(vocab_size=37, **sizes, **heads, **tokens))
    # It never ends by itself.
    model.generation_config.suppress_tokens = [END]
    model.generation_config.forced_eos_token_id = None
    engine = TorchEngine(model)

    assert engine.last_position == longest
    ((found,),) = translate(engine, SOURCES[:1], [[]], [20])
    assert (len(found.tokens), found.reached_limit) == (min(longest, 20), True)


def test_ensemble_refuses_what_does_not_fit_its_first_model(tiny_model):
    tokens = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": START}
    foreign = MarianMTModel(MarianConfig(vocab_size=37, d_model=16, **tokens))
    config = copy.deepcopy(tiny_model.config)
    config.vocab_size = 38
    larger = VanillaTransformerForConditionalGeneration(config)
    begun, limited = copy.deepcopy(tiny_model), copy.deepcopy(tiny_model)
    begun.generation_config.decoder_start_token_id = 5
    limited.generation_config.no_repeat_ngram_size = 2

    for other, message in (
        (foreign, "must be vanilla Transformers, got MarianMTModel"),
        (larger, r"got sizes of source and target \[\(37, 37\), \(38, 38\)\]"),
        (begun, rf"begin and end outputs alike, got .* \[\({START}, {END}\), \(5, {END}\)\]"),
        (limited, r"An ensemble .* no_repeat_ngram_size=2.*or give one model"),
    ):
        with pytest.raises(ValueError, match=message):
            TorchEngine(tiny_model, other)
