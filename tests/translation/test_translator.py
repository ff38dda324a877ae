"""Translator: order, limits, batches and the search, on a model whose weights are random."""

import re

import pytest
import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration, GenerationConfig

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.inspection.attention_maps import read_attention
from vanilla_transformer_tools.saved_folder import RUN_FILE
from vanilla_transformer_tools.translation import Search, Translation, Translator
from vanilla_transformer_tools.translation import translator as translation
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

from ..support.pretrained import SIZES, bart, fsmt_tokenizer
from ..text.test_tokenizer_pair import GREEK, build_latin_to_greek, learn, save_latin_to_greek

# Their translations by the tiny model differ in length, and some of them end.
LINES = [
    "ein hund rennt.",
    "ja",
    "der alte mann schläft",
    "",
    "oh nein",
    "  a",
    "ein hund",
    "x",
    "dort, hier",
]
SEARCHES = pytest.mark.parametrize("num_beams", [1, 3])


@pytest.fixture
def endless_model(tiny_model):
    """The tiny model, which now only ever writes letters: one token, one character."""
    tiny_model.generation_config.suppress_tokens = [2, 3]
    return tiny_model


def spy_on_batches(monkeypatch):
    """Rows and columns of the sources of each batch."""
    shapes = []
    translate_batch = TorchEngine.translate_batch

    def translate_and_note(self, sources, *others):
        shapes.append((len(sources), max(map(len, sources))))
        return translate_batch(self, sources, *others)

    monkeypatch.setattr(TorchEngine, "translate_batch", translate_and_note)
    return shapes


@SEARCHES
def test_line_is_translated_as_if_it_were_alone(build, num_beams):
    translator = build(num_beams=num_beams, max_tokens_per_batch=100)

    together = list(translator.translate(LINES))
    alone = [result for line in LINES for result in translator.translate([line])]

    assert together == alone
    assert len({result.text for result in together}) > 5  # mixing lines up would show
    assert {result.reached_limit for result in together} == {False, True}


@pytest.mark.parametrize(
    ("limit", "size", "taken"), [("WINDOW_LINES", 2, 2), ("WINDOW_CHARACTERS", 20, 3)]
)
def test_translation_waits_for_one_window_and_does_not_depend_on_it(
    build, monkeypatch, limit, size, taken
):
    whole = list(build().translate(LINES))
    monkeypatch.setattr(translation, limit, size)
    read = []

    results = build().translate(read.append(line) or line for line in LINES)

    first = next(results)
    assert read == LINES[:taken]
    assert [first, *results] == whole


def test_single_string_is_refused(build):
    with pytest.raises(ValueError, match="must hold several strings, got the single one 'a dog'"):
        next(build().translate("a dog"))


@pytest.mark.parametrize(
    ("num_beams", "name", "max_extra_tokens"), [(1, "max_length", 0), (3, "max_new_tokens", 3)]
)
def test_limit_is_that_of_the_sentence_and_not_of_the_generation_config(
    endless_model, build, num_beams, name, max_extra_tokens
):
    setattr(endless_model.generation_config, name, 3)
    translator = build(num_beams=num_beams, max_extra_tokens=max_extra_tokens)
    lines = ["ein hund rennt.", "ja", "", "x"]

    results = list(translator.translate(lines))

    assert [result.reached_limit for result in results] == [True, True, False, True]
    # `</s>` is a token of the source too.
    expected = [len(line) + 1 + max_extra_tokens if line else 0 for line in lines]
    assert [len(result.text) for result in results] == expected


def test_search_has_the_defaults_of_the_generation_config(tiny_model, tokenizer, build):
    tiny_model.generation_config.update(num_beams=4, length_penalty=0.6)

    assert build().search == Search(4, 0.6, max_extra_tokens=4)
    assert build(num_beams=2, scores=True).search == Search(2, 0.6, max_extra_tokens=4, scores=True)
    config = GenerationConfig(num_beams=3, length_penalty=0.2)
    assert build(generation_config=config).search == Search(3, 0.2, max_extra_tokens=4)
    assert Translator(tiny_model, tokenizer, search=Search(), num_beams=3).search == Search(3)


