"""What the commands write: nothing that is read is overwritten, and faults are told in time."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.commands.translate import typed_lines
from vanilla_transformer_tools.translation import translator
from vanilla_transformer_tools.translation.engines import TorchEngine

from ..support.full_disk import small_files

LINES = ["ein hund rennt", "ja", "der alte mann", "x"]
BEFORE = "".join(f"{line}\n" for line in LINES)


# Options of each command that writes one file, but for the file; "a" and "b" are read.
WRITERS = {
    "translate": ["--input", "a", "--prefix_file", "b"],
    "evaluate": ["--test", "a", "b", "--bootstrap", "0"],
    "attention": ["--alignments", "a", "b"],
}
# The same with every file that they can read.
READERS = {
    "translate": [*WRITERS["translate"], "--resume"],
    "evaluate": ["--test", "a", "b", "--against", "c"],
    "attention": ["--alignments", "a", "b", "--units", "c", "d", "--gold", "e"],
}

every_writer = pytest.mark.parametrize("command", WRITERS)


@pytest.fixture
def model(folder):
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder in which commands run, with five files of the same number of lines."""
    monkeypatch.chdir(tmp_path)
    for name in "abcde":
        Path(name).write_text(BEFORE)
    return tmp_path


@every_writer
def test_output_that_is_read_is_refused(run, model, here, command, no_model):
    read = [word for word in READERS[command] if not word.startswith("--")]
    for name in read:
        os.link(name, f"link-{name}")

        status, _, err = run(
            command, "--model", model, *READERS[command], "--output", f"link-{name}"
        )

        assert status == 2
        assert f"would overwrite '{name}', which is an input" in err
    assert [Path(name).read_text() for name in read] == [BEFORE] * len(read)


@pytest.mark.parametrize("name", ["new.safetensors", "sub/x.py", "README.md"])
@every_writer
def test_output_that_is_a_file_of_the_model_is_refused(run, model, here, command, name, no_model):
    Path("link").symlink_to(model)
    before = (model / "config.json").read_bytes()

    status, _, err = run(command, "--model", model, *WRITERS[command], "--output", f"link/{name}")

    assert status == 2
    assert f"--output link/{name} would be a file of the model '{model}'" in err
    assert (model / "config.json").read_bytes() == before


def test_file_of_a_model_is_not_overwritten_through_a_link(run, model, here, no_model):
    Path("cache").mkdir()
    copy = shutil.copytree(model, here / "model")
    # As the Hub's cache keeps files.
    shutil.move(copy / "config.json", "cache/blob")
    (copy / "config.json").symlink_to(here / "cache/blob")
    Path("out").symlink_to(copy / "tokenizer.json")

    for out in ("model/config.json", "out"):
        status, _, err = run("translate", "--model", "model", "--output", out, "ja")
        assert status == 2
        assert f"--output {out} would be a file of the model 'model'" in err


@every_writer
def test_output_that_is_open_already_is_refused(run, model, here, command, no_model):
    with open("shell", "w") as file:
        # As /dev/stdout is after `> shell`.
        out = f"/dev/fd/{file.fileno()}"
        status, _, err = run(command, "--model", model, *WRITERS[command], "--output", out)

    assert status == 2
    assert f"--output {out} stands for the file '{here / 'shell'}', which is open already" in err


def test_other_output_in_the_folder_of_a_model_is_written(run, model, here):
    out = shutil.copytree(model, here / "model") / "lines.json"

    assert run("translate", "--model", "model", "--input", "a", "--output", out)[0] == 0

    assert out.read_text().count("\n") == len(LINES)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("no/out", "--output cannot be written to 'no/out': No such file or directory"),
        ("folder", "--output must be a file, got the folder 'folder'"),
        ("x" * 250, "File name too long"),
        ("/proc/out", "--output cannot be written to '/proc/out': "),
    ],
)
@every_writer
def test_output_that_cannot_be_written_is_told_before_the_model_is_loaded(
    run, model, here, command, output, message, no_model
):
    Path("folder").mkdir()
    before = sorted(here.iterdir())

    status, out, err = run(command, "--model", model, *WRITERS[command], "--output", output)

    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(here.iterdir()) == before


def test_picture_that_cannot_be_written_is_told_before_the_model_is_loaded(
    run, model, tmp_path, no_model
):
    out = tmp_path / "no" / "out.svg"

    for options in (["ja", "x"], ["--positions", "3"]):
        status, _, err = run("attention", "--model", model, *options, "--output", out)

        assert status == 2
        assert f"--output cannot be written to '{out}'" in err


