"""Choosing the languages of pretrained tokenizers, which name those of both sides."""

import copy
import json

import pytest
from transformers import AutoTokenizer, GenerationConfig

from vanilla_transformer_tools.text.bpe_dropout import SegmentedPairs
from vanilla_transformer_tools.text.token_ids import encode_pairs
from vanilla_transformer_tools.text.tokenizer_pair import (
    TokenizerPair,
    choose_languages,
    language_codes,
    language_prefix,
)

from ..support.pretrained import BUILD, ENGLISH, GERMAN

NOTHING = GenerationConfig()
# A tokenizer, two of its languages, and how many it has.
KNOWN = {
    "nllb": ("deu_Latn", "eng_Latn", 4),
    "m2m100": ("de", "en", 100),
    "mbart50": ("de_DE", "en_XX", 52),
    "mbart": ("de_DE", "en_XX", 25),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    made = {}

    def find(name):
        if name not in made:
            made[name] = BUILD[name](tmp_path_factory.mktemp(name))[1]
        return made[name]

    return find


@pytest.mark.parametrize("name", KNOWN)
def test_labels_are_those_of_the_tokenizer_for_its_target(tokenizers, name):
    german, english, count = KNOWN[name]
    tokenizer = tokenizers(name)
    pair = TokenizerPair.joint(tokenizer).between(german, english, NOTHING)

    encoded = encode_pairs({"source": GERMAN[:9], "target": ENGLISH[:9]}, pair, 60)

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.src_lang, tokenizer.tgt_lang = german, english
    assert encoded["input_ids"] == tokenizer(GERMAN[:9])["input_ids"]
    assert encoded["labels"] == tokenizer(text_target=ENGLISH[:9])["input_ids"]
    codes = language_codes(tokenizer)
    assert len(codes) == count
    assert (pair.start_token if name == "mbart" else pair.first_token) == codes[english]
    assert codes[english] in encoded["labels"][0]


def test_marian_encodes_targets_with_their_own_pieces(tokenizers):
    tokenizer = tokenizers("marian")

    encoded = encode_pairs(
        {"source": GERMAN[:9], "target": ENGLISH[:9]}, TokenizerPair.joint(tokenizer), 60
    )

    assert encoded["labels"] == tokenizer(text_target=ENGLISH[:9])["input_ids"]
    assert encoded["labels"] != tokenizer(ENGLISH[:9])["input_ids"]


@pytest.mark.parametrize("name", KNOWN)
def test_given_tokenizer_is_not_changed(tokenizers, name):
    tokenizer = tokenizers(name)
    before = tokenizer(GERMAN[3])["input_ids"]
    other = next(code for code, at in language_codes(tokenizer).items() if at not in before)

    chosen, _ = choose_languages(tokenizer, other, other, NOTHING)

    assert chosen(GERMAN[3])["input_ids"] != before
    assert tokenizer(GERMAN[3])["input_ids"] == before


@pytest.mark.parametrize("name", KNOWN)
def test_chosen_languages_are_saved_and_become_the_defaults(tokenizers, tmp_path, name):
    german, english, _ = KNOWN[name]
    pair = TokenizerPair.joint(tokenizers(name)).between(german, english, NOTHING)
    pair.save_pretrained(tmp_path)

    saved = TokenizerPair.from_pretrained(str(tmp_path))

    again = saved.between(None, None, NOTHING)
    assert (again.source.src_lang, again.source.tgt_lang) == (german, english)
    assert again.contents == pair.contents


def test_first_token_of_the_generation_config_is_the_default_target(tokenizers):
    tokenizer = tokenizers("nllb")
    french = language_codes(tokenizer)["fra_Latn"]

    chosen, code = choose_languages(
        tokenizer, "deu_Latn", None, GenerationConfig(forced_bos_token_id=french)
    )

    assert chosen.tgt_lang == "fra_Latn"
    assert code == french


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("de", "eng_Latn", r"source language .* such as deu_Latn.*\(4 in all\), got 'de'\. Name"),
        ("deu_Latn", "german", r"target language .*, got 'german'\. Name it: --target_language"),
        (None, "eng_Latn", r"source language .*, got None\. Name it: --source_language"),
        (None, None, r"(?s)source language .*, got None.*target language .*, got None"),
    ],
)
def test_language_that_is_unknown_or_missing_is_refused(tokenizers, source, target, message):
    with pytest.raises(ValueError, match=message):
        choose_languages(tokenizers("nllb"), source, target, NOTHING)


