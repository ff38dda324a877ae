"""Mistakes in options and files: one message, before a model is loaded, and nothing is changed."""

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG

import pytest

from ..support.training_runs import SIZES

LINES = "ein hund rennt\nja\nder alte mann\nx\n"

# Options of each command that writes one file, but for the file.
WRITERS = {
    "translate": "--model M --input a --prefix_file b",
    "evaluate": "--model M --test a b --bootstrap 0",
    "attention": "--model M --alignments a b",
}
# The same with every file that they can read.
READERS = {
    "translate": "--model M --input a --prefix_file b --resume",
    "evaluate": "--model M --test a b --against c",
    "attention": "--model M --alignments a b --units c d",
}
TRAIN = f"train --use_cpu --output_dir OUT --vocab_size 300 --config {' '.join(SIZES)}"


def of_outputs() -> Iterator[tuple[str, str]]:
    """An output that is read, belongs to the model, is open already or cannot be written."""
    for command, options in READERS.items():
        for name in re.findall(r"\b[a-e]\b", options):
            yield (
                f"{command} {options} --output link-{name}",
                f"would overwrite '{name}', which is an input",
            )
    for command, options in WRITERS.items():
        for output, message in (
            ("link/new.safetensors", "--output link/new.safetensors would be a file of the model"),
            ("M/sub/x.py", "--output M/sub/x.py would be a file of the model 'M'"),
            ("no/out", "--output cannot be written to 'no/out': No such file or directory"),
            ("folder", "--output must be a file, got the folder 'folder'"),
            ("x" * 250, "File name too long"),
            # For the temporary file's name.
            ("x" * 240, "File name too long"),
            ("/proc/out", "--output cannot be written to '/proc/out': "),
        ):
            yield f"{command} {options} --output {output}", message


MISTAKES = [
    ("trian", "unknown command 'trian'; did you mean train?"),
    ("train --trian a b", "unknown option --trian; did you mean --train"),
    ("train a b", "unexpected argument 'a'; an option, such as --train, names it"),
    ("push M me/x", "unexpected argument 'me/x'; an option, such as --model, names it"),
    ("translate --device cuda", "unknown option --device; a GPU is used if there is one"),
    # Outputs
    *of_outputs(),
    # As the Hub's cache keeps files.
    ("translate --model H --output H/config.json ja", "would be a file of the model 'H'"),
    ("translate --model M --output linked ja", "--output linked would be a file of the model 'M'"),
    ("translate --model M --output a ja", "already holds 34 bytes. Pass --resume"),
    ("attention --model M ja x --output no/x.html", "--output cannot be written to 'no/x.html'"),
    ("attention --model M a --output no/x.html", "cannot be written to 'no/x.html'"),
    ("evaluate --model R --test a b --bootstrap 0", "'R/results.json'"),
    ("evaluate --model C --test a b --bootstrap 0", "'C/README.md'"),
    ("export M a/out", "The export cannot be written to 'a/out'"),
    ("export M /proc/out", "The export cannot be written to '/proc/out'"),
    # Translating
    ("translate drei", "--model needs the folder"),
    ("translate --model M --beams=3", "option --beams; did you mean --num_beams"),
    ("translate --model /no/such", "--model: there is no file or folder '/no'$"),
    ("translate --model aa x", "--model: there is no file or folder .aa.; did you mean .a.?"),
    ("translate --model M --resume", "--resume needs the --output to continue"),
    ("translate --model M --resume --output a", "--resume needs --input, which can be compared"),
    ("translate --model M --input a --output b --resume", "must have its record 'b.job.json' next"),
    ("translate --model M --input a text", "exclude each other, got the text 'text' too"),
    ("translate --model M --prefix a --prefix_file b", "--prefix and --prefix_file exclude each"),
    ("translate --model M --n_best 0", "--n_best must be at least 1, got 0"),
    ("translate --model M --input shrt", "there is no file or folder 'shrt'; did you mean 'short'"),
    ("translate --model M --input bad --output OUT", "got byte 0xE9 at byte 5 of line 2"),
    ("translate --model M --input pipe", "--input must be a regular file, .* got 'pipe'"),
    ("translate --model M --prefix_file pipe", "--prefix_file must be a regular file, .* 'pipe'"),
    ("translate --model M --prefix_file empty --input a", "got 0 in 'empty' and 4"),
    ("translate --model M --prefix_file short ja nein", "got 1 in 'short' and 2"),
    ("translate --model M --input a --output mine", "'mine.job.json' must be the record of a tr"),
    ("translate --model M --input a --output deep --resume", "'deep.job.json' must be the record"),
    # Evaluating
    ("evaluate --test a --hypotheses sort", "--hypotheses: there is no .*; did you mean 'short'?"),
    ("evaluate --test a --hypotheses pipe", "--hypotheses must be a regular file, got 'pipe'"),
    ("evaluate --test a --hypotheses b --model M", "leave out --model"),
    (
        "evaluate --test a b --model M --against /no/x",
        "--against: there is no file or folder '/no'",
    ),
    ("evaluate --test a b --model M --against c --bootstrap 0", "resamples of --bootstrap, got 0"),
    ("evaluate --test a b --model M --bootstrap 39", "at least 40 resamples, .*got 39"),
    ("evaluate --test a b --model M --bleu_tokenize moses", "got 'moses'. Choose from: auto, none"),
    ("evaluate --test no.tsv --model M", "--test: there is no file or folder 'no.tsv'"),
    ("evaluate --test a short --model M --output OUT", "lines, got 4 in .* and 1 in"),
    ("evaluate --test a bad --model M --output OUT", "bad' must be UTF-8, got byte 0xE9 at byte 5"),
    ("evaluate --test a b --hypotheses short", "short' must hold .* 4 test pairs, got 1 lines"),
    ("evaluate --test a b --hypotheses c --against short", "short' must hold .* got 1 lines"),
    # Training
    (f"{TRAIN} --train a b --epochs 3", "option --epochs; did you mean --num_train_epochs"),
    (f"{TRAIN} d_modle=64 --train a b", "no field 'd_modle'. Did you mean d_model"),
    (f"{TRAIN} --train a b --bleu_tokenize xx", r"got 'xx'\. Choose from: auto, none, .*13a"),
    (f"{TRAIN} --train a b --max_tokens_per_batch 3", "must hold the longest pair, got 3"),
    (f"{TRAIN} --train a b --init_from /no/such", "--init_from: there is no file or folder '/no'"),
    ("train --train a b --output_dir /proc/x", "--output_dir cannot be written to '/proc/x'"),
    ("train --train a b --metric_for_best_model blue", "must be .* one of --metrics, got blue"),
    ("train --train a b --vocab_size 0", "--vocab_size must be at least 1 and finite, got 0"),
    (f"{TRAIN} --train a short", "same number of lines, got 4 in .* and 1 in"),
    (f"{TRAIN} --train a bad", "bad' must be UTF-8, got byte 0xE9 at byte 5 of line 2"),
    # Attention
    ("attention --model M", "expected a source text and at most its translation, got \\[\\]"),
    ("attention --model M ''", "at most its translation, got \\[''\\]"),
    ("attention --model M a --output x.pdf", "must end in .html, got 'x.pdf'"),
    ("attention --model M a --units a b", "--units needs --alignments"),
    ("attention --model M --alignments a --units a b", "needs the target file of --alignments"),
    ("attention --model M --alignments a b --kind encoder", "--kind is for the attention of a"),
    ("attention --model M --alignments a absent", "--alignments: there is no file .* 'absent'"),
    ("attention --model M --alignments a a --units a short", "4 in 'a', 4 in 'a', 1 in 'short'"),
    # Importing and exporting
    ("import M OUT --tokenizer words", "--tokenizer needs --mapping, .* got 'words'. Leave it out"),
    ("import M OUT --mapping none.yaml", "--mapping: there is no file or folder 'none.yaml'"),
    ("import M OUT --min_count 2", "--min_count needs --keep_vocabulary, got only 2"),
    ("import M OUT --keep_vocabulary words", "--keep_vocabulary: there is no .* 'words'"),
    ("export M OUT --format onnx --quantization int16", "float32 with --format onnx, got int16"),
    ("export M OUT --format marian --quantization int8", "with --format marian, got int8"),
    ("export M OUT --format marian --sample a", "--format ctranslate2, onnx, got marian"),
    ("export M OUT --sample absent", "--sample: there is no file or folder 'absent'"),
    # Sharing
    ("push me/x", "--model needs the folder of a model"),
    ("push --model=W me/x", "--model: there is no file or folder 'W'"),
    ("push --model M a/b/c", "Repo id must be in the form 'repo_name' or 'namespace/repo_name'"),
    ("push --model a me/x", "--model: 'a' cannot be used: Not a directory"),
]


