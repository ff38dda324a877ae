"""Lines that are too long: where they are cut, and that nothing is lost."""

import random

import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.results import join_pieces
from vanilla_transformer_tools.translation.segments import cut_line, cut_lines

from ..support.engines import Recorder


@pytest.fixture(scope="module")
def letters():
    """One character, one token."""
    return VanillaTransformerTokenizer.train(
        ["abcdefghijklmnopqrstuvwxyzABCDE .,!?-'\"”…。」"], vocab_size=60, kind="char"
    )


@pytest.fixture(scope="module")
def subwords():
    lines = ["the old man and the sea", "hello world, hello there!", "......  ----", "日本語。"]
    return VanillaTransformerTokenizer.train(lines * 5, vocab_size=330)


def translate(lines, tokenizer, max_tokens, prefixes="", numbers=None, **settings):
    """What an engine gets, and the translations."""
    engine = Recorder()
    translator = Translator(engine, tokenizer, max_source_length=max_tokens, **settings)
    return engine, list(translator.translate(lines, prefixes, numbers=numbers))


@pytest.mark.parametrize(
    ("line", "max_tokens", "pieces"),
    [
        # At the last sentence that fits; `</s>` takes one token.
        ("Ab. Cd. Ef. Ab.", 12, ["Ab. Cd. Ef.", "Ab."]),
        ("Ab. Cd. Ef. Ab.", 11, ["Ab. Cd.", "Ef. Ab."]),
        ('ab?! "cd." Ec', 12, ['ab?! "cd."', "Ec"]),
        ("ab… Cd ef", 8, ["ab…", "Cd ef"]),
        # In scripts without blanks, behind its sign.
        ("abc。de」abc", 7, ["abc。", "de」abc"]),
        ("abc。」abc", 7, ["abc。」", "abc"]),
        # No sentence ends within a word or a number.
        ("a.b.c d.e", 8, ["a.b.c", "d.e"]),
        # Else before the last blank; blanks around it go.
        ("abc def ghi", 9, ["abc def", "ghi"]),
        ("abc   def", 6, ["abc", "def"]),
        ("   abc def", 5, ["abc", "def"]),
        # Else behind the last token.
        ("abcdefgh", 4, ["abc", "def", "gh"]),
    ],
)
def test_line_is_cut_at_sentences_else_blanks_else_tokens(letters, line, max_tokens, pieces):
    cut = cut_line(line, letters, max_tokens)

    assert [piece.strip() for piece in cut] == pieces
    assert "".join(cut) == line


def test_line_that_fits_is_whole_however_long_its_words_are():
    word = "Donaudampfschifffahrt"
    words = VanillaTransformerTokenizer.train([word], kind="word")

    assert cut_line(" ".join([word] * 5), words, 6) == [" ".join([word] * 5)]
    assert cut_line(" ".join([word] * 6), words, 6) == [" ".join([word] * 5), f" {word}"]


def random_line(rng):
    words = ["the", "old man", "Hello!", "there.", "日本語。", "😀", "x" * 30, "......", "\t"]
    blanks = ["", " ", " ", "  ", "\u3000"]
    return "".join(rng.choice(words) + rng.choice(blanks) for _ in range(rng.randrange(1, 60)))


@pytest.mark.parametrize("max_tokens", [2, 7, 40])
def test_pieces_hold_the_line_and_stay_within_the_limit(subwords, max_tokens):
    rng = random.Random(max_tokens)
    for _ in range(15):
        line = random_line(rng)

        pieces = cut_line(line, subwords, max_tokens)

        assert "".join(pieces) == (line if line.strip() else "")
        for piece in map(str.strip, pieces):
            assert piece
            assert len(subwords(piece)["input_ids"]) <= max_tokens or len(piece) == 1


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_piece_that_ends_within_a_token_stays_within_the_limit(kind):
    rng = random.Random(0)
    quotes = ["「" + "".join(rng.choices("日本語次文", k=3)) + "」。" for _ in range(200)]
    corpus = ["".join(rng.choices(quotes, k=5)) for _ in range(200)]
    tokenizer = VanillaTransformerTokenizer.train(
        corpus, vocab_size=900, kind=kind, pretokenized=True
    )
    for line in corpus[:40]:
        for max_tokens in (3, 5, 8):
            pieces = cut_line(line, tokenizer, max_tokens)

            assert "".join(pieces) == line
            for piece in pieces:
                assert len(tokenizer(piece)["input_ids"]) <= max_tokens


