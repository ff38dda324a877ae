"""The experiment of fine-tuning, on a handful of number words for a few updates."""

import json
import re
import subprocess
import sys

import pytest

from number_words import write_corpus

from ..support.documents import ROOT
from ..support.scripts import run_script

sys.path.insert(0, str(ROOT / "scripts"))

import finetuning_experiment

SCRIPT = ROOT / "scripts" / "finetuning_experiment.py"


def write_pairs(folder, sources, targets):
    files = [folder / "a.de", folder / "a.en"]
    for file, lines in zip(files, (sources, targets), strict=True):
        file.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return [str(file) for file in files]


def test_pairs_are_the_lines_of_all_other_commands(tmp_path):
    sources = ["eins\u2028zwei", "drei\x0c", "vier\x85", "fünf"]
    targets = ["one two", "three", "four", "five"]
    files = write_pairs(tmp_path, sources, targets)

    assert finetuning_experiment.read_sides(files) == [sources, targets]
    assert finetuning_experiment.read_sides(files, 2) == [sources[:2], targets[:2]]


def test_mistake_is_reported_in_one_line(tmp_path):
    files = write_pairs(tmp_path, ["eins", "zwei"], ["one"])
    others = [word for name in ("child", "validation", "test") for word in (f"--{name}", *files)]

    finished = run_script(SCRIPT, tmp_path / "runs", "--parent", *files, *others)

    assert finished.returncode == 2
    assert "a.de" in finished.stderr
    assert finished.stderr.count("\n") == 1


@pytest.mark.slow
# Trainer's default for GPUs, on machines without one.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_each_model_has_a_row_and_what_is_finished_is_kept(tmp_path):
    write_corpus(tmp_path, train=200, validation=4, test=4)

    def pair(split):
        return [tmp_path / f"{split}.{language}" for language in ("de", "en")]

    given = [tmp_path / "runs", "--parent", *pair("train"), "--child", *pair("train")]
    given += ["--validation", *pair("validation"), "--test", *pair("test")]
    given += ["--pairs", 50, "--minutes", 0.001, 0.001]

    def run():
        command = [sys.executable, str(SCRIPT), *map(str, given)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    first = run()
    # As if it had been interrupted, which leaves a model too.
    (tmp_path / "runs" / "lora" / ".unfinished").touch()
    second = run()

    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    table = [line.split(" | ") for line in second.stdout.splitlines()[-6:]]
    assert [row[0] for row in table[:4]] == [
        "| imported, before fine-tuning",
        "| from scratch",
        "| fine-tuned",
        "| fine-tuned with LoRA, rank 16",
    ]
    trained = [int(row[3].replace(",", "")) for row in table[:4]]
    assert trained[0] == 0 < trained[3] < trained[2]
    assert table[4][0].startswith("bleu: nrefs:1|")
    # Only the first 50 pairs are learned from.
    run = json.loads((tmp_path / "runs" / "tuned" / "run.json").read_text())
    assert run["pairs"] == 50
    assert first.stderr.count("The model is in") == 3
    assert re.findall("The model is in .*/(.*)", second.stderr) == ["lora"]