def test_english_that_a_class_saves_is_no_chosen_source(tokenizers, tmp_path):
    tokenizers("nllb").save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)

    assert saved.src_lang == "eng_Latn"
    with pytest.raises(ValueError, match=r"source language .*, got None"):
        choose_languages(saved, None, "deu_Latn", NOTHING)


@pytest.mark.parametrize("name", ["nllb", "m2m100"])
def test_table_may_have_rows_to_spare_but_none_too_few(tokenizers, tmp_path, name):
    tokenizer = tokenizers(name)
    tokenizer.save_pretrained(tmp_path)
    rows = 1 + max(language_codes(tokenizer).values())

    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": rows + 2}))
    TokenizerPair.from_pretrained(str(tmp_path))

    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": rows - 1}))
    with pytest.raises(ValueError, match=f"{rows} entries of the source for a table of {rows - 1}"):
        TokenizerPair.from_pretrained(str(tmp_path))


def test_nllb_with_codes_after_the_text_is_refused(tokenizers, tmp_path):
    tokenizers("nllb").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(config | {"legacy_behaviour": True}), encoding="utf-8")
    legacy = AutoTokenizer.from_pretrained(tmp_path)

    assert legacy("Hund")["input_ids"][-2] == legacy.eos_token_id
    message = "`legacy_behaviour` true, .* Set `legacy_behaviour` to false in tokenizer_config.json"
    with pytest.raises(ValueError, match=message):
        TokenizerPair.from_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=message):
        TokenizerPair.joint(legacy)


@pytest.mark.parametrize("name", ["marian", "bart"])
def test_language_is_refused_by_a_tokenizer_without_any(tokenizers, name):
    pair = TokenizerPair.joint(tokenizers(name))

    with pytest.raises(ValueError, match="takes no source language, got 'de'"):
        pair.between("de", None, NOTHING)
    with pytest.raises(ValueError, match="takes no target language, got 'de'"):
        pair.between(None, "de", NOTHING)


def test_tags_of_marian_come_before_the_source(tokenizers):
    tokenizer = tokenizers("marian_to_several")

    prefix = language_prefix(tokenizer, "fra")

    tagged = tokenizer(">>fra<< " + GERMAN[3])["input_ids"]
    assert [*prefix, *tokenizer(GERMAN[3])["input_ids"]] == tagged
    with pytest.raises(ValueError, match="one of the model's, deu, fra, got 'eng'"):
        language_prefix(tokenizer, "eng")


def test_truncation_keeps_the_code_after_the_end(tokenizers):
    pair = TokenizerPair.joint(tokenizers("mbart")).between("de_DE", "en_XX", NOTHING)
    codes = language_codes(pair.source)

    encoded = encode_pairs({"source": [GERMAN[300]], "target": [ENGLISH[300]]}, pair, 4)

    assert encoded["input_ids"][0][-2:] == [2, codes["de_DE"]]
    assert encoded["labels"][0][-2:] == [2, codes["en_XX"]]
    assert [len(encoded[side][0]) for side in ("input_ids", "labels")] == [4, 4]


def test_bpe_dropout_writes_labels_in_the_target_language(tokenizers):
    pair = TokenizerPair.joint(tokenizers("nllb")).between("deu_Latn", "eng_Latn", NOTHING)

    plain, dropped = (
        SegmentedPairs(pair, GERMAN[:9], ENGLISH[:9], rate=rate, seed=1, max_length=60)
        for rate in (0.0, 0.5)
    )

    expected = encode_pairs({"source": GERMAN[:9], "target": ENGLISH[:9]}, pair, 60)
    assert [plain[row]["labels"] for row in range(9)] == expected["labels"]
    assert [dropped[row]["labels"][0] for row in range(9)] == [pair.first_token] * 9
    assert [dropped[row]["labels"] for row in range(9)] != expected["labels"]


def test_bpe_dropout_refuses_a_tokenizer_that_is_not_fast(tokenizers):
    with pytest.raises(ValueError, match=r"needs a BPE vocabulary .* got MarianTokenizer and 0\.1"):
        SegmentedPairs(
            TokenizerPair.joint(tokenizers("marian")), ["a"], ["b"], rate=0.1, seed=1, max_length=9
        )
