"""Translator: hypotheses, samples, minimum Bayes risk, details, prefixes, engines and dtypes."""

import pytest
import torch

from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.bayes_risk import expected_utilities
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


def test_bayes_risk_chooses_among_candidates_by_their_likeness(build):
    candidates = list(build(do_sample=True, num_hypotheses=6).translate(LINES))

    chosen = list(build(do_sample=True, mbr_candidates=6, scores=True).translate(LINES))

    for line, result, one in zip(LINES, candidates, chosen, strict=True):
        texts = [result.text, *(other.text for other in result.alternatives)]
        utilities = expected_utilities(texts, [1.0] * 6)
        if line.strip():
            assert one.score == pytest.approx(max(utilities))
            assert one.text in texts
            assert utilities[texts.index(one.text)] == pytest.approx(max(utilities))
    assert [one.text for one in chosen] != [result.text for result in candidates]


def test_bayes_risk_weighs_the_hypotheses_of_a_beam(build):
    translator = build(num_beams=4, mbr_candidates=4, num_hypotheses=2, scores=True)

    for line, result in zip(LINES, translator.translate(LINES), strict=True):
        assert len(result.alternatives) == 1
        assert not line.strip() or 100 >= result.score >= result.alternatives[0].score > 0


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
    for setting in ({"details": True}, {"replace_unknown": True}, {"markup": "html"}):
        (name,) = setting
        with pytest.raises(ValueError, match=rf"`{name}` needs the engine 'torch'.* got Foreign"):
            Translator(Foreign(), tokenizer, **setting)


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
