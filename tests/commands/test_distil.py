"""The command `distil`: a student of another model, in one call or in several."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace

import pytest
from datasets.utils.logging import disable_progress_bar, enable_progress_bar
from transformers import Seq2SeqTrainingArguments

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.training import recipe
from vanilla_transformer_tools.training import run as training
from vanilla_transformer_tools.training.stopping import StopOnRequest, StoppedBySignalError
from vanilla_transformer_tools.translation import Translation, Translator

from ..models import interrupted_after, save_small_model
from ..support.training_runs import SIZES, assert_same_weights, read_json

SOURCES = ["zwei", "drei", "vier", "fünf", "zwei drei", "vier fünf", "drei vier", "fünf"]
REFERENCES = ["two", "three", "four", "five", "two three", "four five", "three four", "five"]
PAIRS = ("student_sources.txt", "student_targets.txt")
FILES = ("sources.txt", "references.txt", "outputs.txt", *PAIRS)


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer.train([*SOURCES, *REFERENCES] * 3, vocab_size=300)


@pytest.fixture(scope="module")
def teachers(tokenizer, tmp_path_factory):
    """Two models with the same tokenizer."""
    folders = []
    for name, width in (("first", 16), ("second", 24)):
        folder = tmp_path_factory.mktemp(name)
        folders.append(save_small_model(folder, tokenizer, d_model=width))
    return folders


def command_line(folder, teachers):
    """Options of a student that is trained for two updates."""
    for name, lines in (("train.de", SOURCES), ("train.en", REFERENCES)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return [
        *("--teacher", *teachers, "--train", folder / "train.de", folder / "train.en"),
        *("--teacher_num_beams", 3, "--teacher_max_extra_tokens", 4),
        *("--config", *SIZES, "--vocab_size", 300, "--use_cpu", "--max_steps", 2),
        *("--save_strategy", "steps", "--save_steps", 1),
    ]


@pytest.fixture(scope="module", autouse=True)
def quiet_and_in_float32():
    """No bars, and no measurement whether bfloat16 pays."""
    disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "_bf16_is_faster_on_cpu", lambda: False)
        yield
    enable_progress_bar()


@pytest.fixture
def distil(run, teachers, tmp_path):
    """Runs `distil`; the options come after the common ones."""

    def run_distil(*options, teacher=teachers[:1]):
        argv = command_line(tmp_path, teacher)
        return run("distil", *argv, "--output_dir", tmp_path / "out", *options)

    return run_distil


@pytest.fixture(scope="module")
def whole(teachers, tmp_path_factory):
    """What `distil` makes without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    argv = [*command_line(folder, teachers[:1]), "--output_dir", folder / "out"]
    main(["distil", *map(str, argv)])
    return folder / "out"


@pytest.fixture
def no_training(monkeypatch):
    """The student is not trained; the list holds the settings of its training."""
    calls = []
    monkeypatch.setattr(training, "train", lambda settings, *_: calls.append(settings))
    return calls


def pairs_of(folder):
    sides = ((folder / "teacher" / name).read_text("utf-8").split("\n") for name in PAIRS)
    return list(zip(*sides, strict=True))[:-1]


def translations(models, **settings):
    translator = Translator.from_pretrained(
        [str(model) for model in models], num_beams=3, max_extra_tokens=4, **settings
    )
    return list(translator.translate(SOURCES))


def assert_refused(outcome, *messages):
    assert outcome.status == 2
    for message in messages:
        assert message in outcome.err


def test_student_learns_the_translations_of_its_teacher(whole, teachers):
    expected = [one.text for one in translations(teachers[:1])]

    assert pairs_of(whole) == list(zip(SOURCES, expected, strict=True))
    lines = (whole / "teacher" / "outputs.txt").read_text("utf-8").splitlines()
    assert lines == expected
    run = read_json(whole / "run.json")
    assert run["settings"]["train"] == list(run["sha256"]) == list(PAIRS)
    assert run["settings"]["teacher"] == [teachers[0].name]
    assert run["settings"]["teacher_num_beams"] == 3
    card = (whole / "README.md").read_text("utf-8")
    assert f"from {teachers[0].name}: each target is its best output\n(beam 3, length pen" in card


