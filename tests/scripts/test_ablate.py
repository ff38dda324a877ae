import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vanilla_transformer_tools.commands import main

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/ablate.py"
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
    monkeypatch.syspath_prepend(SCRIPT.parent)
    Path("plan.yaml").write_text(PLAN, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("ablate_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run_script(train, *options):
        def run(command, **_):
            folder = Path(command[command.index("--output_dir") + 1])
            return subprocess.CompletedProcess(command, train(folder))

        monkeypatch.setattr(subprocess, "run", run)
        argv = ["ablate.py", "plan.yaml", "--data", ".", "--output", "runs", *options]
        monkeypatch.setattr(sys, "argv", argv)
        return module.main()

    return run_script


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


def test_failure_of_a_run_is_that_of_the_script(script, capsys):
    begun = []

    def fail(folder):
        begun.append(folder)
        return 2

    assert script(fail, "--seeds", "3") == 2
    assert len(begun) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{begun[0]}: training ended with status 2." in printed.err


def test_run_that_was_stopped_is_no_result_and_begins_anew(script, capsys):
    assert script(stop, "--seeds", "3") == 128 + 15
    assert script(finish, "--seeds", "3", "--table") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2

    assert script(finish, "--seeds", "3") == 0

    assert len(capsys.readouterr().out.splitlines()) == 4
    names = {path.name for path in Path("runs").rglob("*") if path.is_file()}
    assert names == {"run.json", "results.json", ".options"}


def test_table_has_means_and_ranges_over_the_seeds(script, capsys):
    def finish_by_seed(folder):
        seed = int(folder.name[-1])
        record = {"minutes": 2.0 * seed, "parameters": 2000, "updates": 3}
        (folder / "run.json").write_text(json.dumps(record))
        scores = {"wer": 4.0 + seed**2, "loss": 0.5 * seed}
        (folder / "results.json").write_text(json.dumps({"validation": scores}))
        return 0

    assert script(finish_by_seed, "--seeds", "1", "2", "--rows", "post*") == 0

    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "| post-norm | 6.50 | 5.00-8.00 | 0.750 | 2 | 2,000 | 3 | 3.0 |"


def test_finished_run_with_other_options_is_no_result(script, capsys):
    script(finish, "--seeds", "3")
    plan = Path("plan.yaml").read_text(encoding="utf-8")
    Path("plan.yaml").write_text(plan.replace("rate 0.5", "rate 0.4"), encoding="utf-8")

    for options in ([], ["--table"]):
        assert script(finish, "--seeds", "3", *options) == 2
        assert "runs/post-norm-3 holds a run with other options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (PLAN + "  Post norm: --seed 1", [], "two rows would have one folder"),
        ("rows: [a, b]", [], "plan.yaml must have `options` and `rows`"),
        ("rows: {a: --seed 1}\n : :", [], "plan.yaml must be YAML: while parsing"),
        ("options: [--a]\nrows: {a: }", [], "options must be options in one string, got ['--a']"),
        (PLAN, ["--rows", "x"], "Pre-norm, as usual, post-norm, got ['x']"),
        (PLAN, ["--metric", "bleu", "--rows", "post*"], "has no score 'bleu' of translations"),
    ],
)
def test_mistakes_are_reported_without_a_table(script, capsys, plan, options, message):
    Path("plan.yaml").write_text(plan, encoding="utf-8")

    assert script(finish, *options) == 2

    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


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
