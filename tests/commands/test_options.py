"""Every option of every command: its value arrives where it is used, or is read there."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, get_args, get_origin

import pytest

from number_words import write_corpus
from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.commands.evaluate import _like
from vanilla_transformer_tools.evaluation import bleu_tokenizers, metrics, test_sets
from vanilla_transformer_tools.evaluation.bleu_tokenizers import BleuTokenizer
from vanilla_transformer_tools.evaluation.test_sets import NamedTestSet
from vanilla_transformer_tools.interop import export as exporting
from vanilla_transformer_tools.settings import (
    PRESETS,
    AttentionSettings,
    EvaluateSettings,
    ExportSettings,
    PushSettings,
    SearchSettings,
    TrainSettings,
    TranslateSettings,
)
from vanilla_transformer_tools.sharing import model_card
from vanilla_transformer_tools.sharing import push as pushing
from vanilla_transformer_tools.text import parallel_text, training_data
from vanilla_transformer_tools.training import corpus_stats, plan
from vanilla_transformer_tools.training import run as training
from vanilla_transformer_tools.translation import Search, Translation, Translator

from ..support.training_runs import build_arguments, build_settings


class ArrivedError(Exception):
    """Ends a command where its settings have arrived."""


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Puts something in the place of a function; the list holds arguments of its calls."""

    def replace(place: Any, name: str, result: Any = None) -> list[Any]:
        calls = []

        def record(*arguments: Any, **named: Any) -> Any:
            calls.append((arguments, named))
            if result is ArrivedError:
                raise ArrivedError
            return result

        monkeypatch.setattr(place, name, record)
        return calls

    return replace


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
        value = f"other_{field.name}"
    given = value if isinstance(value, list) else [value]
    return [f"--{field.name}", *map(str, given)], value


