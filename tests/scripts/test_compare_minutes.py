import json
import subprocess
import sys
from pathlib import Path

import pytest

import compare_minutes

PLAN = """
Two words:
  folder: raw
  prepare: pairs pairs.de.gz pairs.en.gz --split train --carve 0.3
  metric: exact_match
  evaluate: --num_beams 1
  recipe: recipes/scan.yaml --config d_model=8 --warmup_steps 1
  left_out: --learning_rate 0.001
Others:
  folder: other
  train: train.tsv
  validation: validation.tsv
  metric: wer
  evaluate: --num_beams 5
"""


@pytest.fixture
def corpora(tmp_path):
    """The corpora of the plan by name."""
    (tmp_path / "plan.yaml").write_text(PLAN, encoding="utf-8")
    places = (tmp_path / "data", tmp_path / "runs")
    return compare_minutes.read_corpora(tmp_path / "plan.yaml", ["*"], *places, minutes=15)


def test_rules_have_files_and_metric_and_what_is_left_out_has_its_options_too(corpora, tmp_path):
    runs = corpora["Others"].runs()
    less = corpora["Two words"].runs()["left out"]

    files = ["--train", "train.tsv", "--validation", "validation.tsv"]
    folder = ["--data", str(tmp_path / "data/other")]
    budget = ["--minutes", "15", "--metrics", "wer"]
    last = [*folder, "--disable_tqdm", "true"]
    assert runs == {
        "rules": [*files, *budget, *last],
        "adam": [*files, *budget, "--optimizer", "adam", *last],
    }
    assert less[less.index("--learning_rate") + 1] == "0.001"
    assert less[less.index("--train") + 1] == "train.jsonl"


def test_each_run_is_trained_and_scored_once_and_a_failure_stops_no_other(
    corpora, tmp_path, monkeypatch
):
    calls = []

    def run(command, **_):
        calls.append(command[3])
        folder = Path(
            command[command.index("--output_dir" if calls[-1] == "train" else "--model") + 1]
        )
        if folder.name == "left-out":
            raise subprocess.CalledProcessError(1, command)
        (folder / "run.json").write_text('{"minutes": 7.2}')
        scores = {"validation, whole": {"exact_match": 41.5, "exact_match_signature": "unit:line"}}
        (folder / "results.json").write_text(json.dumps(scores if calls[-1] == "evaluate" else {}))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(compare_minutes.Corpus, "make_files", lambda self: None)
    given = [tmp_path / "plan.yaml", "--data", tmp_path, "--output", tmp_path / "runs"]
    monkeypatch.setattr(sys, "argv", ["", *map(str, given), "--corpora", "Two*"])

    statuses = [compare_minutes.main() for _ in range(2)]

    assert statuses == [1, 1]
    # The one that failed is tried again.
    assert calls == [*["train", "evaluate"] * 2, "train", "train", "evaluate", "train"]
