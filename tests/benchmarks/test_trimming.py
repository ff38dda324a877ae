"""`benchmarks/trimming.py`: the stand-in for a vocabulary, and the table."""

import re
import sys

from ..support.documents import ROOT
from ..support.scripts import run_script

sys.path.insert(0, str(ROOT / "benchmarks"))

from trimming import SPECIAL, stand_in

LINES = ["ein hund rennt", "zwei hunde rennen", "der mann sieht den hund"] * 9


def test_stand_in_spells_its_lines_with_what_it_has_learned():
    tokenizer = stand_in(LINES, 40, 500)

    ids = tokenizer(LINES[1])["input_ids"]
    assert len(tokenizer) == 500
    assert tokenizer.decode(ids, skip_special_tokens=True) == LINES[1]
    assert max(ids) < 40
    assert (tokenizer.convert_ids_to_tokens(range(4))) == list(SPECIAL.values())
    assert ids[-1] == tokenizer.eos_token_id


def test_rows_are_of_the_model_with_all_entries_and_of_the_trimmed_one(tmp_path):
    for side in "ab":
        (tmp_path / side).write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")

    done = run_script(
        *(ROOT / "benchmarks" / "trimming.py", "--size", "minute", "--learned", 40),
        *("--corpus", tmp_path / "a", tmp_path / "b", "--pairs", 2, "--rounds", 1),
    )

    assert done.returncode == 0, done.stderr
    whole, kept = re.findall(r"^\| (?:all entries|kept) \| (\d+) \| ", done.stdout, re.MULTILINE)
    assert int(kept) <= 40 < int(whole) == 500
