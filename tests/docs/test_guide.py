"""The commands of README, tutorial and some pages run in order, on a few sentences."""

import gzip
import json
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM

from number_words import english, german
from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.translation import Translator

from ..sharing.test_hub import hub  # noqa: F401
from ..support.documents import ROOT, code_blocks
from ..support.pretrained import save_pretrained_model
from ..support.scripts import run_script

# Options of the pages, and what is given in their place.
SMALLER = {
    "--minutes": ["0.3"],
    "--max_steps": ["4"],
    "--eval_steps": ["2"],
    "--save_steps": ["2"],
    "--warmup_steps": ["1"],
    "--vocab_size": ["300"],
}
SIZES = ["d_model=16", "encoder_layers=1", "decoder_layers=1", "encoder_ffn_dim=16"]

PAIRS = [("ein hund rennt .", "a dog runs ."), ("die katze schläft .", "the cat sleeps .")] * 4

pytestmark = pytest.mark.slow


def commands(block: str) -> list[list[str]]:
    """Words of the commands of a block for a shell."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def smaller(words: list[str]) -> list[str]:
    """The same command with less work to do."""
    given = list(words)
    for option, values in SMALLER.items():
        if option in given:
            place = given.index(option) + 1
            given[place : place + 1] = values
    if given[0] == "train":
        place = given.index("--config") + 1 if "--config" in given else len(given)
        given[place:place] = SIZES if "--config" in given else ["--config", *SIZES]
    return given


def run(words: list[str]) -> None:
    """Runs a command of the package or a script here, and any other one as the shell does."""
    if words[0] == "vanilla-transformer":
        main(smaller(words[1:]))
    elif words[0] == "python" and words[1].endswith(".py"):
        done = run_script(ROOT / words[1], *words[2:])
        assert done.returncode == 0, done.stderr
    else:
        # The shell knows this environment's Python by this name.
        words = [sys.executable if word == "python" else word for word in words]
        line = " ".join(word if word == ">" else shlex.quote(word) for word in words)
        subprocess.run(["bash", "-c", line], check=True)


def test_first_commands_of_the_readme_train_evaluate_and_translate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for split, start in (("train", 0), ("valid", 5), ("test", 6)):
        numbers = range(start, 900, 9)
        for language, word in (("de", german), ("en", english)):
            text = "".join(f"{word(number)}\n" for number in numbers)
            Path(f"{split}.{language}").write_text(text, encoding="utf-8")
    (block,) = [one for one in code_blocks("README.md", "bash") if "evaluate" in one]

    for words in commands(block):
        run(words)

    assert [words[1] for words in commands(block)] == ["train", "evaluate", "translate"]
    said = capsys.readouterr().out
    assert "chosen      --preset tiny" in said
    assert "chosen      --lowercase_sources: all sources are in lower case" in said
    capitals, small = Translator.from_pretrained("runs/de-en").translate(["ZWEI", "zwei"])
    assert (capitals.text, capitals.unknown_source) == (small.text, ())
    assert "bleu" in json.loads(Path("runs/de-en/results.json").read_text())["test"]


@pytest.mark.usefixtures("hub")
def test_commands_of_the_tutorial_lead_from_the_download_to_a_shared_model(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = [f"{english(number)}.\t{german(number)}.\tCC-BY 2.0\n" for number in range(3000)]
    blocks = code_blocks("docs/tutorial.md", "bash")
    ran = [words for block in blocks for words in commands(block)]

    for words in ran:
        if words[0] == "curl":
            with zipfile.ZipFile(Path(words[-1]).name, "w") as download:
                download.writestr("deu.txt", "".join(rows))
        elif words[:2] != ["hf", "auth"]:
            run([word.replace("user/", "me/") for word in words])

    names = [words[1] for words in ran if words[0] == "vanilla-transformer"]
    assert names == ["train", "evaluate", "translate", "translate", "push"]
    sets = {name: Path(f"data/tatoeba/{name}.jsonl").read_text() for name in ("train", "test")}
    assert not {*sets["train"].splitlines()} & {*sets["test"].splitlines()}
    assert len(Path("out.en").read_text(encoding="utf-8").splitlines()) == 2
    assert "me/de-en" in capsys.readouterr().out


@pytest.fixture
def captions(tmp_path, monkeypatch):
    """A folder with number words under the names of Multi30k."""
    monkeypatch.chdir(tmp_path)
    Path("multi30k").mkdir()
    for split, size in (("train", 5100), ("val", 9), ("test_2016_flickr", 9)):
        for language, word in (("de", german), ("en", english), ("fr", german)):
            text = "".join(f"{word(number)}\n" for number in range(size))
            Path(f"multi30k/{split}.{language}.gz").write_bytes(gzip.compress(text.encode()))


@pytest.mark.usefixtures("captions")
@pytest.mark.parametrize(
    ("page", "lines", "said"),
    [
        ("docs/back_translation.md", {"more.de": 100}, "The model is in runs/de-en"),
        ("docs/several_directions.md", {"translations.txt": 18}, "test fr:"),
    ],
)
def test_commands_of_the_page_lead_from_files_to_a_model(page, lines, said, capsys):
    for block in code_blocks(page, "bash"):
        if "vanilla-transformer" in block:
            for words in commands(block):
                run(words)
        else:
            subprocess.run(["bash", "-ec", block], check=True)

    written = {name: Path(name).read_text(encoding="utf-8").splitlines() for name in lines}
    assert {name: len(each) for name, each in written.items()} == lines
    assert all(line.startswith("<BT> ") for line in written.get("more.de", []))
    assert said in capsys.readouterr().out


@pytest.fixture
def pretrained(tmp_path, monkeypatch):
    """A folder with the pairs and, at the names that the page gives, minute models."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "valid", "test"):
        for side, language in enumerate(("de", "en")):
            text = "".join(f"{pair[side]}\n" for pair in PAIRS)
            (tmp_path / f"{split}.{language}").write_text(text, encoding="utf-8")
    save_pretrained_model("marian", tmp_path / "Helsinki-NLP" / "opus-mt-de-en")
    save_pretrained_model("nllb", tmp_path / "facebook" / "nllb-200-distilled-600M")
    return tmp_path


# PEFT's wrapper asks Transformers by a name of which newer releases warn.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
# Trainer's default for GPUs, on machines without one.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_commands_and_script_of_the_page_fine_tune_a_model(pretrained, capsys):
    page = "docs/finetune.md"
    ran = commands("\n".join(code_blocks(page, "bash")))
    for words in ran:
        main(words[1:])
    namespace: dict[str, object] = {}
    for block in code_blocks(page, "python"):
        exec(compile(block, page, "exec"), namespace)

    assert [words[1] for words in ran][:3] == ["import", "train", "evaluate"]
    assert "trainable params" in capsys.readouterr().out
    before = AutoModelForSeq2SeqLM.from_pretrained("runs/opus").state_dict()
    assert list(Translator.from_pretrained("runs/lora").translate(["ein hund ."]))
    for name in ("mine", "script"):
        assert list(Translator.from_pretrained(f"runs/{name}").translate(["ein hund ."]))
        after = AutoModelForSeq2SeqLM.from_pretrained(f"runs/{name}").state_dict()
        weight = "model.decoder.layers.0.fc1.weight"
        assert not after[weight].equal(before[weight])
