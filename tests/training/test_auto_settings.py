"""What `--minutes` decides, by text and speed alone."""

import dataclasses

import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.training.auto_settings import (
    RULES,
    Decision,
    decisions_on_record,
    run_rules,
)
from vanilla_transformer_tools.training.corpus_stats import CorpusStats

SETTINGS = TrainSettings(train=["a", "b"], validation=["c", "d"])

# Captions: 35 tokens a pair, so one pass takes 100 seconds of updates.
CAPTIONS = CorpusStats(
    minutes=30,
    speed=10_000,
    device="cpu",
    pairs=29_000,
    source_words=12,
    words=24,
    source_characters=60,
    characters=132,
    long_words=26,
    long_characters=140,
    distinct_words=17_000,
    occurrences=40,
    copied_words=0.0,
    alphabet=90,
    alphabet_apart=46,
    growth_apart=1.5,
)
# Single words, and half of their alphabet.
WORDS = dataclasses.replace(
    CAPTIONS, source_words=1, words=2, source_characters=8, alphabet=120, alphabet_apart=60
)
# Spelling to phonemes, and commands to actions.
SYMBOLS = dataclasses.replace(CAPTIONS, pairs=8000, distinct_words=60, occurrences=2000)
PATTERN = dataclasses.replace(SYMBOLS, distinct_words=19)


def decided(stats, given=(), settings=SETTINGS):
    saved = TokenizerPair.from_pretrained(settings.tokenizer) if settings.tokenizer else None
    decisions = run_rules(stats, settings, saved, given)
    return {decision.option: decision.value for decision in decisions}


@pytest.mark.parametrize(
    ("stats", "changes", "expected"),
    [
        (CAPTIONS, {}, {"tokenizer_kind": "bpe", "vocab_size": 10_000, "preset": "tiny"}),
        (CAPTIONS, {"pairs": 9000}, {"vocab_size": 4000}),
        (CAPTIONS, {"pairs": 2_000_000}, {"vocab_size": 32_000, "preset": "tiny"}),
        (CAPTIONS, {"copied_words": 0.3}, {"vocab_size": 2000}),
        (CAPTIONS, {"long_characters": 900}, {"max_length": 301}),
        (WORDS, {}, {"tokenizer_kind": "char", "unicode_form": "NFD"}),
        (WORDS, {"alphabet_apart": 61}, {"unicode_form": None}),
        # Phonemes with blanks between them, then the translations of Chinese sentences.
        (WORDS, {"words": 9, "characters": 40}, {"tokenizer_kind": "char"}),
        (WORDS, {"words": 9, "characters": 41}, {"tokenizer_kind": "bpe"}),
        (WORDS, {"long_characters": 200, "alphabet_apart": 61}, {"max_length": None}),
        (CAPTIONS, {"alphabet_apart": 9}, {"tokenizer_kind": "bpe", "unicode_form": None}),
        (CAPTIONS, {}, {"dropout": 0.2, "max_tokens_per_batch": 2048, "learning_rate": 0.008}),
        (CAPTIONS, {"minutes": 3}, {"dropout": 0.0}),
        (CAPTIONS, {"minutes": 4}, {"dropout": 0.1}),
        (CAPTIONS, {"minutes": 29}, {"dropout": 0.1}),
        (CAPTIONS, {"minutes": 31}, {"dropout": 0.2}),
        (CAPTIONS, {"minutes": 60}, {"dropout": 0.3}),
        (CAPTIONS, {"minutes": 31, "copied_words": 0.3}, {"dropout": 0.1}),
        (CAPTIONS, {"minutes": 120}, {"r_drop": 2.0, "max_tokens_per_batch": 2048}),
        (CAPTIONS, {"minutes": 300}, {"max_tokens_per_batch": 4096, "learning_rate": 0.008}),
        (CAPTIONS, {"minutes": 2}, {"max_validation_pairs": 50, "warmup_steps": 50}),
        # 35 tokens a pair, 46 in the shorter pieces that copy, and 140.
        (CAPTIONS, {"minutes": 10}, {"max_validation_pairs": 200}),
        (CAPTIONS, {"minutes": 10, "copied_words": 0.3}, {"max_validation_pairs": 152}),
        (CAPTIONS, {"minutes": 10, "characters": 552}, {"max_validation_pairs": 50}),
        (CAPTIONS, {"speed": 2e6, "pairs": 200_000}, {"preset": "small"}),
        (CAPTIONS, {"speed": 1e7, "pairs": 1_500_000}, {"preset": "base"}),
        (SYMBOLS, {}, {"tokenizer_kind": "word", "metrics": ["wer", "per"], "dropout": 0.2}),
        (SYMBOLS, {"minutes": 5}, {"max_tokens_per_batch": 1024, "learning_rate": 0.006}),
        (PATTERN, {}, {"dropout": 0.1, "label_smoothing_factor": 0.0, "learning_rate": 0.004}),
        (CAPTIONS, {}, {"optimizer": "muon"}),
        (CAPTIONS, {"device": "cuda"}, {"optimizer": None, "learning_rate": 0.003}),
        (CAPTIONS, {"speed": 2e6, "pairs": 200_000}, {"optimizer": None}),
    ],
)
def test_rule_decides_by_the_stats(stats, changes, expected):
    values = decided(dataclasses.replace(stats, **changes))

    assert {name: values.get(name) for name in expected} == expected


