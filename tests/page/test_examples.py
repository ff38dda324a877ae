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


WIDGET = "widget:\n- text: guten tag\n- text: 3\n- text: [a]\n- example\n- text: '<b>'\n"
OF_VALIDATION = ["ein hund", *["ja"] * (MOST_EXAMPLES - 1)]


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        (WIDGET, ["guten tag", "3", "<b>"]),
        ("license: mit\n", OF_VALIDATION),
        ("widget: yes\n", OF_VALIDATION),
        ("a: [\n", OF_VALIDATION),
    ],
)
def test_examples_are_those_of_the_card_else_of_the_validation_data(folder, metadata, found):
    (folder / "README.md").write_text(f"---\n{metadata}---\n\n# A model\n", encoding="utf-8")

    assert find_examples(str(folder)) == found


def test_other_file_of_that_name_is_no_example(folder):
    (folder.parent / "v.de").write_text("something else\n")
    assert find_examples(str(folder)) == []

    (folder / "run.json").unlink()
    assert find_examples(str(folder)) == []


def test_file_of_examples_is_read(write):
    path = write("lines.txt", "", *map(str, range(9)))

    assert read_examples(path) == list(map(str, range(MOST_EXAMPLES)))
