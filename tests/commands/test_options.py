"""Every option of every command: its value arrives where it is used, or is read there."""

import ast
import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, get_args, get_origin

import pytest

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.commands.__main__ import COMMANDS
from vanilla_transformer_tools.commands.attention import AttentionSettings
from vanilla_transformer_tools.commands.evaluate import EvaluateSettings, _like
from vanilla_transformer_tools.commands.export import ExportSettings
from vanilla_transformer_tools.commands.push import PushSettings
from vanilla_transformer_tools.evaluation import bleu_tokenizers, metrics, significance, test_sets
from vanilla_transformer_tools.evaluation.bleu_tokenizers import BleuTokenizer
from vanilla_transformer_tools.exports import export as exporting
from vanilla_transformer_tools.settings import (
    PRESETS,
    SearchSettings,
    TrainSettings,
    TranslateSettings,
)
from vanilla_transformer_tools.sharing import model_card
from vanilla_transformer_tools.sharing import push as pushing
from vanilla_transformer_tools.text import parallel_text, training_data
from vanilla_transformer_tools.training import build as building
from vanilla_transformer_tools.training import run as training
from vanilla_transformer_tools.translation import Search, Translation, Translator

from ..plugin.test_configuration import BIG
from ..support.documents import ROOT
from ..support.training_runs import build_arguments, build_settings


class ArrivedError(Exception):
    """Ends a command where its settings have arrived."""


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Puts something in the place of a function; the list holds arguments of its calls."""

    def put(place: Any, name: str, result: Any = None) -> list[Any]:
        calls = []

        def record(*arguments: Any, **named: Any) -> Any:
            calls.append((arguments, named))
            if result is ArrivedError:
                raise ArrivedError
            return result

        monkeypatch.setattr(place, name, record)
        return calls

    return put


def another(field: dataclasses.Field) -> tuple[list[str], Any]:
    """Command line of an option with another value than its default, and that value."""
    default = field.default
    if default is dataclasses.MISSING:
        default = field.default_factory()
    # The parser takes the None out of a type that it has seen.
    kinds = set(get_args(field.type)) - {NoneType} if isinstance(field.type, UnionType) else set()
    kind = kinds.pop() if len(kinds) == 1 else field.type
    choices = field.metadata.get("choices") or literals(field.type)
    if kind is bool:
        return [f"--{field.name}"], not default
    if choices:
        value: Any = next(one for one in choices if one not in (default, *(default or ())))
        value = [value] if isinstance(default, list) else value
    elif kind is int:
        value = (default or 0) + 3
    elif kind is float:
        value = (default or 0) + 0.25
    elif "list" in str(kind):
        value = ["one"] * (field.metadata.get("nargs") if field.metadata.get("nargs") == 2 else 1)
    else:
        value = f"other/{field.name}"
    given = value if isinstance(value, list) else [value]
    return [f"--{field.name}", *map(str, given)], value


def literals(kind: Any) -> tuple[str, ...]:
    """Choices of a type that has some."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((get_args(one) for one in get_args(kind) if get_origin(one) is Literal), ())


def others(settings: type, *but: str) -> tuple[list[str], dict[str, Any]]:
    """Command line with another value for each option but those named, and the values."""
    chosen = {field.name: another(field) for field in fields(settings) if field.name not in but}
    words = [word for option, _ in chosen.values() for word in option]
    return words, {name: value for name, (_, value) in chosen.items()}


# Training


def test_train_passes_each_option_on(watch):
    calls = watch(training, "train")
    # `data` is joined with the paths.
    words, values = others(TrainSettings, "data", "minutes")

    main(["train", "--train", "a.de", "a.en", "--use_cpu", *words])

    ((settings, _), _) = calls[0]
    assert {name: getattr(settings, name) for name in values} == values
    default = TrainSettings()
    assert [name for name, value in values.items() if value == getattr(default, name)] == []


def test_options_that_are_given_are_known_by_name_in_every_spelling(watch, write):
    calls = watch(training, "train")
    recipe = write("mine.yaml", "vocab_size: 300")

    main(
        ["train", recipe, "--train", "a", "b", "--use_cpu", "--warmup-steps=7", "--max-length", "9"]
    )

    assert calls[0][1]["given"] == {"vocab_size", "train", "use_cpu", "warmup_steps", "max_length"}


@pytest.mark.parametrize(
    ("changes", "consumer"),
    [
        ({}, "TokenBatchSampler"),
        ({"streaming": True, "shuffle_buffer": 60}, "TokenBatchStream"),
        ({"bpe_dropout": 0.1}, "SegmentedPairs"),
    ],
)
def test_seed_reaches_what_is_drawn(changes, consumer, corpus, tmp_path, monkeypatch, watch):
    settings = build_settings(corpus, validated=False, **changes)
    arguments = build_arguments(settings, tmp_path / "run", max_steps=1, seed=7)
    seeds = watch(building, "set_seed")
    drawn = watch(training_data, consumer, ArrivedError)

    with pytest.raises(ArrivedError):
        training.train(settings, arguments)

    assert seeds == [((7,), {})]
    assert drawn[0][1]["seed"] == 7


