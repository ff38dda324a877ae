"""The script that scores translations of the number corpus."""

import pytest

from ..support.documents import ROOT
from ..support.scripts import run_script


def score(folder):
    return run_script(ROOT / "scripts" / "score_numbers.py", folder, folder / "translations")


def write(folder, **contents):
    lines = {"test.numbers": "1\n2\n30\n", "test.en": "one\ntwo\nthirty\n"}
    for name, content in (lines | contents).items():
        (folder / name).write_text(content)


def test_exact_matches_are_counted_for_each_number_of_digits(tmp_path):
    write(tmp_path, translations="one\nthree\nthirty\n")

    done = score(tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows == [["digits", "exact", "lines"], ["1", "1", "2"], ["2", "1", "1"]]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({}, "translations"),
        ({"translations": "one\n"}, "got 3, 1 and 3"),
    ],
)
def test_mistakes_end_the_script_with_one_line(tmp_path, contents, message):
    write(tmp_path, **contents)

    done = score(tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
