"""Tokens that users add: found in text, and the text comes back."""

import random
import unicodedata

import pytest
from transformers import PreTrainedTokenizerFast

from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer

from .test_tokenization import CORPUS, KINDS, random_strings

OWN = ["<ph>", "ab", "New York", "{name}", "</", "<phx>", "(+", "(+)", "%1$s"]


def train(kind, **changes):
    return VanillaTransformerTokenizer.train(CORPUS, vocab_size=500, kind=kind, **changes)


def saved_and_loaded(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return [
        tokenizer,
        VanillaTransformerTokenizer.from_pretrained(folder),
        PreTrainedTokenizerFast.from_pretrained(folder),
    ]


def texts_with_own(count, seed):
    rng = random.Random(seed)
    return [
        "".join(text[at : at + 3] + rng.choice([*OWN, "", " "]) for at in range(0, len(text), 3))
        for text in random_strings(count, seed)
    ]


@pytest.mark.parametrize(
    ("kind", "pretokenized"), [("bpe", False), ("bpe", True), ("unigram", False)]
)
def test_text_with_added_tokens_comes_back(kind, pretokenized, tmp_path):
    tokenizer = train(kind, pretokenized=pretokenized, target_languages=["de"])
    size = len(tokenizer)
    # "</" may be a piece that was learned.
    assert size + tokenizer.add_tokens(OWN) == len(tokenizer)
    texts = texts_with_own(300, seed=5)
    sources = tokenizer(texts, add_special_tokens=False).input_ids
    targets = tokenizer(text_target=texts, add_special_tokens=False).input_ids

    for loaded in saved_and_loaded(tokenizer, tmp_path):
        assert loaded(texts, add_special_tokens=False).input_ids == sources
        decoded = [loaded.decode(line) for line in targets]
        assert decoded == [unicodedata.normalize("NFC", text) for text in texts]
        assert len(loaded) == len(tokenizer)


@pytest.mark.parametrize("token", [" x", "a\u200bb", "e\u0301"])
def test_token_that_text_cannot_have_is_refused(token):
    tokenizer = train("bpe")
    size = len(tokenizer)

    with pytest.raises(ValueError, match="leaves as it is, got"):
        tokenizer.add_tokens([token])
    assert len(tokenizer) == size


def test_special_token_that_text_cannot_have_is_doubted_but_tags_are_not(caplog):
    tokenizer = train("bpe")

    tokenizer.add_special_tokens({"extra_special_tokens": ["<2fr>"]})
    assert not caplog.records
    tokenizer.add_special_tokens({"extra_special_tokens": ["<sep>"]})

    assert "'<sep>' is added as a special token, which is not looked for in text" in caplog.text
    assert tokenizer.convert_tokens_to_ids("<2fr>") not in tokenizer("<2fr>").input_ids


@pytest.mark.parametrize("kind", KINDS)
def test_symbols_are_kept_whole_and_taken_from_the_vocabulary(kind, tmp_path):
    symbols = ["<ph>", "%1$s", "<ph>"]
    text = "Ein <ph> %1$s dog" if kind == "word" else "Ein <ph>%1$s: dog"
    texts = [*CORPUS, *[text] * 50]

    tokenizer = VanillaTransformerTokenizer.train(texts, vocab_size=330, kind=kind, symbols=symbols)

    assert len(tokenizer) <= 330
    assert tokenizer.convert_ids_to_tokens([len(tokenizer) - 2, len(tokenizer) - 1]) == symbols[:2]
    for loaded in saved_and_loaded(tokenizer, tmp_path):
        assert {"<ph>", "%1$s"} < set(loaded.tokenize(text))
        assert loaded.decode(loaded(text).input_ids, skip_special_tokens=True) == text