class CountingTokenizer:
    """Counts the characters that a tokenizer is given."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.characters = 0
        self.longest = 0

    def __call__(self, text, **settings):
        texts = [text] if isinstance(text, str) else text
        self.characters += sum(map(len, texts))
        self.longest = max(self.longest, *map(len, texts))
        return self.tokenizer(text, **settings)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("unit", ["the old man. ", "x", "日本語", "😀", "?! ", " "])
def test_work_is_in_proportion_to_the_line_and_no_long_text_is_tokenised(subwords, unit):
    line = unit * (15_000 // len(unit))
    counting = CountingTokenizer(subwords)

    (parts,) = cut_lines([line], counting, 64)

    assert bool(parts) == bool(line.strip())
    assert counting.characters <= 40 * len(line)
    assert counting.longest <= 5_000


def test_each_sentence_is_a_piece_and_only_long_lines_are_reported(letters, caplog):
    lines = ["Ab. Cd ab.  Ef", "Ab ab ab. Cd"]
    cut = [["Ab.", " Cd ab.", "  Ef"], ["Ab ab", " ab.", " Cd"]]

    rows = cut_lines(lines, letters, 8, split_sentences=True)
    caplog.clear()
    translate(lines, letters, 8, split_sentences=True, numbers=[101, 104])

    assert [[piece.text for piece in row] for row in rows] == cut
    ids = [letters([text.strip() for text in texts])["input_ids"] for texts in cut]
    assert [[piece.source for piece in row] for row in rows] == ids
    assert caplog.messages == ["Line 104 is longer than 8 tokens and is translated in 3 pieces."]


@pytest.mark.parametrize(
    ("translations", "line"),
    [
        (["One.", "  Two.\t"], "One.  Two.\t"),
        (["One.", "Two."], "One. Two."),
        (["一。", "二。"], "一。二。"),
        (["一。", " 二。"], "一。 二。"),
        (["", "Two."], "Two."),
        (["One.", "\xa0Two."], "One.\xa0Two."),
    ],
)
def test_translations_of_pieces_are_joined_as_the_pieces_were(translations, line):
    assert join_pieces(translations) == line


def test_prefix_goes_with_the_first_piece_only(letters):
    engine, found = translate(["abc abc", "a", "b"], letters, 5, ["de ", "", "E"])

    ids = {text: letters(text, add_special_tokens=False)["input_ids"] for text in ("de", "", "E")}
    assert sorted(engine.prefixes) == sorted([ids["de"], [], [], ids["E"]])
    assert [one.text for one in found] == ["de ", "", "E"]


def test_prefix_with_unknown_words_is_refused_after_the_lines_before_it(letters):
    translator = Translator(Recorder(), letters, max_source_length=9)
    found = translator.translate(["ab", "ab"], ["ab", "ab éa ab"], numbers=[11, 12])

    assert next(found).text == "ab"
    with pytest.raises(ValueError, match=r"line 12 .* got 'ab éa ab', .*unknown: 'é' \(1\)\.$"):
        next(found)
    with pytest.raises(ValueError, match="as many numbers as lines, got fewer"):
        list(translator.translate(["ab", "ab"], numbers=[11]))


def test_lone_surrogate_becomes_a_replacement_character(subwords):
    engine, _ = translate(["a\udc80b\ud800"], subwords, 40)

    assert subwords.decode(engine.sources[0], skip_special_tokens=True) == "a\ufffdb\ufffd"
