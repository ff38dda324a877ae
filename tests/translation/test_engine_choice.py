"""The choice of an engine: when CTranslate2 translates, and what is kept of it."""

import errno
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools import files, saved_folder
from vanilla_transformer_tools.files import CACHE_VARIABLE
from vanilla_transformer_tools.translation import Translator, ctranslate2_conversion, engine_choice
from vanilla_transformer_tools.translation.ctranslate2_engine import CTranslate2Engine
from vanilla_transformer_tools.translation.engine_choice import (
    agrees,
    conversion_of,
    reasons_for_torch,
)
from vanilla_transformer_tools.translation.engines import Hypothesis, TorchEngine
from vanilla_transformer_tools.translation.search import Search

from ..models import save_small_model

LINES = [f"{'abcdefgh'[number % 8]}{'ijklm'[number // 8]} ein hund" for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer.train([*LINES, "der alte mann"] * 3, vocab_size=300)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(path))
    return path


@pytest.fixture
def load(folder, cache, caplog):
    """Loads a translator of one or more copies of the model, with short outputs."""
    caplog.set_level(logging.INFO)

    def load_translator(*models, **settings):
        if "search" not in settings:
            settings = {"num_beams": 1, "max_extra_tokens": 4, **settings}
        return Translator.from_pretrained([str(model) for model in models or [folder]], **settings)

    return load_translator


def texts(translator, lines=LINES):
    return [found.text for found in translator.translate(lines)]


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_ctranslate2_translates_as_torch_does_from_the_first_line(
    load, tokenizer, tmp_path, caplog, monkeypatch
):
    model = save_small_model(tmp_path / "model", tokenizer)
    # Random weights like `<pad>`, which CTranslate2 leaves out before it normalises.
    edit(model / "generation_config.json", renormalize_logits=True)
    expected = texts(load(model, engine="torch", num_beams=3))

    for _ in range(2):
        translator = load(model, num_beams=3)
        assert isinstance(translator.engine, CTranslate2Engine)
        assert texts(translator) == expected
        # Once it is converted, torch is not needed.
        monkeypatch.setattr(engine_choice, "load_model", None)
    name = translator.engine.name
    assert name.startswith("CTranslate2 ")
    assert name.endswith(" (float32)")
    assert caplog.messages == [f"{name} translates: on this CPU it is faster for this model."] * 2


@pytest.mark.parametrize("change", ["token", "end"])
def test_conversion_that_translates_one_line_of_the_sample_differently_is_not_used(
    load, monkeypatch, caplog, change
):
    expected = texts(load(engine="torch"))
    search = CTranslate2Engine.translate_batch

    def differ(self, *args):
        found = search(self, *args)
        best = found[-1][0]
        if change == "end":
            found[-1] = [Hypothesis(best.tokens, best.score, 2 if best.reached_limit else None)]
        else:
            found[-1] = [Hypothesis([9, *best.tokens[1:]], best.score, best.end)]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(CTranslate2Engine, "translate_batch", differ)
        assert texts(load()) == expected
    # It is known from now on.
    monkeypatch.setattr(CTranslate2Engine, "translate_batch", None)
    translator = load()

    assert texts(translator) == expected
    assert translator.engine.name == "torch"
    said = "CTranslate2 gave a different translation for a line of a sample"
    assert caplog.messages == [f"torch translates: {said}."] * 2


def reason(model, dtype="auto", **settings):
    """The first reason for torch, empty if there is none."""
    return next(reasons_for_torch([str(model)], dtype, {"max_extra_tokens": 4, **settings}), "")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        ({"search": Search(4)}, ""),
        ({"do_sample": True, "seed": 3}, "`do_sample`"),
        ({"search": Search(do_sample=True)}, "`do_sample`"),
        ({"scores": True}, "`scores`"),
        ({"num_hypotheses": 2}, "several hypotheses"),
        ({"dtype": "bfloat16"}, "not in float32"),
        # Twice the position table, without the tokens that an output may have more.
        ({"max_source_length": 2044}, ""),
        ({"max_source_length": 2045}, "no positions for 2049 tokens"),
    ],
    ids=str,
)
def test_settings_decide_on_the_engine(folder, settings, said):
    found = reason(folder, **settings)

    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("generation_config.json", {"repetition_penalty": 1.2}, "sets `repetition_penalty`"),
        # No sample can show its effect: outputs are longer.
        ("generation_config.json", {"min_length": 1}, "sets `min_length`"),
        ("generation_config.json", {"no_repeat_ngram_size": 0, "early_stopping": True}, ""),
        ("config.json", {"dtype": "bfloat16"}, "not in float32"),
        ("config.json", {"model_type": "bart"}, "of the type 'bart'"),
    ],
)
def test_configs_decide_on_the_engine(tokenizer, tmp_path, file, changes, said):
    model = save_small_model(tmp_path, tokenizer)
    edit(model / file, **changes)

    assert said in reason(model)
    assert bool(reason(model)) == bool(said)


