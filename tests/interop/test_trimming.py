"""A trimmed vocabulary: the same tokens, logits and translations where all tokens are kept."""

import copy
import functools
import json

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.interop.fast_tokenizers import ending_in_eos
from vanilla_transformer_tools.interop.trimming import Trimming, trim
from vanilla_transformer_tools.text.languages import language_codes
from vanilla_transformer_tools.translation import Translator

from ..models import build_variant
from ..support.pretrained import ENGLISH, GERMAN
from ..support.training_runs import read_json

TEXT = GERMAN[1:9] + ENGLISH[1:9]
# One vocabulary of each kind: BPE with codes, bytes, Unigram with codes before and after the text.
NAMES = ["nllb", "bart", "mbart50", "mbart"]


@pytest.fixture(scope="module")
def sources(pretrained):
    """Our model and the tokenizer of each name, in float64; they are not changed."""

    @functools.cache
    def find(name):
        _, folder = pretrained(name)
        model = AutoModelForSeq2SeqLM.from_pretrained(folder).double().eval()
        return model, AutoTokenizer.from_pretrained(folder), folder

    return find


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXT) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def trimmed(sources, text):
    return lambda name, **options: trim(*sources(name)[:2], Trimming((text,), **options))


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_split_as_before_or_into_smaller_pieces(sources, trimmed, name):
    _, tokenizer, _ = sources(name)
    result = trimmed(name)
    kept, smaller = set(result.kept), result.tokenizer
    lines = {line: set(tokenizer(line)["input_ids"]) <= kept for line in GERMAN + ENGLISH}

    assert len(TEXT) < sum(lines.values()) < len(lines)
    assert len(result.kept) == len(smaller) < len(tokenizer)
    for line, is_same in lines.items():
        old, new = (one(line)["input_ids"] for one in (tokenizer, smaller))
        assert ([result.kept[one] for one in new] == old) == is_same
        assert is_same or len(new) > len(old)
        assert new.count(smaller.unk_token_id) == old.count(tokenizer.unk_token_id)
        assert smaller.decode(new) == tokenizer.decode(old)
    assert smaller("Ω").tokens() == tokenizer("Ω").tokens()
    assert list(language_codes(smaller)) == list(language_codes(tokenizer))
    assert [result.kept[one] for one in smaller.all_special_ids] == tokenizer.all_special_ids


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_kept_entries_are_those_of_the_model(sources, trimmed, name):
    model, tokenizer, _ = sources(name)
    result = trimmed(name)
    old, new = (
        {
            **one(TEXT, padding=True, return_tensors="pt"),
            "decoder_input_ids": one(TEXT[::-1], padding=True, return_tensors="pt")["input_ids"],
        }
        for one in (tokenizer, result.tokenizer)
    )

    with torch.no_grad():
        expected, actual = model(**old).logits, result.model(**new).logits

    torch.testing.assert_close(actual, expected[..., result.kept], rtol=0, atol=1e-12)
    assert expected.abs().max() > 1


def test_entry_is_kept_if_it_occurs_often_enough(sources, tmp_path):
    model, tokenizer, _ = sources("nllb")
    common, rare = (
        next(token for token in tokenizer.tokenize(line) if len(token) > 2)
        for line in ("zweihundert", "thousand")
    )
    path = tmp_path / "text.txt"
    path.write_text("zweihundert zweihundert thousand\n")

    counts = [
        trim(model, tokenizer, Trimming((str(path),), count)).tokenizer.get_vocab()
        for count in (1, 2, 3)
    ]

    assert [common in one for one in counts] == [True, True, False]
    assert [rare in one for one in counts] == [True, False, False]


def test_own_tokenizers_are_trimmed_too(tmp_path):
    tokenizers = [
        VanillaTransformerTokenizer.train(
            GERMAN + ENGLISH, vocab_size=400, kind=kind, target_languages=["de"]
        )
        for kind in ("bpe", "unigram")
    ]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXT))
    for tokenizer in tokenizers:
        model = build_variant(vocab_size=len(tokenizer))

        result = trim(model, tokenizer, Trimming((str(path),)))

        assert type(result.tokenizer) is VanillaTransformerTokenizer
        assert len(result.tokenizer) == result.model.config.vocab_size < len(tokenizer)
        backend = json.loads(result.tokenizer.backend_tokenizer.to_str())["model"]
        if backend["type"] == "Unigram":
            assert backend["vocab"][backend["unk_id"]][0] == "<unk>"
        # Bytes spell what has no entry.
        ids = result.tokenizer("Ω?")["input_ids"]
        assert result.tokenizer.decode(ids, skip_special_tokens=True) == "Ω?"


def test_end_behind_all_other_entries_gets_its_new_id(text):
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(GERMAN, vocab_size=400, show_progress=False)
    tokenizer = ending_in_eos(Tokenizer.from_str(backend.to_str()))

    smaller = trim(build_variant(vocab_size=403), tokenizer, Trimming((text,))).tokenizer

    assert smaller(TEXT[0])["input_ids"][-1] == smaller.eos_token_id < tokenizer.eos_token_id


