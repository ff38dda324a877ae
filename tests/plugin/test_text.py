"""What a text is for a model: the table, in every kind of tokenizer, with and without our class."""

import random
from typing import get_args

import pytest
from transformers import PreTrainedTokenizerFast

from vanilla_transformer.text_vanilla_transformer import as_source, blank_ends, without_blank_ends
from vanilla_transformer.tokenization_vanilla_transformer import (
    TokenizerKind,
    VanillaTransformerTokenizer,
)

KINDS = get_args(TokenizerKind)
LINES = ["ein Hund, wie schön", "ക് ക", "ein Hund wie ein Hund"] * 5
VIRAMA = "\u0d15\u0d4d"
# Each as it is written in a source, and as it is read.
SOURCES = {
    "apart": ("scho\u0308n", "schön"),
    "apart, with a mark between": ("scho\u00ad\u0308n", "schön"),
    "U+FEFF": ("\ufeffein Hund", "ein Hund"),
    "U+200B": ("ein\u200bHund", "ein Hund"),
    "U+200B beside blanks": ("ein \ufeff\u200b Hund\u200b", "ein Hund"),
    "embedding": ("\u202aein Hund\u202c", "ein Hund"),
    "isolate": ("ein \u2068Hund\u2069 wie ein Hund", "ein Hund wie ein Hund"),
    "Arabic letter mark": ("\u061cein \u200eHund", "ein Hund"),
    "soft hyphen": ("ein Hu\u00adnd", "ein Hund"),
    "control": ("\0ein\0 Hund", "ein Hund"),
    "word joiner": ("ein Hund\u2060, wie", "ein Hund, wie"),
    "no-break spaces": ("ein\u202fHund\u00a0wie", "ein Hund wie"),
    "other blanks": ("ein\tHund\u3000wie\u2009ein\r", "ein Hund wie ein"),
    "blank ends": ("  ein  Hund\t\u00a0", "ein  Hund"),
    "joiner after a virama": (f"{VIRAMA}\u200d", f"{VIRAMA}\u200d"),
    "joiner after a letter": ("ک\u200c", "ک\u200c"),
    "joiner after nothing": ("\u200dein Hund \u200c", "ein Hund"),
    "joiner inside": ("می\u200cخو 👩\u200d👧", "می\u200cخو 👩\u200d👧"),
    "compatibility": ("ﬁn ①", "ﬁn ①"),
    "nothing": ("\u202a \u200d\u200b", ""),
}
KEPT = ["a\u00a0!", "កម្ម\u200bក", "\u202aab\u202c", "a\u00adb", "\ufeffa \0", " a\tb ", "क्\u200d"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Each kind as it was trained, as it was saved, and as the plain fast tokenizer."""
    folder = tmp_path_factory.mktemp("saved")
    classes = {}
    for kind in KINDS:
        tokenizer = VanillaTransformerTokenizer.train(LINES, vocab_size=320, kind=kind)
        tokenizer.save_pretrained(folder / kind)
        classes[kind] = [
            tokenizer,
            VanillaTransformerTokenizer.from_pretrained(folder / kind),
            PreTrainedTokenizerFast.from_pretrained(folder / kind),
        ]
    return classes


@pytest.mark.parametrize(("written", "read"), SOURCES.values(), ids=SOURCES)
def test_source_is_read_by_the_table_in_every_kind_and_class(tokenizers, written, read):
    assert as_source(written) == read
    for classes in tokenizers.values():
        expected = classes[0](text_target=read).input_ids
        for tokenizer in classes:
            assert tokenizer(written).input_ids == expected
    # Spelled in bytes where no piece has the character.
    bpe = tokenizers["bpe"][0]
    assert bpe.decode(bpe(written).input_ids, skip_special_tokens=True) == read


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_target_is_kept_and_leaves_the_reading_of_sources(tokenizers, kind, tmp_path):
    tokenizer = tokenizers[kind][1]

    ids = tokenizer(text_target=KEPT).input_ids

    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == KEPT
    assert tokenizer("ein\u00a0Hund", text_target="a\u00a0b").input_ids == (
        tokenizer("ein Hund").input_ids
    )
    with pytest.raises(ValueError, match="text input"):
        tokenizer(text_target=[1])
    tokenizer.save_pretrained(tmp_path)
    saved = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert saved("ein\u00a0Hund").input_ids == tokenizer("ein Hund").input_ids


def test_sources_are_in_lower_case_where_asked_and_targets_are_not():
    tokenizer = VanillaTransformerTokenizer.train(
        ["ein hund", "Ein Hund"], kind="char", lowercase_sources=True
    )

    encoded = tokenizer("EIN Hund", text_target="Ein Hund")

    assert tokenizer.decode(encoded.input_ids, skip_special_tokens=True) == "ein hund"
    assert tokenizer.decode(encoded.labels, skip_special_tokens=True) == "Ein Hund"
    # Every capital has one small letter but sigma, whose last one in a word is another.
    lower = [
        as_source(text, lowercase=True)
        for text in ("\u03a3\u039f\u03a3 \u03a3 STRASSE", "I\u0301\u00a0")
    ]
    assert lower == ["\u03c3\u03bf\u03c2 \u03c3 strasse", "\u00ed"]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_pieces_are_learned_from_text_with_the_marks_of_targets(kind):
    lines = ["Schiff\u00adfahrt im Wind"] * 20
    tokenizer = VanillaTransformerTokenizer.train(lines, vocab_size=300, kind=kind)

    assert "\u00ad" in tokenizer.get_vocab()


def test_ends_are_those_that_a_source_loses_and_reading_twice_changes_nothing():
    draw = random.Random(1)
    characters = "ab \t\0e\u200c\u200d\u200b\ufeff\u202a\u00ad\u00a0\u0d4d\u0d15\u0301\ufe0f"
    for _ in range(20_000):
        line = "".join(draw.choices(characters, k=draw.randrange(8)))
        before, after = blank_ends(line)
        inner = without_blank_ends(line)

        assert before + inner + after == line
        assert as_source(inner) == as_source(line) == as_source(as_source(line))
        assert without_blank_ends(as_source(line)) == as_source(line)


def test_composition_changes_no_id_of_text_in_nfc(tokenizers):
    bpe = tokenizers["bpe"][0]
    plain = PreTrainedTokenizerFast(tokenizer_object=bpe.backend_tokenizer)
    steps = [step for step in plain.backend_tokenizer.normalizer if "NFC" not in repr(step)]
    assert len(steps) == len(plain.backend_tokenizer.normalizer) - 1
    text = "schön 한국어 é ệ"
    expected = bpe(text).input_ids
    plain.backend_tokenizer.normalizer = type(bpe.backend_tokenizer.normalizer)(steps)

    assert plain(text).input_ids == expected
