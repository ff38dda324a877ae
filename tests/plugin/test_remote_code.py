"""A saved folder by itself: with the package imported, and where it is not installed."""

import ast
import json
import logging
import os
import shutil
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.dynamic_module_utils import get_relative_imports

import vanilla_transformer
from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerTokenizer,
)

from ..models import redraw_parameters
from ..support.gradients_of_one_update import build_model
from .test_tokenization import AWKWARD, CORPUS, KINDS

TEXTS = ["Ein Hund rennt.", "Zwei alte Männer schlafen im Garten.", "Ja"]
# Of the package, these travel with a model.
PARTS = ("configuration", "generation", "layers", "loss", "modeling", "pretrained", "stacks")
HUB_FILES = {
    path.name: path
    for part in PARTS
    for path in [Path(vanilla_transformer.__file__).with_name(f"{part}_vanilla_transformer.py")]
}
ALLOWED_IMPORTS = sys.stdlib_module_names | {
    "huggingface_hub",
    "tokenizers",
    "torch",
    "transformers",
}

# Runs where the package is not installed: its folder is all that this process knows.
CLIENT = """
import gc
import json
import sys
from importlib import import_module
from pathlib import Path

sys.modules["vanilla_transformer"] = sys.modules["vanilla_transformer_tools"] = None
# Looking for garbage in what is imported takes a second.
gc.disable()

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

folder, resaved, resaved_bare, report_path, tokenizers, *texts = sys.argv[1:]

try:
    AutoModelForSeq2SeqLM.from_pretrained(folder)
    refusal = None
except ValueError as error:
    refusal = str(error)

config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
bare = AutoModel.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(texts, return_tensors="pt", padding=True)
report = {
    "refusal": refusal,
    "config": config.to_json_string(),
    "modules": [type(loaded).__module__ for loaded in (config, model, bare)],
    "input_ids": inputs["input_ids"].tolist(),
    "untrusted_input_ids": AutoTokenizer.from_pretrained(folder)(texts, padding=True)["input_ids"],
    "generated": model.generate(**inputs, num_beams=3, max_new_tokens=9).tolist(),
    "states": bare(**inputs, decoder_input_ids=inputs["input_ids"]).last_hidden_state.tolist(),
}
model.save_pretrained(resaved)
tokenizer.save_pretrained(resaved)
bare.save_pretrained(resaved_bare)
for again in (resaved, resaved_bare):
    AutoModel.from_pretrained(again, trust_remote_code=True)
folders, texts = json.loads(Path(tokenizers).read_text())
report["tokenizers"] = []
for folder in folders:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = dict(tokenizer(texts))
    decoded = tokenizer.batch_decode(encoded["input_ids"], skip_special_tokens=True)
    report["tokenizers"].append([encoded, decoded])
Path(report_path).write_text(json.dumps(report))
"""


# Loads folders, and says what `MADE_FOR` is in the code that each model runs.
LOAD_BOTH = """
import sys

sys.modules["vanilla_transformer"] = None
from transformers import AutoModelForSeq2SeqLM

for folder in sys.argv[1:]:
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
    print(sys.modules[type(model.get_encoder().layers[0]).__module__].MADE_FOR)
"""


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer.train(TEXTS, vocab_size=37, kind="char")


@pytest.fixture(scope="module")
def model():
    model = build_model(label_smoothing=0.0).eval()
    redraw_parameters(model)
    return model


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "mein schönes Modell"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizers():
    """One of each kind."""
    train = partial(VanillaTransformerTokenizer.train, CORPUS, vocab_size=500)
    return {kind: train(kind=kind) for kind in KINDS}


