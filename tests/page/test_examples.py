"""Where examples of a model come from."""

import json

import pytest

from vanilla_transformer_tools.files import checksum
from vanilla_transformer_tools.page.page import MOST_EXAMPLES, find_examples, read_examples


@pytest.fixture
def folder(tmp_path):
    """A model trained on validation data, which are beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (tmp_path / "v.de").write_text("ein hund\n\n" + "x" * 201 + "\nja\n" * 9, encoding="utf-8")
    run = {
        "settings": {"validation": ["v.de", "v.en"]},
        "sha256": {"v.de": checksum(tmp_path / "v.de")},
    }
    (folder / "run.json").write_text(json.dumps(run))
    return folder


def write_card(folder, metadata):
    (folder / "README.md").write_text(f"---\n{metadata}---\n\n# A model\n", encoding="utf-8")


def test_examples_are_the_first_lines_of_the_validation_data(folder):
    assert find_examples(str(folder)) == ["ein hund", *["ja"] * (MOST_EXAMPLES - 1)]


def test_other_file_of_that_name_is_no_example(folder):
    (folder.parent / "v.de").write_text("something else\n")

    assert find_examples(str(folder)) == []


def test_examples_of_the_card_come_first(folder):
    texts = "- text: guten tag\n- text: 3\n- text: [a]\n- example\n- text: '<b>'\n"
    write_card(folder, f"widget:\n{texts}")

    assert find_examples(str(folder)) == ["guten tag", "3", "<b>"]


@pytest.mark.parametrize("metadata", ["license: mit\n", "widget: yes\n", "a: [\n", ""])
def test_card_without_examples_is_passed_over(folder, metadata):
    write_card(folder, metadata)

    assert find_examples(str(folder))[0] == "ein hund"


def test_model_without_a_record_has_no_examples(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    assert find_examples(str(tmp_path)) == []


def test_file_of_examples_is_read(write):
    path = write("lines.txt", "", *map(str, range(9)))

    assert read_examples(path) == list(map(str, range(MOST_EXAMPLES)))
