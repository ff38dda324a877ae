"""Tokenizers of both sides: in a folder, found there, belonging together; and their languages."""

import copy
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.tokenization_vanilla_transformer import TokenizerKind
from vanilla_transformer_tools.text.bpe_dropout import SegmentedLines, SegmentedPairs
from vanilla_transformer_tools.text.languages import choose_languages, language_codes
from vanilla_transformer_tools.text.token_ids import encode_pairs
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

from ..models import TWO_TABLES, Model, build_variant
from ..support.pretrained import BUILD, ENGLISH, GERMAN

# Nothing in common but the special tokens: what is read by the wrong side is unknown.
LATIN = "abcdefghijklmnopqrstuvwxyz .,!?-'"
GREEK = "αβγδεζηθικλμνξοπρσςτυφχψωάέήίόύώ;·«»"


def learn(text: str, kind: TokenizerKind = "char") -> VanillaTransformerTokenizer:
    """One character, or one word, one token."""
    return VanillaTransformerTokenizer.train([text], vocab_size=99, kind=kind)


def build_latin_to_greek() -> tuple[Model, TokenizerPair]:
    """A model with random weights that reads Latin letters and writes Greek ones."""
    pair = TokenizerPair(learn(LATIN), learn(GREEK))
    assert (len(pair.source), len(pair.target)) == (37, 40)
    return build_variant(**TWO_TABLES, decoder_vocab_size=40), pair


def save_latin_to_greek(folder: Path) -> str:
    model, pair = build_latin_to_greek()
    model.save_pretrained(folder)
    pair.save_pretrained(folder)
    return str(folder)


def test_both_tokenizers_come_back_from_the_folder_of_their_model(tmp_path):
    _, saved = build_latin_to_greek()
    folder = save_latin_to_greek(tmp_path)

    loaded = TokenizerPair.from_pretrained(folder)
    beside = TokenizerPair.of_model(
        AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    )

    assert loaded.contents == beside.contents == saved.contents
    assert not loaded.is_joint
    # What anybody does who has not this package.
    target = AutoTokenizer.from_pretrained(folder, subfolder="target_tokenizer")
    assert target("αβγ")["input_ids"] == saved.target("αβγ")["input_ids"]


@pytest.mark.parametrize("side", ["", "target_tokenizer/"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", '{"version": "9.9"}'),
        # Python reads this one, and Rust does not.
        ("tokenizer.json", '{"added_tokens": [], "model": {"type": "WordLevel", "vocab": []}}'),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_damaged_tokenizer_is_told_in_one_line(tmp_path, side, name, content):
    folder = save_latin_to_greek(tmp_path)
    (tmp_path / f"{side}{name}").write_text(content)

    with pytest.raises(ValueError, match=rf"^[^\n]*{folder}[^\n]* Restore [^\n]*$"):
        TokenizerPair.from_pretrained(folder)


def test_contents_tell_pairs_apart_by_either_side():
    pair, *others = (
        TokenizerPair(learn(source), learn(target))
        for source, target in ((LATIN, GREEK), (LATIN, GREEK[1:]), (LATIN[1:], GREEK))
    )

    assert all(other.contents != pair.contents for other in others)


def test_missing_tokenizer_of_the_target_is_named(tmp_path):
    folder = save_latin_to_greek(tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "target_tokenizer")
    message = (
        r"half' must hold .*`decoder_vocab_size` of 40, got no target_tokenizer/tokenizer.json"
    )

    with pytest.raises(ValueError, match=message):
        TokenizerPair.from_pretrained(folder)
    with pytest.raises(ValueError, match=message):
        TokenizerPair.of_model(AutoModelForSeq2SeqLM.from_pretrained(folder), learn(LATIN))


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("checkpoint-500", r" Its training has not finished; '.*checkpoint-500' is a model\."),
        ("a", ""),
    ],
)
def test_folder_without_a_model_is_refused(tmp_path, content, hint):
    (tmp_path / content).mkdir()

    with pytest.raises(ValueError, match=rf"folder of a saved model, got no \S+ in it\.{hint}$"):
        TokenizerPair.from_pretrained(str(tmp_path))


def test_special_tokens_with_other_ids_on_the_other_side_are_refused(tmp_path):
    learn(GREEK).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["pad_token"] = "</s>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    with pytest.raises(ValueError, match=r"the same ids, got: <pad> is 0 and 2\. Train"):
        TokenizerPair(learn(LATIN), AutoTokenizer.from_pretrained(tmp_path))


# Languages of both sides

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


def test_truncation_keeps_the_code_after_the_end(tokenizers):
    pair = TokenizerPair.joint(tokenizers("mbart")).between("de_DE", "en_XX", NOTHING)
    codes = language_codes(pair.source)

    encoded = encode_pairs({"source": [GERMAN[300]], "target": [ENGLISH[300]]}, pair, 4)

    assert encoded["input_ids"][0][-2:] == [2, codes["de_DE"]]
    assert encoded["labels"][0][-2:] == [2, codes["en_XX"]]
    assert [len(encoded[side][0]) for side in ("input_ids", "labels")] == [4, 4]


def test_bpe_dropout_writes_labels_in_the_target_language(tokenizers):
    pair = TokenizerPair.joint(tokenizers("nllb")).between("deu_Latn", "eng_Latn", NOTHING)

    texts = {"source": GERMAN[:9], "target": ENGLISH[:9]}
    plain, dropped = (
        SegmentedPairs(pair, texts, rate=rate, seed=1, max_length=60) for rate in (0.0, 0.5)
    )

    expected = encode_pairs(texts, pair, 60)
    assert [plain[row]["labels"] for row in range(9)] == expected["labels"]
    assert [dropped[row]["labels"][0] for row in range(9)] == [pair.first_token] * 9
    assert [dropped[row]["labels"] for row in range(9)] != expected["labels"]


def test_bpe_dropout_refuses_a_tokenizer_that_is_not_fast(tokenizers):
    with pytest.raises(ValueError, match=r"needs a BPE vocabulary .* got MarianTokenizer and 0\.1"):
        SegmentedLines(tokenizers("marian"), ["a"], rate=0.1, seed="1")
