"""Table 1 of the paper as a picture: the script that draws it."""

from functools import partial

import pytest

from ..support.documents import ROOT
from ..support.scripts import run_script

SCRIPT = ROOT / "benchmarks" / "plot_complexity.py"


run = partial(run_script, SCRIPT)


def test_points_and_lines_are_printed_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.svg"

    done = run("--sizes", 64, 512, "--fixed", 256, "--rounds", 1, "--picture", picture)

    header, _, *lines = done.stdout.strip().splitlines()[2:]
    names = [cell.strip() for cell in header.split("|")[1:-1]]
    rows = [[float(cell) for cell in line.split("|")[1:-1]] for line in lines]
    assert names[:5] == ["n", "d", "equation (1)", "whole layer", "self-attention, n² d"]
    assert names[5:] == ["recurrent, n d²", "convolutional, k n d²", "restricted, r n d"]
    sizes = [(64, 256), (256, 256), (512, 256), (256, 64), (256, 512)]
    assert [(n, d) for n, d, *_ in rows] == sizes
    point = rows[1][2]
    for n, d, _, _, attention, recurrent, convolutional, restricted in rows:
        # The line meets the point where n = d = 256; cells are rounded to two decimals.
        share = n / 256 * d / 256
        expected = [share * n / 256, share * d / 256, 3 * share * d / 256, share * 64 / 256]
        assert [attention, recurrent, convolutional, restricted] == pytest.approx(
            [point * factor for factor in expected], abs=0.1
        )
    assert picture.read_text(encoding="utf-8").count("<svg") == 1
