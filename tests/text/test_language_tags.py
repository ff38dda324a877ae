"""One model for several target languages: a tag in front of the source names one of them."""

from itertools import permutations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.tokenization_vanilla_transformer import language_tags
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.bpe_dropout import SegmentedPairs
from vanilla_transformer_tools.text.languages import language_prefix
from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs
from vanilla_transformer_tools.text.token_ids import pair_lengths, tokenize_pairs
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.training.run import train
from vanilla_transformer_tools.translation import Translator

from ..support.engines import Recorder
from ..support.training_runs import SIZES, build_arguments, read_json

LANGUAGES = ["de", "zh-Hans"]
# So often, and behind so many letters, that a vocabulary would learn the tags as pieces of words.
SPELLED = ["a <2de> b", *(f"{letter}<2de> {letter}<2zh-Hans>" for letter in "abcdefgh")] * 50
KINDS = ["bpe", "unigram", "char", "word"]

NUMBERS = {
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf"],
    "en": ["zero", "one", "two", "three", "four", "five"],
}
ROWS = [
    (str(n), word, language) for language in NUMBERS for n, word in enumerate(NUMBERS[language])
]


def train_tokenizer(kind="bpe", **options):
    return VanillaTransformerTokenizer.train(
        SPELLED, kind=kind, vocab_size=300, target_languages=LANGUAGES, **options
    )


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


# The vocabulary


@pytest.mark.parametrize(
    ("kind", "pretokenized"), [*((kind, False) for kind in KINDS), ("bpe", True)]
)
def test_text_that_spells_a_tag_is_plain_text_or_unknown(kind, pretokenized):
    tokenizer = train_tokenizer(kind, pretokenized=pretokenized)
    tags = set(language_tags(tokenizer).values())

    ids = tokenizer(SPELLED[:9])["input_ids"]

    assert len(tags) == 2
    assert not tags & {token_id for line in ids for token_id in line}
    if kind == "word":
        assert tokenizer.convert_ids_to_tokens(ids[0])[1] == "<unk>"
    else:
        assert tokenizer.batch_decode(ids, skip_special_tokens=True) == SPELLED[:9]


@pytest.mark.parametrize("kind", KINDS)
def test_vocabulary_size_counts_the_tags(kind):
    # More to learn than there is room for.
    words = ["".join(letters) for letters in permutations("abcdefgh", 3)]
    size = {"bpe": 300, "unigram": 300, "char": 9, "word": 20}[kind]

    tokenizer = VanillaTransformerTokenizer.train(
        [" ".join(words), "<2de>"] * 9, kind=kind, vocab_size=size, target_languages=LANGUAGES
    )

    assert len(tokenizer) == size
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))


def test_vocabulary_that_tags_leave_no_room_is_refused():
    with pytest.raises(ValueError, match=r"at least 264 .* 6 special tokens .* got 263"):
        VanillaTransformerTokenizer.train(["a"], vocab_size=263, target_languages=LANGUAGES)


def test_tags_survive_saving_where_the_package_is_absent_and_are_no_text(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)

    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert language_tags(saved) == language_tags(tokenizer)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert {name: backend.token_to_id(f"<2{name}>") for name in LANGUAGES} == language_tags(saved)
    ids = language_prefix(saved, "de") + saved("ab")["input_ids"]
    assert saved.decode(ids, skip_special_tokens=True) == "ab"


@pytest.mark.parametrize("language", ["", "de en"])
def test_language_without_a_proper_name_is_refused(language):
    with pytest.raises(ValueError, match=f"letters, digits, - and _, .* got {language!r}"):
        VanillaTransformerTokenizer.train(["a"], vocab_size=300, target_languages=[language])


@pytest.mark.parametrize("language", ["fr", None])
def test_language_that_the_model_does_not_know_is_refused_with_those_it_knows(tokenizer, language):
    with pytest.raises(ValueError, match=f"one of the model's, de, zh-Hans, got {language!r}"):
        language_prefix(tokenizer, language)


# Pairs


RECORDS = [{"source": s, "target": t, "to": {"code": tag}} for s, t, tag in ROWS]


