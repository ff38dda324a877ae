"""Translator: hypotheses, samples, details, unknown tokens, engines and dtypes."""

import pytest
import torch

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.engines import Hypothesis, TorchEngine

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


def test_samples_count_in_the_batch(build, monkeypatch):
    rows = []
    search = TorchEngine._search

    def search_and_note(self, sources, *others):
        rows.append(len(sources))
        return search(self, sources, *others)

    monkeypatch.setattr(TorchEngine, "_search", search_and_note)

    # A short line counts for 16 tokens, and each has four samples.
    translator = build(do_sample=True, num_hypotheses=4, max_tokens_per_batch=128)
    list(translator.translate(["ja"] * 5))

    assert rows == [8, 8, 4]


class Foreign:
    """An engine that only searches."""

    max_positions = 50
    last_position = 50

    def translate_batch(self, sources, prefixes, limits, search):
        return [[Hypothesis(source[:-1], -1.0, end=2)] for source in sources]


def test_any_engine_will_do_but_for_details(tokenizer):
    translator = Translator(Foreign(), tokenizer)

    results = list(translator.translate(["ja", "", "nein"]))

    assert [result.text for result in results] == ["ja", "", "nein"]
    assert translator.max_source_length == 50
    for setting in ({"details": True}, {"do_sample": True, "seed": 1}):
        *_, name = setting
        with pytest.raises(ValueError, match=rf"`{name}` needs the engine 'torch'.* got Foreign"):
            Translator(Foreign(), tokenizer, **setting)


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
    engine = Foreign()
    engine.translate_batch = lambda *_: [[Hypothesis(ids, -1.0, tokenizer.eos_token_id)]]

    (found,) = Translator(engine, tokenizer).translate(["w1"])

    assert (found.text, found.unknown) == (shown, shown.count("<unk>"))


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
