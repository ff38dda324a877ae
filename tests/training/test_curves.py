"""The picture of a run's curves: what it shows, and of which reports."""

import json
import re
import sys

import pytest

from vanilla_transformer_tools.training.run_record import plot_curves


def write_log(folder, reports):
    lines = [json.dumps(report) for report in reports]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")


def drawn_points(picture):
    """Points of each line of the picture, as they are in its file; ticks and frames left out."""
    paths = re.findall(r'<path d="([^"]*)" clip-path[^>]*stroke-linecap: square', picture)
    return [
        [tuple(map(float, point)) for point in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path)]
        for path in paths
    ]


def test_curves_show_losses_score_and_learning_rate(tmp_path):
    write_log(
        tmp_path,
        [
            {"minutes": 0.5, "loss": 5.0, "learning_rate": 0.001},
            {"minutes": 1.0, "loss": 3.0, "learning_rate": 0.002},
            {"minutes": 1.1, "eval_loss": 4.0, "eval_bleu": 10.0},
            {"minutes": 1.5, "loss": 2.0, "learning_rate": 0.001},
            {"minutes": 2.1, "eval_loss": 3.0, "eval_bleu": 20.0},
        ],
    )

    path = plot_curves(tmp_path, "bleu")

    picture = path.read_text()
    assert path == tmp_path / "curves.svg"
    loss, validation, bleu, rate = drawn_points(picture)
    assert [len(curve) for curve in (loss, validation, bleu, rate)] == [3, 2, 2, 3]
    # The y axis of the picture points downwards.
    assert loss[0][1] < loss[1][1] < loss[2][1]
    assert bleu[1][1] < bleu[0][1]


def test_same_curves_are_the_same_file(tmp_path):
    write_log(tmp_path, [{"minutes": 1.0, "loss": 2.0}])

    first, second = (plot_curves(tmp_path, "bleu").read_bytes() for _ in range(2))

    assert first == second


def test_curves_name_the_extra_when_matplotlib_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ImportError, match=r"pip install -e '\.\[plot\]'"):
        plot_curves(tmp_path, "bleu")
