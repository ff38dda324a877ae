"""Token ids of pairs, in whatever way they are computed, and the cache of ids and vocabularies."""

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import datasets
import pytest
from accelerate import PartialState
from datasets import Dataset

from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.files import CACHE_VARIABLE
from vanilla_transformer_tools.text import token_ids
from vanilla_transformer_tools.text.blanks import without_blank_ends
from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs
from vanilla_transformer_tools.text.token_ids import (
    PairEncoder,
    cached_ids,
    cached_tokenizer,
    encode_pairs,
    has_independent_parts,
    store_ids,
    tokenize_pairs,
)
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

from ..support.full_disk import small_files
from ..support.odd_text import odd_lines

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


@pytest.mark.parametrize(
    ("options", "by_words"),
    [
        ({}, True),
        ({"pretokenized": True}, True),
        ({"kind": "unigram"}, True),
        ({"target_languages": ["de"]}, True),
        ({"unicode_form": "NFKD"}, False),
        ({"kind": "char"}, False),
        ({"kind": "word"}, False),
    ],
)
def test_ids_are_those_of_the_tokenizer_for_whole_lines(options, by_words, monkeypatch):
    lines = odd_lines(400)
    tokenizer = VanillaTransformerTokenizer.train(lines, vocab_size=400, **options)
    tagged = {"tag": ["de"] * 100} if "target_languages" in options else {}
    # Fewer than there are, so that some are forgotten.
    monkeypatch.setattr(token_ids, "_MOST_WORDS", 300)

    encoder = PairEncoder(TokenizerPair.joint(tokenizer), 1000)
    found = []
    # Lines of the first part occur again in the last one.
    for first in (0, 100, 200, 300, 0):
        part = lines[first : first + 100]
        encoded = encoder({"source": part, "target": part[::-1], **tagged})
        columns = {name: column.to_pylist() for name, column in encoded.items()}
        expected = tokenizer([without_blank_ends(line) for line in part])["input_ids"]
        assert [ids[len(tagged) :] for ids in columns["input_ids"]] == expected
        assert columns["labels"] == expected[::-1]
        found.append(columns)

    assert found[0] == found[-1]
    assert has_independent_parts(tokenizer) == by_words


def test_words_that_a_text_must_not_spell_are_plain_text_from_the_first_batch():
    lines = ["a </s> b", "<pad> a"]
    tokenizer = VanillaTransformerTokenizer.train(lines, vocab_size=270)

    ids = encode_pairs({"source": lines, "target": lines}, TokenizerPair.joint(tokenizer), 50)

    specials = {tokenizer.pad_token_id, tokenizer.eos_token_id}
    assert not specials & {token for side in ids["labels"] for token in side[:-1]}


def test_words_depend_on_each_other_when_a_token_may_span_several():
    tokenizer = VanillaTransformerTokenizer.train(["New York"] * 3, vocab_size=270)
    assert has_independent_parts(tokenizer)

    tokenizer.add_tokens(["New York"])

    pairs = {"source": ["New York"], "target": ["New York"]}
    ids = encode_pairs(pairs, TokenizerPair.joint(tokenizer), 50)
    assert ids["labels"] == tokenizer(["New York"])["input_ids"]
    assert not has_independent_parts(tokenizer)


def test_words_are_independent_beside_characters_that_nobody_sees():
    lines = ["a \u200b b", "\ufeffa b\u200b", "a\u200bb c", "a \ufeff\t b", "\u200b", "a\t\ufeff b"]
    tokenizer = VanillaTransformerTokenizer.train(["a b\tc"], vocab_size=270)
    assert has_independent_parts(tokenizer)

    ids = encode_pairs({"source": lines, "target": lines}, TokenizerPair.joint(tokenizer), 50)

    assert ids["labels"] == tokenizer(lines)["input_ids"]


def test_memory_of_words_is_limited(monkeypatch):
    monkeypatch.setattr(token_ids, "_MOST_WORDS", 30)
    tokenizer = VanillaTransformerTokenizer.train(["12345 67890"] * 3, vocab_size=280)
    encoder = PairEncoder(TokenizerPair.joint(tokenizer), 50)

    for first in range(0, 100, 20):
        lines = [str(number) for number in range(first, first + 20)]
        encoder({"source": lines, "target": lines})

    assert 20 <= len(encoder._source._ids) <= 30
    # Off while they are encoded.
    assert gc.isenabled()


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