def test_line_feed_in_a_translation_becomes_a_blank(tiny_model, monkeypatch):
    tokenizer = VanillaTransformerTokenizer.train(["a\nb"], vocab_size=7, kind="char")
    output = tokenizer(text_target="a\nb\n")["input_ids"]
    monkeypatch.setattr(TorchEngine, "_search", lambda *_: [output])

    results = Translator(tiny_model, tokenizer).translate(["a"])

    assert list(results) == [Translation("a b ", replaced_separators=2)]


@SEARCHES
def test_batches_keep_within_their_tokens(build, monkeypatch, num_beams):
    shapes = spy_on_batches(monkeypatch)

    list(build(num_beams=num_beams, max_tokens_per_batch=120).translate(LINES))

    assert sum(rows for rows, _ in shapes) == sum(bool(line.strip()) for line in LINES)
    # The longest of the lines has 22 tokens, the others count for 16.
    tokens = [num_beams * max(columns, 16) for _, columns in shapes]
    assert all(rows * each <= 120 for (rows, _), each in zip(shapes, tokens, strict=True))
    # One more sentence would have been too many.
    assert all(
        (rows + 1) * each > 120 for (rows, _), each in zip(shapes[:-1], tokens, strict=False)
    )

    del shapes[:]
    list(build(max_tokens_per_batch=32).translate(["der alte mann " * 3, "ja", "oh"]))
    # A sentence beyond the budget goes alone.
    assert shapes == [(1, 42), (2, 3)]


def test_translator_switches_dropout_off(tiny_model, build):
    tiny_model.train()

    build()

    assert not tiny_model.training


def test_two_vocabularies_of_one_tokenizer_are_spelled_by_side(tmp_path):
    sides = {"src": ["the</w>", "cat</w>", "t", "h"], "tgt": ["кот</w>", "да</w>", "нет</w>", "я"]}
    tokenizer = fsmt_tokenizer(tmp_path, sides)
    sizes = {**SIZES, "src_vocab_size": 8, "tgt_vocab_size": 8, "tie_word_embeddings": False}
    config = FSMTConfig(langs=["en", "ru"], decoder_start_token_id=2, **sizes)
    FSMTForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    settings = {"details": True, "max_extra_tokens": 9, "num_beams": 1}
    translator = Translator.from_pretrained(str(tmp_path), **settings)
    (translation,) = translator.translate(["the cat"])

    assert translation.source_tokens == ("the</w>", "cat</w>", "</s>")
    assert not set(translation.tokens) & set(sides["src"])
    assert read_attention(translator, "the cat").cross.columns == translation.source_tokens


def test_model_in_a_wrapper_is_refused_with_what_to_do(tiny_model, tokenizer):
    with pytest.raises(TypeError, match=r"got Sequential\. Unwrap it"):
        Translator(torch.nn.Sequential(tiny_model), tokenizer)


def test_positions_of_another_class_limit_sources_and_prefixes(tmp_path):
    model, tokenizer = bart(tmp_path)
    longest = model.config.max_position_embeddings
    translator = Translator(model, tokenizer, max_source_length=9999, max_extra_tokens=2)
    cut = Translator(model, tokenizer, max_source_length=longest, max_extra_tokens=2)
    long = "ein hund " * longest

    assert list(translator.translate([long])) == list(cut.translate([long]))
    beyond = f"positions of 'bart' end after {longest} tokens, got a"
    with pytest.raises(ValueError, match=beyond):
        translator.engine.translate_batch([[5] * (longest + 1)], [[]], [9], Search())
    with pytest.raises(ValueError, match=beyond):
        read_attention(translator, "ein hund", "a dog " * longest)
    with pytest.raises(ValueError, match="prefix of line 2 must leave room for what follows it"):
        list(translator.translate(["ein", "hund"], ["", long]))


