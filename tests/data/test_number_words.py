import inspect
import math
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from vanilla_transformer.data.number_words import (
    LARGEST_NUMBER,
    DigitScore,
    english,
    english_parts,
    exact_match_by_digits,
    german,
    german_parts,
    gold_alignment,
    write_corpus,
)

from ..support.full_disk import small_files

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_number_corpus.py"
SPLITS = ("train", "validation", "test")


def read(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def parse_english(words):
    """The number that English words say, read from stems and endings rather than whole words."""
    stems = {"two": 2, "twen": 2, "thir": 3, "three": 3, "for": 4, "four": 4, "fif": 5, "five": 5}
    stems |= {"one": 1, "six": 6, "seven": 7, "eigh": 8, "eight": 8, "nine": 9}
    irregular = {"zero": 0, "ten": 10, "eleven": 11, "twelve": 12}
    total = group = 0
    for word in words.replace("-", " ").split():
        if word == "thousand":
            total, group = 1000 * group, 0
        elif word == "hundred":
            group *= 100
        elif word in irregular:
            group += irregular[word]
        elif word.endswith("teen"):
            group += 10 + stems[word.removesuffix("teen")]
        elif word.endswith("ty"):
            group += 10 * stems[word.removesuffix("ty")]
        else:
            group += stems[word]
    return total + group


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def tested_numbers(corpus):
    return [int(line) for line in read(corpus / "test.numbers")]


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (0, "null"),
        (1, "eins"),
        (12, "zwölf"),
        (16, "sechzehn"),
        (17, "siebzehn"),
        (21, "einundzwanzig"),
        (30, "dreißig"),
        (66, "sechsundsechzig"),
        (77, "siebenundsiebzig"),
        (100, "einhundert"),
        (101, "einhunderteins"),
        (121, "einhunderteinundzwanzig"),
        (245, "zweihundertfünfundvierzig"),
        (1000, "eintausend"),
        (1001, "eintausendeins"),
        (11_011, "elftausendelf"),
        (21_021, "einundzwanzigtausendeinundzwanzig"),
        (100_000, "einhunderttausend"),
        (101_001, "einhunderteintausendeins"),
        (999_999, "neunhundertneunundneunzigtausendneunhundertneunundneunzig"),
    ],
)
def test_german_spells_hard_numbers(number, word):
    assert german(number) == word


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (21, "twenty-one"),
        (30, "thirty"),
        (40, "forty"),
        (100, "one hundred"),
        (105, "one hundred five"),
        (245, "two hundred forty-five"),
        (1000, "one thousand"),
        (21_021, "twenty-one thousand twenty-one"),
        (100_000, "one hundred thousand"),
        (999_999, "nine hundred ninety-nine thousand nine hundred ninety-nine"),
    ],
)
def test_english_spells_hard_numbers(number, words):
    assert english(number) == words


def test_english_reads_back_as_the_number():
    numbers = random.Random(5).sample(range(1, LARGEST_NUMBER + 1), 5000)

    assert [parse_english(english(number)) for number in numbers] == numbers


@pytest.mark.parametrize("spell", [german, english])
def test_spelling_differs_between_numbers(spell):
    # The stride is prime, so that every digit takes every value at every place.
    numbers = [*range(10_000), *range(10_000, LARGEST_NUMBER + 1, 17)]

    assert len({spell(number) for number in numbers}) == len(numbers)


@pytest.mark.parametrize("spell", [german, english])
@pytest.mark.parametrize("number", [-1, 1_000_000])
def test_spelling_refuses_number_when_out_of_range(spell, number):
    with pytest.raises(ValueError, match=f"between 0 and 999999, got {number}"):
        spell(number)


def test_corpus_has_the_sizes_asked_for(corpus):
    lengths = {path.name: len(read(path)) for path in corpus.iterdir()}

    assert lengths == {
        "train.de": 40_000,
        "train.en": 40_000,
        "validation.de": 500,
        "validation.en": 500,
        "test.de": 1_000,
        "test.en": 1_000,
        "test.numbers": 1_000,
        "test.parts.de": 1_000,
        "test.parts.en": 1_000,
        "test.alignment": 1_000,
    }