@pytest.mark.parametrize("name", ["results.json", "README.md"])
def test_scores_that_cannot_be_kept_are_told_before_the_model_is_loaded(
    run, model, here, name, no_model
):
    copy = shutil.copytree(model, here / "model")
    (copy / name).unlink(missing_ok=True)
    (copy / name).mkdir()

    status, out, err = run("evaluate", "--model", copy, *WRITERS["evaluate"])

    assert (status, out) == (2, "")
    assert f"Is a directory: '{copy / name}'" in err or f"'{copy / name}': Is a directory" in err


def test_export_that_cannot_be_written_is_told_before_the_model_is_loaded(run, tmp_path):
    (tmp_path / "file").write_text("")

    # Were it looked for, its absence would be told instead.
    for out in (tmp_path / "file" / "out", Path("/proc/out")):
        status, _, err = run("export", tmp_path, out)
        assert status == 2
        assert f"The export cannot be written to '{out}'" in err


@pytest.mark.parametrize("inner", ["", "model"])
def test_export_does_not_replace_a_folder_that_holds_its_model(run, model, tmp_path, inner):
    out = tmp_path / "out"
    copy = shutil.copytree(model, out / inner)
    (out / "model.bin").write_text("by this an export is known")

    status, _, err = run("export", "--force", copy, out)

    assert status == 2
    assert f"MODEL '{copy}' must not be at OUT or inside it, got '{out}'" in err
    assert (copy / "config.json").exists()


class Terminal(io.StringIO):
    """Somebody types and reads."""

    def isatty(self):
        return True


@pytest.mark.parametrize(("output", "prompt"), [(Terminal, "> "), (io.StringIO, "")])
def test_prompt_is_shown_on_a_terminal_only(monkeypatch, output, prompt):
    prompts, typed = [], iter(["ja", "nein"])

    def read_line(shown):
        prompts.append(shown)
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr(sys, "stdout", output())
    monkeypatch.setattr("builtins.input", read_line)

    assert list(typed_lines()) == ["ja", "nein"]
    assert prompts == [prompt] * 3


# A disk that is full


def test_full_disk_leaves_whole_lines_and_a_job_to_continue(run, model, tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text(BEFORE * 30)
    argv = ["translate", "--model", model, "--input", source, "--prefix", 9 * "eine lange zeile "]
    argv += ["--max_extra_tokens", 0]
    whole = run(*argv)[1].encode()

    with small_files(5050):
        status, _, err = run(*argv, "--output", out)

    assert status == 2
    assert err.count("vanilla-transformer:") == 1
    assert f"'{out}' can no longer be written: File too large. Its lines are complete" in err
    content = out.read_bytes()
    assert content
    assert content.endswith(b"\n")
    assert whole.startswith(content)
    assert run(*argv, "--output", out, "--resume")[0] == 0
    assert out.read_bytes() == whole


@every_writer
def test_full_standard_output_is_told_in_one_line(run, stdout_to, model, here, command):
    argv = [command, "--model", model, *WRITERS[command]]
    if command == "evaluate":
        argv = [command, "--hypotheses", "a", "--test", "a", "b"]
    stdout_to(os.open("/dev/full", os.O_WRONLY))

    status, _, err = run(*argv)

    others = ("cut off", "torch translates")
    lines = [line for line in err.split("\n") if not any(map(line.__contains__, others))]
    assert status == 2
    assert lines[0].startswith("vanilla-transformer: ")
    assert "No space left on device" in lines[0]
    assert lines[1:] == [""]


def test_full_standard_output_is_not_told_again_at_exit():
    code = (
        "from vanilla_transformer_tools.commands.command import run\n"
        "run(lambda argv: print('line'), [])\n"
    )

    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, check=False
        )

    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1


# Lines that are done before something goes wrong


