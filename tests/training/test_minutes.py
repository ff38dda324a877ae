"""What `--minutes` decides, by text and speed alone; counts of pairs, counted by hand."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.training import machine
from vanilla_transformer_tools.training import minutes as module
from vanilla_transformer_tools.training.minutes import (
    CorpusStats,
    Decision,
    decide,
    decisions_on_record,
)

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
)
WORDS = dataclasses.replace(CAPTIONS, source_words=1, words=2, source_characters=8)
# Spelling to phonemes, and commands to actions.
SYMBOLS = dataclasses.replace(CAPTIONS, pairs=8000, distinct_words=60, occurrences=2000)
PATTERN = dataclasses.replace(SYMBOLS, distinct_words=19)


def decided(stats, given=(), settings=SETTINGS):
    saved = TokenizerPair.from_pretrained(settings.tokenizer) if settings.tokenizer else None
    decisions = decide(stats, settings, saved, given)
    return {decision.option: decision.value for decision in decisions}


@pytest.mark.parametrize(
    ("stats", "changes", "expected"),
    [
        (CAPTIONS, {}, {"tokenizer_kind": "bpe", "vocab_size": 10_000, "preset": "tiny"}),
        (CAPTIONS, {}, dict.fromkeys(("max_length", "metrics", "r_drop"))),
        (CAPTIONS, {"pairs": 9000}, {"vocab_size": 4000}),
        (CAPTIONS, {"pairs": 2_000_000}, {"vocab_size": 32_000, "preset": "tiny"}),
        (CAPTIONS, {"copied_words": 0.3}, {"vocab_size": 2000}),
        (CAPTIONS, {"long_characters": 900}, {"max_length": 301}),
        (WORDS, {}, {"tokenizer_kind": "char"}),
        # Phonemes with blanks between them, then the translations of Chinese sentences.
        (WORDS, {"words": 9, "characters": 40}, {"tokenizer_kind": "char"}),
        (WORDS, {"words": 9, "characters": 41}, {"tokenizer_kind": "bpe"}),
        (WORDS, {"long_characters": 200}, {"max_length": None}),
        (CAPTIONS, {"both_cases": 0.5}, {"all_caps_every": 50, "title_case_every": 50}),
        (CAPTIONS, {"both_cases": 0.5, "minutes": 6}, {"all_caps_every": None}),
        (CAPTIONS, {"both_cases": 0.4}, {"all_caps_every": None, "title_case_every": None}),
        (CAPTIONS, {"both_cases": 1.0, "copied_words": 0.3}, {"all_caps_every": None}),
        (SYMBOLS, {"both_cases": 1.0}, {"all_caps_every": None}),
        (WORDS, {}, {"lowercase_sources": None}),
        (WORDS, {"source_case": "lower"}, {"lowercase_sources": True}),
        (WORDS, {"source_case": "upper"}, {"lowercase_sources": True}),
        (CAPTIONS, {"source_case": "lower", "copied_words": 0.3}, {"lowercase_sources": True}),
        (CAPTIONS, {"source_case": "upper", "copied_words": 0.3}, {"lowercase_sources": None}),
        (CAPTIONS, {}, {"dropout": 0.2, "max_tokens_per_batch": 2048, "learning_rate": 0.008}),
        (CAPTIONS, {"minutes": 3}, {"dropout": 0.0}),
        (CAPTIONS, {"minutes": 29}, {"dropout": 0.1}),
        (CAPTIONS, {"minutes": 60}, {"dropout": 0.3}),
        (CAPTIONS, {"minutes": 31, "copied_words": 0.3}, {"dropout": 0.1}),
        (CAPTIONS, {"minutes": 120}, {"max_tokens_per_batch": 4096}),
        (CAPTIONS, {"minutes": 300}, {"max_tokens_per_batch": 4096, "learning_rate": 0.008}),
        (CAPTIONS, {"minutes": 2}, {"max_validation_pairs": 50, "warmup_steps": 50}),
        # 35 tokens a pair, 46 in the shorter pieces that copy, and 140.
        (CAPTIONS, {"minutes": 10}, {"max_validation_pairs": 200}),
        (CAPTIONS, {"minutes": 10, "copied_words": 0.3}, {"max_validation_pairs": 152}),
        (CAPTIONS, {"speed": 2e6, "pairs": 200_000}, {"preset": "small", "optimizer": None}),
        (CAPTIONS, {"speed": 1e7, "pairs": 1_500_000}, {"preset": "base"}),
        (SYMBOLS, {}, {"tokenizer_kind": "word", "metrics": ["wer", "per"], "dropout": 0.2}),
        (SYMBOLS, {"minutes": 5}, {"max_tokens_per_batch": 1024, "learning_rate": 0.006}),
        (PATTERN, {}, {"dropout": 0.1, "label_smoothing_factor": 0.0, "learning_rate": 0.004}),
        (CAPTIONS, {}, {"optimizer": "muon"}),
        (CAPTIONS, {"device": "cuda"}, {"optimizer": None, "learning_rate": 0.003}),
    ],
)
def test_rule_decides_by_the_stats(stats, changes, expected):
    values = decided(dataclasses.replace(stats, **changes))

    assert {name: values.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "config", "share"),
    [
        ({}, [], 1),
        ({"batches_per_update": 8}, [], 1 / 8),
        ({}, ["encoder_layers=2", "decoder_layers=2"], 2),
        ({}, ["d_model=128", "dropout=0.2"], 1),
    ],
)
def test_evaluations_and_warm_up_are_shares_of_the_updates(changes, config, share):
    settings = dataclasses.replace(SETTINGS, config=config)

    values = decided(dataclasses.replace(CAPTIONS, **changes), (), settings)

    # 30 minutes of 10,000 tokens a second, of which a share is for updates.
    updates = share * 30 * 60 * 10_000 * 0.85 / values["max_tokens_per_batch"]
    assert values["eval_steps"] == pytest.approx(updates / 12, rel=0.01)
    assert values["warmup_steps"] == pytest.approx(min(updates / 10, 1000), rel=0.01)


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
    assert decided(CAPTIONS, {"optim"})["learning_rate"] == 0.003


def test_sources_keep_their_case_with_symbols_which_may_have_capitals():
    lower = dataclasses.replace(WORDS, source_case="lower")

    settings = dataclasses.replace(SETTINGS, symbols="symbols.txt")

    assert "lowercase_sources" not in decided(lower, (), settings)


@pytest.mark.parametrize("option", [*decided(PATTERN), *decided(CAPTIONS)])
def test_every_rule_yields(option):
    # Other rules read it, and without --minutes it has no value of its own.
    settings = dataclasses.replace(SETTINGS, max_tokens_per_batch=8192)
    assert option not in decided(PATTERN, {option}, settings)
    assert option not in decided(WORDS, {option}, settings)
    assert option not in decided(dataclasses.replace(CAPTIONS, minutes=120), {option}, settings)


@pytest.mark.parametrize(
    ("given", "changes", "left"),
    [
        ("config", {"config": ["dropout=0.5", "d_model=64"]}, "dropout"),
        ("eval_strategy", {}, "eval_steps"),
        ("metric_for_best_model", {}, "metrics"),
        ("optim", {}, "optimizer"),
        ("bpe_dropout", {}, "all_caps_every"),
        ("dataloader_persistent_workers", {}, "title_case_every"),
        ("lowercase_sources", {"lowercase_sources": True}, "title_case_every"),
    ],
)
def test_option_that_another_one_decides_is_left_alone(given, changes, left):
    stats = dataclasses.replace(CAPTIONS if "every" in left else SYMBOLS, both_cases=1.0)
    assert left in decided(stats)
    assert left not in decided(stats, {given}, dataclasses.replace(SETTINGS, **changes))


@pytest.mark.parametrize(
    ("options", "of_tokenizers"),
    [
        ({"kind": "char"}, {"tokenizer_kind": "char"}),
        ({"kind": "word"}, {"tokenizer_kind": "word"}),
        ({"kind": "bpe"}, {"vocab_size": 300}),
    ],
)
def test_rules_follow_saved_tokenizers(options, of_tokenizers, tmp_path):
    of_saved = {"tokenizer_kind", "vocab_size"}
    alike = dataclasses.replace(SETTINGS, **of_tokenizers)
    lines = ["the old man sleeps , yes ."] * 3
    VanillaTransformerTokenizer.train(lines, vocab_size=300, **options).save_pretrained(tmp_path)

    values = decided(CAPTIONS, (), dataclasses.replace(SETTINGS, tokenizer=str(tmp_path)))

    assert values == decided(CAPTIONS, of_saved, alike)
    assert values != decided(CAPTIONS, of_saved)


# A resumed run


def test_resumed_run_follows_the_options_that_it_is_given():
    made = [Decision(name, 4, "few") for name in ("vocab_size", "metrics", "dropout", "eval_steps")]
    previous = {"decisions": [dataclasses.asdict(decision) for decision in made]}
    settings = dataclasses.replace(SETTINGS, minutes=1.0, resume=True, config=["dropout=0.5"])
    given = {"metrics", "save_steps", "config"}

    assert decisions_on_record(previous, settings, given) == tuple(made[:1])


# What the rules go by


@pytest.fixture
def stats_of(monkeypatch):
    arguments = SimpleNamespace(device=torch.device("cpu"), gradient_accumulation_steps=1)

    def measure(*pairs):
        columns = zip(("source", "target"), zip(*pairs, strict=True), strict=True)
        dataset = Dataset.from_dict({name: list(values) for name, values in columns})
        return module.look(1, machine.Speed(2), arguments, dataset)

    return measure


def test_stats_are_counted(stats_of):
    stats = stats_of(("ab cd", "xy"), ("ab", "ab cd efgh ij"))

    assert (stats.pairs, stats.distinct_words) == (2, 5)
    assert (stats.source_words, stats.words) == (1.5, 4.0)
    assert (stats.source_characters, stats.characters) == (3.5, 11.0)
    assert stats.occurrences == 8 / 5
    assert stats.long_characters == 12
    assert stats_of(("Ab", "aB"), ("ab", "Ab"), ("Ab", "AB"), ("A", "Ab")).both_cases == 0.25
    # Long words of the same pair.
    stats = stats_of(("int openFile ;", "int openFile ;"), ("none", "other openFile"))
    assert stats.copied_words == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("sources", "case"),
    [
        (["ein hund 1", "stra\u00dfe"], "lower"),
        (["EIN HUND 1", "\u00c4"], "upper"),
        (["ein hund"] * 900 + ["ein Hund"], "mixed"),
        (["\u72d7 1", "\u05db\u05dc\u05d1"], "mixed"),
    ],
)
def test_case_of_the_sources_is_that_of_all_of_them(stats_of, sources, case):
    assert stats_of(*((source, "Ab") for source in sources)).source_case == case


def test_order_of_a_corpus_changes_no_statistics(stats_of, monkeypatch):
    monkeypatch.setattr(module, "EXAMINED_PAIRS", 100)
    words, sentences = [("a", "b")] * 1000, [("a b c d e f", "g h i j k l")] * 1000

    first, last = stats_of(*words, *sentences), stats_of(*sentences, *words)

    assert first == last
    assert first.source_words == 3.5


@pytest.mark.parametrize(
    ("seconds", "speed"),
    [
        ([0.5], (200, 0.0)),
        # A second for each 900 tokens more; the first hundred take 0.5 s all the same.
        ([0.5, 1.5], (900, 0.5 - 100 / 900)),
        # No difference that the clock shows: a tenth of 0.5 s.
        ([0.5, 0.4], (900 / 0.04, 0.5 - 0.04 / 9)),
        ([0.1, 1.1], (900, 0.0)),
    ],
)
def test_speed_is_a_line_through_two_batches(seconds, speed):
    found = machine._line_through([100, 1000][: len(seconds)], seconds)

    assert found == pytest.approx(speed)