def test_corpus_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    write_corpus(tmp_path, train=5, validation=4, test=3)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    # The files of the other splits are small.
    with small_files(20_000), pytest.raises(OSError, match=r"no room for train\.de in"):
        write_corpus(tmp_path, seed=1, train=5000, validation=4, test=3)

    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_corpus_returns_the_files_it_wrote(tmp_path):
    paths = write_corpus(tmp_path / "made" / "here", train=5, validation=4, test=3)

    assert sorted(paths) == sorted((tmp_path / "made" / "here").iterdir())


@pytest.mark.parametrize("split", ["validation", "test", "train"])
def test_corpus_lines_are_translations_of_each_other(corpus, split):
    sources, targets = read(corpus / f"{split}.de"), read(corpus / f"{split}.en")

    assert sources == [german(parse_english(words)) for words in targets]


def test_corpus_numbers_belong_to_the_test_lines(corpus, tested_numbers):
    assert read(corpus / "test.de") == [german(number) for number in tested_numbers]


@pytest.mark.parametrize("language", ["de", "en"])
def test_corpus_parts_spell_the_test_lines(corpus, language):
    lines, cut = read(corpus / f"test.{language}"), read(corpus / f"test.parts.{language}")

    assert [line.replace(" ", "") for line in cut] == [line.replace(" ", "") for line in lines]
    assert max(len(line.split()) for line in cut) == 11


@pytest.mark.parametrize(
    ("number", "parts", "words", "alignment"),
    [
        (1, "eins", "one", "0-0"),
        (17, "siebzehn", "seventeen", "0-0"),
        (40, "vierzig", "forty", "0-0"),
        (245, "zwei hundert fünf und vierzig", "two hundred forty - five", "0-0 1-1 2-4 3?3 4-2"),
        (
            21_001,
            "ein und zwanzig tausend eins",
            "twenty - one thousand one",
            "0-2 1?1 2-0 3-3 4-4",
        ),
        (
            300_300,
            "drei hundert tausend drei hundert",
            "three hundred thousand three hundred",
            None,
        ),
    ],
)
def test_parts_of_a_number_are_linked_by_meaning(number, parts, words, alignment):
    assert " ".join(part.text for part in german_parts(number)) == parts
    assert " ".join(part.text for part in english_parts(number)) == words
    assert gold_alignment(number) == (alignment or "0-0 1-1 2-2 3-3 4-4")


def test_corpus_aligns_the_parts_of_the_test_lines(corpus, tested_numbers):
    assert read(corpus / "test.alignment") == [gold_alignment(number) for number in tested_numbers]


def test_corpus_repeats_no_number_within_or_across_splits(corpus):
    lines = [line for split in SPLITS for line in read(corpus / f"{split}.de")]

    assert len(set(lines)) == len(lines) == 41_500


def test_corpus_is_the_same_when_the_seed_is(corpus, tmp_path):
    write_corpus(tmp_path, seed=0)

    for path in corpus.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_corpus_changes_with_the_seed(corpus, tmp_path):
    write_corpus(tmp_path, seed=1)

    for path in corpus.iterdir():
        assert (tmp_path / path.name).read_bytes() != path.read_bytes()


def test_corpus_tests_the_same_numbers_when_train_grows(corpus, tmp_path):
    write_corpus(tmp_path, train=50_000)

    assert (tmp_path / "test.de").read_bytes() == (corpus / "test.de").read_bytes()


def test_corpus_draws_half_of_the_test_uniformly(tested_numbers):
    upper_half = sum(number >= 500_000 for number in tested_numbers)

    # 250 of the uniform half, and about one in twenty of the other, give or take.
    assert 230 <= upper_half <= 340


def test_corpus_draws_half_of_the_test_log_uniformly(tested_numbers):
    # Numbers below 10,000 are one percent of the range; the log-uniform half brings the rest.
    assert sum(number < 10_000 for number in tested_numbers) >= 150


