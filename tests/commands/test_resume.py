"""The command `translate --resume`: it continues the same job, and no other."""

import json
import os
import shutil
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from vanilla_transformer_tools.commands import translate as translate_command
from vanilla_transformer_tools.commands.outputs import open_alone
from vanilla_transformer_tools.commands.translate import record_path
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.engines import TorchEngine

from ..models import interrupted_after
from ..support.training_runs import flip_bit
from .conftest import LINES, as_bytes


@pytest.fixture
def run(translate):
    return translate


@pytest.fixture
def job(run, folder, tmp_path):
    """Begins a job, of which three lines are done; gives its options, and its output."""

    def begin(*options, model=folder):
        source, out = tmp_path / "in", tmp_path / "out"
        source.write_bytes(as_bytes(LINES))
        argv = ["--model", model, "--input", source, "--output", out]
        argv += ["--num_beams", 3, "--max_extra_tokens", 5, *options]
        with interrupted_after(3):
            assert run(*argv)[0] == 130
        assert out.read_bytes()
        return argv, out

    return begin


def assert_refused(outcome, out, before, *messages):
    """The output is as it was, and one line tells why."""
    status, _, err = outcome
    assert (status, out.read_bytes()) == (2, before)
    assert err.count("\n") == 1
    for message in messages:
        assert message in err


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_second_translation_into_an_output_is_refused_while_the_first_one_runs(
    run, job, options, monkeypatch
):
    argv, out = job()
    before = out.read_bytes()
    monkeypatch.setattr(Translator, "from_pretrained", None)

    with open_alone(out):
        status, _, err = run(*argv, *options)

    assert (status, out.read_bytes()) == (2, before)
    assert f"--output {out} is in use by another translation that has not ended. Wait" in err


@pytest.mark.parametrize("has_ended", [True, False])
def test_translation_that_began_meanwhile_is_not_overwritten(
    run, folder, tmp_path, monkeypatch, has_ended
):
    out = tmp_path / "out"
    with ExitStack() as other:

        def load(*_, **__):
            out.write_text("theirs\n")
            if not has_ended:
                other.enter_context(open_alone(out))
            search = SimpleNamespace(num_beams=1, length_penalty=1.0)
            return SimpleNamespace(engine=SimpleNamespace(name="torch"), search=search)

        monkeypatch.setattr(Translator, "from_pretrained", load)
        status, _, err = run("--model", folder, "--output", out, "ja")

    assert (status, out.read_text()) == (2, "theirs\n")
    expected = "was changed while the model was loaded: expected 0 bytes, got 7"
    assert (expected if has_ended else "is in use by another translation") in err


def test_resume_refuses_other_settings(run, job):
    argv, out = job("--n_best", 2)
    before = out.read_bytes()

    outcome = run(*argv, "--dtype", "bfloat16", "--seed", 7, "--resume")

    whose = f"'{out}' must be continued by the job that began it, got "
    differences = ["--dtype bfloat16 instead of auto", "--seed 7 instead of 0"]
    assert_refused(outcome, out, before, whose, *differences)
    assert run(*argv, "--resume")[0] == 0


@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json", "run.json"])
def test_resume_refuses_a_model_that_has_changed_and_names_the_file(
    run, job, folder, tmp_path, name
):
    copy = shutil.copytree(folder, tmp_path / "model")
    argv, out = job(model=copy)
    before = out.read_bytes()
    file = copy / name
    if name == "model.safetensors":
        flip_bit(file)
    else:
        file.write_text(file.read_text() + " " if file.exists() else "{}")

    outcome = run(*argv, "--resume")

    assert_refused(outcome, out, before, f"got {name} of model 1 SHA-256 ")
    assert outcome[2].count(" instead of ") == 1


def test_resume_refuses_another_number_of_models(run, job, folder):
    argv, out = job()
    before = out.read_bytes()

    outcome = run("--model", folder, *argv, "--resume")

    assert_refused(outcome, out, before, "--model 2 instead of 1")


def test_resume_refuses_another_version(run, job, monkeypatch):
    argv, out = job()
    before = out.read_bytes()
    now = translate_command.version("vanilla-transformer")
    monkeypatch.setattr(translate_command, "version", lambda _: "99.0")

    outcome = run(*argv, "--resume")

    assert_refused(outcome, out, before, f"got vanilla-transformer 99.0 instead of {now}")


@pytest.mark.parametrize(
    ("name", "lines"), [("in", ["anders", *LINES[1:]]), ("in", LINES[:6]), ("prefixes", "xbcdefg")]
)
def test_resume_refuses_other_text(run, job, tmp_path, name, lines):
    prefixes = tmp_path / "prefixes"
    prefixes.write_bytes(as_bytes("abcdefg"))
    argv, out = job("--prefix_file", prefixes)
    before = out.read_bytes()
    (tmp_path / name).write_bytes(as_bytes(lines))
    if len(lines) < len(LINES):
        prefixes.write_bytes(as_bytes("abcdef"))

    option = "--input" if name == "in" else "--prefix_file"
    assert_refused(run(*argv, "--resume"), out, before, f"{option} SHA-256 ", " instead of SHA-")


def test_resume_takes_what_changes_no_result(run, job, folder, tmp_path):
    argv, out = job()
    moved, source = shutil.copytree(folder, tmp_path / "model"), tmp_path / "moved"
    (moved / "README.md").write_text("scored since")
    source.write_bytes(as_bytes(LINES))
    whole = run(*argv[:4], *argv[6:])[1]
    other = ["--input", source, "--max_tokens_per_batch", 1]

    status, _, _ = run("--model", moved, *argv[2:], "--resume", *other)

    assert (status, out.read_bytes()) == (0, whole)


def test_record_of_a_job_that_wrote_nothing_does_not_hinder_another(run, job, tmp_path):
    argv, out = job()
    out.write_bytes(b"")

    assert run(*argv, "--num_beams", 1, "--resume")[0] == 0
    assert out.read_bytes() == run(*argv[:4], *argv[6:], "--num_beams", 1)[1]
    assert not (tmp_path / "out.job.json").exists()


def test_output_is_on_disk_before_its_record_is_deleted(run, job, monkeypatch):
    argv, out = job()
    synced = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(record_path(out).exists()))

    assert run(*argv, "--resume")[0] == 0

    assert synced == [True]
    assert not record_path(out).exists()


def test_devices_have_no_record(run, folder, tmp_path):
    device = tmp_path / "out"
    device.symlink_to("/dev/null")

    with interrupted_after(1):
        run("--model", folder, "--output", device, "ja", "nein")

    assert list(tmp_path.iterdir()) == [device]


def test_resume_refuses_another_engine(run, job, monkeypatch):
    argv, out = job("--length_penalty", 0.5)
    before, search = out.read_bytes(), json.loads(record_path(out).read_text())["search"]
    assert search == {"engine": "torch", "num_beams": 3, "length_penalty": 0.5}
    monkeypatch.setattr(TorchEngine, "name", "CTranslate2 4")

    outcome = run(*argv, "--resume")

    told = f"'{out}' must be continued with its engine, torch, got CTranslate2 4. Install"
    assert_refused(outcome, out, before, told)