@pytest.fixture(scope="module")
def client(folder, tokenizers, tmp_path_factory):
    """What a process without the package reports; `resaved` and `resaved_bare` are its folders."""
    home = tmp_path_factory.mktemp("client")
    paths = {name: home / name for name in ("resaved", "resaved_bare", "report", "tokenizers")}
    for kind in KINDS:
        tokenizers[kind].save_pretrained(home / kind)
        (home / kind / "config.json").write_text('{"model_type": "vanilla_transformer"}')
    paths["tokenizers"].write_text(json.dumps([[str(home / kind) for kind in tokenizers], AWKWARD]))
    finished = subprocess.run(
        [sys.executable, "-c", CLIENT, folder, *paths.values(), *TEXTS],
        env={**os.environ, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return {**paths, **json.loads(paths["report"].read_text())}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def model_contents(folder):
    return {name: data for name, data in contents(folder).items() if "tokenizer" not in name}


def code_and_auto_map(folder):
    code = {name: text for name, text in contents(folder).items() if name.endswith(".py")}
    return code, json.loads((folder / "config.json").read_text())["auto_map"]


def model_inputs(tokenizer):
    return tokenizer(TEXTS, return_tensors="pt", padding=True)


def test_folder_needs_trust_without_the_package(client):
    assert "Please pass the argument `trust_remote_code=True`" in client["refusal"]
    assert all(module.startswith("transformers_modules.") for module in client["modules"])


def test_config_and_tokenizer_are_the_same_without_the_package(client, folder, tokenizer):
    ids = model_inputs(tokenizer)["input_ids"].tolist()

    assert client["config"] == AutoConfig.from_pretrained(folder).to_json_string()
    assert client["input_ids"] == client["untrusted_input_ids"] == ids


def test_each_kind_of_tokenizer_is_the_same_without_the_package(client, tokenizers):
    for tokenizer, (encoded, decoded) in zip(
        tokenizers.values(), client["tokenizers"], strict=True
    ):
        expected = tokenizer(AWKWARD)
        assert encoded == dict(expected)
        assert decoded == tokenizer.batch_decode(expected.input_ids, skip_special_tokens=True)


def test_model_computes_the_same_without_the_package(client, model, tokenizer):
    inputs = model_inputs(tokenizer)

    generated = model.generate(**inputs, num_beams=3, max_new_tokens=9)
    with torch.no_grad():
        states = model.model(**inputs, decoder_input_ids=inputs["input_ids"]).last_hidden_state

    assert client["generated"] == generated.tolist()
    torch.testing.assert_close(torch.tensor(client["states"]), states)


@pytest.mark.parametrize(
    ("auto_class", "expected"),
    [
        (AutoConfig, VanillaTransformerConfig),
        (AutoModel, VanillaTransformerModel),
        (AutoModelForSeq2SeqLM, VanillaTransformerForConditionalGeneration),
        (AutoTokenizer, VanillaTransformerTokenizer),
    ],
)
def test_package_is_used_when_it_is_imported(folder, auto_class, expected):
    for trust in (None, True):
        assert type(auto_class.from_pretrained(folder, trust_remote_code=trust)) is expected


def test_folder_holds_all_that_is_promised(folder):
    assert contents(folder).keys() == {
        *HUB_FILES,
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_folder_is_the_same_when_it_is_saved_again(client, folder, tokenizer, tmp_path):
    AutoModelForSeq2SeqLM.from_pretrained(folder).save_pretrained(tmp_path)

    assert contents(tmp_path) == model_contents(client["resaved"]) == model_contents(folder)
    resaved = AutoTokenizer.from_pretrained(client["resaved"])
    assert resaved(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]


def test_bare_folder_has_code_and_auto_map(client, folder, tmp_path):
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path)

    for bare in (tmp_path, client["resaved_bare"]):
        assert code_and_auto_map(bare) == code_and_auto_map(folder)


def test_config_saved_alone_brings_the_code_of_its_model(tmp_path):
    VanillaTransformerConfig().save_pretrained(tmp_path)

    code, auto_map = code_and_auto_map(tmp_path)
    config = "configuration_vanilla_transformer.VanillaTransformerConfig"
    assert code.keys() == HUB_FILES.keys()
    assert auto_map == {"AutoConfig": config}


def test_auto_map_names_its_own_folder_when_the_model_came_from_the_hub(folder, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    # What Transformers makes of the map of a repository.
    model.config.auto_map = {
        name: f"me/my-model--{reference}" for name, reference in model.config.auto_map.items()
    }

    model.save_pretrained(tmp_path)

    assert code_and_auto_map(tmp_path) == code_and_auto_map(folder)


def test_folder_is_the_same_when_a_subclass_saves_it(folder, tmp_path):
    # As FSDP does, which gives the model a class of its own.
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    model.__class__ = type("Wrapped", (type(model),), {})

    model.save_pretrained(tmp_path)

    config = AutoConfig.from_pretrained(folder)
    config.architectures = ["Wrapped"]
    assert contents(tmp_path) == {
        **model_contents(folder),
        "config.json": config.to_json_string().encode(),
    }


def test_registered_subclass_is_saved_with_its_own_code_too(folder, tmp_path, monkeypatch):
    code = tmp_path / "modeling_mine.py"
    code.write_text(
        "from vanilla_transformer import VanillaTransformerForConditionalGeneration\n\n\n"
        "class Mine(VanillaTransformerForConditionalGeneration):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = import_module("modeling_mine").Mine
    mine.register_for_auto_class("AutoModelForSeq2SeqLM")

    mine.from_pretrained(folder).save_pretrained(tmp_path / "saved")

    files, auto_map = code_and_auto_map(tmp_path / "saved")
    expected_files, expected_map = code_and_auto_map(folder)
    assert files == {**expected_files, code.name: code.read_bytes()}
    assert auto_map == {**expected_map, "AutoModelForSeq2SeqLM": "modeling_mine.Mine"}


def test_each_of_two_folders_of_one_name_runs_its_own_code(folder, tmp_path):
    folders = [tmp_path / name / "best" for name in ("de-en", "fr-en")]
    for path in folders:
        shutil.copytree(folder, path)
        with (path / "layers_vanilla_transformer.py").open("a", encoding="utf-8") as code:
            code.write(f"\nMADE_FOR = {path.parent.name!r}\n")

    printed = subprocess.check_output(
        [sys.executable, "-c", LOAD_BOTH, *folders],
        env={**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        text=True,
    )

    assert printed.split() == ["de-en", "fr-en"]


@pytest.mark.parametrize(("version", "count"), [("5.25.0", 1), ("5.24.7", 0), ("5.17.0", 0)])
def test_newer_release_than_was_tested_is_named_once(caplog, version, count):
    with caplog.at_level(logging.INFO, logger="vanilla_transformer"):
        vanilla_transformer._tell_of_untested(version)

    said = [record.message for record in caplog.records if version in record.message]
    assert len(said) == count
    assert all("5.17 to 5.24" in message for message in said)


@pytest.mark.parametrize("file", HUB_FILES.values(), ids=HUB_FILES)
def test_hub_file_imports_only_its_siblings_and_what_its_users_have(file):
    libraries, siblings = set(), set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            libraries |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, ast.unparse(node)
            (siblings if node.level else libraries).add(node.module)

    assert {name.partition(".")[0] for name in libraries} <= ALLOWED_IMPORTS
    # Some builds of torch lack it.
    assert not [name for name in libraries if "torch.distributed" in name]
    assert {f"{name}.py" for name in siblings} <= HUB_FILES.keys()
    # The scanner of Transformers is a regular expression: it misses some imports, and takes prose
    # for others.
    assert set(get_relative_imports(file)) == siblings
