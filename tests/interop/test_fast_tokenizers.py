"""Fast tokenizers of SentencePiece models give the ids of the slow ones, in all scripts."""

import random
import unicodedata
from functools import cache

import pytest
from transformers import MarianTokenizer

from vanilla_transformer_tools.interop.fast_tokenizers import fast_pair
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

from ..support.pretrained import BUILD, ENGLISH, GERMAN

CHARACTERS = [
    one
    for one in map(chr, range(0x20, 0x1F000))
    if unicodedata.category(one) not in ("Cn", "Cs", "Co")
]
MARKS = [one for one in CHARACTERS if unicodedata.category(one)[0] == "M"]


def lines(spelled, size):
    """Words of neighbouring characters, marks in between, number words, and tokens in some."""
    draw = random.Random(5)
    for _ in range(size):
        words = draw.choices(GERMAN + ENGLISH, k=1)
        for _ in range(draw.randint(1, 6)):
            start = draw.randrange(4000 if draw.random() < 0.6 else len(CHARACTERS))
            near = CHARACTERS[start : start + 64]
            words.append("".join(draw.choices(near, k=draw.randint(1, 6))))
            words[-1] += draw.choice(MARKS) * (draw.random() < 0.1)
        if draw.random() < 0.1:
            words.insert(draw.randrange(len(words)), draw.choice(spelled))
        line = draw.choice([" ", "  ", ""]).join(words)
        yield unicodedata.normalize("NFD", line) if draw.random() < 0.1 else line


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """By name: the slow tokenizer and its fast pair, which tests do not change."""

    @cache
    def make(name):
        _, slow = BUILD[name](tmp_path_factory.mktemp(name))
        return slow, fast_pair(TokenizerPair.joint(slow))

    return make


WITH_TAGS = [
    ">>deu<< one",
    ">>deu<<  one >>deu<< two>>fra<<",
    " >>deu<< one",
    ">>deu<<>>fra<<one",
    ">>deu<<",
    ">>xyz<< one",
    ">>x\ny<<жone",
    ">> one",
    "</s>>>fra<< one </s> >>fra<<",
]


# The first two differ in tags only.
@pytest.mark.parametrize(
    ("name", "size"), [("marian", 30), ("marian_to_several", 150), ("m2m100", 150)]
)
def test_ids_are_those_of_the_slow_tokenizer(name, size, pairs):
    slow, pair = pairs(name)
    spelled = [*slow.all_special_tokens, *getattr(slow, "lang_token_to_id", ())]
    sides = {"text": pair.source} | ({} if pair.is_joint else {"text_target": pair.target})
    is_unigram = isinstance(slow, MarianTokenizer)

    texts = [*WITH_TAGS, *lines([*spelled, ">>deu<<", ">>xyz<<", ">> a", "b<<"], size)]
    for side, fast in sides.items():
        for line, ids in zip(texts, fast(**{side: texts})["input_ids"], strict=True):
            expected = [*slow(**{side: line})["input_ids"]]
            # SentencePiece adds scores in single precision, which decides between I II and II I.
            assert ids == expected or (is_unigram and sorted(ids) == sorted(expected)), ascii(line)


@pytest.mark.parametrize("name", ["marian", "m2m100"])
def test_texts_are_those_of_the_slow_tokenizer(name, pairs):
    slow, pair = pairs(name)
    (blank, letter), end = slow.convert_tokens_to_ids(["▁", "e"]), slow.eos_token_id

    for ids in ([blank] * 3, [blank, blank, letter, blank, blank, letter, blank, blank, end]):
        expected = slow.decode(ids, skip_special_tokens=True)
        assert pair.target.decode(ids, skip_special_tokens=True) == expected


def test_table_that_lacks_pieces_keeps_the_slow_tokenizer(tmp_path):
    _, slow = BUILD["marian"](tmp_path)
    del slow.encoder["▁"]

    with pytest.raises(ValueError, match="the table of ids has no '▁'"):
        fast_pair(TokenizerPair.joint(slow))
