"""Recipes: YAML files that stand for options, and those of the repository."""

from dataclasses import fields
from pathlib import Path

import pytest
from transformers import Seq2SeqTrainingArguments
from transformers.hf_argparser import string_to_bool

from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.commands.command import build_parser
from vanilla_transformer_tools.commands.recipes import insert_recipe
from vanilla_transformer_tools.settings import TrainSettings

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.fixture
def write_recipe(tmp_path):
    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_options_of_a_recipe_come_before_those_of_the_command_line(write_recipe):
    recipe = write_recipe("preset: tiny\nlearning_rate: 0.004\ntrain: [a.de, a.en]\n")

    argv = insert_recipe([recipe, "--learning_rate", "1"])

    assert argv == [
        *["--preset", "tiny", "--learning_rate", "0.004", "--train", "a.de", "a.en"],
        *["--learning_rate", "1"],
    ]


def test_our_switches_take_no_value_and_those_of_trainer_do(write_recipe):
    recipe = write_recipe("pretokenized: true\nresume: false\nbf16: false\n")

    assert insert_recipe([recipe]) == ["--pretokenized", "--bf16", "False"]


@pytest.mark.parametrize(("on", "off"), [("Yes", "no"), ("on", "off"), ("True", "FALSE")])
def test_switch_is_turned_by_every_word_of_yaml(write_recipe, on, off):
    recipe = write_recipe(f"pretokenized: {on}\nresume: {off}\nbf16: {off}\n")

    assert insert_recipe([recipe])[:2] == ["--pretokenized", "--bf16"]
    assert string_to_bool(insert_recipe([recipe])[2]) is False


def test_config_is_a_mapping_of_its_fields(write_recipe):
    recipe = write_recipe("config: {d_model: 64, activation_function: gelu}\n")

    assert insert_recipe([recipe]) == ["--config", "d_model=64", "activation_function=gelu"]


def test_config_on_the_command_line_continues_that_of_a_recipe(write_recipe):
    recipe = write_recipe("config: {d_model: 64, dropout: 0.2}\n")
    parser = build_parser(main, TrainSettings, "")

    given = parser.parse_args(insert_recipe([recipe, "--config", "dropout=0.1"]))

    assert given.config == ["d_model=64", "dropout=0.2", "dropout=0.1"]
    assert parser.parse_args([]).config == []


def test_config_has_booleans_and_null_as_in_json(write_recipe):
    recipe = write_recipe("config: {pre_norm: false, d_k: null}\n")

    assert insert_recipe([recipe]) == ["--config", "pre_norm=false", "d_k=null"]


def test_no_is_the_code_of_norwegian(write_recipe):
    recipe = write_recipe("language: [no, en]\ntarget_language: no\n")

    assert insert_recipe([recipe]) == ["--language", "no", "en", "--target_language", "no"]


@pytest.mark.parametrize(
    "argv", [[], ["--train", "a.yaml"], ["--preset", "tiny"]], ids=["none", "later", "option"]
)
def test_command_line_without_a_recipe_stays_as_it_is(argv):
    assert insert_recipe(argv) == argv


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- preset\n", r"must hold options and their values.* got \['preset'\]"),
        ("", "must hold options and their values"),
        ("a: [b\n", "mine.yaml is not YAML"),
        pytest.param("a: " + 3000 * "[", "mine.yaml is not YAML", id="nested"),
        ("preset:\n", "'preset' must have a value or a list of values, got None"),
        ("preset: {a: 1}\n", "'preset' must have a value or a list of values, got {'a': 1}"),
        ("train: []\n", r"'train' must have a value or a list of values, got \[\]"),
    ],
)
def test_recipe_is_refused_when_it_is_no_mapping_of_options(write_recipe, text, message):
    with pytest.raises(ValueError, match=message):
        insert_recipe([write_recipe(text)])


def test_command_tells_an_option_that_nobody_knows(write_recipe, refused):
    recipe = write_recipe("train: [a.de, a.en]\npretokenised: true\n")

    told = refused("train", recipe)

    assert "unknown option --pretokenised; did you mean --pretokenized?" in told


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_of_the_repository_name_options_and_files_of_theirs(path, tmp_path, refused):
    known = {
        field.name for kind in (TrainSettings, Seq2SeqTrainingArguments) for field in fields(kind)
    }
    options = {word[2:] for word in insert_recipe([str(path)]) if word.startswith("--")}

    assert options <= known
    # Everything is in order but the files, which are looked for in the folder given.
    here = str(tmp_path / "here")
    assert here in refused("train", path, "--data", here, "--use_cpu")
