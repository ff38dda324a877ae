"""Recipes: YAML files that stand for options, and those of the repository."""

from dataclasses import fields
from pathlib import Path

import pytest
from transformers import Seq2SeqTrainingArguments

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


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        (
            "preset: tiny\nlearning_rate: 0.004\ntrain: [a.de, a.en]\n",
            ["--preset", "tiny", "--learning_rate", "0.004", "--train", "a.de", "a.en"],
        ),
        # Our switches take no value, and those of Trainer do.
        ("pretokenized: Yes\nresume: off\nbf16: FALSE\n", ["--pretokenized", "--bf16", "false"]),
        # `no` is the code of Norwegian.
        ("pretokenized: on\nlanguage: [no, en]\n", ["--pretokenized", "--language", "no", "en"]),
        (
            "config: {d_model: 64, pre_norm: False, d_k: null}\n",
            ["--config", "d_model=64", "pre_norm=false", "d_k=null"],
        ),
    ],
)
def test_recipe_stands_for_options_before_those_of_the_command_line(write_recipe, text, argv):
    given = ["--learning_rate", "1"]

    assert insert_recipe([write_recipe(text), *given]) == [*argv, *given]


def test_config_on_the_command_line_continues_that_of_a_recipe(write_recipe):
    recipe = write_recipe("config: {d_model: 64, dropout: 0.2}\n")
    parser = build_parser(main, TrainSettings, "")

    given = parser.parse_args(insert_recipe([recipe, "--config", "dropout=0.1"]))

    assert given.config == ["d_model=64", "dropout=0.2", "dropout=0.1"]
    assert parser.parse_args([]).config == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- preset\n", r"must hold options and their values.* got \['preset'\]"),
        ("", "must hold options and their values"),
        ("a: [b\n", "mine.yaml is not YAML"),
        ("preset:\n", "'preset' must have a value or a list of values, got ''"),
        (
            "train: [a, null]\n",
            r"'train' must have a value or a list of values, got \['a', 'null'\]",
        ),
        ("preset: {a: 1}\n", "'preset' must have a value or a list of values, got {'a': '1'}"),
    ],
)
def test_recipe_is_refused_when_it_is_no_mapping_of_options(write_recipe, text, message):
    with pytest.raises(ValueError, match=message):
        insert_recipe([write_recipe(text)])


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("pretokenised: on", "unknown option --pretokenised; did you mean --pretokenized?"),
        ("vocab_size: many", "--vocab_size: expected a whole number, got 'many'"),
        ("learning_rate: high", "--learning_rate: expected a number, got 'high'"),
        ("bpe_dropout: 2", "--bpe_dropout must be"),
        ("config: {d_modle: 64}", "--config: VanillaTransformerConfig has no field 'd_modle'"),
        ("init_from: ./no", "--init_from: there is no file or folder 'no'"),
        ("data: here", "--data: there is no file or folder 'here'"),
    ],
)
def test_recipe_is_named_when_a_mistake_is_its_own(
    write_recipe, refused, tmp_path, monkeypatch, line, fault
):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(f"train: [a.de, a.en]\n{line}\n")
    name, _, value = line.partition(": ")

    assert f"vanilla-transformer: {recipe}: {fault}" in refused("train", recipe)
    # What the command line repeats is its own.
    value = value.strip("{}").replace(": ", "=")
    assert f"vanilla-transformer: {fault}" in refused("train", recipe, f"--{name}", value)


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
