"""Swapped languages of a test set."""

import gzip
from pathlib import Path

import pytest

from vanilla_transformer_tools.evaluation.swapped import (
    SOURCE_WORDS,
    frequent_words,
    warning_of_swapped,
)

PLACES = [folder / "shared" / "data" for folder in Path(__file__).parents]


def read(name: str) -> list[str]:
    files = (folder / f"{name}.gz" for folder in PLACES)
    file = next(filter(Path.exists, files), None)
    if file is None:
        pytest.skip(f"There is no ../shared/data/{name}.gz beside the repository.")
    return gzip.decompress(file.read_bytes()).decode("utf-8").split("\n")[:-1]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("multi30k/train.{}", "multi30k/val.{}"),
        ("multi30k_tok/train.lc.norm.tok.{}", "multi30k_tok/val.lc.norm.tok.{}"),
        ("tatoeba_de_en/train.{}", "tatoeba_de_en/dev.{}"),
        ("java_csharp/train.{}", "java_csharp/valid.{}"),
    ],
    ids=lambda name: name.split("/")[0],
)
def test_swapped_languages_are_noticed_in_real_corpora(train, test):
    languages = ("java", "cs") if "java" in train else ("de", "en")
    for source, target in (languages, languages[::-1]):
        record = {SOURCE_WORDS: frequent_words(read(train.format(source))[:10_000])}
        sources, references = (read(test.format(side)) for side in (source, target))

        assert warning_of_swapped(sources, references, record) == ""
        warning = warning_of_swapped(references, sources, record)
        # Both sides of code have the same words.
        assert warning.startswith("Are the languages swapped?") == (languages[0] == "de")


def test_nothing_is_said_without_known_words():
    assert frequent_words([f"w{number}" for number in range(1000)]) == []
    assert warning_of_swapped(["a b"], ["c d"], {}) == ""
    assert "0% of the words of the sources, and 50%" in warning_of_swapped(
        ["a b"], ["c d"], {SOURCE_WORDS: ["c"]}
    )
