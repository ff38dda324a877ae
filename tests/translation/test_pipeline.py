"""`pipeline("vanilla-translation")`: what Transformers' former translation pipeline gave."""

import pytest
from transformers import pipeline

from vanilla_transformer_tools.translation import Search, Translator

from ..text.test_tokenizer_pair import GREEK, save_latin_to_greek

LINES = ["ein hund rennt.", "", "ja"]


@pytest.fixture
def folder(tiny_model, tokenizer, tmp_path):
    """The tiny model, saved with a tokenizer of letters."""
    tiny_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def texts(folder, lines, **settings):
    translator = Translator.from_pretrained(folder, **settings)
    return [{"translation_text": result.text} for result in translator.translate(lines)]


def test_pipeline_translates_as_translator_does(folder):
    translate = pipeline("vanilla-translation", model=folder)

    expected = texts(folder, LINES)
    assert translate(LINES) == translate(iter(LINES)) == expected
    assert translate(LINES[-1]) == expected[-1:]


def test_pipeline_takes_settings_when_made_and_when_called(folder):
    translate = pipeline("vanilla-translation", model=folder, num_beams=3, max_extra_tokens=2)

    assert translate(LINES) == texts(folder, LINES, num_beams=3, max_extra_tokens=2)
    assert translate(LINES, num_beams=1) == texts(folder, LINES, num_beams=1, max_extra_tokens=2)
    wide = texts(folder, LINES, num_beams=3, max_extra_tokens=2)
    assert texts(folder, LINES) != wide
    search = Search(num_beams=3, max_extra_tokens=2)
    assert pipeline("vanilla-translation", model=folder, search=search)(LINES) == wide


def test_pipeline_writes_in_the_vocabulary_of_the_target(tmp_path):
    folder = save_latin_to_greek(tmp_path)

    translated = pipeline("vanilla-translation", model=folder)(LINES)

    assert translated == texts(folder, LINES)
    assert translated[0]["translation_text"].strip(GREEK) == ""
    assert translated[0]["translation_text"]