def literals(kind: Any) -> tuple[str, ...]:
    """Choices of a type that has some."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((get_args(one) for one in get_args(kind) if get_origin(one) is Literal), ())


def each(settings: type, *others: str) -> Any:
    """A test for each field of the settings but those named, which have tests of their own."""
    chosen = [field for field in fields(settings) if field.name not in others]
    return pytest.mark.parametrize("field", chosen, ids=[field.name for field in chosen])


# Training


def test_train_passes_each_option_on(watch):
    calls = watch(training, "train")
    # `data` is joined with the paths.
    chosen = [field for field in fields(TrainSettings) if field.name not in ("data", "minutes")]
    options = [another(field) for field in chosen]

    words = [word for option, _ in options for word in option]
    main(["train", "--train", "a.de", "a.en", "--use_cpu", *words])

    ((settings, _), _) = calls[0]
    default = TrainSettings()
    for field, (_, value) in zip(chosen, options, strict=True):
        assert getattr(settings, field.name) == value != getattr(default, field.name), field.name


@pytest.fixture
def train_for_minutes(watch, tmp_path, monkeypatch):
    """Plans `train --minutes 5`; gives settings, arguments and decisions."""
    calls = watch(training, "build", ArrivedError)
    speed = corpus_stats.Speed(10_000.0)
    monkeypatch.setattr(corpus_stats, "training_speed", lambda arguments: speed)
    pairs = [str(tmp_path / f"a.{language}") for language in ("de", "en")]
    for path in pairs:
        Path(path).write_text("ein Hund schläft\n", encoding="utf-8")

    def run(*options: str, recipe: str = "") -> tuple[TrainSettings, Any, list[Any]]:
        file = tmp_path / "mine.yaml"
        file.write_text(recipe, encoding="utf-8")
        first = [str(file)] if recipe else []
        output = ["--output_dir", str(tmp_path / "out"), "--use_cpu"]
        with pytest.raises(ArrivedError):
            main(["train", *first, "--train", *pairs, "--minutes", "5", *output, *options])
        (made, *_), _ = calls[-1]
        return made.settings, made.arguments, made.decisions

    return run


def test_minutes_choose_what_neither_recipe_nor_command_line_gives(train_for_minutes):
    settings, arguments, decisions = train_for_minutes(
        "--warmup_steps", "7", recipe="vocab_size: 300\n"
    )

    assert (settings.vocab_size, arguments.warmup_steps) == (300, 7)
    assert (settings.r_drop, arguments.learning_rate) == (2.0, 0.008)
    assert arguments.lr_scheduler_type == "constant_with_warmup"
    options = {decision.option for decision in decisions}
    assert {"learning_rate", "r_drop"} <= options
    assert options.isdisjoint({"vocab_size", "warmup_steps"})


@pytest.mark.parametrize(
    "words",
    [["--vocab_size", "300"], ["--vocab-size=300"], ["--warmup_steps=7"], ["--warmup-steps", "7"]],
)
def test_minutes_leave_given_options_alone_in_both_spellings(words, train_for_minutes):
    settings, arguments, decisions = train_for_minutes(*words)

    name = words[0][2:].partition("=")[0].replace("-", "_")
    assert getattr(settings, name, None) == 300 or getattr(arguments, name) == 7
    assert name not in {decision.option for decision in decisions}


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], None),
        (["--logging_steps", "200"], None),
        (["--eval_steps", "300"], (300, 300)),
        (["--save-steps", "300"], (300, 300)),
        (["--eval_steps", "100", "--save_steps", "300"], (100, 300)),
    ],
)
def test_minutes_save_and_score_at_the_same_updates_unless_both_are_given(
    words, steps, train_for_minutes, tmp_path
):
    pairs = [str(tmp_path / f"a.{language}") for language in ("de", "en")]

    _, arguments, decisions = train_for_minutes("--validation", *pairs, *words)

    chosen = {decision.option: decision.value for decision in decisions}
    assert ("eval_steps" in chosen) == (steps is None)
    expected = steps or (chosen["eval_steps"], chosen["eval_steps"])
    assert (arguments.eval_steps, arguments.save_steps) == expected
    assert arguments.eval_strategy == arguments.save_strategy == "steps"


@pytest.mark.parametrize("preset", PRESETS)
def test_train_takes_learning_rate_and_warm_up_of_the_preset(preset, watch):
    calls = watch(training, "train")

    main(["train", "--train", "a.de", "a.en", "--use_cpu", "--preset", preset])

    ((_, arguments), _) = calls[0]
    assert arguments.learning_rate == PRESETS[preset].learning_rate
    assert arguments.warmup_steps == PRESETS[preset].warmup_steps


# Read from `run.json`: the card's test sees them there.
OF_THE_CARD = {"language", "license", "dataset_tags"}
# Only saved models have them; `training/pretrained` sees them there.
OF_SAVED_MODELS = {"source_language", "target_language"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, train=60, validation=4, test=1)
    return folder


@pytest.fixture
def read_fields(monkeypatch):
    """Names of the settings that anything but the record of the run and the check reads."""
    read = set()
    known = {field.name for field in fields(TrainSettings)}
    describe = plan.describe_run

    def remember(settings: TrainSettings, name: str) -> Any:
        # `dataclasses.replace` copies all of them.
        if name in known and sys._getframe(1).f_globals["__name__"] != "dataclasses":
            read.add(name)
        return object.__getattribute__(settings, name)

    def describe_unseen(*arguments: Any) -> Any:
        before = read.copy()
        run = describe(*arguments)
        read.intersection_update(before)
        return run

    monkeypatch.setattr(TrainSettings, "__getattribute__", remember, raising=False)
    monkeypatch.setattr(plan, "describe_run", describe_unseen)
    monkeypatch.setattr(training, "check_settings", lambda *_: None)
    return read


def test_training_reads_each_setting(corpus, tmp_path, read_fields):
    whole = build_settings(corpus, separate_vocabularies=True)
    streamed = build_settings(corpus, streaming=True, shuffle_buffer=60, validated=False)
    adapted = build_settings(corpus, init_from=str(tmp_path / "whole"), peft="lora")
    settings = [
        (whole, build_arguments(whole, tmp_path / "whole", max_steps=1)),
        (streamed, build_arguments(streamed, tmp_path / "streamed", max_steps=1)),
        (adapted, build_arguments(adapted, tmp_path / "adapted", max_steps=1)),
    ]
    read_fields.clear()

    for one, arguments in settings:
        training.train(one, arguments)

    unread = {field.name for field in fields(TrainSettings)} - read_fields
    assert unread <= OF_THE_CARD | {"data"} | OF_SAVED_MODELS


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
    seeds = watch(training, "set_seed")
    drawn = watch(training_data, consumer, ArrivedError)

    with pytest.raises(ArrivedError):
        training.train(settings, arguments)

    assert seeds == [((7,), {})]
    assert drawn[0][1]["seed"] == 7


# Search


OF_THE_SEARCH = {field.name for field in fields(SearchSettings)}

LOADERS = {"translate": SearchSettings, "evaluate": SearchSettings, "attention": AttentionSettings}


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (command, field)
        for command, settings in LOADERS.items()
        for field in fields(settings)
        if field.name in OF_THE_SEARCH
    ],
    ids=lambda part: getattr(part, "name", part),
)
def test_search_gets_each_option(command, field, watch, tmp_path):
    calls = watch(Translator, "from_pretrained", ArrivedError)
    watch(parallel_text, "load_pairs", {"source": ["a"], "target": ["b"]})
    model = str(tmp_path)
    rest = ["--test", "a.de", "a.en"] if command == "evaluate" else ["text"]
    option, value = another(field)
    if field.name == "model":
        # An ensemble, of which there are no attention maps.
        option, value = ([], model) if command == "attention" else (["--model", model], [model] * 2)

    with pytest.raises(ArrivedError):
        main([command, "--model", model, *option, *rest])

    ((models,), named) = calls[0]
    assert ({"model": models} | named)[field.name] == value


# Evaluating


class EchoTranslator:
    """Gives each line back."""

    search = "greedy"
    engine = SimpleNamespace(name="")
    replace_unknown = False

    def translate(self, lines: list[str]) -> Iterator[Translation]:
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
        "compare": watch(metrics, "compare", []),
        "record": watch(model_card, "record_results"),
    }
    watch(metrics, "format_scores", "")
    watch(metrics, "format_comparisons", "")

    def run(*options: str, model: bool = False) -> dict[str, Any]:
        if model:
            watch(Translator, "from_pretrained", EchoTranslator())
        system = ["--model", str(tmp_path)] if model else ["--hypotheses", str(hypotheses)]
        main(["evaluate", *system, "--test", "a.de", "a.en", *options])
        return calls

    return run


OF_THE_TEST_PAIRS = {
    "source_column": "source_column",
    "target_column": "target_column",
    "dataset_config": "config_name",
    "test_split": "split",
}


@pytest.mark.parametrize("option", OF_THE_TEST_PAIRS)
def test_evaluate_reads_the_test_pairs_as_told(option, evaluate):
    calls = evaluate(f"--{option}", "other")

    ((text,), _) = calls["load"][0]
    assert getattr(text, OF_THE_TEST_PAIRS[option]) == "other"


def test_evaluate_scores_and_compares_as_told(evaluate, tmp_path):
    other = tmp_path / "other.en"
    other.write_text("c\n", encoding="utf-8")
    options = ["--metrics", "wer", "--bleu_tokenize", "char", "--bootstrap", "50", "--lowercase"]
    named = {"metrics": ["wer"], "tokenize": BleuTokenizer("char"), "bootstrap": 50}
    named["lowercase"] = True

    assert [given for _, given in evaluate(*options)["compute"]] == [named]
    calls = evaluate("--against", str(other), *options)

    assert calls["compare"] == [((["b"], ["c"], [("b",)]), named)]


def test_evaluate_takes_further_references(evaluate, tmp_path):
    files = [tmp_path / name for name in ("first", "second")]
    for file in files:
        file.write_text(f"{file.name}\n", encoding="utf-8")

    calls = evaluate("--references", *map(str, files))

    ((_, references), _) = calls["compute"][0]
    assert references == [("b", "first", "second")]


def test_evaluate_takes_a_test_set_of_the_list_of_sacrebleu(evaluate, tmp_path, monkeypatch):
    file = tmp_path / "second"
    file.write_text("c\n", encoding="utf-8")
    named = NamedTestSet("wmt19 de-zh", "s", ["r", str(file)], "zh")
    monkeypatch.setattr(test_sets, "named_test_set", lambda _: named)

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


def test_evaluate_does_not_record_the_scores_of_an_ensemble(evaluate, tmp_path):
    assert evaluate("--model", str(tmp_path), model=True)["record"] == []


@pytest.mark.parametrize("max_source_length", [None, 50])
def test_other_model_is_evaluated_with_the_search_of_the_first(max_source_length):
    search = Search(num_beams=7, length_penalty=0.3)
    first = SimpleNamespace(search=search, max_source_length=99)
    settings = EvaluateSettings(model=["a"], against="b", max_source_length=max_source_length)

    other = _like(first, settings)

    assert other.model == ["b"]
    assert (other.num_beams, other.length_penalty) == (7, 0.3)
    assert other.max_source_length == max_source_length
    assert _like([], EvaluateSettings(against="b")).num_beams is None


def test_evaluate_translates_the_sources_and_compares_with_the_references(evaluate):
    calls = evaluate(model=True)

    assert calls["compute"][0][0] == (["a"], [("b",)])


# Sharing and exporting


# The others are tested in `test_space.py`.
@each(PushSettings, "space", "save_space", "web")
def test_push_passes_each_option_on(field, watch):
    calls = watch(pushing, "push")
    option, value = another(field)
    if field.name == "model":
        option = []

    main(["push", "--model", "other_model", *option, "user/name"])

    ((folder, repo_id), named) = calls[0]
    assert repo_id == "user/name"
    assert ({"model": str(folder)} | named)[field.name] == value


@pytest.mark.parametrize("runtime", ["ctranslate2", "onnx", "web"])
@each(ExportSettings)
def test_export_passes_each_option_on(field, runtime, watch, tmp_path):
    calls = watch(exporting, "export_model")
    option, value = another(field)
    if field.name == "sample":
        lines = tmp_path / "sample"
        lines.write_text("one\ntwo\n", encoding="utf-8")
        option, value = ["--sample", str(lines)], ["one", "two"]
    if field.name == "format":
        option = []
    if field.name == "quantization":
        option, value = ["--quantization", "int8"], "int8"

    main(["export", "--format", runtime, *option, "model", "out"])

    ((model, output), named) = calls[0]
    assert (model, output, named["format"]) == ("model", Path("out"), runtime)
    if option:
        assert named[field.name] == value


# Options that no search has are tested here, and in the files of their commands.
TESTED = {
    TranslateSettings: "input output resume prefix prefix_file n_best scores details markup",
    EvaluateSettings: "metrics bleu_tokenize bootstrap lowercase references test hypotheses output "
    f"against name {' '.join(OF_THE_TEST_PAIRS)}",
    AttentionSettings: "output kind layer head positions alignments units gold",
}


@pytest.mark.parametrize("settings", TESTED)
def test_each_option_has_its_test(settings):
    own = {field.name for field in fields(settings)}

    assert own - OF_THE_SEARCH == {*TESTED[settings].split()}


@pytest.mark.parametrize("name", ["torch", "CTranslate2 4"])
def test_evaluate_records_search_and_engine(evaluate, monkeypatch, name):
    monkeypatch.setattr(EchoTranslator, "engine", SimpleNamespace(name=name))

    (((_, _, scores), _),) = evaluate(model=True)["record"]

    assert (scores["search"], scores["engine"]) == ("greedy", name)
