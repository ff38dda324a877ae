"""`benchmarks/threads.py`: idle cores against the best fixed number of threads."""

import os
import sys

import pytest
import torch

import threads
from threads import cells, contenders
from vanilla_transformer_tools import threads as counting


def test_row_divides_idle_cores_by_the_best_fixed_number():
    seconds = {1: [2.0, 2.0, 9.0], 2: [4.0, 5.0, 6.0], None: [3.0, 3.0, 0.1]}

    assert cells(seconds) == ["2.000", "5.000", "3.000", "1.50"]


def test_each_contender_has_its_number_of_threads(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(counting.IdleCores, "use", lambda self: chosen.append("idle"))
    runs = contenders(lambda: chosen.append("task"), range(1, 3))

    assert [run() >= 0 for run in runs.values()] == [True] * 3
    assert chosen == [1, "task", 2, "task", "idle", "task"]


def test_fixed_number_of_threads_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["threads.py"])
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")

    with pytest.raises(SystemExit, match="2"):
        threads.main()

    assert "unset it" in capsys.readouterr().err
