from pathlib import Path

import pytest

from number_words import english, english_parts, german, german_parts, write_corpus

from ..support.scripts import run_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "number_words.py"
SPLITS = ("train", "validation", "test")


def read(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, train=20_000)
    return folder


@pytest.mark.parametrize(
    ("number", "word", "words"),
    [
        (0, "null", "zero"),
        (77, "siebenundsiebzig", "seventy-seven"),
        (101, "einhunderteins", "one hundred one"),
        (1001, "eintausendeins", "one thousand one"),
        (
            999_999,
            "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
            "nine hundred ninety-nine thousand nine hundred ninety-nine",
        ),
    ],
)
def test_hard_numbers_are_spelled(number, word, words):
    assert german(number) == word
    assert english(number) == words


def test_corpus_has_the_sizes_asked_for(corpus):
    lengths = {path.name: len(read(path)) for path in corpus.iterdir()}

    sizes = {"train": 20_000, "validation": 500, "test": 1_000}
    pairs = {f"{split}.{language}": sizes[split] for split in SPLITS for language in ("de", "en")}
    others = ("numbers", "parts.de", "parts.en")
    assert lengths == pairs | {f"test.{name}": 1_000 for name in others}
    # No number is repeated.
    assert len({line for split in SPLITS for line in read(corpus / f"{split}.de")}) == 21_500


def test_corpus_lines_are_translations_of_each_other(corpus):
    translations = {german(number): english(number) for number in range(20_000)}

    for split in SPLITS:
        pairs = zip(read(corpus / f"{split}.de"), read(corpus / f"{split}.en"), strict=True)
        found = {source: target for source, target in pairs if source in translations}
        assert found
        assert found.items() <= translations.items()


@pytest.mark.parametrize(
    ("number", "parts", "words"),
    [
        (17, "siebzehn", "seventeen"),
        (245, "zwei hundert fünf und vierzig", "two hundred forty - five"),
        (21_001, "ein und zwanzig tausend eins", "twenty - one thousand one"),
    ],
)
def test_parts_of_a_number_are_its_words(number, parts, words):
    assert " ".join(german_parts(number)) == parts
    assert " ".join(english_parts(number)) == words


def test_corpus_follows_from_the_seed_and_its_test_from_nothing_else(corpus, tmp_path):
    def contents(name, seed=0):
        paths = write_corpus(tmp_path / name / "here", seed=seed, train=50, validation=20)
        assert sorted(paths) == sorted((tmp_path / name / "here").iterdir())
        return {path.name: path.read_bytes() for path in paths}

    again, other = contents("again"), contents("other", seed=1)

    assert not again.items() & other.items()
    for name in (name for name in again if name.startswith("test.")):
        assert again[name] == (corpus / name).read_bytes()


def score(folder, translations):
    contents = {"test.numbers": "1\n2\n30\n", "test.en": "one\ntwo\nthirty\n"}
    for name, content in (contents | translations).items():
        (folder / name).write_text(content)
    return run_script(SCRIPT, "score", folder, folder / "translations")


def test_exact_matches_are_counted_for_each_number_of_digits(tmp_path):
    done = score(tmp_path, {"translations": "one\ntwo \nthirty\n"})

    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows == [["digits", "exact", "lines"], ["1", "1", "2"], ["2", "1", "1"]]


@pytest.mark.parametrize(
    ("translations", "message"),
    [({}, "translations"), ({"translations": "one\n"}, "got 3, 1 and 3")],
)
def test_mistakes_end_the_script_with_one_line(tmp_path, translations, message):
    done = score(tmp_path, translations)

    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
