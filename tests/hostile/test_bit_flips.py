"""Flipped bits in a saved model: each is noticed or changes no translation."""

import random
import shutil

import pytest

from .conftest import limited

pytestmark = pytest.mark.slow

FLIPS = 80
GROUPS = 2


@pytest.mark.parametrize("group", range(GROUPS))
def test_flipped_bits_are_noticed_or_harmless(model, tmp_path, run, group):
    translate = ["translate", "--engine", "torch", "--model", tmp_path / "M", "ein wort", "noch"]
    shutil.copytree(model, tmp_path / "M")
    files = sorted(file for file in (tmp_path / "M").iterdir() if file.is_file())
    files = [file for file in files if file.suffix not in (".py", ".md")]
    whole = run(*translate)
    assert whole.status == 0, whole.err
    for seed in range(group, FLIPS, GROUPS):
        draw = random.Random(seed)
        file = draw.choice(files)
        before = file.read_bytes()
        place, bit = draw.randrange(len(before)), draw.randrange(8)
        after = bytearray(before)
        after[place] ^= 1 << bit
        file.write_bytes(after)

        with limited():
            outcome = run(*translate)

        file.write_bytes(before)
        told = f"seed {seed}: bit {bit} of byte {place} of {file.name}: {outcome}"
        assert outcome.status == 2 or outcome[:2] == whole[:2], told
        assert "Traceback" not in outcome.err, told