def test_each_occurrence_of_a_word_is_drawn_under_dropout():
    tokenizer = VanillaTransformerTokenizer.train(["abc bcab abca " * 9], vocab_size=280)
    tokenizer.backend_tokenizer.model.dropout = 0.5
    lines = ["bcab"] * 30

    ids = encode_pairs({"source": lines, "target": lines}, TokenizerPair.joint(tokenizer), 20)

    assert len(set(map(tuple, ids["labels"]))) > 1


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

    class Recorder(token_ids.PairEncoder):
        def __call__(self, pairs):
            sizes.append(len(pairs["source"]))
            return super().__call__(pairs)

    monkeypatch.setattr(token_ids, "PairEncoder", Recorder)
    # Names are made from the ids of a sample.
    monkeypatch.setattr(token_ids, "encode_pairs", lambda *_: {})
    return sizes


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_second_run_reads_what_the_first_one_tokenised(cache, tokenizers, tokenized):
    first, truncated = cached_ids(pairs_of(PAIRS), tokenizers, max_length=4)
    second, truncated_again = cached_ids(pairs_of(PAIRS), tokenizers, max_length=4)

    expected, _ = tokenize_pairs(pairs_of(PAIRS), tokenizers, max_length=4)
    assert tokenized == [4, 4]  # the first run and `tokenize_pairs`
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


def test_tokenizer_that_encodes_otherwise_gets_an_entry_of_its_own(cache, tokenizers, monkeypatch):
    cached_ids(pairs_of(PAIRS), tokenizers, max_length=9)
    # Languages that are chosen for a tokenizer may be no part of its file.
    monkeypatch.setattr(token_ids, "encode_pairs", lambda *_: {"input_ids": [[7]], "labels": [[8]]})

    cached_ids(pairs_of(PAIRS), tokenizers, max_length=9)

    assert len(entries(cache)) == 2