@pytest.fixture(scope="module")
def place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict]]:
    """A folder with models and files; and the number of an open file."""
    here = tmp_path_factory.mktemp("place")
    for name in "abcde":
        (here / name).write_text(LINES)
        os.link(here / name, here / f"link-{name}")
    texts = {"short": b"one\n", "bad": b"one\ntwo \xe9\n", "empty": b"", "links": b"0-0\n0-0\n"}
    texts |= {"mine.job.json": b'{"mine": 1}', "deep.job.json": b"[" * 100_000}
    for name, text in texts.items():
        (here / name).write_bytes(text)
    os.mkfifo(here / "pipe")
    for model in "MRC":
        shutil.copytree(folder, here / model)
    (here / "R/results.json").mkdir()
    (here / "C/README.md").unlink(missing_ok=True)
    for inner in ("C/README.md", "H", "cache", "folder"):
        (here / inner).mkdir()
    (here / "cache/blob").write_text("{}")
    (here / "H/config.json").symlink_to(here / "cache/blob")
    (here / "linked").symlink_to(here / "M/tokenizer.json")
    (here / "link").symlink_to(here / "M")
    with open(here / "open", "w") as file:
        yield here, {"fd": file.fileno()}


def changes(folder: Path) -> dict[str, int | None]:
    """When each file was last changed; of folders and others only that they are there."""
    stamps = {path: path.stat() for path in folder.rglob("*")}
    return {
        str(path): status.st_mtime_ns if S_ISREG(status.st_mode) else None
        for path, status in stamps.items()
    }


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistake_is_refused_in_time_and_changes_nothing(
    run, place, no_model, monkeypatch, line, message
):
    here, numbers = place
    monkeypatch.chdir(here)
    before = changes(here)

    status, out, err = run(*shlex.split(line.format(**numbers)))

    assert (status, out) == (2, "")
    assert re.search(f"(?m)^vanilla-transformer: (?s:.*){message}", err), err
    assert not re.search(r"Traceback|usage:|exporting|\[Errno", err)
    assert changes(here) == before
