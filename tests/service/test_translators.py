"""Translators of a service: the languages that models have, and what a request is done with."""

import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.service.translators import RequestKind, ServedLanguages, Translators
from vanilla_transformer_tools.text.tokenizer_pair import target_tags
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.translator import LEAST_TOKENS

from ..models import save_small_model
from ..support.pretrained import GERMAN

LINES = ["ein hund", "ja", "der alte mann schläft. oh nein! der alte hund rennt. ja!"]
CARD = "---\nlanguage:\n{}---\n\n# Model\n"


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer.train(LINES * 3, vocab_size=300)


@pytest.fixture
def folder(tmp_path, tokenizer):
    return save_small_model(tmp_path, tokenizer)


def write_card(folder, *languages):
    items = "".join(f"- {language}\n" for language in languages)
    (folder / "README.md").write_text(CARD.format(items), encoding="utf-8")


def translators_of(name, source=None, target=None, **settings):
    languages = ServedLanguages.load(str(name), source, target)
    chosen = languages.chosen(languages.sources[0], languages.targets[0])
    first = Translator.from_pretrained(
        str(name), source_language=chosen[0], target_language=chosen[1], **settings
    )
    return Translators(first, languages)


def sources_of(translators, monkeypatch):
    """Token ids that the engine gets from now on."""
    seen = []
    engine = translators.first.engine
    translate_batch = engine.translate_batch

    def note(sources, *others):
        seen.extend(sources)
        return translate_batch(sources, *others)

    monkeypatch.setattr(engine, "translate_batch", note)
    return seen


# Languages


@pytest.mark.parametrize(
    ("card", "target", "found"),
    [
        (["de", "en"], None, ("de", "en")),
        (["de", "en"], "fr", ("de", "fr")),
        # It is no truth value.
        (["no", "en"], None, ("no", "en")),
    ],
)
def test_model_of_one_direction_has_the_two_languages_of_its_card(folder, card, target, found):
    write_card(folder, *card)

    languages = ServedLanguages.load(str(folder), None, target)

    assert str(languages) == "{} -> {}".format(*found)
    assert languages.chosen(*found) == (None, None)


@pytest.mark.parametrize(
    ("named", "got"),
    [
        ((), "no languages"),
        (("de", "en", "fr"), r"\['de', 'en', 'fr'\]"),
    ],
)
def test_languages_that_nothing_names_must_be_given(folder, named, got):
    if named:
        write_card(folder, *named)

    with pytest.raises(
        ValueError, match=f"(?s)source .* got {got} in.*--source_language.*--target"
    ):
        ServedLanguages.load(str(folder))
    languages = ServedLanguages.load(str(folder), "x", "y")
    assert (languages.sources, languages.targets) == (("x",), ("y",))


def test_model_with_tags_translates_from_its_card_into_its_tags(tmp_path, monkeypatch):
    tokenizer = VanillaTransformerTokenizer.train(
        LINES, vocab_size=300, target_languages=["de", "fr"]
    )
    folder = save_small_model(tmp_path, tokenizer)
    write_card(folder, "en", "de", "fr")

    translators = translators_of(folder)

    languages = translators.languages
    assert (languages.sources, languages.targets) == (("en", "de", "fr"), ("de", "fr"))
    kinds = [translators.kind("en", target, 0) for target in ("de", "fr")]
    assert kinds == [RequestKind(None, "de", 0), RequestKind(None, "fr", 0)]
    seen = sources_of(translators, monkeypatch)
    for kind in kinds:
        translators.translate(kind, LINES)
    tags = target_tags(tokenizer)
    assert [source[0] for source in seen] == [tags["de"]] * 3 + [tags["fr"]] * 3


def test_model_with_codes_translates_between_all_of_them(pretrained):
    _, folder = pretrained("nllb")

    translators = translators_of(folder)

    assert translators.languages.sources == translators.languages.targets
    assert len(translators.languages.sources) == 4
    for pair in (("deu_Latn", "zho_Hans"), ("eng_Latn", "deu_Latn")):
        source, target = pair
        expected = Translator.from_pretrained(
            str(folder), source_language=source, target_language=target
        )
        found = translators.translate(translators.kind(source, target, 0), GERMAN[:3])
        assert [best for (best,) in found] == [one.text for one in expected.translate(GERMAN[:3])]


def test_language_that_is_not_offered_is_refused_with_some_that_are():
    codes = tuple(f"l{number}" for number in range(20))
    languages = ServedLanguages(codes, ("en",))

    with pytest.raises(ValueError, match=r"`source` .* l0, l1.*l7 \.\.\. \(20 in all\), got 'xx'"):
        languages.chosen("xx", "en")
    with pytest.raises(ValueError, match=r"`target` must be one .* en, got 'de'"):
        languages.chosen("l1", "de")
    with pytest.raises(ValueError, match="It does not detect languages"):
        languages.chosen("auto", "en")


# Work


def test_parts_are_those_that_translator_cuts(folder, monkeypatch):
    translators = translators_of(folder, "de", "en", max_source_length=9)
    seen = sources_of(translators, monkeypatch)
    lines = [*LINES, "", " \t", "ein hund " * 200]
    kind = translators.kind("de", "en", 0)

    parts = translators.cut(kind, lines)
    list(translators.first.translate(lines))

    tokenizer = translators.first.tokenizer
    ours = [tokenizer(str(part.text).strip())["input_ids"] for found in parts for part in found]
    assert sorted(ours) == sorted(seen)
    assert ["".join(str(part.text) for part in found) for found in parts[:3]] == LINES
    # Short ones count for more.
    counted = [max(LEAST_TOKENS, len(ids)) for ids in ours]
    assert [part.tokens for found in parts for part in found] == counted
    assert [bool(found) for found in parts] == [True, True, True, False, False, True]


@pytest.mark.parametrize(
    ("search", "most"),
    [
        ({"num_beams": 3}, 2),
        ({"do_sample": True}, 9),
        ({"do_sample": True, "mbr_candidates": 4}, 3),
    ],
)
def test_alternatives_are_as_many_as_the_search_finds(folder, search, most):
    translators = translators_of(folder, "de", "en", **search)

    with pytest.raises(ValueError, match=f"from 0 to {most}, .* got {most + 1}"):
        translators.kind("de", "en", most + 1)
    (found,) = translators.translate(translators.kind("de", "en", most), ["ein hund"])
    assert len(found) == 1 + most


def test_search_and_limits_are_those_of_the_options(folder):
    translators = translators_of(
        folder, "de", "en", num_beams=3, max_source_length=9, max_tokens_per_batch=600
    )

    made = translators._of(RequestKind(None, None, 1))

    assert (made.search.num_beams, made.search.num_hypotheses) == (3, 2)
    assert (made.max_source_length, made.max_tokens_per_batch) == (9, 600 // 3)
    assert made.engine is translators.first.engine
    assert translators._of(RequestKind(None, None, 1)) is made
