"""Token ids of pairs, their cache, and vocabularies."""

import datasets
import pytest
from datasets import Dataset

from vanilla_transformer.text_vanilla_transformer import without_blank_ends
from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.files import CACHE_VARIABLE
from vanilla_transformer_tools.text import token_ids
from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs
from vanilla_transformer_tools.text.token_ids import (
    cached_ids,
    encode_pairs,
    learn_tokenizer,
    tokenize_pairs,
)
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.text.units import most_frequent, unknown_strings

from ..support.full_disk import small_files
from ..support.odd_text import odd_lines
from ..support.pretrained import fsmt_tokenizer

PAIRS = [("abc", "aa"), ("", "bcab"), ("abca", "abcb"), ("bbbbbb", "a")]


@pytest.fixture(scope="module")
def tokenizers():
    return learn("aaaabc")


def learn(text, **options):
    tokenizer = VanillaTransformerTokenizer.train([text], vocab_size=20, kind="char", **options)
    return TokenizerPair.joint(tokenizer)


def pairs_of(rows, names=("source", "target", "tag")):
    columns = zip(*rows, strict=True)
    return Dataset.from_dict(dict(zip(names, map(list, columns), strict=False)))


def test_ids_are_those_of_the_tokenizer_and_targets_keep_their_characters():
    lines = odd_lines(100)
    tokenizer = VanillaTransformerTokenizer.train(lines, vocab_size=400, target_languages=["de"])
    pairs = {"source": lines, "target": lines, "tag": ["de"] * len(lines)}

    ids = encode_pairs(pairs, TokenizerPair.joint(tokenizer), 1000)

    stripped = list(map(without_blank_ends, lines))
    assert [row[1:] for row in ids["input_ids"]] == tokenizer(stripped)["input_ids"]
    assert ids["labels"] == tokenizer(text_target=stripped)["input_ids"]
    assert ids["labels"] != tokenizer(stripped)["input_ids"]


def test_tokenizing_truncates_before_eos_and_counts_pairs(tokenizers):
    tokenizer = tokenizers.source
    before = tokenizer.backend_tokenizer.to_str()

    tokenized, truncated = tokenize_pairs(pairs_of(PAIRS), tokenizers, max_length=4)

    # One pair is too long on its target, one on both sides, one on its source.
    assert truncated == 3
    sources, targets = tokenized["input_ids"][:], tokenized["labels"][:]
    assert tokenizer.batch_decode(sources) == ["abc</s>", "</s>", "abc</s>", "bbb</s>"]
    assert tokenizer.batch_decode(targets) == ["aa</s>", "bca</s>", "abc</s>", "a</s>"]
    # The tokenizer would go on truncating if it had been told to.
    assert tokenizer.backend_tokenizer.to_str() == before


