import gzip
import json
import random
import unicodedata
from collections import Counter
from typing import get_args

import pytest

from vanilla_transformer import vocabulary_vanilla_transformer as module
from vanilla_transformer.tokenization_vanilla_transformer import (
    TokenizerKind,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.vocabulary_vanilla_transformer import BYTE_TOKENS, SPECIAL_TOKENS
from vanilla_transformer_tools.text.units import unknown_strings

from ..support.odd_text import odd_lines

KINDS = get_args(TokenizerKind)
SUBJECTS = ["Ein Hund", "Der alte Mann", "Zwei Kinder", "A dog", "The old man", "Two children"]
VERBS = ["rennt", "schläft", "spielen", "runs", "doesn't sleep", "are playing"]
PLACES = ["im Garten", "am Strand", "in the garden", "on the beach", "at 10:45", "(2023)"]
CORPUS = [
    f"{subject} {verb} {place}{end}"
    for subject in SUBJECTS
    for verb in VERBS
    for place in PLACES
    for end in (".", "!", " ...", "")
]
# Text that spells what the vocabulary reserves, often enough to be learned as one piece.
SPELLINGS = ["</s>", "<s>", "<pad>", "<unk>", "<0x41>", "<0xE2>", "<0xab>"]
SPELLING_CORPUS = CORPUS + [f"x{s}y {s} {s}{s}" for s in SPELLINGS] * 100

AWKWARD = [
    "",
    " ",
    "   ",
    " Hund",
    "Hund ",
    "  ein   Hund  ",
    "a\tb",
    "a\r",
    "\r\n",
    "\n",
    "a\n b\n  c",
    "\x00a\x00",
    "\x0b\x0c\x1c\x85",
    "▁",
    "▁Hund ▁ Hund▁",
    "a\u00a0!",
    "a\u2028b\u2029c",
    "e\u0301 \u00e9 \u0301 \ufb01 \u212b",
    "👩\u200d👩\u200d👧 ❤\ufe0f 🏴\U000e0067\U000e007f",
    "日本語 中文、한국어",
    "नमस्ते क्\u200dष עִבְרִית",
    "\ufffd \U0010ffff \ue000",
    "Don't stop... (10:45)!",
    *SPELLINGS,
    *(f"a{s}b {s} <{s}>" for s in SPELLINGS),
]


@pytest.fixture(scope="module", params=[("bpe", False), ("bpe", True), ("unigram", False)])
def subword(request):
    kind, pretokenized = request.param
    return VanillaTransformerTokenizer.train(
        CORPUS, vocab_size=500, kind=kind, pretokenized=pretokenized
    )


@pytest.fixture(scope="module")
def tokenizers():
    return {
        kind: VanillaTransformerTokenizer.train(CORPUS, vocab_size=500, kind=kind) for kind in KINDS
    }


def roundtrip(tokenizer, texts):
    ids = tokenizer(text_target=texts).input_ids
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def random_strings(count, seed):
    rng = random.Random(seed)
    fragments = [*SPELLINGS, " ", "  ", "\t", "▁", "<", ">", "\u0301", "Hund", "1", "'"]
    planes = [range(0x80), range(0x80, 0xD800), range(0xE000, 0x110000)]

    def fragment():
        if rng.random() < 0.5:
            return rng.choice(fragments)
        return chr(rng.choice(rng.choice(planes)))

    return ["".join(fragment() for _ in range(rng.randrange(12))) for _ in range(count)]


def pipeline(tokenizer):
    return json.loads(tokenizer.backend_tokenizer.to_str())


# ids and special tokens


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_the_first_ids(tokenizers, kind):
    tokenizer = tokenizers[kind]

    assert tokenizer.convert_ids_to_tokens(range(4)) == ["<pad>", "<s>", "</s>", "<unk>"]
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id] == [0, 1]
    assert [tokenizer.eos_token_id, tokenizer.unk_token_id] == [2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_source_and_labels_end_in_eos_and_start_with_text(tokenizers, kind):
    tokenizer = tokenizers[kind]

    encoded = tokenizer("Ein Hund", text_target="A dog")

    assert sorted(encoded) == ["attention_mask", "input_ids", "labels"]
    for ids, text in ((encoded.input_ids, "Ein Hund"), (encoded.labels, "A dog")):
        assert ids == [*tokenizer(text, add_special_tokens=False).input_ids, 2]


def test_targets_have_a_limit_of_their_own(tokenizer):
    sources, targets = ["Ein Hund", "Ja"], ["A dog", "Yes"]
    alone = tokenizer(text_target=targets, truncation=True, max_target_length=3)

    encoded = tokenizer(
        sources, None, targets, truncation=True, max_length=4, max_target_length=3, padding=True
    )

    assert set(encoded) == {"input_ids", "attention_mask", "labels"}
    assert [len(ids) for ids in encoded.input_ids] == [4, 4]
    assert [len(ids) for ids in encoded.labels] == [3, 3]
    assert [ids[:3] for ids in alone.input_ids] == encoded.labels


def test_truncation_keeps_eos_and_padding_is_on_the_right(subword):
    ids = subword("Der alte Mann rennt.", truncation=True, max_length=4).input_ids
    encoded = subword(["", "Hund"], padding=True)

    assert ids == [*subword("Der alte Mann rennt.").input_ids[:3], 2]
    assert encoded.input_ids[0][:2] == [2, 0]
    assert encoded.attention_mask[0][:2] == [1, 0]


# every target survives


def test_roundtrip_is_exact_and_nothing_unknown_in_awkward_text_and_random_unicode(subword):
    texts = [*AWKWARD, *random_strings(1000, seed=1)]

    assert roundtrip(subword, texts) == [unicodedata.normalize("NFC", text) for text in texts]
    assert not unknown_strings(subword, texts)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("pretokenized", [False, True])
def test_spelled_special_and_byte_tokens_are_plain_text_even_when_frequent(kind, pretokenized):
    tokenizer = VanillaTransformerTokenizer.train(
        SPELLING_CORPUS, vocab_size=600, kind=kind, pretokenized=pretokenized
    )

    ids = tokenizer(SPELLINGS, add_special_tokens=False).input_ids

    # All characters are frequent, so neither special nor byte tokens have a place here.
    assert min(map(min, ids)) >= len(SPECIAL_TOKENS) + len(BYTE_TOKENS)
    assert roundtrip(tokenizer, SPELLINGS + SPELLING_CORPUS) == SPELLINGS + SPELLING_CORPUS


# boundaries of pieces


def learned_pieces(tokenizer):
    return tokenizer.convert_ids_to_tokens(
        range(len(SPECIAL_TOKENS) + len(BYTE_TOKENS), len(tokenizer))
    )


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_raw_text_pieces_mix_neither_letters_nor_digits_nor_signs(kind):
    tokenizer = VanillaTransformerTokenizer.train(CORPUS, vocab_size=600, kind=kind)

    for piece in map(str.lstrip, learned_pieces(tokenizer)):
        assert piece.isalpha() or len(piece) < 2 or not any(map(str.isalnum, piece)), piece


def test_pretokenized_tokens_are_split_at_blanks_and_not_at_signs():
    lines = ["<lang:de> x1-y2 doesn't"] * 10

    tokenizer = VanillaTransformerTokenizer.train(lines, pretokenized=True)

    assert tokenizer.tokenize(lines[0]) == [" <lang:de>", " x1-y2", " doesn't"]


def test_word_has_the_same_pieces_at_the_beginning_of_a_line(subword):
    assert (
        subword.tokenize("Hund") == subword.tokenize("Ein Hund")[-len(subword.tokenize("Hund")) :]
    )


# training


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_rarest_characters_are_left_to_the_byte_tokens(kind, caplog):
    # Sorted by code point, the frequent ones would come last; 20 of the 40 pieces are characters.
    rare, frequent = (list(map(chr, range(start, start + 15))) for start in (0x4E00, 0x5E00))

    tokenizer = VanillaTransformerTokenizer.train(
        [*rare, *frequent * 3], vocab_size=4 + 256 + 40, kind=kind
    )

    vocabulary = tokenizer.get_vocab()
    assert [character for character in frequent if character not in vocabulary] == []
    assert sum(character in vocabulary for character in rare) == 4
    assert "11 of 31 different characters are left to the byte tokens" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_training_raises_when_vocabulary_is_too_small(kind):
    minimum = 262 if kind in ("bpe", "unigram") else 5

    with pytest.raises(ValueError, match=f"at least {minimum} .*got {minimum - 1}"):
        VanillaTransformerTokenizer.train(CORPUS, vocab_size=minimum - 1, kind=kind)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("vocab_size", [330, 500])
def test_training_is_deterministic(kind, vocab_size):
    # Equally rare characters, always in front of the same one: trainers draw lots among them.
    rare = map(chr, range(0x4E00, 0x4E00 + 60))
    texts = CORPUS + [f"{character}x{end}" for character in rare for end in ("an", "en", "in")]

    trained = [
        VanillaTransformerTokenizer.train(texts, vocab_size=vocab_size, kind=kind) for _ in range(3)
    ]

    assert len({tokenizer.backend_tokenizer.to_str() for tokenizer in trained}) == 1


def test_training_from_files_equals_training_from_texts(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(CORPUS[:300]), encoding="utf-8")
    (tmp_path / "b.gz").write_bytes(gzip.compress("\n".join(CORPUS[300:]).encode()))

    from_files = VanillaTransformerTokenizer.train(files=[tmp_path / "a.txt", tmp_path / "b.gz"])
    from_texts = VanillaTransformerTokenizer.train(iter(CORPUS))

    assert pipeline(from_files) == pipeline(from_texts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of `texts` and `files`, got neither"),
        ({"texts": ["a"], "files": ["b"]}, "exactly one of `texts` and `files`, got both"),
        ({"texts": "a b c"}, "got the single one 'a b c'"),
        ({"files": "corpus.txt"}, "got the single one 'corpus.txt'"),
        ({"texts": ["", ""]}, "no text to learn from: got 2 lines"),
        ({"texts": ["a"], "kind": "wordpiece"}, "one of bpe, unigram, char, word, got 'wordpiece'"),
    ],
)
def test_training_raises_when_called_wrongly(arguments, message):
    with pytest.raises(ValueError, match=message):
        VanillaTransformerTokenizer.train(**arguments)


