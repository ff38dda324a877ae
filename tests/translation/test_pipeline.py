"""`pipeline("vanilla-translation")`: what Transformers' former translation pipeline gave."""

import pytest
from transformers import pipeline

from vanilla_transformer_tools.translation import Search, Translator

from ..text.test_tokenizer_pair import GREEK, save_latin_to_greek

LINES = ["ein hund rennt.", "", "ja"]


@pytest.fixture
def folder(tmp_path):
    """A model that writes in a vocabulary of its own."""
    return save_latin_to_greek(tmp_path)


def texts(folder, lines, **settings):
    translator = Translator.from_pretrained(folder, **settings)
    return [{"translation_text": result.text} for result in translator.translate(lines)]


def test_pipeline_translates_as_translator_does(folder):
    translate = pipeline("vanilla-translation", model=folder)

    expected = texts(folder, LINES)
    assert translate(LINES) == translate(iter(LINES)) == expected
    assert translate(LINES[-1]) == expected[-1:]
    assert expected[0]["translation_text"]
    assert expected[0]["translation_text"].strip(GREEK) == ""


def test_pipeline_takes_settings_when_made_and_when_called(folder):
    translate = pipeline("vanilla-translation", model=folder, num_beams=3, max_extra_tokens=2)

    wide = texts(folder, LINES, num_beams=3, max_extra_tokens=2)
    assert translate(LINES) == wide != texts(folder, LINES)
    short = texts(folder, LINES, num_beams=3, max_extra_tokens=0)
    assert translate(LINES, max_extra_tokens=0) == short != wide
    search = Search(num_beams=3, max_extra_tokens=2)
    assert pipeline("vanilla-translation", model=folder, search=search)(LINES) == wide