# The cache of ids


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Folder of the entries."""
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vanilla_transformer"


@pytest.fixture
def tokenized(monkeypatch):
    """Numbers of pairs in the batches that were tokenised for entries, not for their names."""
    sizes = []
    encode = token_ids.encode_pairs

    def recording(pairs, *arguments, **options):
        sizes.append(len(pairs["source"]))
        return encode(pairs, *arguments, **options)

    monkeypatch.setattr(token_ids, "encode_pairs", recording)
    # Names are made from the ids of a sample.
    monkeypatch.setattr(token_ids, "_SAMPLE", 1)
    return sizes


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_second_run_reads_what_the_first_one_tokenised(cache, tokenizers, tokenized):
    first, truncated = cached_ids(pairs_of(PAIRS), tokenizers, max_length=4)
    second, truncated_again = cached_ids(pairs_of(PAIRS), tokenizers, max_length=4)

    expected, _ = tokenize_pairs(pairs_of(PAIRS), tokenizers, max_length=4)
    # The samples, the first run, and `tokenize_pairs`.
    assert tokenized == [1, 4, 1, 4]
    assert first.column_names == second.column_names == ["input_ids", "labels"]
    assert first[:] == second[:] == expected.select_columns(["input_ids", "labels"])[:]
    assert truncated == truncated_again == 3
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_saved_tokenizer_finds_the_entry_of_the_fresh_one(cache, tmp_path, kind):
    fresh = TokenizerPair.joint(
        VanillaTransformerTokenizer.train(["ab"], vocab_size=270, kind=kind)
    )
    cached_ids(pairs_of(PAIRS), fresh, max_length=9)
    fresh.save_pretrained(tmp_path / "model")

    cached_ids(
        pairs_of(PAIRS), TokenizerPair.from_pretrained(str(tmp_path / "model")), max_length=9
    )

    assert len(entries(cache)) == 1


@pytest.mark.parametrize(
    "changed",
    [
        [*PAIRS[:3], ("bbbbbb", "b")],
        [*PAIRS[:2], PAIRS[3], PAIRS[2]],
        # The same characters, cut elsewhere.
        [PAIRS[0], ("ab", "bcab"), ("ca", "abcb"), PAIRS[3]],
    ],
)
def test_changed_text_is_tokenised_anew(cache, tokenizers, monkeypatch, changed):
    # Otherwise the ids of the sample would differ.
    monkeypatch.setattr(token_ids, "_SAMPLE", 1)
    cached_ids(pairs_of(PAIRS), tokenizers, max_length=9)

    ids, _ = cached_ids(pairs_of(changed), tokenizers, max_length=9)

    texts = [tokenizers.source.batch_decode(ids[name][:], True) for name in ids.column_names]
    assert list(zip(*texts, strict=True)) == changed


def test_changed_tokenizer_or_setting_or_tag_is_tokenised_anew(cache, tokenizers, monkeypatch):
    monkeypatch.setattr(token_ids, "_SAMPLE", 1)
    # All tokenizers give the sample the same ids.
    plain = [("", ""), *PAIRS]
    german = [(*pair, "de") for pair in plain]
    tagged = learn("aaaabc", target_languages=["de", "en"])

    for number, (rows, tokenizer, max_length) in enumerate(
        [
            (plain, tokenizers, 9),
            (plain, tokenizers, 5),
            (plain, learn("bbbbca"), 9),
            (german, tagged, 9),
            ([*german[:4], (*PAIRS[3], "en")], tagged, 9),
        ],
        start=1,
    ):
        cached_ids(pairs_of(rows), tokenizer, max_length=max_length)
        assert len(entries(cache)) == number


def test_full_disk_is_named_and_leaves_no_entry(cache, tokenizers):
    pairs = pairs_of([("abc", "abc")] * 5_000)

    with (
        small_files(100_000),
        pytest.raises(OSError, match=r"no room for the token ids .*vanilla_transformer'.* HF_DATA"),
    ):
        cached_ids(pairs, tokenizers, max_length=10)

    assert entries(cache) == []


def test_entries_that_were_not_used_for_longest_are_deleted(cache, tokenizers, monkeypatch):
    monkeypatch.setattr(token_ids, "MOST_ENTRIES", 2)

    def use(max_length):
        cached_ids(pairs_of(PAIRS), tokenizers, max_length=max_length)
        return {path: path.stat().st_mtime for path in cache.iterdir()}

    (first,) = use(4)
    (second,) = use(5).keys() - {first}
    (third,) = use(6).keys() - {first, second}

    assert set(cache.iterdir()) == {second, third}
    use(5)
    assert set(use(7)) & {second, third} == {second}


@pytest.mark.parametrize("how", ["variable", "datasets", "unwritable"])
def test_nothing_is_kept_when_it_cannot_or_shall_not_be(cache, tokenizers, monkeypatch, how):
    if how == "variable":
        monkeypatch.setenv(CACHE_VARIABLE, "")
    elif how == "datasets":
        monkeypatch.setattr(token_ids.datasets, "is_caching_enabled", lambda: False)
    else:
        cache.parent.write_text("no folder")

    ids, truncated = cached_ids(pairs_of(PAIRS), tokenizers, max_length=4)

    assert (ids.column_names, len(ids), truncated) == (["input_ids", "labels"], 4, 3)
    assert not cache.exists()


def test_filtered_pairs_are_those_of_the_entry(cache, tokenizers, tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in PAIRS))
    pairs = load_pairs(ParallelText((str(tmp_path / "pairs.tsv"),)))
    cached_ids(pairs, tokenizers, max_length=9)

    ids, _ = cached_ids(pairs.select([3, 0]), tokenizers, max_length=9)

    assert tokenizers.source.batch_decode(ids["input_ids"][:], True) == ["bbbbbb", "abc"]


# Vocabularies


def test_vocabulary_is_learned_from_sources_as_they_are_read_and_targets_as_they_are():
    pairs = pairs_of([("ab\u00a0c", "d\u00a0e"), ("\u202aab", " d\u00a0e")])

    tokenizer = learn_tokenizer(pairs, ["source", "target"], kind="word")

    assert tokenizer.convert_ids_to_tokens(range(4, len(tokenizer))) == ["ab", "d\u00a0e", "c"]


def test_vocabulary_of_a_large_corpus_is_learned_from_the_same_pairs_each_time(monkeypatch):
    monkeypatch.setattr(token_ids, "MOST_LEARNED_PAIRS", 30)
    monkeypatch.setattr(token_ids, "ROWS_AT_A_TIME", 7)
    rows = [(f"s{number}", f"t{number}") for number in range(100)]

    words = [
        learn_tokenizer(pairs_of(rows), ["source", "target"], kind="word").get_vocab()
        for _ in range(2)
    ]

    assert sorted(words[0]) == sorted(words[1])
    # Others are special.
    sources = {word[1:] for word in words[0] if word[0] == "s"}
    assert sources == {word[1:] for word in words[0] if word[0] == "t"}
    assert len(sources) == 30
    assert sources != {source[1:] for source, _ in rows[:30]}


def test_slow_tokenizers_name_the_words_that_they_lack(tmp_path):
    slow = fsmt_tokenizer(tmp_path, {"src": ["the</w>", "cat</w>"], "tgt": ["cat</w>"]})

    unknown = unknown_strings(slow, ["the cat", "the dog dog", "a"])

    assert not slow.is_fast
    assert most_frequent(unknown) == "'dog' (2), 'a' (1)"
