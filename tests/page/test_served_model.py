"""What readers may choose, and that the model does it."""

import dataclasses

import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.page.served_model import LINES_AT_A_TIME, Choices, ServedModel
from vanilla_transformer_tools.translation import Search, Translation, Translator

from ..models import build_variant, save_small_model


@pytest.mark.parametrize(
    ("choices", "match"),
    [
        ({"beam": 4}, "no setting 'beam'. Choose from: source_language, target_language, num_b"),
        ({"num_beams": True}, "`num_beams` must be of type int, got True"),
        ({"top_p": "x"}, "`top_p` must be of type float, got 'x'"),
        ([1], r"The settings must be an object, such as {'num_beams': 4}, got \[1\]"),
        ({"num_hypotheses": 0}, "at least 1 and at most 10 here, got 0"),
        ({"num_beams": 11}, "at most 10 here, got 11"),
    ],
)
def test_choice_that_there_is_not_is_refused(choices, match):
    with pytest.raises(ValueError, match=match):
        Choices.of(choices)


def test_empty_choices_are_the_defaults():
    assert Choices.of({"source_language": "", "num_beams": None}) == Choices()
    assert Choices.of({"length_penalty": 1, "top_k": 3}) == Choices(length_penalty=1, top_k=3)


def test_panic_of_a_tokenizer_is_a_message(model, monkeypatch):
    class PanicException(BaseException):
        """As pyo3's, which is no `Exception`."""

    def panic(*_, **__):
        raise PanicException("Onig: retry-limit-in-match over")

    monkeypatch.setattr(Translator, "translate", panic)
    monkeypatch.setattr("vanilla_transformer_tools.page.served_model.encode_pair", panic)

    for call in (
        lambda: list(model.translate(["ja"], Choices())),
        lambda: model.attention("ja", Choices()),
    ):
        with pytest.raises(ValueError, match="The tokenizer of 'runs/one' failed: Onig"):
            call()


def test_every_choice_reaches_the_search(model):
    choices = Choices(num_beams=4, length_penalty=0.3, num_hypotheses=2)
    assert model.chosen_search(choices) == Search(4, 0.3, num_hypotheses=2, scores=True)
    # The beam is as wide as the number of translations.
    assert model.chosen_search(Choices(num_hypotheses=3)).num_beams == 3
    wide = ServedModel("wide", Translator(build_variant(), model.tokenizers.source, num_beams=12))
    assert wide.chosen_search(Choices()).num_beams == 10
    # Samples have no beam and no penalty, and beams no temperature.
    draws = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 8}
    sampled = dataclasses.replace(choices, do_sample=True, **draws)
    assert model.chosen_search(sampled) == Search(
        num_hypotheses=2, do_sample=True, scores=True, **draws
    )
    assert model.chosen_search(dataclasses.replace(choices, **draws)) == model.chosen_search(
        choices
    )


def test_other_readers_get_their_turn_between_parts_of_a_file(model, monkeypatch):
    parts = []

    def translate(self, lines, *, first_line):
        assert model._lock.locked()
        parts.append((first_line, len(lines)))
        return map(Translation, lines)

    monkeypatch.setattr(Translator, "translate", translate)
    lines = list(map(str, range(LINES_AT_A_TIME + 1)))

    found = [each.text for each in model.translate(lines, Choices())]

    assert found == lines
    assert parts == [(1, LINES_AT_A_TIME), (1 + LINES_AT_A_TIME, 1)]
    assert not model._lock.locked()


def test_attention_is_that_of_the_translation(model):
    (translation,) = model.translate(["ein hund"], Choices(num_beams=3))

    page = model.attention("ein hund", Choices(num_beams=3))

    assert f'"target":"{translation.text}"' in page


def test_attention_of_a_blank_or_long_line_is_refused(model, monkeypatch):
    config = model.translator.engine.model.config
    maps = 3 * config.encoder_layers * config.encoder_attention_heads
    monkeypatch.setattr("vanilla_transformer_tools.page.served_model.MOST_WEIGHTS", maps * 8**2)

    assert "ein" in model.attention("ein hun", Choices())
    for line, match in ((" ", "the line is blank"), ("ein hund", "at most 8 tokens, got 9")):
        with pytest.raises(ValueError, match=match):
            model.attention(line, Choices())


def test_model_of_several_directions_offers_them(tmp_path):
    tokenizer = VanillaTransformerTokenizer.train(
        ["ein hund rennt"] * 3, vocab_size=280, target_languages=["de", "fr"]
    )
    model = ServedModel.load(str(save_small_model(tmp_path, tokenizer)))

    assert model.languages == {"source_language": [], "target_language": ["de", "fr"]}
    assert model.begins_with["target_language"] == "de"
    default, german, french = (
        model._translator(Choices(target_language=language), False).tokenizers.source_prefix
        for language in (None, "de", "fr")
    )
    assert default == german != french
    french = ServedModel.load(str(tmp_path), target_language="fr")
    assert french.begins_with["target_language"] == "fr"
    with pytest.raises(ValueError, match="de, fr, got 'it'"):
        list(model.translate(["ja"], Choices(target_language="it")))


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("nllb", "deu_Latn", "zho_Hans"),
        # Its decoder begins with the code of the one language that it writes.
        ("mbart", "ar_AR", "de_DE"),
    ],
)
def test_model_between_languages_begins_with_two_of_them(pretrained, name, source, target):
    model = ServedModel.load(str(pretrained(name)[1]))

    assert model.begins_with == {"source_language": source, "target_language": target}
    sources, targets = model.languages.values()
    assert {source, "zho_Hans" if name == "nllb" else "zh_CN"} <= {*sources}
    assert (targets == [target]) == (name == "mbart")
    chosen = model._translator(Choices(source_language=sources[1]), False)
    assert chosen.tokenizer.src_lang == sources[1]
    assert chosen.tokenizer.tgt_lang == target
