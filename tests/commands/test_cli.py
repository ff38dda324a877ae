"""The command line: what goes in and out, and how mistakes are told."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from number_words import write_corpus
from vanilla_transformer_tools.commands.__main__ import COMMANDS
from vanilla_transformer_tools.evaluation.swapped import SOURCE_WORDS, frequent_words
from vanilla_transformer_tools.files import read_lines

from .conftest import Outcome, as_bytes

COMMAND = Path(sys.executable).with_name("vanilla-transformer")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with 25 pairs of number words to test on."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, train=1, validation=1, test=25)
    return folder


def pair(corpus: Path, split: str) -> list[Path]:
    return [corpus / f"{split}.{language}" for language in ("de", "en")]


@pytest.fixture
def copied_model(folder: Path, tmp_path: Path) -> Path:
    """A copy of the model for tests that change it."""
    return shutil.copytree(folder, tmp_path / "model")


@pytest.fixture
def sources(corpus: Path) -> list[str]:
    """Number words of 1 to 6 digits."""
    return list(read_lines(corpus / "test.de"))


# Translating


def test_translate_gives_a_line_for_each_line_in_order(run, folder, sources):
    together = run("translate", "--model", folder, stdin=as_bytes(["", *sources[:4], " \t", ""]))

    alone = [run("translate", "--model", folder, source).out for source in sources[:4]]
    assert together.out == "".join(["\n", *alone, " \t\n\n"])
    assert len({*alone, "\n"}) == 5
    assert together.status == 0


def test_translate_takes_text_on_both_sides_of_options_and_switches(run, folder):
    piped = run("translate", "--model", folder, stdin=b"drei\nvier hundert\n")

    assert run("translate", "drei", "--model", folder, "vier hundert") == piped
    given = ["drei", "--model", folder, "--trust_remote_code", "vier hundert"]
    assert run("translate", *given) == piped
    piped = run("translate", "--model", folder, stdin=b"drei\n--model\n")
    assert run("translate", "drei", "--model", folder, "--", "--model") == piped


def test_console_script_runs_the_command():
    done = subprocess.run([COMMAND, "translate"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("vanilla-transformer: --model needs the folder")
    closed = subprocess.run(f"'{COMMAND}' --help >&-", shell=True, capture_output=True, check=False)
    assert (closed.returncode, closed.stderr[:46]) == (
        2,
        b"vanilla-transformer: the standard output is cl",
    )


# Evaluating


def test_evaluate_prints_and_records_scores_with_their_signatures(run, copied_model, corpus):
    options = ["--num_beams", 4, "--length_penalty", 0.6, "--name", "numbers"]
    words = frequent_words(list(read_lines(corpus / "test.en")))
    (copied_model / "run.json").write_text(json.dumps({SOURCE_WORDS: words}))
    outcome = run("evaluate", "--model", copied_model, "--test", *pair(corpus, "test"), *options)

    assert "Are the languages swapped? Frequent words of the training sources are" in outcome.err

    scores = json.loads((copied_model / "results.json").read_text())["numbers"]
    assert scores["lines"] == 25
    assert scores["search"] == "beam 4, length penalty 0.6"
    card = (copied_model / "README.md").read_text(encoding="utf-8")
    assert "### numbers" in card
    for name, title in (("bleu", "BLEU"), ("chrf", "chrF"), ("exact_match", "exact match")):
        value = f"{scores[name]:.2f} ± {scores[f'{name}_ci']:.2f}"
        signature = scores[f"{name}_signature"]
        assert "bs:1000|seed:12345" in signature
        assert f"{title} {value} ({signature})\n" in outcome.out
        assert f"| {value} |" in card
        assert f"- {title} `{signature}`" in card


def test_evaluate_counts_how_often_a_test_set_was_scored(run, copied_model, corpus):
    evaluate = ["evaluate", "--model", copied_model, "--test", *pair(corpus, "test")]
    evaluate += ["--num_beams", 1, "--max_extra_tokens", 0, "--metrics", "chrf", "--bootstrap", 0]
    seen = []

    for name in ("one", "one", "two"):
        run(*evaluate, "--name", name)
        seen.append(json.loads((copied_model / "results.json").read_text())[name]["scorings"])

    card = (copied_model / "README.md").read_text(encoding="utf-8")
    assert seen == [1, 2, 1]
    assert re.findall(r"\nScored (\d+) times under this name", card) == ["2"]


def test_evaluate_scores_what_translate_gives(run, copied_model, corpus, sources, tmp_path):
    quick = ["--num_beams", 1, "--bootstrap", 0, "--metrics", "exact_match"]
    evaluate = ["evaluate", "--model", copied_model, "--output", tmp_path / "out", *quick]
    run(*evaluate, "--test", *pair(corpus, "test"))
    written = (tmp_path / "out").read_text(encoding="utf-8")
    translate = ["translate", "--model", copied_model, "--num_beams", 1]
    assert written == run(*translate, stdin=as_bytes(sources)).out

    # Against itself the translation is perfect; other results of the folder stay.
    test = ["--test", corpus / "test.de", tmp_path / "out"]
    outcome = run("evaluate", *translate[1:], *quick, *test, "--name", "itself")
    assert "exact match 100.00" in outcome.out
    assert json.loads((copied_model / "results.json").read_text()).keys() == {"test", "itself"}


def test_evaluate_compares_two_files(run, corpus, write):
    right = corpus / "test.en"
    nearly = write("nearly.en", "x", "y", *list(read_lines(right))[2:])
    argv = ["--hypotheses", right, "--against", nearly, "--test", *pair(corpus, "test")]

    outcome = run("evaluate", *argv, "--metrics", "wer", "--bootstrap", 40)

    assert (outcome.status, outcome.err) == (0, "")
    heading, row, meaning = outcome.out.split("\n\n")[1].split("\n")[:3]
    assert heading.split() == [str(right), nearly, "difference", "p"]
    assert row.split()[:4] == ["WER", "0.00", "8.00", "-8.00"]
    assert meaning.startswith("p: ")


# Help


def test_help_loads_neither_torch_nor_an_extra():
    code = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from vanilla_transformer_tools.commands import main\n"
        "for command in ('', *sys.argv[1:]):\n"
        "    with suppress(SystemExit):\n"
        "        main([*command.split(), '--help'])\n"
        "slow = 'torch ctranslate2 matplotlib onnx'.split()\n"
        "print(sys.modules.keys() & slow)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *COMMANDS], capture_output=True, text=True, check=True
    )

    assert done.stdout.count("usage: vanilla-transformer") == 1 + len(COMMANDS)
    assert done.stdout.endswith("\nset()\n")


def test_no_arguments_are_a_question_for_help(run):
    assert run() == run("--help")
    assert run("--version").out.startswith("vanilla-transformer 0.")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_a_command_to_paste(run, command):
    outcome = run(command, "--help")

    assert outcome.status == 0
    assert re.search(rf"\nexamples?:\n  vanilla-transformer {command} ", outcome.out)


def test_help_all_lists_trainers_options_with_our_defaults(run):
    text = " ".join(run("train", "--help-all", "--preset", "base").out.split())

    assert "--max_tokens_per_batch" in text
    assert re.search(r"--learning_rate .*?\(default: 0\.0007\)", text)


@pytest.mark.parametrize("argv", [["--help"], ["push", "--help"]], ids=" ".join)
def test_reader_of_the_help_may_stop_early_and_a_full_disk_is_told(run, stdout_to, argv):
    reading, writing = os.pipe()
    os.close(reading)
    stdout_to(writing)
    assert run(*argv) == Outcome(141, "", "")

    stdout_to(os.open("/dev/full", os.O_WRONLY))
    told = "vanilla-transformer: No space left on device\n"
    assert run(*argv) == Outcome(2, "", told)
