"""A saved model's folder: only what is whole, finite and unchanged is loaded."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer_tools.saved_folder import (
    FILES_FILE,
    RUN_FILE,
    check_files,
    describe_model_files,
    load_config,
    load_model,
    read_object,
)
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.translation import Translator

from .models import TINY

NORM = "model.encoder.layer_norm.weight"
ENCODER = "model.encoder."


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model, its tokenizer, and the record of a run that lists them."""
    folder = tmp_path_factory.mktemp("whole")
    tokenizer = VanillaTransformerTokenizer.train(["abcdefghij klmnop"], vocab_size=30, kind="char")
    config = VanillaTransformerConfig(**{**TINY, "vocab_size": len(tokenizer)})
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record = {"files": describe_model_files(folder)}
    (folder / RUN_FILE).write_text(json.dumps(record))
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def change_weights(folder, change, *, recorded=False):
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file(change(weights), file, metadata={"format": "pt"})
    if not recorded:
        (folder / RUN_FILE).unlink()


def without(prefix):
    return lambda weights: {
        name: tensor for name, tensor in weights.items() if not name.startswith(prefix)
    }


@pytest.fixture
def said(caplog):
    """What Transformers' loggers say too."""
    transformers_logging.enable_propagation()
    yield caplog
    transformers_logging.disable_propagation()


def test_whole_model_loads_as_saved_without_warnings(folder, said):
    loaded = load_model(str(folder))

    assert said.messages == []
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert not loaded.training
    # On some processors a product of tensors that begin elsewhere has another last bit.
    assert {tensor.data_ptr() % 64 for tensor in loaded.parameters()} == {0}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (without(NORM), rf"1 missing \({re.escape(NORM)}\)"),
        (without(ENCODER), r"\d\d missing \(.*, .*, .* and \d+ more\)"),
        (lambda weights: weights | {"extra": torch.ones(2)}, r"1 unknown to its config \(extra\)"),
        (lambda weights: weights | {NORM: torch.ones(5)}, r"1 of another shape .*layer_norm"),
        # One number of many.
        (lambda weights: weights | {NORM: weights[NORM] / torch.arange(24)}, r"1 not finite"),
        (
            lambda weights: without(NORM)(weights) | {"extra": torch.ones(2)},
            "1 missing .*; 1 unknown",
        ),
    ],
    ids=["tensor", "encoder", "extra", "shape", "infinite", "two"],
)
def test_incomplete_weights_are_refused_in_one_line(folder, said, change, fault):
    change_weights(folder, change)

    with pytest.raises(ValueError, match=rf"must hold exactly the tensors .* got {fault}") as error:
        load_model(str(folder))

    assert "\n" not in str(error.value)
    # Transformers' own table says that the model should be trained.
    assert said.messages == []


def test_pickled_weights_are_not_read(folder):
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    with pytest.raises(OSError, match=r"got pytorch_model\.bin, which only `import` reads"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("config.json", "hold a saved model, got no config.json. Restore it."),
        ("tokenizer.json", "hold a tokenizer that can be loaded, got no tokenizer.json. Restore"),
        ("tokenizer*", "folder of a saved model, got no tokenizer_config.json in it. It has no to"),
    ],
)
def test_folder_that_lacks_a_file_is_told_so(folder, refused, names, told):
    for file in folder.glob(names):
        file.unlink()

    assert re.search(f"'{folder}' must .*{told}", refused("translate", "--model", folder, "ab"))