# char and word


def test_char_takes_every_character_and_word_what_stands_between_blanks(tokenizers):
    text = "  Ein Hund "

    assert tokenizers["char"].tokenize(text) == list(text.strip())
    assert roundtrip(tokenizers["char"], [text]) == [text]
    assert tokenizers["word"].tokenize("  A dog  doesn't ...") == ["A", "dog", "doesn't", "..."]
    assert roundtrip(tokenizers["word"], ["  A dog  runs"]) == ["A dog runs"]


def test_plain_vocabulary_keeps_the_most_frequent_words():
    tokenizer = VanillaTransformerTokenizer.train(
        ["c c c b b a a d"], kind="word", vocab_size=len(SPECIAL_TOKENS) + 3
    )

    assert tokenizer.convert_ids_to_tokens(range(4, len(tokenizer))) == ["c", "b", "a"]


def test_word_that_spells_a_special_token_is_unknown():
    tokenizer = VanillaTransformerTokenizer.train(["</s> <pad> a", "<pad> </s>x"], kind="word")

    ids = tokenizer("a </s> </s>x <pad> <s>").input_ids

    a, word = tokenizer.convert_tokens_to_ids(["a", "</s>x"])
    assert ids == [a, 3, word, 3, 3, 2]
    assert tokenizer.pad_token_id == 0


