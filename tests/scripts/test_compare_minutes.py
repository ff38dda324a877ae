import sys

import pytest

from ..support.documents import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import compare_minutes

SCRIPT = ROOT / "scripts/compare_minutes.py"
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
def plan(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN, encoding="utf-8")
    return path


@pytest.fixture
def corpora(plan, tmp_path):
    """The corpora of the plan by name."""
    found = compare_minutes.read_corpora(plan, ["*"], tmp_path / "data", tmp_path / "runs")
    return {corpus.name: corpus for corpus in found}


def test_rules_have_files_and_metric_and_what_is_left_out_has_its_options_too(corpora, tmp_path):
    words = corpora["Others"].options("rules", 15)
    less = corpora["Two words"].options("left out", 15)

    files = ["--train", "train.tsv", "--validation", "validation.tsv"]
    folder = ["--data", str(tmp_path / "data/other")]
    budget = ["--minutes", "15", "--metrics", "wer"]
    assert words == [*files, *budget, *folder, "--disable_tqdm", "true"]
    assert less[less.index("--learning_rate") + 1] == "0.001"
    assert less[less.index("--train") + 1] == "train.jsonl"


def test_recipe_is_stopped_after_the_minutes(corpora, tmp_path):
    words = corpora["Two words"].options("recipe", 15)

    assert words[:3] == [str(ROOT / "recipes/scan.yaml"), "--config", "d_model=8"]
    assert words[words.index("--max_minutes") + 1] == "15"
    assert words[words.index("--data") + 1] == str(tmp_path / "runs/two-words/data")
    assert "--minutes" not in words


def test_table_has_the_difference_to_the_recipe(corpora, monkeypatch):
    scores = {"rules": 41.5, "left out": 40.0, "recipe": 42.0}
    signature = {"exact_match_signature": "unit:line"}
    monkeypatch.setattr(
        compare_minutes.Corpus,
        "scores",
        lambda self, run: (
            {"exact_match": scores[run], "minutes": 7.2, **signature}
            if self.metric == "exact_match"
            else {}
        ),
    )

    lines = compare_minutes.score_table([*corpora.values()]).splitlines()

    assert lines[2] == "| Two words | exact_match | 41.50 | 40.00 | 42.00 | 7.2 | -0.50 |"
    assert lines[3] == "| Others | wer |  |  |  |  |  |"
    assert lines[4:] == ["", "exact_match: unit:line"]