def test_several_teachers_are_an_ensemble(distil, teachers, tmp_path, no_training):
    distil(teacher=teachers)

    expected = [one.text for one in translations(teachers)]
    assert expected != [one.text for one in translations(teachers[:1])]
    assert [target for _, target in pairs_of(tmp_path / "out")] == expected


def test_student_learns_all_outputs_and_the_reference(distil, teachers, tmp_path, no_training):
    distil("--targets", "both", "--teacher_n_best", 2)

    best = translations(teachers[:1], num_hypotheses=2, scores=True)
    expected = [
        (source, target)
        for source, reference, one in zip(SOURCES, REFERENCES, best, strict=True)
        # Some outputs are spelt alike.
        for target in dict.fromkeys((reference, one.text, one.alternatives[0].text))
    ]
    assert pairs_of(tmp_path / "out") == expected
    assert (no_training[0].targets, no_training[0].teacher_n_best) == ("both", 2)


def test_student_learns_the_output_nearest_to_the_reference(
    distil, tmp_path, monkeypatch, no_training
):
    def translate(*_, **__):
        for text in REFERENCES:
            best = Translation("none", score=-1.0)
            yield replace(best, alternatives=(Translation(f"{text}\tone", score=-2.0),))

    monkeypatch.setattr(Translator, "translate", translate)

    distil("--teacher_n_best", 2, "--nearest", "chrf")

    assert [target for _, target in pairs_of(tmp_path / "out")] == [
        f"{text}\tone" for text in REFERENCES
    ]


def test_pairs_may_have_any_form_that_training_reads(
    distil, write, tmp_path, monkeypatch, no_training
):
    monkeypatch.chdir(tmp_path)
    write("some.jsonl", '{"one": {"de": "zwei\\ndrei"}, "other": "two three"}')

    columns = ["--source_column", "one.de", "--target_column", "other"]
    outcome = distil("--data", tmp_path, "--train", "some.jsonl", *columns, "--output_dir", "out")

    assert outcome.status == 0, outcome.err
    (settings,) = no_training
    assert settings.train == [f"out/teacher/{name}" for name in PAIRS]
    # Those of the validation pairs.
    assert (settings.source_column, settings.target_column) == ("one.de", "other")
    assert [source for source, _ in pairs_of(tmp_path / "out")] == ["zwei drei"]


# Interruptions


def assert_same_outputs(folder, whole):
    for name in FILES:
        assert (folder / "teacher" / name).read_bytes() == (whole / "teacher" / name).read_bytes()


def assert_same_student(folder, whole):
    assert_same_outputs(folder, whole)
    assert_same_weights(folder, whole)


def test_interrupted_teacher_continues(distil, whole, tmp_path, monkeypatch, no_training):
    with interrupted_after(3):
        assert distil().status == 130
    outputs = tmp_path / "out" / "teacher" / "outputs.txt"
    assert outputs.read_text("utf-8").count("\n") == 3
    calls = []
    translate = Translator.translate

    def count(self, lines, *others, **named):
        calls.append(named["first_line"])
        return translate(self, lines, *others, **named)

    monkeypatch.setattr(Translator, "translate", count)

    assert distil().status == 0

    assert calls == [4]
    assert_same_outputs(tmp_path / "out", whole)


def killed(args, state):
    if state.global_step == 2:
        raise RuntimeError("killed")


def interrupted_twice(args, state):
    raise StoppedBySignalError(2)


@pytest.mark.parametrize(("stop", "previous"), [(killed, 1), (interrupted_twice, 0)])
def test_stopped_training_continues_or_begins_anew(
    distil, whole, tmp_path, monkeypatch, stop, previous
):
    on_step_end = StopOnRequest.on_step_end

    def stop_or_go_on(self, args, state, control, **others):
        stop(args, state)
        on_step_end(self, args, state, control, **others)

    with monkeypatch.context() as patch, suppress(RuntimeError):
        patch.setattr(StopOnRequest, "on_step_end", stop_or_go_on)
        assert distil().status == 130

    assert distil().status == 0

    # Without a checkpoint there is no run to continue.
    assert len(read_json(tmp_path / "out" / "run.json").get("previous_runs", [])) == previous
    assert_same_student(tmp_path / "out", whole)