def write_tsv(folder, rows=ROWS):
    (folder / "rows.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    return str(folder / "rows.tsv")


def write_parquet(folder):
    pq.write_table(pa.Table.from_pylist(RECORDS), folder / "rows.parquet")
    return str(folder / "rows.parquet")


@pytest.mark.parametrize("write_rows", [write_tsv, write_parquet])
def test_tag_column_is_read_beside_the_pairs(write_rows, tmp_path):
    rows = load_pairs(ParallelText((write_rows(tmp_path),), tag_column="to.code"))

    assert rows.column_names == ["source", "target", "tag"]
    assert [(row["source"], row["target"], row["tag"]) for row in rows] == ROWS


def test_tag_column_of_two_files_is_refused():
    with pytest.raises(ValueError, match="got the `tag_column` 'to' for 'a' and 'b'"):
        ParallelText(("a", "b"), tag_column="to")


def tagged(*rows):
    return Dataset.from_list(
        [dict(zip(("source", "target", "tag"), row, strict=True)) for row in rows]
    )


def test_tag_comes_before_the_source_counts_as_a_token_and_survives_truncation():
    tokenizer = VanillaTransformerTokenizer.train(
        ["abc"], kind="char", vocab_size=20, target_languages=LANGUAGES
    )
    pairs = tagged(("ab", "abc", "zh-Hans"), ("abc", "a", "de"))

    tokenized, truncated = tokenize_pairs(pairs, TokenizerPair.joint(tokenizer), max_length=4)

    assert truncated == 1
    sources = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenized["input_ids"]]
    assert sources == [[f"<2{tag}>", "a", "b", "</s>"] for tag in ("zh-Hans", "de")]
    assert tokenized["labels"][:] == tokenizer(["abc", "a"])["input_ids"]
    assert pair_lengths(tokenized).tolist() == [[4, 4], [4, 2]]


def test_length_that_leaves_no_room_beside_the_tag_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"at least 3, .* after a tag, got 2"):
        tokenize_pairs(tagged(("a", "b", "de")), TokenizerPair.joint(tokenizer), max_length=2)


def test_bpe_dropout_leaves_the_tag_and_counts_it(tokenizer):
    texts = {"source": ["a <2de> b"] * 2, "target": ["x"] * 2, "tag": ["zh-Hans", "de"]}
    pairs = SegmentedPairs(TokenizerPair.joint(tokenizer), texts, rate=0.5, seed=3, max_length=9)

    tags = language_tags(tokenizer)
    assert [pairs[row]["input_ids"][0] for row in (0, 1)] == [tags["zh-Hans"], tags["de"]]
    assert not set(tags.values()) & set(pairs[0]["labels"])
    assert [len(pairs[row]["input_ids"]) for row in (0, 1)] == pairs.draw(0)[:, 0].tolist()


def test_each_piece_of_a_long_line_begins_with_the_tag_and_fits(tokenizer):
    # Cut between tokens, so that a piece is as long as it may be.
    line = "ab" * 40
    (tag,) = language_prefix(tokenizer, "de")
    engine = Recorder()

    translator = Translator(engine, tokenizer, max_source_length=12, target_language="de")
    list(translator.translate([line]))

    assert len(engine.sources) > 3
    assert all(source.index(tag) == 0 for source in engine.sources)
    assert max(map(len, engine.sources)) == 12
    texts = [tokenizer.decode(source, skip_special_tokens=True) for source in engine.sources]
    assert sorted("".join(texts)) == sorted(line)


# A model of two languages


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model that writes digits as German or English words, as told, scored in training."""
    folder = tmp_path_factory.mktemp("numbers")
    settings = TrainSettings(
        train=[write_tsv(folder, ROWS * 300)],
        validation=[write_parquet(folder)],
        tag_column="to.code",
        tokenizer_kind="word",
        config=[*SIZES, "dropout=0.0"],
        max_tokens_per_batch=200,
        average_last=1,
    )
    train(settings, build_arguments(settings, folder / "run", num_train_epochs=1))
    return folder / "run"


@pytest.mark.parametrize("language", NUMBERS)
def test_model_translates_and_is_scored_in_the_language_of_the_tag(model_folder, language):
    translator = Translator.from_pretrained(str(model_folder), target_language=language)

    texts = [translation.text for translation in translator.translate(map(str, range(6)))]
    assert texts == NUMBERS[language]
    assert read_json(model_folder / "run.json")["target_languages"] == ["de", "en"]
    assert read_json(model_folder / "results.json")["validation"]["exact_match"] == 100


def test_fine_tuning_needs_the_tags_of_the_model(model_folder, tmp_path):
    settings = TrainSettings(
        train=[write_tsv(tmp_path, [(source, target) for source, target, _ in ROWS])],
        init_from=str(model_folder),
    )

    with pytest.raises(ValueError, match=r"de, en, got None.* --tag_column of the pairs"):
        train(settings, build_arguments(settings, tmp_path / "run"))
