"""Text in a Unicode form: on the way in, and composed again on the way out."""

import json
import os
import unicodedata
from typing import get_args

import pytest
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.tokenization_vanilla_transformer import (
    TokenizerKind,
    UnicodeForm,
    VanillaTransformerTokenizer,
)
from vanilla_transformer_tools.exports.export import export_model
from vanilla_transformer_tools.translation import Translator

from ..models import save_small_model

LINES = [
    "한국어 문장이 있다.",
    "Tiếng Việt có những dấu thanh: ệ ữ ấ ỡ.",
    "L'élève a mangé une crêpe à Noël, ça va où?",
]
FORMS = get_args(UnicodeForm)


def train(kind="bpe", form="NFD", **changes):
    return VanillaTransformerTokenizer.train(
        LINES * 3, vocab_size=400, kind=kind, unicode_form=form, **changes
    )


def decoded(tokenizer, texts=LINES):
    return tokenizer.batch_decode(tokenizer(texts).input_ids, skip_special_tokens=True)


def settings(folder):
    return json.loads((folder / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", get_args(TokenizerKind))
def test_text_comes_back_composed_however_it_was_written(kind, form):
    tokenizer = train(kind, form)

    for written in ("NFC", "NFD"):
        texts = [unicodedata.normalize(written, line) for line in LINES]
        assert decoded(tokenizer, texts) == LINES


def test_decomposed_syllables_have_tokens_of_their_own():
    text = "국장"

    def tokens_of(form):
        return train("char", form).tokenize(text)

    assert tokens_of("NFD") == list(unicodedata.normalize("NFD", text))
    assert tokens_of(None) == ["국", "장"]


@pytest.mark.parametrize("kind", get_args(TokenizerKind))
def test_text_that_was_apart_comes_back_apart(tmp_path, kind):
    apart = [unicodedata.normalize("NFD", line) for line in LINES]
    tokenizer = VanillaTransformerTokenizer.train(
        [*apart, LINES[0]], vocab_size=400, kind=kind, unicode_form="NFD"
    )
    tokenizer.save_pretrained(tmp_path)

    assert decoded(tokenizer) == apart
    assert decoded(VanillaTransformerTokenizer.from_pretrained(tmp_path)) == apart


def test_stray_lines_that_are_apart_leave_the_rest_composed():
    stray = unicodedata.normalize("NFD", LINES[0])
    tokenizer = VanillaTransformerTokenizer.train(
        [stray, *LINES[1:], *LINES[1:]], kind="char", unicode_form="NFD"
    )

    assert decoded(tokenizer, LINES[1:]) == LINES[1:]


def test_text_without_accents_in_training_is_composed():
    tokenizer = VanillaTransformerTokenizer.train(["ete"], vocab_size=300, unicode_form="NFD")

    assert decoded(tokenizer, ["été"]) == ["été"]


def test_compatibility_forms_replace_characters_for_good():
    assert decoded(train(form="NFKD"), ["ﬁn ①"]) == ["fin 1"]
    assert decoded(train(form="NFD"), ["ﬁn ①"]) == ["ﬁn ①"]


@pytest.mark.parametrize("kind", get_args(TokenizerKind))
def test_text_that_normalizes_to_a_special_token_is_plain_text(kind):
    tokenizer = train(kind, "NFKC")

    ids = tokenizer("\uff1c/s\uff1e").input_ids

    assert ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("form", [None, *FORMS])
def test_saved_tokenizer_equals_the_trained_one(tmp_path, form):
    tokenizer = train(form=form)
    tokenizer.save_pretrained(tmp_path)

    loaded = VanillaTransformerTokenizer.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "again")

    assert loaded(LINES).input_ids == tokenizer(LINES).input_ids
    assert decoded(loaded) == LINES
    # Transformers adds how it was loaded.
    assert settings(tmp_path).items() <= settings(tmp_path / "again").items()


def test_code_lies_in_the_folder_before_transformers_uploads_it(tmp_path, monkeypatch):
    there = []

    def save_and_upload(self, folder, *args, **kwargs):
        there.extend(os.listdir(folder))
        return ()

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", save_and_upload)

    files = train().save_pretrained(tmp_path / "new", push_to_hub=True)

    assert there == ["composing_vanilla_transformer.py"]
    assert files == (str(tmp_path / "new" / there[0]),)


@pytest.mark.parametrize("form", [None, "NFC", "NFKC"])
def test_tokenizer_that_decomposes_nothing_needs_no_code(tmp_path, form):
    train(form=form).save_pretrained(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not {"auto_map", "unicode_form"} & settings(tmp_path).keys()


def test_export_translates_like_the_model_and_writes_composed_text(tmp_path):
    tokenizer = VanillaTransformerTokenizer.train(LINES, kind="char", unicode_form="NFD")
    folder = save_small_model(tmp_path / "model", tokenizer)
    export_model(str(folder), tmp_path / "export", force=False)

    def translate(name, engine):
        translator = Translator.from_pretrained(
            str(tmp_path / name), engine=engine, max_extra_tokens=9
        )
        return [translation.text for translation in translator.translate(LINES, "été")]

    texts = translate("export", "ctranslate2")
    assert texts == translate("model", "torch")
    assert all(text.startswith("été") for text in texts)


def test_unknown_form_is_refused():
    with pytest.raises(ValueError, match="must be one of NFC, NFD, NFKC, NFKD, got 'nfd'"):
        train(form="nfd")