def test_entry_that_is_damaged_or_of_another_length_is_made_again(cache, tokenizers):
    whole, _ = cached_ids(pairs_of(PAIRS), tokenizers, max_length=9)
    expected = whole[:]
    (path,) = cache.iterdir()
    content = path.read_bytes()
    # A file that is cut between two batches can be read.
    store_ids(pairs_of(PAIRS[:2]), tokenizers, 9, path)

    for damaged in (path.read_bytes(), b"", content[: len(content) // 2], content[:-200]):
        path.unlink()
        path.write_bytes(damaged)
        again, _ = cached_ids(pairs_of(PAIRS), tokenizers, max_length=9)
        assert again[:] == expected


def test_full_disk_is_named_and_leaves_no_entry(cache, tokenizers):
    pairs = pairs_of([("abc", "abc")] * 5_000)

    with (
        small_files(100_000),
        pytest.raises(OSError, match=r"no room for the token ids .*vanilla_transformer'.* HF_DATA"),
    ):
        cached_ids(pairs, tokenizers, max_length=10)

    assert entries(cache) == []


def test_process_reads_what_the_first_of_its_machine_tokenised(
    cache, tokenizers, tokenized, monkeypatch
):
    of_the_first = []

    @contextmanager
    def after_the_first_process():
        with monkeypatch.context() as patched:
            patched.setattr(token_ids, "PartialState", PartialState)
            of_the_first.append(cached_ids(pairs_of(PAIRS), tokenizers, max_length=9)[0])
        yield

    state = SimpleNamespace(local_main_process_first=after_the_first_process)
    monkeypatch.setattr(token_ids, "PartialState", lambda: state)

    ids, _ = cached_ids(pairs_of(PAIRS), tokenizers, max_length=9)

    assert ids[:] == of_the_first[0][:]
    assert tokenized == [4]


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

BOTH = ["source", "target"]
SETTINGS = {"vocab_size": 270, "kind": "bpe"}


@pytest.fixture
def learned(monkeypatch):
    """Texts from which a vocabulary was learned, one list for each."""
    texts_of = []
    train = VanillaTransformerTokenizer.train.__func__

    def recording(cls, texts, **settings):
        texts_of.append(list(texts))
        return train(cls, texts_of[-1], **settings)

    monkeypatch.setattr(VanillaTransformerTokenizer, "train", classmethod(recording))
    return texts_of


def saved_files(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "settings",
    [{}, {"kind": "unigram"}, {"target_languages": ["en", "de"]}, {"unicode_form": "NFKD"}],
)
def test_second_run_has_the_vocabulary_of_the_first(cache, learned, tmp_path, settings):
    settings = {**SETTINGS, **settings}
    first = cached_tokenizer(pairs_of(PAIRS), BOTH, **settings)
    second = cached_tokenizer(pairs_of(PAIRS), BOTH, **settings)

    assert learned == [["abc", "", "abca", "bbbbbb", "aa", "bcab", "abcb", "a"]]
    assert first("abc bé")["input_ids"] == second("abc bé")["input_ids"]
    assert saved_files(first, tmp_path / "1") == saved_files(second, tmp_path / "2")


def test_vocabulary_depends_on_text_sides_and_settings(cache, learned):
    for number, (rows, columns, changed) in enumerate(
        [
            (PAIRS, BOTH, {}),
            ([*PAIRS[:3], ("bbbbbb", "b")], BOTH, {}),
            (PAIRS, ["source"], {}),
            (PAIRS, ["target"], {}),
            (PAIRS, BOTH, {"vocab_size": 280}),
            (PAIRS, BOTH, {"kind": "unigram"}),
            (PAIRS, BOTH, {"unicode_form": "NFD"}),
            (PAIRS, BOTH, {"target_languages": ["de"]}),
        ],
        start=1,
    ):
        cached_tokenizer(pairs_of(rows), columns, **SETTINGS | changed)
        assert len(learned) == len(entries(cache)) == number


def test_vocabulary_of_other_versions_is_learned_anew(cache, learned, monkeypatch):
    cached_tokenizer(pairs_of(PAIRS), BOTH, **SETTINGS)
    monkeypatch.setattr(token_ids, "version", lambda name: f"another {name}")

    cached_tokenizer(pairs_of(PAIRS), BOTH, **SETTINGS)

    assert len(learned) == 2


def test_vocabulary_that_was_cut_or_changed_is_learned_anew(cache, learned):
    whole = cached_tokenizer(pairs_of(PAIRS), BOTH, **SETTINGS).backend_tokenizer.to_str()
    (path,) = cache.iterdir()
    content = path.read_bytes()

    changed = content.replace(b'"bc"', b'"cb"')
    assert changed != content
    for damaged in (b"", content[: len(content) // 2], content[:-1], changed, b"\xff" + content):
        path.write_bytes(damaged)
        again = cached_tokenizer(pairs_of(PAIRS), BOTH, **SETTINGS)
        assert again.backend_tokenizer.to_str() == whole
        assert path.read_bytes() == content
    assert len(learned) == 6


def test_vocabulary_of_a_large_corpus_is_learned_from_the_same_pairs_each_time(
    cache, learned, monkeypatch
):
    monkeypatch.setattr(token_ids, "MOST_LEARNED_PAIRS", 30)
    monkeypatch.setattr(token_ids, "ROWS_AT_A_TIME", 7)
    rows = [(f"s{number}", f"t{number}") for number in range(100)]

    monkeypatch.setenv(CACHE_VARIABLE, "")
    for _ in range(2):
        cached_tokenizer(pairs_of(rows), BOTH, **SETTINGS)

    assert learned[0] == learned[1]
    sources, targets = learned[0][:30], learned[0][30:]
    assert [text.replace("s", "t") for text in sources] == targets
    assert sources != [source for source, _ in rows[:30]]
    assert len(set(sources)) == 30


def test_vocabularies_and_ids_do_not_push_each_other_out(cache, tokenizers, monkeypatch):
    monkeypatch.setattr(token_ids, "MOST_ENTRIES", 1)

    for size in (270, 280):
        cached_tokenizer(pairs_of(PAIRS), BOTH, **SETTINGS | {"vocab_size": size})
        cached_ids(pairs_of(PAIRS), tokenizers, max_length=size)

    assert sorted(path.suffix for path in cache.iterdir()) == [".arrow", ".tokenizer"]
