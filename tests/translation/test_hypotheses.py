"""Translator: hypotheses, samples, details, unknown tokens, engines and dtypes."""

import pytest
import torch

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.engine import Hypothesis

from ..support.engines import Echo

LINES = [
    "ein hund rennt.",
    "ja",
    "",
    "der alte mann schläft",
    "oh nein",
    "  a",
    "ein hund",
    "x",
    "-",
]


def test_any_engine_will_do_but_for_details(tokenizer):
    translator = Translator(Echo(), tokenizer)

    results = list(translator.translate(["ja", "", "nein"]))

    assert [result.text for result in results] == ["ja", "", "nein"]
    assert translator.max_source_length == 50
    for setting in ({"details": True}, {"do_sample": True, "seed": 1}):
        *_, name = setting
        with pytest.raises(ValueError, match=rf"`{name}` needs the engine 'torch'.* got Echo"):
            Translator(Echo(), tokenizer, **setting)


@pytest.mark.parametrize(
    ("kind", "text", "shown"),
    [
        ("word", "w1 w2", "w1 <unk> w2 <unk>"),
        ("char", "w12 Bach", "w1 Bach w2 <unk>h<unk><unk><unk>"),
    ],
)
def test_unknown_words_are_shown_and_counted(monkeypatch, kind, text, shown):
    tokenizer = VanillaTransformerTokenizer.train([text], kind=kind, vocab_size=300)
    ids = tokenizer("w1 Bach w2 Rhein", add_special_tokens=False).input_ids
    engine = Echo()
    engine.translate_batch = lambda *_: [[Hypothesis(ids, -1.0, tokenizer.eos_token_id)]]

    (found,) = Translator(engine, tokenizer).translate(["w1"])

    assert (found.text, found.unknown) == (shown, shown.count("<unk>"))


@pytest.mark.parametrize(
    ("kind", "named"), [("word", ("Ufer", "!", "Bach")), ("char", ("U", "f", "B"))]
)
def test_source_strings_that_the_vocabulary_lacks_are_named(kind, named):
    text = "am Rhein achter!"
    tokenizer = VanillaTransformerTokenizer.train([text], kind=kind, vocab_size=300)
    translator = Translator(Echo(), tokenizer, split_sentences=True)

    known, unknown, blank = translator.translate([text, "Ufer ! Bach", ""])

    assert (known.unknown_source, blank.unknown_source) == ((), ())
    assert unknown.unknown_source == named
    # Pieces of words have bytes for what is not in the text that they are learned from.
    pieces = VanillaTransformerTokenizer.train([text], vocab_size=300)
    assert next(Translator(Echo(), pieces).translate(["B"])).unknown_source == ()


@pytest.mark.parametrize(
    ("settings", "dtype"), [({}, torch.bfloat16), ({"dtype": "float32"}, torch.float32)]
)
def test_dtype_is_as_saved_unless_told(tiny_model, tokenizer, tmp_path, settings, dtype):
    tiny_model.bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = {**settings, "num_beams": 2, "scores": True, "details": True}

    loaded = Translator.from_pretrained(str(tmp_path), max_extra_tokens=4, **settings)

    assert loaded.engine.model.dtype == dtype
    for line, result in zip(LINES, loaded.translate(LINES), strict=True):
        assert not line.strip() or result.score < 0


def test_list_of_the_best_repeats_a_text_only_if_the_beam_has_no_other(tokenizer):
    ja, nein, jo = (tokenizer(text).input_ids[:-1] for text in ("ja", "nein", "jo"))
    engine, searches = Echo(), []

    def translate_batch(sources, prefixes, limits, search):
        searches.append(search)
        ranked = [ja, [tokenizer.pad_token_id, *ja], nein, jo]
        return [[Hypothesis(ids, -float(rank), 2) for rank, ids in enumerate(ranked)]]

    engine.translate_batch = translate_batch
    translator = Translator(engine, tokenizer, num_beams=4, num_hypotheses=3, scores=True)

    (found,) = translator.translate(["wo"])

    assert [(one.text, one.score) for one in found.ranked] == [("ja", 0), ("nein", -2), ("jo", -3)]
    assert searches[0].num_hypotheses == 4


COPIED = ["-", "42", "12:30", "\U0001f600", "%", "\u2026", "3.5 \u2192 4", "\t7 ", "1\n2"]


def test_text_without_letters_is_copied_by_models_of_sentences(tokenizer):
    class LastToken(Echo):
        def translate_batch(self, sources, prefixes, limits, search):
            return [[Hypothesis(source[-2:-1], -1.0, end=2)] for source in sources]

    settings = {"copy_without_letters": True, "split_sentences": True, "scores": True}
    copying = Translator(LastToken(), tokenizer, **settings)

    assert [one.text for one in copying.translate(COPIED)] == [*COPIED[:-1], "1 2"]
    ((alone,), (mixed,), (begun,)) = (
        list(copying.translate([line], prefix))
        for line, prefix in (("42.", ""), ("Wo? 420. Da.", ""), ("42", "ja"))
    )
    assert (alone.text, alone.score) == ("42.", 0.0)
    assert mixed.text == "? 420. ."
    assert begun.text == "<unk>"
    assert [one.text for one in Translator(LastToken(), tokenizer).translate(["42"])] == ["<unk>"]