# Search


OF_THE_SEARCH = {field.name for field in fields(SearchSettings)} | {
    field.name for field in fields(Search) if "help" in field.metadata
}

LOADERS = {"translate": SearchSettings, "evaluate": SearchSettings, "attention": AttentionSettings}


@pytest.mark.parametrize("command", LOADERS)
def test_search_gets_each_option(command, watch, tmp_path):
    calls = watch(Translator, "from_pretrained", ArrivedError)
    watch(parallel_text, "load_pairs", {"source": ["a"], "target": ["b"]})
    settings, model = LOADERS[command], str(tmp_path)
    names = {field.name for field in fields(settings)}
    words, values = others(settings, "model", "search", *(names - OF_THE_SEARCH))
    if command != "attention":
        more = {item.name: another(item) for item in fields(Search) if "help" in item.metadata}
        words += [word for option, _ in more.values() for word in option]
        values |= {name: value for name, (_, value) in more.items()}
    # An ensemble, of which there are no attention maps.
    models = [model] if command == "attention" else [model, model]
    rest = ["--test", "a.de", "a.en"] if command == "evaluate" else ["text"]

    with pytest.raises(ArrivedError):
        main([command, *(word for name in models for word in ("--model", name)), *words, *rest])

    ((loaded,), named) = calls[0]
    assert loaded == (model if command == "attention" else models)
    assert {name: named[name] for name in values} == values


# Modules that read the settings of a command.
READERS = {
    TrainSettings: ("training/*.py", "text/*.py"),
    TranslateSettings: ("commands/*.py",),
    **{
        settings: (f"commands/{command.__module__.rpartition('.')[2]}.py",)
        for command in COMMANDS.values()
        for name, settings in command.__globals__.items()
        if name.endswith("Settings") and settings.__module__ == command.__module__
    },
}
# Joined with the paths; read from `run.json` by the card.
READ_ELSEWHERE = {"data", "dataset_tags", "license"}


@pytest.mark.parametrize("settings", READERS)
def test_each_setting_is_read(settings):
    read = {
        node.attr
        for pattern in READERS[settings]
        for file in (ROOT / "src" / "vanilla_transformer_tools").glob(pattern)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("settings")
    }

    unread = {field.name for field in fields(settings)} - read
    assert unread - (READ_ELSEWHERE if settings is TrainSettings else OF_THE_SEARCH) == set()


# Evaluating


class EchoTranslator:
    """Gives each line back."""

    search = "greedy"
    engine = SimpleNamespace(name="CTranslate2 4")

    def translate(self, lines: list[str], numbers: list[int]) -> Iterator[Translation]:
        return map(Translation, lines)


@pytest.fixture
def evaluate(watch, tmp_path, monkeypatch):
    """Runs the command on one pair without a model; gives the calls by function."""
    hypotheses = tmp_path / "out.en"
    hypotheses.write_text("b\n", encoding="utf-8")
    scores = {"bleu": 1.0, "bleu_signature": "s", "lines": 1}
    calls = {
        "load": watch(parallel_text, "load_pairs", {"source": ["a"], "target": ["b"]}),
        "compute": watch(metrics, "score", scores),
        "compare": watch(significance, "compare", []),
        "record": watch(model_card, "record_results"),
    }
    watch(metrics, "format_scores", "")
    watch(significance, "format_comparisons", "")

    def run(*options: str, model: bool = False) -> dict[str, Any]:
        if model:
            watch(Translator, "from_pretrained", EchoTranslator())
        system = ["--model", str(tmp_path)] if model else ["--hypotheses", str(hypotheses)]
        main(["evaluate", *system, "--test", "a.de", "a.en", *options])
        return calls

    return run


def test_evaluate_scores_and_compares_as_told(evaluate, tmp_path):
    other = tmp_path / "other.en"
    other.write_text("c\n", encoding="utf-8")
    options = ["--metrics", "wer", "--bleu_tokenize", "char", "--bootstrap", "50", "--lowercase"]
    named = {"metrics": ["wer"], "tokenize": BleuTokenizer("char"), "bootstrap": 50}
    named["lowercase"] = True

    assert [given for _, given in evaluate(*options)["compute"]] == [named]
    calls = evaluate("--against", str(other), *options)

    assert calls["compare"] == [((["b"], ["c"], [("b",)]), named)]


