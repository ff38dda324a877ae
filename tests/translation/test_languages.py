"""Pretrained models with their own tokenizers: the translations of their own classes."""

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.exports.export import export_model
from vanilla_transformer_tools.inspection.alignments import align_words
from vanilla_transformer_tools.interop import declarations
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.loading import faster_export
from vanilla_transformer_tools.translation.segments import cut_line
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

from ..support.pretrained import BUILD, GERMAN

LINES = GERMAN[5:400:140]
EXTRA = 6
SEARCH = {"num_beams": 3, "length_penalty": 0.6}
# Source and target language, and how the class itself is told the target.
CODES = {
    "nllb": ("deu_Latn", "zho_Hans"),
    "m2m100": ("de", "fr"),
    "mbart50": ("de_DE", "fr_XX"),
    "mbart": ("fr_XX", "de_DE"),
}


@pytest.fixture
def folders(pretrained):
    return lambda name: tuple(map(str, pretrained(name)))


def languages_of(name):
    source, target = CODES.get(name, (None, None))
    if name == "marian_to_several":
        target = "fra"
    return {"source_language": source, "target_language": target}


def texts_of_its_own_class(folder, name, search):
    """What somebody writes who has Transformers alone, one line at a time."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    forced = {}
    if name in CODES:
        source, target = CODES[name]
        tokenizer.src_lang = source
        if name == "m2m100":
            forced["forced_bos_token_id"] = tokenizer.get_lang_id(target)
        elif name == "mbart":
            forced["decoder_start_token_id"] = tokenizer.lang_code_to_id[target]
        else:
            forced["forced_bos_token_id"] = tokenizer.convert_tokens_to_ids(target)
    texts = []
    for line in LINES:
        tagged = f">>fra<< {line}" if name == "marian_to_several" else line
        inputs = tokenizer(tagged, return_tensors="pt")
        length = 1 + inputs["input_ids"].shape[1] + EXTRA
        outputs = model.generate(
            **inputs, **forced, **search, max_length=length, forced_eos_token_id=None
        )
        texts += tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return texts


@pytest.mark.parametrize("name", BUILD)
def test_translations_are_those_of_its_own_class(folders, name):
    source, imported = folders(name)
    expected = texts_of_its_own_class(source, name, SEARCH)

    assert translate(imported, name, **SEARCH) == expected
    assert len(set(expected)) > 1
    # Without an import, too.
    assert translate(source, name, **SEARCH) == expected
    engine = Translator.from_pretrained(source, **languages_of(name)).engine
    assert isinstance(engine.model, VanillaTransformerForConditionalGeneration)
    # It advises no export, which needs a folder of ours.
    assert faster_export(engine) == ""


def test_command_and_pipeline_translate_a_model_of_another_class_in_our_layers(folders, capsys):
    source, _ = folders("marian")
    expected = texts_of_its_own_class(source, "marian", SEARCH)
    settings = {**SEARCH, "max_extra_tokens": EXTRA}

    translated = pipeline("vanilla-translation", model=source, **settings)
    options = [f"--{name}={value}" for name, value in settings.items()]
    main(["translate", "--model", source, *options, *LINES])

    assert capsys.readouterr().out.splitlines() == expected
    assert [one["translation_text"] for one in translated(LINES)] == expected
    assert isinstance(translated.model, VanillaTransformerForConditionalGeneration)


def test_model_that_computes_something_else_here_translates_by_its_own_generate(
    folders, monkeypatch, caplog
):
    source, _ = folders("nllb")
    expected = texts_of_its_own_class(source, "nllb", SEARCH)
    monkeypatch.setitem(declarations._COMPUTED, "first_position_after_padding", lambda _: 9)

    assert translate(source, "nllb", **SEARCH) == expected
    (message,) = caplog.messages
    assert message.startswith("M2M100ForConditionalGeneration translates with its own `generate`")
    assert "must compute what its source does, but logits of up to" in message


def translate(folder, name, lines=LINES, **settings):
    settings = {"max_extra_tokens": EXTRA, **languages_of(name), **settings}
    return [found.text for found in Translator.from_pretrained(folder, **settings).translate(lines)]


def test_text_that_outputs_begin_with_comes_after_the_first_token(folders):
    _, imported = folders("nllb")
    translator = Translator.from_pretrained(
        imported, **languages_of("nllb"), max_extra_tokens=EXTRA, details=True, num_beams=2
    )
    prefix = translator.target_tokenizer(text_target="vier", add_special_tokens=False)["input_ids"]
    expected = [*translator.search.opening([]), *prefix]

    (found,) = translator.translate(LINES[:1], "vier")

    ids = translator.target_tokenizer.convert_tokens_to_ids(list(found.tokens))
    assert ids[: len(expected)] == expected
    assert len(expected) > len(prefix)


def test_ctranslate2_translates_like_torch(folders, tmp_path):
    _, imported = folders("nllb")
    export_model(imported, tmp_path / "exported")

    exported = translate(str(tmp_path / "exported"), "nllb", engine="ctranslate2", **SEARCH)
    assert exported == translate(imported, "nllb", **SEARCH)


def test_pieces_of_a_long_line_are_as_long_as_they_may_be(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders("mbart")[1])
    line = " ".join(GERMAN[:40])

    pieces = cut_line(line, tokenizer, 30)

    lengths = [len(tokenizer(piece)["input_ids"]) for piece in pieces]
    assert "".join(pieces).replace(" ", "") == line.replace(" ", "")
    assert max(lengths) <= 30
    # A piece ends at a blank.
    assert min(lengths[:-1]) > 12


def test_model_of_one_target_language_begins_with_it_and_refuses_another(folders):
    translator = Translator.from_pretrained(folders("mbart")[1], source_language="fr_XX")

    assert translator.tokenizer.tgt_lang == "de_DE"
    with pytest.raises(ValueError, match=r"`decoder_start_token_id` names, got it_IT, whose id is"):
        Translator.from_pretrained(
            folders("mbart")[1], source_language="fr_XX", target_language="it_IT"
        )


def test_code_of_a_language_is_no_text(folders):
    original, imported = folders("m2m100")
    tokenizer = AutoTokenizer.from_pretrained(original)
    # Saved by a release that did not count them among the special tokens.
    tokenizer = type(tokenizer)(f"{original}/vocab.json", f"{original}/sentencepiece.bpe.model")
    model = AutoModelForSeq2SeqLM.from_pretrained(imported)

    (found,) = Translator(
        model, tokenizer, **languages_of("m2m100"), max_extra_tokens=EXTRA, details=True
    ).translate(LINES[:1])

    assert found.tokens[0] == "__fr__"
    assert "__fr__" not in found.text


def test_alignments_need_a_fast_tokenizer(folders):
    original, imported = folders("marian")
    model = AutoModelForSeq2SeqLM.from_pretrained(imported)
    translator = Translator(model, AutoTokenizer.from_pretrained(original))

    with pytest.raises(ValueError, match=r"need a fast tokenizer, .* got MarianTokenizer"):
        next(align_words(translator, ["eins"], ["one"]))


def test_no_word_is_aligned_to_the_language_at_the_end_of_a_source(folders, monkeypatch):
    """mBART's sources end in `</s> fr_XX`."""
    ends = []
    force = TorchEngine.force

    def note(self, *texts, end_length, **others):
        ends.append(end_length)
        return force(self, *texts, end_length=end_length, **others)

    monkeypatch.setattr(TorchEngine, "force", note)
    languages = languages_of("mbart")
    translator = Translator.from_pretrained(folders("mbart")[1], details=True, **languages)

    (best,) = translator.translate(LINES[:1])
    list(align_words(translator, LINES[:1], ["un"]))

    assert best.source_tokens[-2:] == ("</s>", "fr_XX")
    assert ends == [2, 2]