def test_good_lines_of_standard_input_are_written_before_the_error(run, model, monkeypatch):
    monkeypatch.setattr(translator, "WINDOW_LINES", 3)
    argv = ["translate", "--model", model, "--max_extra_tokens", 3]
    expected = run(*argv, stdin=BEFORE.encode())[1]

    for good in (BEFORE, BEFORE * 2):
        status, out, err = run(*argv, stdin=good.encode() + b"a\xff\nja\n")

        assert (status, out) == (2, expected * (len(good) // len(BEFORE)))
        assert f"got byte 0xFF at byte 2 of line {good.count(chr(10)) + 1}." in err
        assert err.count("vanilla-transformer:") == 1


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [("ein\nja\n", "got only 2"), ("ein\n" * 5, "as many prefixes as lines")],
)
def test_lines_that_have_a_prefix_are_written_before_the_error(
    run, model, tmp_path, prefixes, message
):
    (tmp_path / "prefixes").write_text(prefixes)
    argv = ["translate", "--model", model, "--prefix_file", tmp_path / "prefixes"]
    argv += ["--max_extra_tokens", 3]

    status, out, err = run(*argv, stdin=BEFORE.encode())

    (tmp_path / "prefixes").write_text("".join(prefixes.splitlines(keepends=True)[: len(LINES)]))
    done = BEFORE.splitlines(keepends=True)[: prefixes.count("\n")]
    assert (status, out) == (2, run(*argv, stdin="".join(done).encode())[1])
    assert message in err


def test_lines_that_are_finished_are_written_before_the_error_of_an_engine(run, model, monkeypatch):
    monkeypatch.setattr(translator, "WINDOW_LINES", 4)
    argv = ["translate", "--model", model, "--max_extra_tokens", 3, "--max_tokens_per_batch", 1]
    # Sorted by length, so that these are done in the order of their numbers but for the last.
    lines = ["ja", "nein", "x", "ja", "ein hund rennt im wald", "ein hund rennt", "", "ja", "wo"]
    expected = run(*argv, *lines)[1].split("\n")
    original = TorchEngine.translate_batch

    def translate_batch(self, sources, prefixes, limits, search):
        if len(sources[0]) <= 3:
            raise RuntimeError("CUDA error: out of memory")
        return original(self, sources, prefixes, limits, search)

    monkeypatch.setattr(TorchEngine, "translate_batch", translate_batch)
    status, out, err = run(*argv, *lines[4:])

    assert (status, out.split("\n")) == (2, [*expected[4:7], ""])
    assert "there is not enough memory" in err
    assert "CUDA error: out of memory" in err


def test_interrupt_is_not_taken_for_an_error(run, model, monkeypatch):
    def translate_batch(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchEngine, "translate_batch", translate_batch)

    assert run("translate", "--model", model, "", "ja")[:2] == (130, "")


# What is read


@pytest.mark.parametrize("option", ["--input", "--prefix_file"])
def test_what_cannot_be_read_twice_is_refused(run, model, tmp_path, option, no_model):
    path = tmp_path / "odd"
    os.mkfifo(path)

    status, out, err = run("translate", "--model", model, option, path)

    assert (status, out) == (2, "")
    assert f"{option} must be a regular file, since it is read twice, got '{path}'" in err


@pytest.mark.parametrize(("prefixes", "has_file"), [("", True), ("ein\nja\nx\n", False)])
def test_prefixes_are_counted_before_the_model_is_loaded(
    run, model, tmp_path, prefixes, has_file, no_model
):
    (tmp_path / "prefixes").write_text(prefixes)
    (tmp_path / "in").write_text("ja\nnein\n")
    argv = ["--prefix_file", tmp_path / "prefixes"]
    argv += ["--input", tmp_path / "in"] if has_file else ["ja", "nein"]

    status, _, err = run("translate", "--model", model, *argv)

    assert status == 2
    assert f"got {prefixes.count(chr(10))} in '{tmp_path / 'prefixes'}' and 2" in err


@pytest.fixture
def type_lines(monkeypatch):
    """Sets what is typed."""

    def type_lines(*lines):
        typed = iter(lines)

        def read_line(_):
            for line in typed:
                return line
            raise EOFError

        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr("builtins.input", read_line)

    return type_lines


def test_typed_lines_are_named_by_their_number(model, type_lines, caplog):
    type_lines("ja", "quer durch den wald", "x", "zyxwvutsrq")

    main(["translate", "--model", str(model), "--max_source_length", "8"])

    cut = [message.split(" is ")[0] for message in caplog.messages if "Line" in message]
    assert cut == ["Line 2", "Line 4"]


@pytest.mark.parametrize(
    ("lines", "got"), [(["ja"], "more than 1"), (["ja", "x", "nein"], "only 2")]
)
def test_typed_lines_need_as_many_prefixes(model, type_lines, tmp_path, capsys, lines, got):
    (tmp_path / "prefixes").write_text("a\nb\n")
    type_lines(*lines)

    with pytest.raises(SystemExit):
        main(["translate", "--model", str(model), "--prefix_file", str(tmp_path / "prefixes")])

    printed = capsys.readouterr()
    assert f"must be as many prefixes as lines, got {got}." in printed.err
    assert len(printed.out.splitlines()) == min(2, len(lines))
