from types import SimpleNamespace

import pytest

from vanilla_transformer_tools.evaluation import test_sets as module
from vanilla_transformer_tools.evaluation.test_sets import find_test_set


@pytest.fixture
def listed(monkeypatch):
    """Puts a test set of two references into sacreBLEU's list, or one that fails."""

    def add(error=None):
        def source(languages):
            if error:
                raise error
            return f"src.{languages}"

        known = SimpleNamespace(
            langpairs={"de-en": [], "en-zh": []},
            get_source_file=source,
            get_reference_files=lambda languages: [f"ref.{languages}", f"ref-B.{languages}"],
        )
        monkeypatch.setattr(module, "DATASETS", {"news21": known, "news20": known})

    return add


def test_named_test_set_has_all_references_and_its_language(listed):
    listed()

    found = find_test_set("sacrebleu:news21:en-zh")

    assert found == ("news21 en-zh", "zh", ["src.en-zh", "ref.en-zh", "ref-B.en-zh"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sacrebleu:news22:de-en", "such as news21, news20, got 'news22'"),
        ("sacrebleu:news21:en-fr", r"sacrebleu:news21:de-en, got 'en-fr'. Choose from: de-en, en-"),
        ("sacrebleu:news21", r"languages of news21 after a colon.* got ''"),
    ],
)
def test_unknown_test_set_is_refused_with_those_that_exist(name, message, listed):
    listed()

    with pytest.raises(ValueError, match=message):
        find_test_set(name)


@pytest.mark.parametrize("error", [OSError("no network"), SystemExit(1)])
def test_test_set_that_cannot_be_downloaded_is_named(error, listed):
    listed(error)

    with pytest.raises(OSError, match=r"test set news21 de-en cannot be downloaded: .*SACREBLEU"):
        find_test_set("sacrebleu:news21:de-en")