@pytest.mark.parametrize(
    ("width", "threads", "is_fast"), [(16, 8, True), (24, 1, True), (24, 2, False)]
)
def test_width_and_threads_decide_on_the_engine(
    tokenizer, tmp_path, monkeypatch, width, threads, is_fast
):
    model = save_small_model(tmp_path / "model", tokenizer, d_model=width)
    monkeypatch.setattr(engine_choice, "_NARROW", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    assert (reason(model) == "") == is_fast


def test_torch_translates_on_a_gpu_and_without_the_package(folder, monkeypatch):
    with monkeypatch.context() as patch:
        gpu = torch.device("cuda")
        patch.setattr(torch.accelerator, "current_accelerator", lambda **_: gpu)
        assert reason(folder) == "there is a GPU"
    monkeypatch.setitem(sys.modules, "ctranslate2", None)

    assert reason(folder) == "CTranslate2 is not installed"


def test_ensembles_samples_and_the_absence_of_a_cache_leave_torch(
    load, folder, cache, monkeypatch, caplog
):
    for translator in (load(folder, folder), load(do_sample=True), load(engine="torch")):
        assert type(translator.engine) is TorchEngine
        assert len(texts(translator)) == len(LINES)
    assert not cache.exists()
    assert caplog.messages == [
        "torch translates: several models are an ensemble.",
        "torch translates: CTranslate2 does not do the same with `do_sample`.",
    ]
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert type(load().engine) is TorchEngine


@pytest.mark.parametrize("held", ["heads", "ends"])
def test_model_that_ctranslate2_cannot_hold_is_translated_by_torch(load, tokenizer, tmp_path, held):
    changes = {"talking_heads": "both"} if held == "heads" else {}
    model = save_small_model(tmp_path / "model", tokenizer, **changes)
    if held == "ends":
        edit(model / "generation_config.json", eos_token_id=[2, 36])

    translator = load(model)

    assert texts(translator) == texts(load(model, engine="torch"))
    assert translator.engine.name == "torch"
    assert list((tmp_path / "cache" / "ctranslate2").iterdir()) == []


# The cache


def test_damaged_conversion_is_made_again(load, cache, folder):
    expected = texts(load())
    made = conversion_of(folder)
    before = (made / "model.bin").read_bytes()
    for name, damage in (
        ("config.json", lambda content: content[:10]),
        ("files.json", lambda content: b"{}"),
        ("files.json", None),
        ("model.bin", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
    ):
        whole = (made / name).read_bytes()
        (made / name).unlink()
        if damage:
            (made / name).write_bytes(damage(whole))
        assert agrees(made) is None
        if name != "model.bin":
            (made / name).write_bytes(whole)

    translator = load()

    assert texts(translator) == expected
    assert translator.engine.name.startswith("CTranslate2")
    assert (made / "model.bin").read_bytes() == before
    assert not list((cache / "ctranslate2").glob(".*"))


def test_each_file_of_the_model_and_both_converters_change_its_place(
    tokenizer, cache, tmp_path, monkeypatch
):
    model = save_small_model(tmp_path / "model", tokenizer)
    places = {conversion_of(model)}
    (model / "README.md").write_text("a card")
    assert {conversion_of(model)} == places

    for file in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        (model / file).write_bytes((model / file).read_bytes() + b" ")
        places.add(conversion_of(model))
    (tmp_path / "converter.py").write_text("another")
    monkeypatch.setattr(engine_choice, "_CONVERTER", tmp_path / "converter.py")
    places.add(conversion_of(model))
    monkeypatch.setattr(engine_choice, "version", lambda name: f"99 {name}")
    places.add(conversion_of(model))

    assert len(places) == 7


def test_cache_that_cannot_be_written_leaves_torch_and_one_line(
    load, tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))

    translator = load()

    assert texts(translator) == texts(load(engine="torch"))
    assert translator.engine.name == "torch"
    (said,) = caplog.messages
    assert said.startswith("torch translates: a conversion cannot be kept: ")
    assert str(tmp_path / "file") in said


def test_read_only_cache_is_used(load, monkeypatch):
    expected = texts(load())

    def fail(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(engine_choice, "write_lines", fail)
    monkeypatch.setattr(files.os, "utime", fail)
    translator = load(max_extra_tokens=3)

    assert len(texts(translator)) == len(expected)
    assert translator.engine.name.startswith("CTranslate2")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_process_that_was_slower_keeps_what_the_other_made_if_it_is_whole(
    load, cache, folder, monkeypatch, is_damaged
):
    made, marks = conversion_of(folder), []
    convert = ctranslate2_conversion.convert

    def convert_slowly(*args):
        convert(*args)
        monkeypatch.setattr(ctranslate2_conversion, "convert", convert)
        load()
        if is_damaged:
            (made / "model.bin").write_bytes(b"")
        marks.append(made.stat().st_ino)

    monkeypatch.setattr(ctranslate2_conversion, "convert", convert_slowly)

    assert load().engine.name.startswith("CTranslate2")

    assert (marks == [made.stat().st_ino]) != is_damaged
    assert list((cache / "ctranslate2").iterdir()) == [made]


def test_model_that_changes_while_it_is_loaded_is_not_kept(
    load, tokenizer, tmp_path, caplog, monkeypatch
):
    model = save_small_model(tmp_path / "model", tokenizer)

    def load_model(*args, **named):
        loaded = saved_folder.load_model(*args, **named)
        (model / "README.md").write_text("a card")
        (model / "model.safetensors").write_bytes(b"other weights")
        return loaded

    monkeypatch.setattr(engine_choice, "load_model", load_model)
    translator = load(model)

    assert translator.engine.name == "torch"
    assert f"{str(model)!r} was changed while it was loaded" in caplog.messages[0]
    assert list((tmp_path / "cache" / "ctranslate2").iterdir()) == []


def test_models_that_were_not_used_for_longest_are_deleted(
    load, cache, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(engine_choice, "MOST_MODELS", 2)
    models = [
        save_small_model(tmp_path / str(bias), tokenizer, max_position_embeddings=100 + bias)
        for bias in range(3)
    ]
    places = []
    for number, model in enumerate(models):
        load(model)
        places.append(conversion_of(model))
        os.utime(places[-1], (number, number))
        if number == 1:
            load(models[0])

    left = {path.name for path in (cache / "ctranslate2").iterdir() if path.is_dir()}
    assert left == {places[0].name, places[2].name}


def test_model_that_differs_from_its_record_is_refused_though_it_is_converted(
    load, tokenizer, tmp_path
):
    model = save_small_model(tmp_path / "model", tokenizer)
    texts(load(model))
    wrong = {"model.safetensors": {"bytes": 1, "sha256": "0"}}
    (model / "run.json").write_text(json.dumps({"files": wrong}))

    with pytest.raises(ValueError, match="is not the file that was saved"):
        load(model)


@pytest.mark.parametrize(
    ("given", "home", "expected"),
    [
        ("", None, None),
        ("/else", None, "/else"),
        (None, "/caches", "/caches/vanilla_transformer"),
        (None, "", "~/.cache/vanilla_transformer"),
    ],
)
def test_place_of_the_cache(monkeypatch, given, home, expected):
    for name, value in ((CACHE_VARIABLE, given), ("XDG_CACHE_HOME", home)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)

    found = files.cache_folder()

    assert found == (expected and Path(expected).expanduser())


def test_conversion_that_others_can_have_written_is_made_anew(load, folder, monkeypatch, caplog):
    expected = texts(load())
    made = conversion_of(folder)
    assert agrees(made)

    for place in (made, made.parent):
        place.chmod(0o770)
        assert agrees(made) is None
        place.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: made.stat().st_uid + 1)
        assert agrees(made) is None
        # Nor can it be made anew in the folder of another user.
        assert texts(load()) == expected
        assert "Others can write to" in caplog.text
        assert CACHE_VARIABLE in caplog.text
    assert agrees(made)

    made.parent.chmod(0o777)
    texts(load())
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent)] == [0o700, 0o700]


def test_conversion_of_another_model_is_not_taken_for_this_one(load, folder, tmp_path):
    texts(load())
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "generation_config.json").write_text('{"num_beams": 2}')

    conversion_of(folder).rename(conversion_of(other))

    assert agrees(conversion_of(other)) is None