def test_most_defaults_of_captions_stay():
    assert decided(CAPTIONS).keys() == {
        *("tokenizer_kind", "vocab_size", "preset", "dropout", "max_tokens_per_batch"),
        *(
            "optimizer",
            "learning_rate",
            "warmup_steps",
            "average_last",
            "max_validation_pairs",
            "eval_steps",
        ),
    }


def test_evaluations_are_spread_over_the_updates():
    values = decided(CAPTIONS)

    # 30 minutes of 10,000 tokens a second, of which a share is for updates.
    updates = 30 * 60 * 10_000 * 0.85 / values["max_tokens_per_batch"]
    assert values["eval_steps"] == round(updates / 12)
    assert values["warmup_steps"] == round(updates / 10)


def test_updates_are_those_of_accumulated_batches():
    steps = [
        decided(dataclasses.replace(CAPTIONS, minutes=60, batches_per_update=number))["eval_steps"]
        for number in (1, 8)
    ]

    assert steps[0] == pytest.approx(8 * steps[1], rel=0.01)


def test_cost_is_that_of_the_sizes_in_the_config():
    half = dataclasses.replace(SETTINGS, config=["encoder_layers=2", "decoder_layers=2"])
    named = dataclasses.replace(SETTINGS, config=["d_model=128", "dropout=0.2"])

    steps, fewer, as_many = (
        decided(CAPTIONS, (), settings)["eval_steps"] for settings in (half, SETTINGS, named)
    )

    assert steps == pytest.approx(2 * fewer, rel=0.01)
    assert as_many == fewer


# 20 ms to launch the kernels of a batch, and 50 with Trainer's work.
ON_A_GPU = dataclasses.replace(
    CAPTIONS, device="cuda", minutes=2, speed=3e6, seconds_per_batch=0.02
)


@pytest.mark.parametrize(
    ("changes", "tokens", "rate"),
    [
        ({}, 32_768, 0.008),
        # 77 ms; twice the tokens would take 105, and leave 0.74 times as many updates.
        ({"speed": 1.5e5}, 4096, 0.004),
        # With twice the tokens, a pass would have 10, 9 and 15 updates.
        ({"pairs": 9000, "minutes": 1}, 16_384, 0.004),
        ({"pairs": 2000, "minutes": 30}, 4096, 0.004),
        ({"batches_per_update": 8}, 4096, 0.004),
        ({"device": "cpu"}, 4096, 0.008),
    ],
)
def test_batch_grows_on_a_gpu_while_it_takes_hardly_longer(changes, tokens, rate):
    values = decided(dataclasses.replace(ON_A_GPU, **changes))

    assert (values["max_tokens_per_batch"], values["learning_rate"]) == (tokens, rate)


