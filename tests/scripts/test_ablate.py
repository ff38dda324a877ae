import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from vanilla_transformer_tools.commands import main

from ..support.documents import ROOT
from ..support.scripts import run_script

PLANS = [*sorted((ROOT / "ablations").glob("*.yaml")), ROOT / "scripts/speedrun.yaml"]
PLAN = """
options: >-
  --train train.tsv --validation train.tsv --vocab_size 280 --max_tokens_per_batch 200
  --config d_model=8 encoder_attention_heads=2 decoder_attention_heads=2 encoder_layers=1
  --max_steps 2 --save_strategy steps --eval_strategy steps --save_steps 1 --eval_steps 1
  --metrics wer --metric_for_best_model wer --warmup_steps 1
rows:
  Pre-norm, as usual:
  post-norm: --learning_rate 0.5
"""


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Runs the script in this process, with a function in place of the training command."""
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(PLAN, encoding="utf-8")

    def run(train, *options):
        def run_command(command, **_):
            folder = Path(command[command.index("--output_dir") + 1])
            subprocess.CompletedProcess(command, train(folder)).check_returncode()

        monkeypatch.setattr(subprocess, "run", run_command)
        given = ["plan.yaml", "--data", ".", "--output", "runs", *options]
        return run_script(ROOT / "scripts/ablate.py", *given)

    return run


def finish(folder):
    record = {"minutes": 1.0, "parameters": 2, "updates": 3}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "results.json").write_text('{"validation": {"wer": 4.0, "loss": 5.0}}')
    return 0


def stop(folder):
    """What SIGTERM leaves: a model and its scores."""
    finish(folder)
    (folder / "stopped").touch()
    return -15


def test_failure_of_a_run_is_that_of_the_script(script):
    begun = []

    def fail(folder):
        begun.append(folder)
        return 2

    done = script(fail, "--seeds", "3")

    assert (done.returncode, done.stdout) == (2, "")
    assert len(begun) == 1
    assert str(begun[0]) in done.stderr
    assert "returned non-zero exit status 2." in done.stderr


def test_run_that_was_stopped_is_no_result_and_begins_anew(script):
    assert script(stop, "--seeds", "3").returncode == 128 + 15
    assert len(script(finish, "--seeds", "3", "--table").stdout.splitlines()) == 2

    done = script(finish, "--seeds", "3")

    assert len(done.stdout.splitlines()) == 4
    names = {path.name for path in Path("runs").rglob("*") if path.is_file()}
    assert names == {"run.json", "results.json", ".options"}


def test_table_has_means_and_ranges_over_the_seeds(script):
    def finish_by_seed(folder):
        seed = int(folder.name[-1])
        record = {"minutes": 2.0 * seed, "parameters": 2000, "updates": 3}
        (folder / "run.json").write_text(json.dumps(record))
        scores = {"wer": 4.0 + seed**2, "loss": 0.5 * seed}
        (folder / "results.json").write_text(json.dumps({"validation": scores}))
        return 0

    done = script(finish_by_seed, "--seeds", "1", "2", "--rows", "post*")

    line = done.stdout.splitlines()[-1]
    assert line == "| post-norm | 6.50 | 5.00-8.00 | 0.750 | 2 | 2,000 | 3 | 3.0 |"


def test_finished_run_with_other_options_is_no_result(script):
    script(finish, "--seeds", "3")
    plan = Path("plan.yaml").read_text(encoding="utf-8")
    Path("plan.yaml").write_text(plan.replace("rate 0.5", "rate 0.4"), encoding="utf-8")

    for options in ([], ["--table"]):
        done = script(finish, "--seeds", "3", *options)
        assert done.returncode == 2
        assert "runs/post-norm-3 holds a run with other options" in done.stderr


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (PLAN + "  Post norm: --seed 1", [], "two rows would have one folder"),
        ("rows: [a, b]", [], "plan.yaml must have `options` and `rows`"),
        ("rows: {a: --seed 1}\n : :", [], "plan.yaml must be YAML: while parsing"),
        ("options: [--a]\nrows: {a: }", [], "options must be options in one string, got ['--a']"),
        (PLAN, ["--rows", "x"], "Pre-norm, as usual, post-norm; one must be named, got ['x']"),
        (PLAN, ["--metric", "bleu", "--rows", "post*"], "has no score 'bleu' of translations"),
    ],
)
def test_mistakes_are_reported_without_a_table(script, plan, options, message):
    Path("plan.yaml").write_text(plan, encoding="utf-8")

    done = script(finish, *options)

    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.slow
def test_plans_of_the_repository_name_options_and_fields_that_exist(tmp_path, capsys):
    assert len(PLANS) >= 4
    for path in PLANS:
        plan = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert len(plan["rows"]) >= 2
        for row in plan["rows"].values():
            words = shlex.split(f"{plan['options']} {row or ''}")
            # Everything is in order but the files, which are looked for in the folder given.
            with pytest.raises(SystemExit, match="2"):
                main(["train", *words, "--data", str(tmp_path / "here"), "--use_cpu"])
            assert str(tmp_path / "here") in capsys.readouterr().err
