"""The commands in the pages: each one is parsed by its own parser, and each script exists."""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest
from transformers import Seq2SeqTrainingArguments
from transformers.hf_argparser import HfArgumentParser

from ..support.documents import PAGES, ROOT, code_blocks, read
from ..support.scripts import help_of_script

sys.path.insert(0, str(ROOT / "docs"))

import generate

PARSERS = generate.parsers()
TRAINER = HfArgumentParser(Seq2SeqTrainingArguments, allow_abbrev=False)
OPTIONS = [
    option for parser in (*PARSERS.values(), TRAINER) for option in parser._option_string_actions
]
# Pages with options of other programs.
OF_OTHERS = {"docs/install.md", "docs/scale.md", "examples/README.md"}
OF_OTHERS.add("docs/reference/command_line.md")
# Where the commands are that are not part of the package.
FOLDERS = ("scripts", "lab", "benchmarks", "checks", "examples")
# A command ends at what the shell takes for itself.
_ENDS = {"|", ">", "<", ">>", "&&", "||", ";", "&", ")", "2>"}
_MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))


def shell_commands(page: str) -> list[list[str]]:
    """Words of the commands of a page: of its blocks for a shell, and of code within a line."""
    blocks = code_blocks(page, "bash") + code_blocks(page, "sh")
    # A program that is fed to Python is none of the shell.
    blocks = [re.sub(r"<<'END'.*?^END$", "", block, flags=re.S | re.M) for block in blocks]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    fenceless = re.sub(r"^```.*?^```", "", read(page), flags=re.S | re.M)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+ --[^`]+)`", fenceless)]
    commands = []
    for line in lines:
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:
            continue
        command: list[str] = []
        for word in [*words, ";"]:
            if word in _ENDS:
                commands.append(command)
                command = []
            else:
                command.append(word)
    return [command for command in commands if command]


def of_package(words: list[str]) -> tuple[str, list[str]] | None:
    """Name and arguments of a command of the package, also without the program before it."""
    names = [Path(word).name for word in words]
    if "vanilla-transformer" in names:
        words = words[names.index("vanilla-transformer") + 1 :]
    if words and words[0] in PARSERS:
        return words[0], words[1:]
    return None


def faults(name: str, arguments: list[str]) -> list[str]:
    """What the parser of a command, and for training that of Trainer, does not accept."""
    said = io.StringIO()
    # What a loop of the shell or an ellipsis stands for can be anything.
    arguments = [word for word in arguments if not re.search(r"[$…{%]|^\.\.\.$", word)]
    arguments = [word for word in arguments if word not in ("--help", "--help-all", "--")]
    try:
        with contextlib.redirect_stderr(said):
            _, unknown = PARSERS[name].parse_known_args(arguments)
            if name == "train":
                _, unknown = TRAINER.parse_known_args(unknown)
    except (SystemExit, ValueError) as error:
        told = f"{error} {said.getvalue()}"
        # Within a line an option may stand without its value.
        return [] if re.search("expected .*argument|are required", told) else [told]
    return [word for word in unknown if word.startswith("--")]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_accepted_by_their_own_parsers(page):
    found = [command for words in shell_commands(page) if (command := of_package(words))]

    assert [(name, fault) for name, words in found for fault in faults(name, words)] == []


def test_commands_are_found_in_the_pages():
    names = {
        command[0]
        for page in PAGES
        for words in shell_commands(page)
        if (command := of_package(words))
    }

    expected = "train translate evaluate import export push"
    assert names >= set(expected.split())
    assert faults("translate", ["--preset", "tiny"]) == ["--preset"]
    assert faults("train", ["--preset", "huge"])
    assert faults("train", ["--num_train_epochs", "3", "--preset", "tiny"]) == []


@pytest.mark.parametrize("page", PAGES)
def test_scripts_of_a_page_exist_and_know_the_options(page):
    for words in shell_commands(page):
        scripts = [place for place, word in enumerate(words) if word.endswith(".py")]
        starts = [place for place, word in enumerate(words) if Path(word).name.startswith("python")]
        if not scripts or not starts or words[scripts[0]].startswith(("my_", "$")):
            continue
        script = ROOT / words[scripts[0]]
        if not (ROOT / words[scripts[0]]).exists() and "/" not in words[scripts[0]]:
            continue

        assert script.is_file(), words
        options = {word.partition("=")[0] for word in words[scripts[0] :] if word.startswith("--")}
        if script.parent.name in FOLDERS:
            assert not {word for word in options if word not in help_of_script(script)}, words


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_OTHERS])
def test_options_in_a_page_exist(page):
    # The last two are options of Python's http.server and of `hf`.
    foreign = {"--help", "--directory", "--space"}
    used = set(re.findall(r"--[a-z][a-z_]+", read(page))) - foreign
    others = [option for option in used if not any(option in known for known in OPTIONS)]
    scripts = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
    named = [path for path in scripts if re.search(rf"\b{path.name}", read(page))]

    # Some scripts take no options, and would run.
    known = "".join(map(help_of_script, named)) if others else ""
    assert [option for option in others if option not in known] == []


def names_a_command(text: str) -> bool:
    """Whether a command in a text exists: of the package, a script, or a target of make."""
    for words in re.findall(r"(?:[\w.-]+/)?(?:[\w.-]+\.py)|vanilla-transformer \w+|make \w+", text):
        first, _, second = words.partition(" ")
        if first == "make" and second in _MAKE_TARGETS:
            return True
        if first == "vanilla-transformer" and second in PARSERS:
            return True
        if first.endswith(".py") and (ROOT / first).is_file():
            return True
    return False


def tables(page: str) -> list[tuple[str, str]]:
    """Headings of the parts of a page that hold tables, and the text of each part."""
    parts = re.split(r"^#{2,3} (.*)$", read(page), flags=re.MULTILINE)
    found = zip(parts[1::2], parts[2::2], strict=True)
    return [(heading, text) for heading, text in found if "\n| --- |" in text]


@pytest.mark.parametrize("page", ["docs/results.md", "docs/speed.md"])
def test_tables_name_a_command_that_exists(page):
    found = tables(page)

    assert len(found) > 5
    assert [heading for heading, text in found if not names_a_command(text)] == []
    # A command that a reader could take for one must be one.
    for path in re.findall(r"\b(?:benchmarks|scripts)/\w+\.py", read(page)):
        assert (ROOT / path).is_file(), path