def test_given_options_are_left_alone_and_later_rules_follow_them():
    given = dataclasses.replace(SETTINGS, max_tokens_per_batch=8192)

    values = decided(CAPTIONS, {"max_tokens_per_batch"}, given)

    assert "max_tokens_per_batch" not in values
    assert values["learning_rate"] == 0.008
    assert values["warmup_steps"] < decided(CAPTIONS)["warmup_steps"]


@pytest.mark.parametrize("given", ["optim", "optimizer"])
def test_rate_is_that_of_adam_if_the_user_chose_the_optimizer(given):
    values = decided(CAPTIONS, {given})

    assert "optimizer" not in values
    assert values["learning_rate"] == 0.003


@pytest.mark.parametrize("option", RULES)
def test_every_rule_yields(option):
    # Other rules read it, and without --minutes it has no value of its own.
    settings = dataclasses.replace(SETTINGS, max_tokens_per_batch=8192)
    assert option not in decided(PATTERN, {option}, settings)
    assert option not in decided(WORDS, {option}, settings)
    assert option not in decided(dataclasses.replace(CAPTIONS, minutes=120), {option}, settings)


def test_dropout_of_the_config_is_given():
    settings = dataclasses.replace(SETTINGS, config=["dropout=0.5", "d_model=64"])

    assert "dropout" not in decided(CAPTIONS, {"config"}, settings)


def test_strategy_of_the_user_keeps_its_steps():
    assert "eval_steps" not in decided(CAPTIONS, {"eval_strategy"})


def test_metrics_stay_when_the_user_names_the_one_that_decides():
    assert "metrics" not in decided(SYMBOLS, {"metric_for_best_model"})


def with_saved_tokenizer(folder, **options):
    lines = ["the old man sleeps , yes ."] * 3
    VanillaTransformerTokenizer.train(lines, vocab_size=300, **options).save_pretrained(folder)
    return dataclasses.replace(SETTINGS, tokenizer=str(folder))


@pytest.mark.parametrize(
    ("options", "of_tokenizers"),
    [
        ({"kind": "char"}, {"tokenizer_kind": "char"}),
        (
            {"kind": "char", "unicode_form": "NFD"},
            {"tokenizer_kind": "char", "unicode_form": "NFD"},
        ),
        ({"kind": "word"}, {"tokenizer_kind": "word"}),
        ({"kind": "bpe"}, {"vocab_size": 300}),
    ],
)
def test_rules_follow_saved_tokenizers(options, of_tokenizers, tmp_path):
    of_saved = {"tokenizer_kind", "unicode_form", "vocab_size"}
    alike = dataclasses.replace(SETTINGS, **of_tokenizers)

    values = decided(CAPTIONS, (), with_saved_tokenizer(tmp_path, **options))

    assert values == decided(CAPTIONS, of_saved, alike)
    assert values != decided(CAPTIONS, of_saved)


def test_decision_is_a_line_with_its_reason():
    assert str(Decision("vocab_size", 4000, "few")) == "chosen      --vocab_size 4000: few"
    assert str(Decision("pretokenized", True, "x")) == "chosen      --pretokenized: x"
    assert str(Decision("dropout", 0.1, "x")) == "chosen      --config dropout=0.1: x"
    assert str(Decision("metrics", ["wer", "per"], "x")) == "chosen      --metrics wer per: x"


# A resumed run


def test_resumed_run_follows_the_options_that_it_is_given():
    made = [Decision(name, 4, "few") for name in ("vocab_size", "metrics", "dropout", "eval_steps")]
    previous = {"decisions": [dataclasses.asdict(decision) for decision in made]}
    settings = dataclasses.replace(SETTINGS, minutes=1.0, resume=True, config=["dropout=0.5"])
    given = {"metrics", "save_steps", "config"}

    assert decisions_on_record(previous, settings, given) == tuple(made[:1])
