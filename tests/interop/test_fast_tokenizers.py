"""Fast tokenizers of SentencePiece models give the ids of the slow ones, in all scripts."""

import random
import unicodedata

import pytest

from vanilla_transformer_tools.interop.fast_tokenizers import fast_pair
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

from ..support.pretrained import BUILD, ENGLISH, GERMAN


def lines(count):
    """Words of characters that lie beside each other, marks in between, and number words."""
    draw = random.Random(5)
    codes = map(chr, range(0x20, 0x1F000))
    assigned = [one for one in codes if unicodedata.category(one) not in ("Cn", "Cs", "Co")]
    marks = [one for one in assigned if unicodedata.category(one)[0] == "M"]
    for _ in range(count):
        words = draw.choices(GERMAN + ENGLISH, k=1)
        for _ in range(draw.randint(1, 6)):
            start = draw.randrange(4000 if draw.random() < 0.6 else len(assigned))
            words.append("".join(draw.choices(assigned[start : start + 64], k=draw.randint(1, 6))))
            words[-1] += draw.choice(marks) * (draw.random() < 0.1)
        line = draw.choice([" ", "  ", ""]).join(words)
        yield unicodedata.normalize("NFD", line) if draw.random() < 0.1 else line


@pytest.mark.parametrize("name", ["marian", "marian_to_several", "m2m100"])
@pytest.mark.parametrize("count", [200, pytest.param(30_000, marks=pytest.mark.slow)])
def test_ids_are_those_of_the_slow_tokenizer(name, count, tmp_path):
    _, slow = BUILD[name](tmp_path)
    pair = fast_pair(TokenizerPair.joint(slow))
    sides = {"text": pair.source} | ({} if pair.is_joint else {"text_target": pair.target})

    for line in lines(count):
        for side, fast in sides.items():
            assert fast(**{side: line})["input_ids"] == list(slow(**{side: line})["input_ids"]), (
                ascii(line)
            )


def test_table_that_lacks_pieces_keeps_the_slow_tokenizer(tmp_path):
    _, slow = BUILD["marian"](tmp_path)
    del slow.encoder["▁"]

    with pytest.raises(ValueError, match="the table of ids has no '▁'"):
        fast_pair(TokenizerPair.joint(slow))
