"""Unknown words of translations: shown, counted, or replaced by those of the source."""

import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.engines import ForcedPass, Hypothesis

from ..models import build_variant

LINE = "w1 Bach w2 Rhein"


def build(monkeypatch, kind="word", text="w1 w2", outputs=("w1 Bach w2 Rhein",), **settings):
    """A translator whose engine writes given texts, and aligns each token to its own place."""
    tokenizer = VanillaTransformerTokenizer.train([text], kind=kind, vocab_size=300)
    model = build_variant(vocab_size=len(tokenizer))
    translator = Translator(model, tokenizer, num_beams=len(outputs), **settings)
    written = [tokenizer(output, add_special_tokens=False).input_ids for output in outputs]
    hypotheses = [Hypothesis(ids, -1.0, tokenizer.eos_token_id) for ids in written]
    engine = translator.engine

    def force(sources, targets, **_):
        return [ForcedPass([0.0] * len(ids), list(range(len(ids)))) for ids in targets]

    monkeypatch.setattr(
        engine, "translate_batch", lambda sources, *_: [hypotheses for _ in sources]
    )
    monkeypatch.setattr(engine, "force", force)
    return translator


@pytest.mark.parametrize(
    ("kind", "text", "shown"),
    [
        ("word", "w1 w2", "w1 <unk> w2 <unk>"),
        ("char", "w12 Bach", "w1 Bach w2 <unk>h<unk><unk><unk>"),
    ],
)
def test_unknown_words_are_shown_and_counted_or_replaced(monkeypatch, kind, text, shown):
    (found,) = build(monkeypatch, kind, text).translate([LINE])
    (replaced,) = build(monkeypatch, kind, text, replace_unknown=True).translate([LINE])

    assert (found.text, replaced.text) == (shown, LINE)
    assert found.unknown == replaced.unknown == shown.count("<unk>")


def test_alternatives_have_their_own_words(monkeypatch):
    translator = build(
        monkeypatch, outputs=("w1 x", "x y w2", "w1 w2"), replace_unknown=True, num_hypotheses=3
    )

    first, second = translator.translate(["A B", "C D E"])

    assert [found.text for found in (first, *first.alternatives)] == ["w1 B", "A B w2", "w1 w2"]
    assert [found.text for found in (second, *second.alternatives)] == ["w1 D", "C D w2", "w1 w2"]


def test_word_of_an_end_of_the_source_stays_unknown(monkeypatch):
    translator = build(monkeypatch, outputs=("w1 w2 x",), replace_unknown=True)

    # Its third token is </s>, which is no word.
    (found,) = translator.translate(["A B"])

    assert found.text == "w1 w2 <unk>"


def test_alignment_of_the_model_is_used():
    tokenizer = VanillaTransformerTokenizer.train(["w1 w2"], kind="word", vocab_size=300)
    model = build_variant(vocab_size=len(tokenizer))
    model.generation_config.suppress_tokens = list(
        set(range(len(tokenizer))) - {tokenizer.unk_token_id}
    )
    translator = Translator(model, tokenizer, replace_unknown=True, max_extra_tokens=0)

    (found,) = translator.translate(["A B C"])

    assert found.unknown == len(found.text.split()) > 0
    assert set(found.text.split()) <= set("ABC")