def test_ids_of_the_configs_are_renumbered_and_bans_of_what_is_gone_dropped(sources, text):
    model, tokenizer, _ = sources("mbart50")
    model = copy.deepcopy(model)
    french, english = (language_codes(tokenizer)[code] for code in ("fr_XX", "en_XX"))
    kept = trim(model, tokenizer, Trimming((text,))).kept
    gone = next(token for token in range(len(tokenizer)) if token not in kept)
    model.generation_config = GenerationConfig(
        forced_bos_token_id=french,
        eos_token_id=[2, french],
        decoder_start_token_id=2,
        pad_token_id=1,
        bad_words_ids=[[1], [gone], [french, gone], [french, 2]],
        suppress_tokens=[gone, english],
        sequence_bias={(french, 2): 1.5, (gone,): -2.0},
    )

    result = trim(model, tokenizer, Trimming((text,)))

    now = result.kept.index(french)
    assert now != french
    config = result.model.generation_config
    assert config.forced_bos_token_id == now
    assert config.eos_token_id == [2, now]
    assert config.bad_words_ids == [[1], [now, 2]]
    assert config.suppress_tokens == [result.kept.index(english)]
    assert config.sequence_bias == [[[now, 2], 1.5]]
    assert model.generation_config.forced_bos_token_id == french
    assert result.model.config.decoder_start_token_id == 2


def test_id_of_a_config_without_an_entry_is_refused(sources, text):
    model, tokenizer, _ = sources("nllb")
    model = copy.deepcopy(model)
    model.generation_config.forced_bos_token_id = len(tokenizer) + 1

    with pytest.raises(ValueError, match=r"`forced_bos_token_id` of the Gen.* got 67"):
        trim(model, tokenizer, Trimming((text,)))


def test_tokenizer_of_m2m100_is_trimmed_once_it_is_fast(sources, text):
    model, tokenizer, folder = sources("m2m100")
    slow = AutoTokenizer.from_pretrained(folder.with_name("source"))

    with pytest.raises(ValueError, match=r"needs a tokenizer\.json with .* got M2M100Tokenizer"):
        trim(model, slow, Trimming((text,)))
    assert len(trim(model, tokenizer, Trimming((text,))).kept) < model.config.vocab_size


def test_words_and_two_vocabularies_are_refused(text):
    tokenizer = VanillaTransformerTokenizer.train(TEXT, vocab_size=50, kind="word")
    model = build_variant(share_encoder_decoder_embeddings=False, decoder_vocab_size=40)

    with pytest.raises(ValueError, match="vocabulary for both sides, got `decoder_vocab_size` 40"):
        trim(model, tokenizer, Trimming((text,)))
    with pytest.raises(ValueError, match="BPE or a Unigram vocabulary, got WordLevel"):
        trim(build_variant(), tokenizer, Trimming((text,)))


def test_one_table_with_a_size_for_each_side_is_trimmed(text):
    # Marian's configs give both.
    tokenizer = VanillaTransformerTokenizer.train(TEXT, vocab_size=290)
    model = build_variant(vocab_size=len(tokenizer), decoder_vocab_size=len(tokenizer))

    config = trim(model, tokenizer, Trimming((text,), min_count=9)).model.config

    assert config.vocab_size == config.decoder_vocab_size < len(tokenizer)


def test_command_reports_the_sizes_and_keeps_the_languages(sources, text, tmp_path, capsys):
    _, tokenizer, folder = sources("nllb")
    command = ["import", str(folder.with_name("source")), str(tmp_path / "small")]
    command += ["--keep_vocabulary", text]

    main([*command, "--dry_run"])
    foretold = capsys.readouterr().out.splitlines()[-1]
    assert not (tmp_path / "small").exists()
    main(command)

    entries = len(AutoTokenizer.from_pretrained(tmp_path / "small"))
    assert foretold == f"vocabulary of 68 entries would be cut to {entries}"
    assert f"vocabulary of 68 entries cut to {entries}, weights of" in capsys.readouterr().out
    # Two rows have no entry.
    sizes = read_json(tmp_path / "small" / "run.json")["trimmed"]
    assert sizes["entries"] == [len(tokenizer) + 2, entries]
    translator = Translator.from_pretrained(
        str(tmp_path / "small"), source_language="deu_Latn", target_language="zho_Hans"
    )
    assert len(list(translator.translate(TEXT))) == len(TEXT)
    assert read_json(tmp_path / "small" / "config.json")["vocab_size"] == entries


def test_command_leaves_no_folder_behind_when_a_file_has_no_text(sources, tmp_path, refused):
    (tmp_path / "empty").write_text(" \n")
    source = sources("nllb")[2].with_name("source")

    (tmp_path / "text").write_text("Hund\n")

    files = [tmp_path / "text", tmp_path / "empty"]
    told = refused("import", source, tmp_path / "small", "--keep_vocabulary", *files)

    assert f"needs text, got none in '{files[1]}'" in told
    assert not (tmp_path / "small").exists()