def test_evaluate_takes_a_test_set_of_the_list_of_sacrebleu(evaluate, tmp_path, monkeypatch):
    file = tmp_path / "second"
    file.write_text("c\n", encoding="utf-8")
    found = "wmt19 de-zh", "zh", ["s", "r", str(file)]
    monkeypatch.setattr(test_sets, "find_test_set", lambda _: found)

    calls = evaluate("--test", "sacrebleu:wmt19:de-zh", model=True)

    ((text,), _) = calls["load"][0]
    assert text.paths == ("s", "r")
    assert calls["compute"][0][0][1] == [("b", "c")]
    assert calls["record"][0][0][1] == "wmt19 de-zh"


@pytest.mark.parametrize(
    ("option", "file", "record", "expected"),
    [
        ([], "a.en", None, "13a"),
        (["--target_language", "zh"], "a.en", "ja", "zh"),
        ([], "a.zh", "ja", "zh"),
        (["--target_language", "ja"], "a.zh", None, "char"),
        ([], "a.en", "zh", "zh"),
        ([], "a.en", "ja", "char"),
    ],
)
def test_language_of_the_references_comes_from_option_name_or_record(
    option, file, record, expected, evaluate, tmp_path, monkeypatch
):
    watch_pairs = {"source": ["a"], "target": ["\u6771\u4eac" if expected != "13a" else "b"]}
    monkeypatch.setattr(parallel_text, "load_pairs", lambda _: watch_pairs)
    monkeypatch.setattr(bleu_tokenizers, "_is_usable", lambda name: name in ("zh", "char", "13a"))
    if record:
        run = {"settings": {"language": ["de", record]}}
        (tmp_path / "run.json").write_text(json.dumps(run), encoding="utf-8")

    calls = evaluate(*option, "--test", "a.de", file, model=bool(record))

    ((_, named),) = calls["compute"]
    assert named["tokenize"].name == expected


def test_evaluate_scores_a_model_and_records_that(evaluate, tmp_path):
    calls = evaluate(model=True)

    assert calls["compute"][0][0] == (["a"], [("b",)])
    ((_, _, scores), _) = calls["record"].pop()
    assert (scores["search"], scores["engine"]) == ("greedy", "CTranslate2 4")
    # Not those of an ensemble, which is scored by the tokens of its models.
    (tmp_path / "run.json").write_text('{"settings": {"pretokenized": true}}', encoding="utf-8")
    calls = evaluate("--model", str(tmp_path), model=True)
    assert (calls["record"], calls["compute"][-1][1]["tokenize"].name) == ([], "none")


def test_other_model_is_evaluated_with_the_search_of_the_first():
    search = {"num_beams": 7, "length_penalty": 0.3, "repetition_penalty": 1.3}
    search |= {"no_repeat_ngram_size": 4, "min_length": 2}
    first = SimpleNamespace(search=Search(**search, scores=True), max_source_length=99)
    settings = EvaluateSettings(model=["a"], against="b", max_source_length=50)

    other = _like(first, settings)

    assert other == replace(settings, model=["b"], search=search)
    assert _like([], settings) == replace(settings, model=["b"])


# Sharing and exporting


def test_push_passes_each_option_on(watch, tmp_path):
    calls = watch(pushing, "push")
    words, values = others(PushSettings, "model")

    main(["push", "--model", str(tmp_path), *words, "user/name"])

    assert calls == [((tmp_path, "user/name"), values)]


@pytest.mark.parametrize(("runtime", "kind"), [("ctranslate2", "int8"), ("onnx", "float32")])
def test_export_passes_each_option_on(runtime, kind, watch, write):
    calls = watch(exporting, "export_model")
    words, values = others(ExportSettings, "format", "quantization", "sample")
    words += ["--quantization", kind, "--sample", write("sample", "one", "two")]

    main(["export", "--format", runtime, *words, "me/model", "out"])

    values |= {"format": runtime, "quantization": kind, "sample": ["one", "two"]}
    assert calls == [(("me/model", Path("out")), values)]


# Values that belong together, and paths that are completed


@pytest.mark.parametrize(("name", "sizes", "dropout"), [("base", {}, 0.1), ("big", BIG, 0.3)])
def test_presets_of_the_paper_have_its_sizes_and_schedule(name, sizes, dropout):
    preset, paper = PRESETS[name], VanillaTransformerConfig(**sizes, dropout=dropout)

    config = preset.config()
    assert config.keys() == {"encoder_layers", "decoder_layers", "dropout", *BIG}
    assert config == {field: getattr(paper, field) for field in config}
    # The peak of equation (3).
    peak = (paper.d_model * preset.warmup_steps) ** -0.5
    assert preset.learning_rate == pytest.approx(peak, rel=0.02)


def test_data_is_the_folder_of_training_and_validation_files():
    settings = TrainSettings(
        data="corpus", train=["a.de", "/b/a.en"], validation=["v.de", "../v.en"]
    )

    # A copy has them as they are.
    for same in (settings, replace(settings, tokenizer="x")):
        assert same.train == ["corpus/a.de", "/b/a.en"]
        assert same.validation == ["corpus/v.de", "corpus/../v.en"]
