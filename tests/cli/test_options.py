"""Every option of every command: its value arrives where it is used, or is read there."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest

from vanilla_transformer.data import parallel_text, training_data
from vanilla_transformer.data.number_words import write_corpus
from vanilla_transformer.evaluation import metrics, significance
from vanilla_transformer.inspection import (
    alignments,
    attention_figures,
    attention_maps,
    attention_page,
)
from vanilla_transformer.interop import export as exporting
from vanilla_transformer.sharing import model_card
from vanilla_transformer.sharing import push as pushing
from vanilla_transformer.training import run as training
from vanilla_transformer.translation import Translation, Translator
from vanilla_transformer_cli import main
from vanilla_transformer_cli.settings import (
    PRESETS,
    AttentionSettings,
    EvaluateSettings,
    ExportSettings,
    PushSettings,
    SearchSettings,
    TrainSettings,
    TranslateSettings,
)

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
    kinds = set(get_args(field.type)) - {type(None)} if not get_origin(field.type) else set()
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


def each(settings: type) -> Any:
    """A test for each field of the settings."""
    chosen = fields(settings)
    return pytest.mark.parametrize("field", chosen, ids=[field.name for field in chosen])


# Training


# `__post_init__` puts it in front of the paths.
OF_THE_PATHS = {"data"}


@pytest.mark.parametrize("of_the_paths", [True, False])
def test_train_passes_each_option_on(of_the_paths, watch):
    calls = watch(training, "train")
    chosen = [
        field for field in fields(TrainSettings) if (field.name in OF_THE_PATHS) == of_the_paths
    ]
    options = [another(field) for field in chosen]

    words = [word for option, _ in options for word in option]
    main(["train", "--train", "a.de", "a.en", "--use_cpu", *words])

    ((settings, _), _) = calls[0]
    default = TrainSettings()
    for field, (_, value) in zip(chosen, options, strict=True):
        assert getattr(settings, field.name) == value != getattr(default, field.name), field.name


@pytest.mark.parametrize("preset", PRESETS)
def test_train_takes_learning_rate_and_warm_up_of_the_preset(preset, watch):
    calls = watch(training, "train")

    main(["train", "--train", "a.de", "a.en", "--use_cpu", "--preset", preset])

    ((_, arguments), _) = calls[0]
    assert arguments.learning_rate == PRESETS[preset].learning_rate
    assert arguments.warmup_steps == PRESETS[preset].warmup_steps


# Read from `run.json`: the card's test sees them there.
OF_THE_CARD = {"language", "license", "dataset_tags"}


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
    describe = training.describe_run

    def remember(settings: TrainSettings, name: str) -> Any:
        if name in known:
            read.add(name)
        return object.__getattribute__(settings, name)

    def describe_unseen(*arguments: Any) -> Any:
        before = read.copy()
        run = describe(*arguments)
        read.intersection_update(before)
        return run

    monkeypatch.setattr(TrainSettings, "__getattribute__", remember, raising=False)
    monkeypatch.setattr(training, "describe_run", describe_unseen)
    monkeypatch.setattr(training, "check_settings", lambda *_: None)
    return read


def test_training_reads_each_setting(corpus, tmp_path, read_fields):
    whole = build_settings(corpus, separate_vocabularies=True)
    streamed = build_settings(corpus, streaming=True, shuffle_buffer=60, validated=False)
    settings = [
        (whole, build_arguments(whole, tmp_path / "whole", max_steps=1)),
        (streamed, build_arguments(streamed, tmp_path / "streamed", max_steps=1)),
    ]
    read_fields.clear()

    for one, arguments in settings:
        training.train(one, arguments)

    unread = {field.name for field in fields(TrainSettings)} - read_fields
    assert unread <= OF_THE_CARD | OF_THE_PATHS


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


@pytest.mark.parametrize("command", ["translate", "evaluate"])
@each(SearchSettings)
def test_search_gets_each_option(command, field, watch, tmp_path):
    calls = watch(Translator, "from_pretrained", ArrivedError)
    watch(parallel_text, "load_pairs", {"source": ["a"], "target": ["b"]})
    model = str(tmp_path)
    rest = ["--test", "a.de", "a.en"] if command == "evaluate" else ["text"]
    option, value = another(field)
    if field.name == "model":
        option, value = ["--model", model], [model, model]

    with pytest.raises(ArrivedError):
        main([command, "--model", model, *option, *rest])

    ((models,), named) = calls[0]
    assert ({"model": models} | named)[field.name] == value


SHARED = [
    field
    for field in fields(AttentionSettings)
    if field.name in {one.name for one in fields(SearchSettings)}
]


@pytest.mark.parametrize("field", SHARED, ids=[field.name for field in SHARED])
def test_attention_loads_the_model_as_told(field, watch, tmp_path):
    calls = watch(Translator, "from_pretrained", ArrivedError)
    option, value = another(field)
    if field.name == "model":
        option, value = [], str(tmp_path)

    with pytest.raises(ArrivedError):
        main(["attention", "--model", str(tmp_path), *option, "text"])

    ((models,), named) = calls[0]
    assert ({"model": models} | named)[field.name] == value


# Translating


class EchoTranslator:
    """Gives each line back with its prefix and number."""

    def translate(
        self, lines: Iterator[str], prefixes: Any = "", *, first_line: int = 1
    ) -> Iterator[Translation]:
        given = iter([prefixes] * 9 if isinstance(prefixes, str) else prefixes)
        for number, line in enumerate(lines, first_line):
            yield Translation(f"{number} {next(given)} {line}", score=-1.0)


@pytest.fixture
def translate(watch, tmp_path, capsysbinary):
    """Runs the command on two lines; gives what it wrote and the arguments of the translator."""
    calls = watch(Translator, "from_pretrained", EchoTranslator())
    model = tmp_path / "model"
    model.mkdir()
    source = tmp_path / "in.de"
    source.write_text("a\nb\n", encoding="utf-8")

    def run(*options: str) -> tuple[str, dict[str, Any]]:
        main(["translate", "--model", str(model), "--input", str(source), *options])
        return capsysbinary.readouterr().out.decode(), calls[-1][1]

    return run


def test_translate_reads_input_and_writes_output(translate, tmp_path):
    output = tmp_path / "out.en"

    written, _ = translate("--output", str(output))

    assert written == ""
    assert output.read_text("utf-8") == "1  a\n2  b\n"


def test_translate_resumes_only_when_told(translate, tmp_path, monkeypatch):
    output = tmp_path / "out.en"

    def translate_one(self: EchoTranslator, lines: Iterator[str], *_: Any, **__: Any) -> Any:
        yield Translation(f"1  {next(lines)}")
        raise ArrivedError

    with monkeypatch.context() as patch:
        patch.setattr(EchoTranslator, "translate", translate_one)
        with pytest.raises(ArrivedError):
            translate("--output", str(output))

    with pytest.raises(SystemExit):
        translate("--output", str(output))
    translate("--output", str(output), "--resume")

    assert output.read_text("utf-8") == "1  a\n2  b\n"


def test_translate_gives_prefixes_to_the_search(translate, tmp_path):
    prefixes = tmp_path / "prefixes"
    prefixes.write_text("x\ny\n", encoding="utf-8")

    assert translate("--prefix", "p")[0] == "1 p a\n2 p b\n"
    assert translate("--prefix_file", str(prefixes))[0] == "1 x a\n2 y b\n"


@pytest.mark.parametrize(
    ("option", "wanted", "first_row"),
    [
        (["--n_best", "2"], {"num_hypotheses": 2, "scores": True, "details": False}, "1\t-1"),
        (["--scores"], {"num_hypotheses": 1, "scores": True, "details": False}, "1\t-1"),
        (["--details"], {"num_hypotheses": 1, "scores": True, "details": True}, "{"),
        ([], {"num_hypotheses": 1, "scores": False, "details": False}, "1  a"),
    ],
)
def test_translate_asks_for_what_it_writes(option, wanted, first_row, translate):
    written, named = translate(*option)

    assert {name: named[name] for name in wanted} == wanted
    assert written.startswith(first_row)


def test_each_option_of_translate_has_its_test():
    own = {field.name for field in fields(TranslateSettings)}

    assert own - {field.name for field in fields(SearchSettings)} == {
        *("input", "output", "resume", "prefix", "prefix_file", "n_best", "scores", "details")
    }


# Evaluating


@pytest.fixture
def evaluate(watch, tmp_path, monkeypatch):
    """Runs the command on one pair without a model; gives the calls by function."""
    hypotheses = tmp_path / "out.en"
    hypotheses.write_text("b\n", encoding="utf-8")
    scores = {"bleu": 1.0, "bleu_signature": "s", "lines": 1}
    scorer = SimpleNamespace(compute=None)
    watch(metrics, "TranslationScores", scorer)
    calls = {
        "load": watch(parallel_text, "load_pairs", {"source": ["a"], "target": ["b"]}),
        "compute": watch(scorer, "compute", scores),
        "compare": watch(significance, "compare", []),
        "record": watch(model_card, "record_results"),
    }
    watch(metrics, "format_scores", "")
    watch(significance, "format_comparisons", "")

    def run(*options: str, model: bool = False) -> dict[str, Any]:
        if model:
            named = SimpleNamespace(search="greedy", translate=EchoTranslator().translate)
            watch(Translator, "from_pretrained", named)
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


def test_evaluate_scores_as_told(evaluate):
    options = ["--metrics", "wer", "--bleu_tokenize", "char", "--bootstrap", "50"]

    ((_, named),) = evaluate(*options)["compute"]

    expected = {"metrics": ["wer"], "tokenize": "char", "bootstrap": 50}
    assert {name: named[name] for name in expected} == expected


def test_each_option_of_evaluate_has_its_test():
    own = {field.name for field in fields(EvaluateSettings)}

    assert own - {field.name for field in fields(SearchSettings)} == {
        *OF_THE_TEST_PAIRS,
        *("metrics", "bleu_tokenize", "bootstrap"),
        *("test", "hypotheses", "against", "output", "name"),
    }


def test_evaluate_does_not_record_the_scores_of_an_ensemble(evaluate, tmp_path):
    assert evaluate("--model", str(tmp_path), model=True)["record"] == []


def test_evaluate_compares_with_the_same_options(evaluate, tmp_path):
    other = tmp_path / "other.en"
    other.write_text("c\n", encoding="utf-8")
    options = ["--metrics", "chrf", "--bleu_tokenize", "char", "--bootstrap", "50"]

    calls = evaluate("--against", str(other), *options)

    ((first, second, references), named) = calls["compare"][0]
    assert (first, second, references) == (["b"], ["c"], ["b"])
    assert named == {"metrics": ["chrf"], "tokenize": "char", "bootstrap": 50}


def test_evaluate_reads_the_test_pairs_and_records_under_their_name(evaluate, tmp_path):
    output = tmp_path / "translations.en"

    calls = evaluate("--name", "mine", "--output", str(output), model=True)

    ((text,), _) = calls["load"][0]
    assert text.paths == ("a.de", "a.en")
    ((_, name, record), _) = calls["record"][0]
    assert name == "mine"
    assert record["search"] == "greedy"
    assert output.read_text("utf-8") == "1  a\n"


# Sharing and exporting


@each(PushSettings)
def test_push_passes_each_option_on(field, watch):
    calls = watch(pushing, "push")
    option, value = another(field)
    if field.name == "model":
        option = []

    main(["push", "--model", "other_model", *option, "user/name"])

    ((folder, repo_id), named) = calls[0]
    assert repo_id == "user/name"
    assert ({"model": str(folder)} | named)[field.name] == value


@pytest.mark.parametrize("runtime", ["ctranslate2", "onnx"])
@each(ExportSettings)
def test_export_passes_each_option_on(field, runtime, watch, tmp_path):
    calls = watch(exporting, f"export_to_{runtime}")
    option, value = another(field)
    if field.name == "sample":
        lines = tmp_path / "sample"
        lines.write_text("one\ntwo\n", encoding="utf-8")
        option, value = ["--sample", str(lines)], ["one", "two"]
    if field.name == "format" or (field.name, runtime) == ("quantization", "onnx"):
        option = []

    main(["export", "--format", runtime, *option, "model", "out"])

    ((model, output), named) = calls[0]
    assert (model, output) == ("model", Path("out"))
    if option:
        assert named[field.name] == value


# Looking inside


@pytest.fixture
def attend(watch, tmp_path, monkeypatch):
    """Runs the command in an empty folder; gives the calls by function."""
    monkeypatch.chdir(tmp_path)
    translator = SimpleNamespace(engine=SimpleNamespace(model="the model"))
    watch(Translator, "from_pretrained", translator)
    maps = SimpleNamespace(source="a", target="b", of_kind=lambda kind: kind)
    watch(attention_maps, "read_attention", maps)
    calls = {
        "page": watch(attention_page, "write_attention_page"),
        "picture": watch(attention_figures, "plot_attention"),
        "positions": watch(attention_figures, "plot_positions"),
        "align": watch(alignments, "align_words", ["0-0"]),
        "gold": watch(alignments, "read_gold", ["links"]),
        "score": watch(alignments, "score_alignments", "AER"),
    }

    def run(*options: str) -> dict[str, Any]:
        main(["attention", "--model", str(tmp_path), *options])
        return calls

    return run


def test_attention_draws_what_is_asked_for(attend):
    chosen = ["--kind", "decoder", "--layer", "3", "--head", "2", "text"]

    page = attend(*chosen)["page"][0]
    picture = attend("--output", "mine.svg", *chosen)["picture"][0]

    assert page[0][1] == Path("attention.html")
    assert page[1] == {"kind": "decoder", "layer": 3, "head": 2}
    assert picture == (("decoder", Path("mine.svg")), {"layer": 3, "head": 2})


def test_attention_draws_as_many_positions_as_asked_for(attend):
    calls = attend("--positions", "17", "--output", "mine.png")

    assert calls["positions"] == [(("the model", Path("mine.png"), 17), {})]


def test_attention_aligns_the_files_in_units_with_gold(attend, tmp_path):
    for name in ("s", "t", "us", "ut"):
        Path(name).write_text(f"{name}\n", encoding="utf-8")

    calls = attend(
        *["--alignments", "s", "t", "--units", "us", "ut", "--gold", "g", "--output", "links"]
    )

    ((_, *texts), _) = calls["align"][0]
    assert texts == [["s"], ["t"], (["us"], ["ut"])]
    assert calls["gold"] == [(("g",), {})]
    assert calls["score"][0] == ((["0-0"], ["links"]), {})
    assert Path("links").read_text("utf-8") == "0-0\n"


def test_each_option_of_attention_has_its_test():
    own = {field.name for field in fields(AttentionSettings)}

    assert own - {field.name for field in SHARED} == {
        *("output", "kind", "layer", "head", "positions", "alignments", "units", "gold")
    }