# saving


def test_saved_tokenizer_carries_no_settings_of_the_last_call(tmp_path):
    tokenizer = VanillaTransformerTokenizer.train(CORPUS)
    tokenizer("Ein Hund rennt.", truncation=True, max_length=3, padding="max_length")

    tokenizer.save_pretrained(tmp_path)

    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert (saved["truncation"], saved["padding"]) == (None, None)
    assert "auto_map" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pretokenized": True},
        {"kind": "unigram"},
        {"target_languages": ["de"]},
        # Not all characters get a token.
        {"vocab_size": 290},
    ],
)
def test_vocabulary_is_that_of_the_trainer_on_whole_lines(options, monkeypatch):
    # Every word twice and more, in lines of their own and in long ones.
    lines = [*odd_lines(150), *odd_lines(60), " ".join(odd_lines(90)), "x" * 1100]
    options = {"vocab_size": 420, **options}
    monkeypatch.setattr(module, "_WORDS_AT_A_TIME", 7)

    lines = [unicodedata.normalize("NFC", line) for line in lines]

    found = VanillaTransformerTokenizer.train(lines, **options).backend_tokenizer.to_str()

    with monkeypatch.context() as patched:
        patched.setattr(
            module,
            "_learn_from_parts",
            lambda learner, trainer, *_, **__: learner.train_from_iterator(lines, trainer),
        )
        characters = Counter(" " * len(lines) + "".join(lines))
        patched.setattr(module, "_count_characters", lambda _: characters)
        expected = VanillaTransformerTokenizer.train(lines, **options)
    assert found == expected.backend_tokenizer.to_str()
