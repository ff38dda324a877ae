"""What must not be translated: found, given as symbols, copied by alignment, never lost."""

import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.translation import Translation, Translator, marks
from vanilla_transformer_tools.translation.marks import find_items, kinds_of

ALL = ("placeholders", "urls", "emails", "emoji", "numbers")


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("%s of %1$s, %-5.2f and %(name)s: 100 % der", ["%s", "%1$s", "%-5.2f", "%(name)s", "100"]),
        ("Hi {name}, {{ user }} ${x} {n, plural}", ["{name}", "{{ user }}", "${x}", "{n, plural}"]),
        ("see (https://a.b/c?d=1&e=2).", ["https://a.b/c?d=1&e=2"]),
        (
            "www.example.org, or me+x@mail.example.org!",
            ["www.example.org", "me+x@mail.example.org"],
        ),
        ("👍🏽 👩‍👩‍👧 🇩🇪 1️⃣ ❤️", ["👍🏽", "👩‍👩‍👧", "🇩🇪", "1️⃣", "❤️"]),
        ("1.234,5 or -7, B2B and v1", ["1.234,5", "-7"]),
        ("it spells <ph> and <ph1>", ["<ph>", "<ph1>"]),
        ("nothing (at all): half, a@b, {", []),
    ],
)
def test_items_are_found(text, items):
    found = [text[slice(*place)] for place in find_items(text, ALL)]

    assert found == items


def test_kinds_are_those_named_or_the_usual_ones_of_a_model_with_symbols():
    assert kinds_of(None, []) == kinds_of("none", ["<ph>"]) == ()
    assert kinds_of(None, ["<ph>"]) == ("placeholders", "urls", "emails", "emoji")
    assert kinds_of("urls,numbers", []) == ("urls", "numbers")
    with pytest.raises(ValueError, match=r"some of urls.* got 'tags'"):
        kinds_of("urls,tags", [])


@pytest.fixture
def answering(build, monkeypatch):
    """A Translator that answers with given texts, and keeps what it was given."""

    def build_answering(answers, links=(), **settings):
        translator = build(**{"max_source_length": 200, **settings})
        translator.given = []

        def translate(self, batch):
            translator.given += [piece.text for piece in batch]
            return [Translation(answers[piece.text]) for piece in batch]

        monkeypatch.setattr(Translator, "_translate_batch", translate)
        monkeypatch.setattr(
            marks, "character_links", lambda pairs, *_: [list(links) for _ in pairs]
        )
        return translator

    return build_answering


@pytest.mark.parametrize(
    ("line", "answer", "links", "expected"),
    [
        # Items that were copied stay.
        ("ab {x} {y}", "{y} cd {x}", [], "{y} cd {x}"),
        # `{name}` was translated as "de nom", which it replaces.
        ("ab {name}", "de nom xy", [(0, 2, 7, 9), (3, 9, 0, 2), (3, 9, 3, 6)], "{name} xy"),
    ],
)
def test_item_is_where_it_was_copied_or_its_words_are(answering, line, answer, links, expected):
    translator = answering({line: answer}, links, protect="placeholders")

    (found,) = translator.translate([line])

    assert found.text == expected


def test_item_without_a_place_is_appended_with_a_warning(answering, caplog):
    translator = answering({"ab": "x", "1 {a} 11 ": "11 z "}, protect="placeholders,numbers")

    texts = [found.text for found in translator.translate(["ab", "1 {a} 11 "], first_line=7)]

    # The 1 in 11 is another number.
    assert texts == ["x", "11 z 1 {a} "]
    assert caplog.messages == [
        "Line 8: 2 protected items were missing in the translation and are appended."
    ]


def test_item_over_the_end_of_a_sentence_keeps_the_parts_of_its_piece_in_order(answering):
    translator = answering(
        {"ab {xy.": "A {xy.", " Zz} cd": " Zz} C"}, protect="placeholders", split_sentences=True
    )

    (found,) = translator.translate(["ab {xy. Zz} cd"])

    assert found.text == "A {xy. Zz} C"


def test_model_with_symbols_gets_them(answering):
    tokenizer = VanillaTransformerTokenizer.train(
        ["abcdefghijklmnop xyz{}<>"], vocab_size=40, kind="char", symbols=["<ph1>", "<ph2>"]
    )
    sources = ["a {x} {y} {x} {z}", "ab"]
    answers = {"a <ph1> <ph2> <ph1> {z}": "<ph2> b <ph1> <ph1> {z}", "ab": "b"}
    translator = answering(answers, target_tokenizer=tokenizer)
    assert translator.symbols == []
    translator.symbols, translator.protect = ["<ph1>", "<ph2>"], kinds_of(None, ["<ph1>"])

    texts = [found.text for found in translator.translate(sources)]

    assert translator.given == [*answers]
    assert texts == ["{y} b {x} {x} {z}", "b"]


def test_symbols_are_those_that_both_sides_have(tiny_model):
    tokenizer = VanillaTransformerTokenizer.train(
        ["abc {}<>"], vocab_size=30, kind="char", symbols=["<ph1>", "<ph2>", "<ph>"]
    )
    other = VanillaTransformerTokenizer.train(
        ["abc {}<>"], vocab_size=30, kind="char", symbols=["<ph1>"]
    )

    assert Translator(tiny_model, tokenizer).symbols == ["<ph1>", "<ph2>"]
    assert Translator(tiny_model, tokenizer, target_tokenizer=other).symbols == ["<ph1>"]


def test_real_model_loses_no_item(build):
    translator = build(protect=",".join(ALL), max_source_length=30)
    source = "ab {x} cd. ef 👍 gh https://a.b/c ij 7 " * 3

    (found,) = translator.translate([source])

    for item in ("{x}", "👍", "https://a.b/c", "7"):
        assert found.text.count(item) == 3
