"""Search: its ranges, its defaults, and what is written beside a score."""

import math

import pytest
from transformers import GenerationConfig

from vanilla_transformer_tools.translation import Search


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 0}, "`num_beams` must be at least 1, got 0"),
        ({"num_beams": 2, "num_hypotheses": 3}, "must be at most `num_beams`, got 3 and 2"),
        ({"do_sample": True, "num_beams": 2}, "`num_beams` must be 1, got 2"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be .* above 0, got 0"),
        *[
            ({"do_sample": True, "temperature": value}, f"finite and at least 1e-06, got {value}")
            for value in (0.0, 1e-300, math.inf, math.nan)
        ],
        *[
            ({"length_penalty": value}, f"`length_penalty` must be between .* got {value}")
            for value in (20.5, -20.5, math.nan)
        ],
        ({"do_sample": True, "top_p": math.nan}, "`top_p` must be .*, got nan"),
        ({"do_sample": True, "top_p": 1.5}, "`top_p` must be above 0 and at most 1, got 1.5"),
        ({"temperature": 0.5}, "need `do_sample`, got 0.5, 0 and 1.0 without it"),
        ({"max_extra_tokens": -1}, "`max_extra_tokens` must be between 0 and .*, got -1"),
        ({"max_extra_tokens": 10**30}, "`max_extra_tokens` must be between .*, got 1000000000"),
    ],
)
def test_search_refuses_what_is_out_of_range_or_contradictory(settings, message):
    with pytest.raises(ValueError, match=message):
        Search(**settings)


def test_all_faults_are_reported_together():
    with pytest.raises(ValueError, match=r"got 0\..*\n.*got 2\.0\.\n.*got -3\."):
        Search(num_beams=0, num_hypotheses=0, top_p=2.0, max_extra_tokens=-3)


TRAINED = GenerationConfig(num_beams=4, length_penalty=0.6)
RESTRICTED = GenerationConfig(repetition_penalty=1.3, no_repeat_ngram_size=3, min_length=6)
RESTRICTIONS = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_length": 5}


@pytest.mark.parametrize(
    ("config", "settings", "search"),
    [
        (TRAINED, {}, Search(4, 0.6)),
        (TRAINED, {"num_beams": None, "length_penalty": None, "seed": 3}, Search(4, 0.6, seed=3)),
        (TRAINED, {"num_beams": 2}, Search(2, 0.6)),
        (TRAINED, {"length_penalty": 0.0}, Search(4, 0.0)),
        (TRAINED, {"num_beams": 1}, Search()),
        (TRAINED, {"do_sample": True, "seed": 5}, Search(do_sample=True, seed=5)),
        (GenerationConfig(num_beams=3, length_penalty=0.0), {}, Search(3, 0.0)),
        (GenerationConfig(), {}, Search()),
        # Transformers counts the start token in `min_length`.
        (RESTRICTED, {"no_repeat_ngram_size": 2}, Search(**RESTRICTIONS)),
    ],
)
def test_defaults_are_those_of_the_generation_config(config, settings, search):
    assert Search.of(config, **settings) == search


@pytest.mark.parametrize(
    ("search", "words"),
    [
        (Search(), "greedy"),
        (Search(4, 0.6), "beam 4, length penalty 0.6"),
        (Search(do_sample=True, seed=5), "sampling, temperature 1.0, seed 5"),
        (
            Search(do_sample=True, temperature=0.5, top_k=9, top_p=0.8, repetition_penalty=1.5),
            "sampling, temperature 0.5, top_k 9, top_p 0.8, seed 0, repetition penalty 1.5",
        ),
    ],
)
def test_search_is_described_beside_a_score(search, words):
    assert str(search) == words
