"""`evaluate` of pairs with a language each, and probabilities of given pairs."""

import json
import re

import pytest
import torch

from vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer_tools.translation import Translator

from ..models import save_small_model
from ..support.engines import Echo

ROWS = [("ein hund", "a dog", "en"), ("ein hund", "un chien ", "fr"), ("ja", "yes", "en")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = VanillaTransformerTokenizer.train(
        [text for row in ROWS for text in row[:2]] * 9,
        vocab_size=60,
        kind="char",
        target_languages=["en", "fr"],
    )
    return save_small_model(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture
def pairs(write):
    return write("pairs.tsv", *map("\t".join, ROWS))


@torch.no_grad()
def test_pairs_are_scored_by_line_and_token_in_their_directions(run, model, pairs):
    status, out, err = run(
        "evaluate", "--model", model, "--test", pairs, "--tag_column", "tag", "--score_pairs"
    )

    assert status == 0, err
    scored = [json.loads(line) for line in out.splitlines()]
    assert [each["line"] for each in scored] == [1, 2, 3]
    tokenizer = VanillaTransformerTokenizer.from_pretrained(model)
    network = VanillaTransformerForConditionalGeneration.from_pretrained(model).eval()
    for each, (source, target, tag) in zip(scored, ROWS, strict=True):
        ids = [tokenizer.convert_tokens_to_ids(f"<2{tag}>"), *tokenizer(source).input_ids]
        labels = torch.tensor([tokenizer(text_target=target.strip()).input_ids])
        logits = network(input_ids=torch.tensor([ids]), labels=labels, return_logits=True).logits
        expected = logits.log_softmax(-1).gather(-1, labels[..., None])[0, :, 0]
        assert each["tokens"] == tokenizer.convert_ids_to_tokens(labels[0].tolist())
        assert each["token_scores"] == pytest.approx(expected.tolist(), abs=2e-4)
        assert each["score"] == pytest.approx(float(expected.sum()), abs=1e-3)


def test_directions_of_a_tagged_file_are_translated_and_scored_each(
    run, model, pairs, tmp_path, write
):
    own = []
    for source, _, tag in ROWS:
        own.append(run("translate", "--model", model, "--target_language", tag, source).out[:-1])
    # The decomposed form of a translation is not the same text.
    rows = [(row[0], text, row[2]) for row, text in zip(ROWS, own, strict=True)]
    same = write("same.tsv", *map("\t".join, rows))

    arguments = ["evaluate", "--model", model, "--tag_column", "tag", "--bootstrap", 0]
    options = ["--test", same, "--metrics", "exact_match"]
    _, out, _ = run(*arguments, *options)

    assert out.count("exact match 100.00") == 3
    results = json.loads((model / "results.json").read_text())
    assert {name: scores["lines"] for name, scores in results.items()} == {
        "test": 3,
        "test en": 2,
        "test fr": 1,
    }
    _, _, err = run(*arguments, *options, "--max_source_length", 6, "--name", "news")
    assert json.loads((model / "results.json").read_text()).keys() > {"news", "news en", "news fr"}
    assert re.findall("Line (.) is longer", err) == ["1", "2"]


def test_translations_that_differ_in_canonical_form_alone_are_counted(run, write):
    composed, decomposed = write("a", "\u00fcber", "x"), write("b", "u\u0308ber", "y")

    status, out, err = run(
        "evaluate", "--hypotheses", composed, "--test", composed, decomposed, "--bootstrap", 0
    )

    assert status == 0
    assert "exact match 0.00" in out
    assert err.startswith("1 translations differ from a reference in Unicode's canonical form")


def test_unknown_characters_of_sources_are_counted_and_named_once(run, model, write):
    test = write("odd.tsv", "EIN hEnd\ta dog\ten", "ja \u72d7\tyes\ten")
    known = write("known.tsv", "ein hund\ta dog\ten")
    named = "5 tokens of the sources are not in the vocabulary: 'E' (2), 'I' (1), 'N' (1), "
    evaluate = ["evaluate", "--model", model, "--tag_column", "tag", "--bootstrap", 0, "--test"]
    translate = ["translate", "--model", model, "--target_language", "en", "--num_beams", 2]

    errors = [run(*evaluate, test).err, run(*translate, "--n_best", 2, "EIN hEnd", "ja \u72d7").err]

    assert [named in error for error in errors] == [True, True], errors
    assert "of the sources" not in run(*evaluate, known).err


def test_words_that_end_in_a_joiner_are_scored_as_they_are_spelled(run, write, monkeypatch):
    # Three words of Malayalam whose last letter is a consonant, a virama and a joiner.
    words = [
        "\u0d05\u0d35\u0d28\u0d4d\u200d",
        "\u0d2a\u0d3e\u0d32\u0d4d\u200d",
        "\u0d28\u0d3e\u0d33\u0d4d\u200d",
    ]
    tokenizer = VanillaTransformerTokenizer.train(words, kind="char", vocab_size=60)
    monkeypatch.setattr(
        Translator, "from_pretrained", lambda *_, **__: Translator(Echo(), tokenizer)
    )
    sources = write("source", *(f"{word} " for word in words))
    same = write("same", f"{words[0]}\u200b", words[1], words[2].rstrip("\u200d"))

    _, out, err = run("evaluate", "--model", "me/m", "--test", sources, same, "--bootstrap", 0)

    assert "exact match 66.67" in out, err
