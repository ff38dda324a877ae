"""Two vocabularies: how their tokenizers lie in a folder, are found there, and belong together."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.tokenization_vanilla_transformer import TokenizerKind
from vanilla_transformer_tools.text import tokenizer_pair
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

from ..models import TWO_TABLES, Model, build_variant

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


@pytest.mark.parametrize("changes", [{}, TWO_TABLES], ids=["one_table", "two_tables"])
def test_one_vocabulary_has_one_tokenizer_whatever_the_tables(tmp_path, changes):
    build_variant(**changes).save_pretrained(tmp_path)
    TokenizerPair.joint(learn(LATIN)).save_pretrained(tmp_path)

    assert not (tmp_path / "target_tokenizer").exists()
    assert TokenizerPair.from_pretrained(str(tmp_path)).is_joint


def test_contents_tell_pairs_apart_by_either_side():
    pair, *others = (
        TokenizerPair(learn(source), learn(target))
        for source, target in ((LATIN, GREEK), (LATIN, GREEK[1:]), (LATIN[1:], GREEK))
    )

    assert all(other.contents != pair.contents for other in others)


def test_revision_reaches_every_file_of_the_pair(tmp_path, monkeypatch):
    folder, asked = save_latin_to_greek(tmp_path), []

    def find(name, file, revision=None):
        asked.append((file, revision))
        return tmp_path / file

    def load(name, subfolder="", **loading):
        asked.append((subfolder, loading["revision"]))
        return AutoTokenizer.from_pretrained(folder, subfolder=subfolder)

    monkeypatch.setattr(tokenizer_pair, "find_file", find)
    monkeypatch.setattr(tokenizer_pair, "load_tokenizer", load)

    TokenizerPair.from_pretrained("me/model", revision="v1")

    files = ("config.json", "", "target_tokenizer/tokenizer.json", "target_tokenizer")
    assert asked == [(file, "v1") for file in files]


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
