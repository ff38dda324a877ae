"""`benchmarks/threads.py`: idle cores against the best fixed number of threads."""

import os
import sys

import pytest

import threads
from threads import cells


def test_row_divides_idle_cores_by_the_best_fixed_number():
    seconds = {1: [2.0, 2.0, 9.0], 2: [4.0, 5.0, 6.0], None: [3.0, 3.0, 0.1]}

    assert cells(seconds) == ["2.000", "5.000", "3.000", "1.50"]


def test_fixed_number_of_threads_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["threads.py"])
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")

    with pytest.raises(SystemExit, match="2"):
        threads.main()

    assert "unset it" in capsys.readouterr().err