def test_corpus_is_not_ordered_by_the_way_it_was_drawn(tested_numbers):
    first, second = tested_numbers[:500], tested_numbers[500:]

    def mean_logarithm(numbers):
        return sum(math.log10(number) for number in numbers) / len(numbers)

    assert abs(mean_logarithm(first) - mean_logarithm(second)) < 0.3


def test_corpus_keeps_most_short_numbers_for_training(corpus):
    trained = set(read(corpus / "train.de"))

    assert sum(german(number) in trained for number in range(10)) == 7
    assert sum(german(number) in trained for number in range(10, 100)) == 63


@pytest.mark.parametrize("seed", range(5))
def test_corpus_never_holds_out_zero(tmp_path, seed):
    write_corpus(tmp_path, seed=seed, train=1, validation=40, test=400)

    assert "null" not in read(tmp_path / "test.de") + read(tmp_path / "validation.de")


def test_corpus_gives_short_numbers_to_validation_too(corpus):
    targets = read(corpus / "validation.en")

    assert sum(words in map(english, range(1, 100)) for words in targets) == 10


def test_corpus_names_every_impossible_size(tmp_path):
    with pytest.raises(ValueError, match=r"`test` .* got 200001[\s\S]*`train` .* got 0"):
        write_corpus(tmp_path / "corpus", train=0, test=200_001)

    assert not (tmp_path / "corpus").exists()


def test_corpus_keeps_the_old_file_when_writing_fails(tmp_path, monkeypatch):
    old = tmp_path / "test.de"
    old.write_text("old\n", encoding="utf-8")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_corpus(tmp_path, train=1, validation=1, test=1)

    assert old.read_text(encoding="utf-8") == "old\n"
    assert list(tmp_path.iterdir()) == [old]


def test_exact_match_by_digits_counts_each_length():
    numbers = [7, 12, 45, 999_999, 0]
    references = [english(number) for number in numbers]
    predictions = [references[0], "twelve ", *references[2:4], "Zero"]

    scores = exact_match_by_digits(numbers, predictions, references)

    assert scores == [DigitScore(1, 1, 2), DigitScore(2, 1, 2), DigitScore(6, 1, 1)]


def test_exact_match_by_digits_refuses_unequal_lengths():
    with pytest.raises(ValueError, match="got 1, 2 and 3"):
        exact_match_by_digits([1], ["one", "two"], ["one", "two", "three"])


@pytest.fixture
def run_script(monkeypatch):
    """Runs the script in this process, where the package is loaded already."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return stop.value.code

    return run


def test_script_prints_files_and_counts(run_script, tmp_path, capsys):
    status = run_script(tmp_path, "--train", 5, "--validation", 4, "--test", 3)

    printed = capsys.readouterr().out
    assert status == 0
    assert f"{tmp_path / 'train.de'}\t5 lines\n" in printed
    assert len(read(tmp_path / "train.de")) == 5
    assert len(printed.splitlines()) == len(list(tmp_path.iterdir())) == 10


def test_script_prints_the_message_alone_when_a_size_is_wrong(run_script, tmp_path, capsys):
    status = run_script(tmp_path, "--validation", 100_001)

    assert status == 2
    assert capsys.readouterr() == (
        "",
        "`validation` must be between 1 and 100000 lines, got 100001. "
        "Choose a size in this range.\n",
    )


def test_script_help_loads_no_package():
    result = subprocess.run(
        [sys.executable, "-X", "importtime", SCRIPT, "--help"], capture_output=True, text=True
    )

    assert "--validation" in result.stdout
    assert "argparse" in result.stderr
    assert "vanilla_transformer" not in result.stderr


def test_script_help_shows_the_defaults_of_the_function(run_script, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    defaults = inspect.signature(write_corpus).parameters

    run_script("--help")

    printed = capsys.readouterr().out.splitlines()
    for option in (*SPLITS, "seed"):
        line = next(line for line in printed if line.strip().startswith(f"--{option} "))
        assert line.endswith(f"(default: {defaults[option].default})")
