"""Exports as a whole: what the folder holds, how it is compared, and that a bad one is not kept."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig, MarianConfig, MarianMTModel

from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.exports import ctranslate2_conversion as loader
from vanilla_transformer_tools.exports import onnx as onnx_export
from vanilla_transformer_tools.exports.export import Agreement, export_model, verify
from vanilla_transformer_tools.saved_folder import describe_model_files, load_model, write_run
from vanilla_transformer_tools.settings import TranslateSettings
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.ctranslate2_engine import CTranslate2Engine
from vanilla_transformer_tools.translation.job import job_record
from vanilla_transformer_tools.translation.loading import faster_export
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

from ..models import build_variant
from ..text.test_tokenizer_pair import GREEK, save_latin_to_greek
from .test_onnx import draw_rows, read_in_torch

LINES = ["ein hund rennt.", "", "ja", "der alte mann"]


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """A saved model with its tokenizer and what training leaves beside them."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    model = build_variant()
    model.generation_config.update(num_beams=3, length_penalty=0.7)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "run.json").write_text('{"settings": {"max_length": 17}}')
    return folder


@pytest.fixture
def source(saved, tmp_path):
    """A copy of it, `model`."""
    return str(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture(scope="module")
def exported(saved, tmp_path_factory):
    """Its export, compared on random lines: how it agrees, and the folder."""
    folder = tmp_path_factory.mktemp("exported") / "out"
    return export_model(str(saved), folder), folder


@pytest.fixture
def out(exported, tmp_path):
    """A copy of the export, `out`, where `source` is `model`."""
    return shutil.copytree(exported[1], tmp_path / "out")


def export(source, output, **options):
    """An export that is compared on three lines only."""
    return export_model(source, output, sample=LINES, **options)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


OF_TOKENIZERS = {"tokenizer.json", "tokenizer_config.json"}
OF_EVERY_EXPORT = {"config.json", "generation_config.json", "run.json", *OF_TOKENIZERS}


def test_ctranslate2_folder_is_complete(saved, exported):
    agreement, folder = exported

    assert files(folder) == OF_EVERY_EXPORT | {"model.bin", "shared_vocabulary.json"}
    assert agreement.lines == agreement.identical == 100
    assert 0 < agreement.gap < 1e-4
    assert files(folder.parent) == {"out"}
    ordinary = folder.parent / "ordinary"
    ordinary.mkdir()
    assert folder.stat().st_mode == ordinary.stat().st_mode
    ordinary.rmdir()
    config = GenerationConfig.from_pretrained(folder)
    assert (config.num_beams, config.length_penalty) == (3, 0.7)
    ids = [AutoTokenizer.from_pretrained(place)(LINES)["input_ids"] for place in (saved, folder)]
    assert ids[0] == ids[1]
    assert json.loads((folder / "run.json").read_text())["settings"] == {"max_length": 17}


@pytest.mark.parametrize("quantization", ["int8", "bfloat16"])
def test_reduced_weights_are_compared_too_on_the_lines_that_are_given(
    source, tmp_path, quantization
):
    agreement = export(source, tmp_path / "out", quantization=quantization)

    assert agreement.lines == 3
    assert agreement.gap > 1e-4


def test_sample_without_text_is_refused(source, tmp_path):
    with pytest.raises(ValueError, match="must have lines with text, got 2 blank ones"):
        export_model(source, tmp_path / "out", sample=["", "  "])

    assert files(tmp_path) == {"model"}


def shift_positions(self, spec, stack, set_stack=loader.VanillaTransformerLoader._set_stack):
    set_stack(self, spec, stack)
    table = spec.position_encodings
    table.encodings = table.encodings.roll(-1, 0)


@pytest.mark.parametrize("name", ["ctranslate2", "pegasus"])
def test_model_of_another_class_is_refused(source, tmp_path, name):
    sizes = {"d_model": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = MarianConfig(vocab_size=37, encoder_layers=1, decoder_layers=1, **sizes, **ids)
    MarianMTModel(config).save_pretrained(source)

    with pytest.raises(ValueError, match=f"The format {name} is made of models of this package"):
        export_model(source, tmp_path / "out", name)


def test_export_that_translates_otherwise_is_not_kept(source, tmp_path, monkeypatch):
    monkeypatch.setattr(loader.VanillaTransformerLoader, "_set_stack", shift_positions)

    with pytest.raises(ValueError, match=r"must translate at least .* of 3 lines translated"):
        export(source, tmp_path / "out", quantization="int8")

    assert files(tmp_path) == {"model"}


def test_onnx_export_that_computes_otherwise_is_not_kept(source, tmp_path, monkeypatch):
    other = load_model(source, attn_implementation="eager")
    other.model.decoder.layers[1].fc2.bias.data[3] += 0.01
    monkeypatch.setattr(onnx_export, "export_onnx", lambda *_: None)
    monkeypatch.setattr(onnx_export, "OnnxModel", lambda _: read_in_torch(other))

    with pytest.raises(ValueError, match=r"token that differ by at most 0\.0001, got"):
        export_model(source, tmp_path / "out", "onnx", sample=["ja"])

    assert files(tmp_path) == {"model"}


def test_onnx_export_says_how_it_is_run(source, tmp_path, monkeypatch):
    model = load_model(source, attn_implementation="eager")
    monkeypatch.setattr(onnx_export, "export_onnx", lambda *_: None)
    monkeypatch.setattr(onnx_export, "OnnxModel", lambda _: read_in_torch(model))

    agreement = export_model(source, tmp_path / "out", "onnx", sample=["ja"])

    assert 0 <= agreement.gap < 1e-4
    config, tokenizer = (
        json.loads((tmp_path / "out" / name).read_text())
        for name in ("config.json", "tokenizer_config.json")
    )
    assert config["transformers.js_config"]["dtype"] == "fp32"
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def compared(model, change=lambda found: None):
    """How an export compares whose hypotheses something has changed."""
    reader = read_in_torch(model)

    def translate_otherwise(sources, limits):
        found = reader.translate(sources, limits)
        change(found)
        return found

    return verify(TorchEngine(model), translate_otherwise, draw_rows(20, 9))


def test_score_of_every_line_is_compared(tiny_model):
    def change(found):
        found[0] = replace(found[0], score=found[0].score + 0.5)

    agreement = compared(tiny_model, change)

    # Of each batch, of which there are two.
    assert (agreement.lines, agreement.identical) == (20, 20)
    assert agreement.gap == pytest.approx(2 * 0.5 / 20, abs=1e-4)


def test_other_translation_is_noticed(tiny_model):
    def change(found):
        found[1] = replace(found[1], tokens=[*found[1].tokens, 5])

    assert compared(tiny_model, change).identical == 18


def test_nothing_that_is_never_generated_is_translated_or_has_probability():
    model = build_variant(lm_head_bias=True, attn_implementation="eager")
    model.lm_head.bias.data[model.config.pad_token_id] += 99

    agreement = compared(model)

    assert agreement.identical == 20
    assert agreement.gap < 1e-4


def test_agreement_within_the_tolerance_is_kept():
    for identical in (100, 99):
        Agreement(100, identical, 0.001).check("float32")

    for identical, gap in ((98, 0.001), (100, 0.0011), (100, float("nan"))):
        with pytest.raises(ValueError, match=r"at least 99% .* differ by at most 0\.001, got: "):
            Agreement(100, identical, gap).check("float32")


def test_nothing_is_replaced(source, tmp_path, monkeypatch):
    check = Agreement.check

    def check_slowly(*args):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").touch()
        check(*args)

    monkeypatch.setattr(Agreement, "check", check_slowly)

    # What appears while the export is compared, and what was there before.
    for _ in range(2):
        with pytest.raises(FileExistsError, match="out' must not exist yet"):
            export(source, tmp_path / "out")
        assert files(tmp_path / "out") == {"mine.txt"}
        assert files(tmp_path) == {"model", "out"}


def test_export_is_found_in_the_folder_of_its_model(source, write, refused, capsys):
    record = {"files": describe_model_files(Path(source))}
    write_run(Path(source), record)

    main(["export", "--sample", write("sample.txt", *LINES), source])

    output, printed = Path(source, "ctranslate2"), capsys.readouterr()
    assert printed.out.startswith(f"{output}: 3 of 3 lines")
    assert f"exporting {source} and comparing the result with it" in printed.err
    assert "writing model.bin in float32\n" in printed.err
    assert json.loads((output / "run.json").read_text())["exported_from"] == record["files"]
    assert "OUT is needed" in refused("export", "--format", "onnx", source)
    load_model(source)
    engines = [
        Translator.from_pretrained(source, engine=one, num_beams=1, max_extra_tokens=4)
        for one in ("torch", "ctranslate2")
    ]
    texts = [[one.text for one in each.translate(LINES)] for each in engines]
    assert texts[0] == texts[1]
    assert isinstance(engines[1].engine, CTranslate2Engine)
    assert faster_export(engines[0].engine).endswith(
        f"export {source}, then --engine ctranslate2\n"
    )
    # An export has its own tokenizers, whose checksums are on record.
    file = Path(source, "tokenizer.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": None}))
    exported = Translator.from_pretrained(source, engine="ctranslate2")
    assert exported.tokenizers.contents == engines[1].tokenizers.contents
    # A job that goes on is told of another export.
    settings = TranslateSettings(model=[source], engine="ctranslate2")
    before = job_record(settings)
    (output / "model.bin").write_bytes((output / "model.bin").read_bytes()[:-1] + b"x")
    assert job_record(settings)["--model"] != before["--model"]
    for other in ({}, {"files": {"model.safetensors": {"bytes": 1}}}):
        write_run(Path(source), other)
        with pytest.raises(ValueError, match=r"must be an export of the weights in .*others"):
            Translator.from_pretrained(source, engine="ctranslate2")
    write_run(Path(source), {})
    # Without checksums on either side, nobody can tell.
    write_run(output, {})
    with pytest.raises(ValueError, match=r"must be an export .* no checksums"):
        Translator.from_pretrained(source, engine="ctranslate2")
    assert faster_export(engines[0].engine).endswith(" --model FOLDER\n")