# Lines that are too long


def test_number_out_of_range_is_refused(build):
    with pytest.raises(ValueError, match=r"`max_source_length` must be at least 2, .* got 1"):
        build(max_source_length=1)


def test_long_line_has_what_its_pieces_have(build):
    settings = {"details": True, "scores": True, "num_beams": 3, "num_hypotheses": 3}
    translator = build(max_source_length=14, **settings)
    joined, short = translator.translate(["ein hund. der alte mann", "ja"])
    first, second, alone = translator.translate(["ein hund.", "der alte mann", "ja"])

    assert short == alone
    ranks = [(one, *one.alternatives) for one in (joined, first, second)]
    for whole, *parts in zip(*ranks, strict=True):
        assert whole.text == " ".join(part.text for part in parts)
    assert joined.source_tokens == first.source_tokens + second.source_tokens
    assert joined.tokens == first.tokens + second.tokens
    assert joined.token_scores == pytest.approx(first.token_scores + second.token_scores)
    assert joined.score == pytest.approx((first.score + second.score) / 2)
    moved = [
        (source + len(first.source_tokens), target + len(first.tokens))
        for source, target in second.alignment
    ]
    assert joined.alignment == (*first.alignment, *moved)
    assert joined.reached_limit == (first.reached_limit or second.reached_limit)


@pytest.mark.parametrize(("field", "length"), [("max_position_embeddings", 9), (None, 1024)])
def test_longest_source_is_what_the_model_expects(tiny_model, build, field, length):
    if field:
        setattr(tiny_model.config, field, length)

    assert build().max_source_length == length


def test_longest_source_is_that_of_the_training(tiny_model, tokenizer, tmp_path):
    tiny_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / RUN_FILE).write_text('{"settings": {"max_length": 77}}')

    assert Translator.from_pretrained(str(tmp_path)).max_source_length == 77
    assert Translator.from_pretrained(str(tmp_path), max_source_length=5).max_source_length == 5


# Two vocabularies


def test_translator_is_refused_without_the_tokenizer_of_a_target_vocabulary():
    model, pair = build_latin_to_greek()

    with pytest.raises(ValueError, match="target vocabulary, of 40 tokens, got none"):
        Translator(model, pair.source)


def test_ensemble_shares_the_tokenizer_of_the_target_too(tmp_path, caplog):
    names = [save_latin_to_greek(tmp_path / name) for name in ("one", "two")]
    GenerationConfig(num_beams=3).save_pretrained(names[1])
    together = Translator.from_pretrained(names, max_extra_tokens=4)
    assert next(together.translate(["ja"])).text
    assert re.search("defaults are those of .*one: .*two has: beam 3", caplog.text)

    learn(GREEK[::-1]).save_pretrained(tmp_path / "two" / "target_tokenizer")

    with pytest.raises(ValueError, match=r"share one tokenizer, got another one in .*two"):
        Translator.from_pretrained(names)


@pytest.mark.parametrize(
    ("device", "given", "tokens"), [("cuda", None, 64_000), ("cpu", None, 4096), ("cuda", 80, 80)]
)
def test_batches_of_a_gpu_are_larger(tiny_model, tokenizer, monkeypatch, device, given, tokens):
    monkeypatch.setattr(type(tiny_model), "device", torch.device(device))

    translator = Translator(tiny_model, tokenizer, num_beams=2, max_tokens_per_batch=given)

    assert translator.max_tokens_per_batch == tokens // 2


@pytest.mark.parametrize(("computes", "used"), [(True, torch.bfloat16), (False, torch.float32)])
def test_weights_on_a_gpu_are_bfloat16_if_it_computes_in_that(
    tiny_model, tokenizer, tmp_path, monkeypatch, computes, used
):
    tiny_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(translation, "gpu_computes_bfloat16", lambda: computes)

    translator = Translator.from_pretrained(str(tmp_path), engine="torch", dtype="auto")

    assert translator.engine.model.dtype == used
