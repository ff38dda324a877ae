"""Tokens that users add: found in text, and the text comes back."""

import random

import pytest
from transformers import PreTrainedTokenizerFast

from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer

from .test_tokenization import CORPUS, KINDS, random_strings

PLAIN = ["<ph>", "ab", "New York", "{name}", "</", "<phx>", "(+"]
SPECIAL = ["<sep>", "<a</s>", "(+)", "<mask>", "%1$s", "<sep"]
OWN = [*PLAIN, *SPECIAL]


def train(kind, **changes):
    return VanillaTransformerTokenizer.train(CORPUS, vocab_size=500, kind=kind, **changes)


def add(tokenizer):
    added = tokenizer.add_tokens(PLAIN)
    extra, (mask, cls, sep) = SPECIAL[:3], SPECIAL[3:]
    added += tokenizer.add_special_tokens({"extra_special_tokens": extra, "mask_token": mask})
    return added + tokenizer.add_special_tokens({"sep_token": sep, "cls_token": cls})


def saved_and_loaded(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return [
        tokenizer,
        VanillaTransformerTokenizer.from_pretrained(folder),
        PreTrainedTokenizerFast.from_pretrained(folder),
    ]


def decoded(tokenizer, ids):
    return [tokenizer.decode(line) for line in ids]


def texts_with_own(count, seed):
    rng = random.Random(seed)
    return [
        "".join(text[at : at + 3] + rng.choice([*OWN, "", " "]) for at in range(0, len(text), 3))
        for text in random_strings(count, seed)
    ]


@pytest.mark.parametrize("tags", [(), ("de",)])
@pytest.mark.parametrize(
    ("kind", "pretokenized"), [("bpe", False), ("bpe", True), ("unigram", False)]
)
def test_text_with_added_tokens_comes_back(kind, pretokenized, tags, tmp_path):
    tokenizer = train(kind, pretokenized=pretokenized, target_languages=tags)
    size = len(tokenizer)
    # "</" may be a piece that was learned.
    assert size + add(tokenizer) == len(tokenizer)
    texts = texts_with_own(300, seed=5)
    ids = tokenizer(texts, add_special_tokens=False).input_ids

    for loaded in saved_and_loaded(tokenizer, tmp_path):
        assert loaded(texts, add_special_tokens=False).input_ids == ids
        assert decoded(loaded, ids) == texts
        assert len(loaded) == len(tokenizer)


def test_words_that_are_added_come_back_and_are_found_between_blanks(tmp_path):
    tokenizer = train("word", target_languages=["de"])
    with pytest.raises(ValueError, match="a word without blanks, got 'New York'"):
        tokenizer.add_tokens(["New York"])
    tokenizer.add_tokens(["<ph>", "{name}"])
    tokenizer.add_special_tokens({"sep_token": "<sep>"})
    rng = random.Random(1)
    texts = [" ".join(rng.choices(["<ph>", "<sep>", "Ein", "dog"], k=9)) for _ in range(100)]
    ids = tokenizer(texts, add_special_tokens=False).input_ids

    for loaded in saved_and_loaded(tokenizer, tmp_path):
        assert loaded(texts, add_special_tokens=False).input_ids == ids
        assert decoded(loaded, ids) == texts
        unknown = loaded("<sep>: </s> <2de>", add_special_tokens=False).input_ids
        assert unknown == [tokenizer.unk_token_id] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_are_added_are_found_and_dropped_as_such(kind, tmp_path):
    tokenizer = train(kind)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<sep>"]})
    tokenizer.add_tokens(["<ph>"])

    for loaded in saved_and_loaded(tokenizer, tmp_path):
        ids = loaded("Ein <sep> dog <ph>").input_ids
        assert {loaded.extra_special_tokens_ids[0], len(loaded) - 1} < set(ids)
        text = loaded.decode(ids, skip_special_tokens=True)
        assert text.split() == ["Ein", "dog", "<ph>"]
        assert loaded("</s>").input_ids.count(loaded.eos_token_id) == 1


@pytest.mark.parametrize(("form", "token"), [(None, " x"), ("NFKC", "①"), (None, "a\u200bb")])
def test_token_that_text_cannot_have_is_refused(form, token):
    tokenizer = train("bpe", unicode_form=form)
    size = len(tokenizer)

    with pytest.raises(ValueError, match="leaves as it is, got"):
        tokenizer.add_tokens([token])
    assert len(tokenizer) == size


def test_language_tag_that_is_added_is_still_no_text():
    tokenizer = train("bpe")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<2fr>"]})

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


def test_nothing_is_learned_from_symbols():
    tokenizer = VanillaTransformerTokenizer.train(
        ["<ph>x <ph>y"] * 50, vocab_size=300, symbols=["<ph>"]
    )

    assert not {"ph", "<", ">"} & set(tokenizer.get_vocab())