@pytest.mark.parametrize(
    ("format", "file", "changes", "reasons"),
    [
        ("onnx", "generation_config", {"no_repeat_ngram_size": 3, "min_length": 4}, ["=3", "=4"]),
        ("onnx", "generation_config", {"bad_words_ids": [[5, 6]]}, ["single tokens"]),
        ("ctranslate2", "generation_config", {"bad_words_ids": [[5, 6]]}, ["single tokens"]),
        ("ctranslate2", "config", {"activation_function": "relu6"}, ["got 'relu6'"]),
    ],
)
def test_what_a_runtime_cannot_do_is_refused_before_work_is_announced(
    source, tmp_path, refused, format, file, changes, reasons
):
    path = Path(source, f"{file}.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    told = refused("export", "--format", format, source, tmp_path / "out")

    assert all(reason in told for reason in reasons)
    assert "exporting" not in told
    assert files(tmp_path) == {"model"}


def test_export_that_was_changed_for_searches_of_torch_is_refused(out):
    file = out / "generation_config.json"
    config = json.loads(file.read_text())

    for change, message in (
        ({"eos_token_id": [2, 7]}, r"needs one `eos_token_id` .* got \[2, 7\]"),
        ({"repetition_penalty": 1.2}, r"without these settings .*: repetition_penalty=1\.2\."),
    ):
        file.write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            Translator.from_pretrained(str(out), engine="ctranslate2")


def test_command_names_the_cure_for_a_missing_package(source, tmp_path, refused, monkeypatch):
    monkeypatch.delitem(sys.modules, "vanilla_transformer_tools.exports.ctranslate2_conversion")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ctranslate2"]:
        monkeypatch.setitem(sys.modules, name, None)

    assert "pip install -e '.[export]'" in refused("export", source, tmp_path / "out")


def test_ctranslate2_translates_from_one_vocabulary_into_another(tmp_path):
    source = save_latin_to_greek(tmp_path / "model")

    agreement = export(source, tmp_path / "out")

    assert agreement.lines == agreement.identical == 3
    vocabularies = {"source_vocabulary.json", "target_vocabulary.json", "target_tokenizer"}
    assert files(tmp_path / "out") == OF_EVERY_EXPORT | vocabularies | {"model.bin"}
    pair = TokenizerPair.from_pretrained(source)
    for side, tokenizer in (("source", pair.source), ("target", pair.target)):
        tokens = json.loads((tmp_path / "out" / f"{side}_vocabulary.json").read_text("utf-8"))
        assert tokens == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    torchs, ours = (
        Translator.from_pretrained(folder, engine=engine, num_beams=1, max_extra_tokens=4)
        for folder, engine in ((source, "torch"), (str(tmp_path / "out"), "ctranslate2"))
    )
    for prefix in ("", "φως"):
        texts = [[one.text for one in each.translate(LINES, prefix)] for each in (torchs, ours)]
        assert texts[0] == texts[1]
        assert set("".join(texts[1])) <= set(GREEK)
    shutil.rmtree(tmp_path / "out" / "target_tokenizer")
    with pytest.raises(ValueError, match=r"got no target_tokenizer/tokenizer\.json"):
        Translator.from_pretrained(str(tmp_path / "out"), engine="ctranslate2")


@pytest.mark.parametrize("name", ["model.bin", "tokenizer.json"])
def test_flipped_bit_of_an_export_is_noticed(out, name):
    content = bytearray((out / name).read_bytes())
    content[-10] ^= 1
    (out / name).write_bytes(content)

    with pytest.raises(ValueError, match=f"{name} of .* is not the file that was saved"):
        Translator.from_pretrained(str(out), engine="ctranslate2")
    with pytest.raises(ValueError, match=r"is an export to CTranslate2\. Choose .* got 'torch'"):
        Translator.from_pretrained(str(out))
