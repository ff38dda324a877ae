"""The command `translate --resume`: it continues the same job, and no other."""

import shutil

import pytest
import torch

from vanilla_transformer_tools.settings import TranslateSettings
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation import job as jobs
from vanilla_transformer_tools.translation.job import planned

from ..models import interrupted_after
from ..support.training_runs import flip_bit
from .conftest import LINES, as_bytes


@pytest.fixture
def job(translate, folder, tmp_path):
    """Begins a job, of which three lines are done; gives its options, and its output."""

    def begin(*options, model=folder):
        source, out = tmp_path / "in", tmp_path / "out"
        source.write_bytes(as_bytes(LINES))
        argv = ["--model", model, "--input", source, "--output", out]
        argv += ["--num_beams", 3, "--max_extra_tokens", 5, *options]
        with interrupted_after(3):
            status, _, err = translate(*argv)
        assert status == 130
        assert f"stopped: --resume continues {out}" in err
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


def test_second_translation_into_an_output_is_refused_while_the_first_one_runs(
    translate, job, monkeypatch
):
    argv, out = job()
    before = out.read_bytes()
    settings = TranslateSettings(model=argv[1:2], input=argv[3], output=str(out), resume=True)
    monkeypatch.setattr(jobs, "_continue", lambda *_: None)
    monkeypatch.setattr(Translator, "from_pretrained", None)

    with planned(settings, []):
        status, _, err = translate(*argv, "--resume")

    assert (status, out.read_bytes()) == (2, before)
    assert f"--output {out} is in use by another translation that has not ended. Wait" in err


def test_resume_refuses_other_settings_engines_and_versions(translate, job, monkeypatch):
    argv, out = job("--n_best", 2)
    before, now = out.read_bytes(), jobs.version("vanilla-transformer")
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "version", lambda _: "99.0")
        patch.setattr(jobs, "device", lambda: torch.device("cuda"))
        other = ["--dtype", "bfloat16", "--seed", 7, "--engine", "ctranslate2"]
        outcome = translate(*argv, *other, "--length_penalty", 0.5, "--resume")

    whose = f"'{out}' must be continued by the job that began it, got "
    differences = ["--dtype bfloat16 instead of auto", "--seed 7 instead of 0"]
    differences += ["--engine ctranslate2 instead of torch", "--length_penalty 0.5 instead of "]
    differences += [f"vanilla-transformer 99.0 instead of {now}", "device cuda instead of cpu"]
    assert_refused(outcome, out, before, whose, *differences)
    assert translate(*argv, "--resume")[0] == 0


def test_resume_refuses_changed_files_and_names_them(translate, job, folder, tmp_path):
    copy, prefixes = shutil.copytree(folder, tmp_path / "model"), tmp_path / "prefixes"
    prefixes.write_bytes(as_bytes("abcdefg"))
    argv, out = job("--prefix_file", prefixes, model=copy)
    before = out.read_bytes()
    flip_bit(copy / "model.safetensors")
    (tmp_path / "in").write_bytes(as_bytes(["anders", *LINES[1:]]))
    prefixes.write_bytes(as_bytes("xbcdefg"))

    outcome = translate(*argv, "--resume")

    assert_refused(outcome, out, before, "--input SHA-256 ", "--prefix_file SHA-256 ")
    assert "--model ['SHA-256 " in outcome[2]
    assert outcome[2].count(" instead of ") == 3


def test_resume_takes_what_changes_no_result(translate, job, folder, tmp_path):
    argv, out = job()
    moved, source = shutil.copytree(folder, tmp_path / "model"), tmp_path / "moved"
    (moved / "README.md").write_text("scored since")
    source.write_bytes(as_bytes(LINES))
    whole = translate(*argv[:4], *argv[6:])[1]
    other = ["--input", source, "--max_tokens_per_batch", 1]

    status, _, _ = translate("--model", moved, *argv[2:], "--resume", *other)

    assert (status, out.read_bytes()) == (0, whole)


def test_resume_leaves_a_complete_output_as_it_is(translate, job, monkeypatch):
    argv, out = job()
    assert translate(*argv, "--resume")[0] == 0
    before = out.read_bytes()
    # But for half a line after the last one.
    out.write_bytes(before + b"half")
    assert translate(*argv, "--resume")[0] == 0
    monkeypatch.setattr(Translator, "from_pretrained", None)
    monkeypatch.setattr(jobs, "version", lambda _: "99.0")

    status, printed, err = translate(*argv, "--resume")

    assert (status, printed, out.read_bytes()) == (0, b"", before)
    assert f"{out} is complete: {len(LINES)} lines" in err
    assert_refused(
        translate(*argv, "--num_beams", 1, "--resume"), out, before, "--num_beams 1 instead"
    )