def test_finished_student_stays_as_it_is(distil, whole, tmp_path, no_model):
    shutil.copytree(whole, tmp_path / "out")

    assert distil().status == 0

    assert_same_student(tmp_path / "out", whole)


# Mistakes


def test_outputs_of_another_job_are_not_mixed(distil, teachers, write, tmp_path, no_training):
    with interrupted_after(3):
        distil()
    before = (tmp_path / "out" / "teacher" / "outputs.txt").read_bytes()

    assert_refused(
        distil("--teacher_num_beams", 2, teacher=teachers[1:]),
        "must be continued by the job that began it",
        "--num_beams 2 instead of 3",
        "model.safetensors of model 1 SHA-256",
    )
    other = [write("other.de", *SOURCES, "neun"), write("other.en", *REFERENCES, "nine")]
    assert_refused(distil("--train", *other[::-1]), "got --input SHA-256 ")
    assert (tmp_path / "out" / "teacher" / "outputs.txt").read_bytes() == before
    assert not no_training


def test_pairs_of_a_finished_run_stay_when_others_are_wanted(distil, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "out")

    assert_refused(distil("--targets", "both"), "--targets was ")

    assert pairs_of(tmp_path / "out") == pairs_of(whole)
    # The size of the teacher's batches is free.
    assert distil("--teacher_max_tokens_per_batch", 64, "--max_steps", 3).status == 0


def test_teacher_that_writes_nothing_is_refused(distil, monkeypatch):
    monkeypatch.setattr(Translator, "translate", lambda *_, **__: (Translation(" "),) * 8)

    assert_refused(distil(), "must translate at least one source, got 8 blank outputs")


def test_folder_of_another_run_is_refused_before_the_teacher_is_loaded(distil, tmp_path, no_model):
    (tmp_path / "out" / "checkpoint-1").mkdir(parents=True)

    assert_refused(distil(), "already holds a run")


def test_word_level_student_has_the_tokenizer_of_its_teacher(distil, teachers, whole, tmp_path):
    distil("--word_level", 0.5)

    student, teacher = (
        (folder / "tokenizer.json").read_text("utf-8") for folder in (tmp_path / "out", teachers[0])
    )
    assert student == teacher
    losses = [
        json.loads((folder / "log.jsonl").read_text("utf-8").splitlines()[-1])["train_loss"]
        for folder in (tmp_path / "out", whole)
    ]
    assert losses[0] != losses[1]


def test_word_level_teachers_must_have_the_tokenizer_of_the_student(
    distil, teachers, tmp_path, no_training
):
    other = VanillaTransformerTokenizer.train(SOURCES * 3, vocab_size=280)
    saved = save_small_model(tmp_path / "other", other)

    outcome = distil("--word_level", 1, teacher=[teachers[0], saved])

    assert_refused(outcome, "with the tokenizers of", repr(str(saved)))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def multilingual(pretrained):
    """A teacher that names the languages of both sides."""
    return pretrained("nllb")[1]


def test_student_has_the_languages_of_a_teacher_whose_tokenizer_it_takes(
    distil, multilingual, tmp_path
):
    languages = ["--teacher_source_language", "deu_Latn", "--teacher_target_language", "fra_Latn"]

    outcome = distil(*languages, "--word_level", 0.5, teacher=[multilingual])

    assert outcome.status == 0, outcome.err
    # Without languages: the student has one direction.
    translator = Translator.from_pretrained(str(tmp_path / "out"))
    french = translator.tokenizer.convert_tokens_to_ids("fra_Latn")
    assert translator.search.first_token == french


def test_missing_language_is_told_before_the_teacher_translates(
    distil, multilingual, teachers, tmp_path
):
    outcome = distil("--tokenizer", multilingual)

    assert_refused(outcome, "--source_language", "such as deu_Latn")
    assert not (tmp_path / "out").exists()


def test_several_processes_are_refused(distil, no_model, monkeypatch, tmp_path):
    monkeypatch.setattr(Seq2SeqTrainingArguments, "world_size", 2)

    assert_refused(distil(), "distil translates in one process, got 2")
    assert not (tmp_path / "out").exists()