@pytest.mark.parametrize("length", [0, 5000])
def test_cut_weights_without_a_record_are_named(folder, length):
    (folder / RUN_FILE).unlink()
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(length)

    with pytest.raises(ValueError, match=r"weights of .*model' are damaged"):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_flipped_bit_is_noticed_where_a_checksum_is_recorded(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[-10] ^= 1
    (folder / name).write_bytes(content)

    with pytest.raises(
        ValueError, match=rf"{name} of .* not the file .* is not the one in run\.json"
    ):
        load_model(str(folder))


def test_checkpoint_is_compared_with_its_own_list(folder):
    (folder / RUN_FILE).rename(folder / FILES_FILE)
    files = describe_model_files(folder)
    files["model.safetensors"]["sha256"] = "0" * 64
    (folder / FILES_FILE).write_text(json.dumps(files))

    with pytest.raises(ValueError, match=r"checksum is not the one in files\.json"):
        check_files(str(folder))


NAMES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("name", [*NAMES, RUN_FILE])
def test_damaged_json_is_named_by_the_commands(folder, refused, name):
    (folder / name).write_text('{"a": 1')

    *_, err = refused("translate", "--model", folder, "ab").splitlines()

    assert err.startswith(f"vanilla-transformer: {folder / name} must hold a JSON object, got ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", {"added_tokens": 3, "backend": []}, "tokenizer"),
        (RUN_FILE, {"settings": {"max_length": "long"}}, "number as `max_length`, got 'long'"),
        (RUN_FILE, {"files": []}, rf"{RUN_FILE} of .* must hold size and checksum of each"),
        (RUN_FILE, {"files": {"tokenizer.json": None}}, "not the file .* not the one"),
    ],
)
def test_file_with_other_content_is_named(folder, name, content, message):
    (folder / name).write_text(json.dumps(content))
    if name != RUN_FILE:
        (folder / RUN_FILE).unlink()

    with pytest.raises(ValueError, match=message):
        Translator.from_pretrained(str(folder))


def test_ids_that_a_generation_config_lacks_are_those_of_the_config(folder):
    (folder / "generation_config.json").write_text('{"num_beams": 2, "eos_token_id": [2, 7]}')

    config = load_model(str(folder)).generation_config

    ids = config.pad_token_id, config.eos_token_id, config.decoder_start_token_id
    assert ids == (0, [2, 7], 1)
    assert config.num_beams == 2


def test_name_of_no_model_is_told_with_both_places_it_may_be_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(
        OSError, match=r"^There is no folder 'runs/typo', and no model .* the Hub: We "
    ):
        TokenizerPair.from_pretrained("runs/typo")


@pytest.mark.parametrize("resolve", [TokenizerPair.from_pretrained, load_model, load_config])
def test_name_in_a_folder_is_not_looked_up_on_the_hub(resolve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()

    with pytest.raises(FileNotFoundError, match=r"^There is no folder 'runs/typo'\.$"):
        resolve("runs/typo")


def test_code_in_a_folder_of_ours_is_not_run_even_if_it_is_trusted(folder, tmp_path):
    modeling = next(folder.glob("modeling_*.py"))
    modeling.write_text("raise RuntimeError('the code of the folder runs')\n")

    translator = Translator.from_pretrained(str(folder), trust_remote_code=True)

    assert type(translator.engine.model) is VanillaTransformerForConditionalGeneration


def test_tokenizer_of_another_size_or_with_other_special_ids_is_refused(folder):
    (folder / RUN_FILE).unlink()
    config = read_object(folder / "config.json")
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 9}))

    with pytest.raises(ValueError, match=r"got eos_token 2 for 9"):
        TokenizerPair.from_pretrained(str(folder))

    (folder / "config.json").write_text(json.dumps(config))
    VanillaTransformerTokenizer.train(["abc"], vocab_size=30, kind="char").save_pretrained(folder)

    with pytest.raises(ValueError, match=r"not the one of its model, got 7 entries of the source"):
        TokenizerPair.from_pretrained(str(folder))


@pytest.mark.parametrize(
    "arguments",
    [
        ["translate", "abc", "--model"],
        ["train", "--train", "{pairs}", "--output_dir", "{out}", "--init_from"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_end_with_status_2_when_weights_are_not_finite(
    folder, tmp_path, refused, arguments
):
    change_weights(folder, lambda weights: weights | {NORM: weights[NORM] * torch.nan})
    (tmp_path / "pairs.tsv").write_text("abc\tcba\n")
    names = {"model": folder, "pairs": tmp_path / "pairs.tsv", "out": tmp_path / "out"}
    argv = [argument.format(**names) for argument in arguments]

    assert f"1 not finite ({NORM})" in refused(*argv, folder)
    assert not (tmp_path / "out").exists()


def test_folder_of_a_newer_release_says_so(folder):
    config = read_object(folder / "config.json")
    (folder / "config.json").write_text(json.dumps({**config, "zeta_norm": 3}))

    assert load_model(str(folder)).config.zeta_norm == 3
    change_weights(folder, lambda weights: weights | {"zeta": torch.ones(2)})
    with pytest.raises(ValueError, match=r"1 unknown .* config has zeta_norm, .* newer release"):
        load_model(str(folder))
