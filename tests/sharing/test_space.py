"""The files of a Space: what they are, that they are uploaded, and that they run alone."""

import os
import re
import subprocess
from importlib import metadata

import httpx
import pytest
import yaml

from vanilla_transformer_tools.page.page import Page
from vanilla_transformer_tools.sharing import space as spaces
from vanilla_transformer_tools.sharing.space import save_space, space_files

from ..support.documents import ROOT
from ..support.environments import build_environment
from ..text.test_tokenizer_pair import LATIN, learn
from .test_hub import command, hub, make_model  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def files():
    return space_files("me/de-en")


def front_matter(card):
    return yaml.safe_load(re.match("---\n(.*?)---\n", card.decode(), re.DOTALL)[1])


@pytest.fixture
def package(tmp_path_factory, monkeypatch):
    """A package of one file, in place of ours."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "code.py").write_text("# nothing\n")
    monkeypatch.setattr(spaces, "files", lambda name: folder)
    return folder


def test_link_in_the_package_is_not_uploaded(package):
    (package / ".mine.md").symlink_to("/etc/passwd")
    assert {name for name in space_files("me/x") if name.endswith("code.py")} == {
        "vanilla_transformer/code.py",
        "vanilla_transformer_tools/code.py",
    }
    assert not any(name.endswith(".mine.md") for name in space_files("me/x"))

    (package / "notes.md").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"must be no links, got '.*notes\.md'"):
        space_files("me/x")
    (package / "notes.md").unlink()
    (package / "code.py").write_text("\ntoken = 'hf_" + "aB3" * 11 + "'\n")
    with pytest.raises(ValueError, match=r"/code\.py, line 2: a token of the Hub\n"):
        space_files("me/x")


def test_card_and_requirements_are_what_a_space_needs(files):
    found = front_matter(files["README.md"])
    lines = files["requirements.txt"].decode().splitlines()
    pins = dict(line.split("==") for line in lines)

    assert (found["sdk"], found["sdk_version"]) == ("gradio", metadata.version("gradio"))
    assert found["app_file"] in files
    assert (found["models"], found["title"]) == (["me/de-en"], "Translate with de-en")
    assert len(found["short_description"]) <= 60
    assert {"torch", "transformers", "gradio", "accelerate"} <= pins.keys()
    assert not {"pytest", "ctranslate2"} & pins.keys()
    assert all(metadata.version(name).partition("+")[0] == pins[name] for name in pins)
    assert lines == sorted(lines)


def test_package_travels_with_the_page(files):
    expected = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", "")
    }

    assert files.keys() - {"app.py", "README.md", "requirements.txt"} == expected
    assert {
        "vanilla_transformer_tools/page/page.css",
        "vanilla_transformer_tools/settings.py",
    } <= expected


@pytest.mark.parametrize("name", ["runs/de/en", "de-en", '"me/x'])
def test_model_that_is_not_on_the_hub_has_no_space(name):
    with pytest.raises(ValueError, match=rf"user/name, got '{re.escape(name)}'"):
        space_files(name)


def test_space_needs_gradio(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(spaces.metadata, "version", missing)

    with pytest.raises(ValueError, match=r"got none of \w+. Install it: .*\[demo\]"):
        space_files("me/x")


def test_folder_is_new(package, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")

    for folder in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(ValueError, match="needs an empty folder"):
            save_space(folder, "me/x")
    with pytest.raises(OSError, match=r"cannot be written to '.*txt/x': .* another folder"):
        save_space(tmp_path / "mine.txt" / "x", "me/x")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_command_saves_and_uploads_nothing(hub, tmp_path, package):  # noqa: F811
    hub.requests.clear()

    said = command("me/de-en", "--save_space", tmp_path / "space")

    assert said.startswith(f"The page of me/de-en is in {tmp_path / 'space'}")
    saved = {
        str(path.relative_to(tmp_path / "space")): path.read_bytes()
        for path in (tmp_path / "space").rglob("*")
        if path.is_file()
    }
    assert saved == space_files("me/de-en")
    assert hub.requests == []


def test_command_uploads_a_space_with_or_without_a_model(hub, tmp_path, package):  # noqa: F811
    make_model().save_pretrained(tmp_path)
    learn(LATIN).save_pretrained(tmp_path)
    hub.requests.clear()

    said = command("me/de-en", "--space", "me/page", "--private")
    both = command("--model", tmp_path, "me/both", "--space", "me/both-page")

    page = "The page is at {}/spaces/me/{}\n"
    assert said == page.format(hub.url, "page")
    assert both == f"The model is at {hub.url}/me/both\n" + page.format(hub.url, "both-page")
    repository, files = hub.repositories["me/page"], space_files("me/de-en")
    assert {name: repository.files()[name] for name in files} == files
    assert repository.messages[-1] == "Page of me/de-en"
    assert repository.private
    assert "/api/spaces/me/page/commit/main" in hub.requests
    assert "me/de-en" not in hub.repositories
    assert b'"me/both"' in hub.repositories["me/both-page"].files()["app.py"]


@pytest.fixture
def page(tmp_path):
    """A folder as `export --format web` leaves it, as far as an upload looks at it."""
    (tmp_path / "page" / "model" / "onnx").mkdir(parents=True)
    for name in ("index.html", "page.json", "model/onnx/encoder_model.onnx"):
        (tmp_path / "page" / name).write_text("{}")
    return tmp_path / "page"


def test_command_uploads_a_page_of_the_browser_as_a_static_space(hub, page):  # noqa: F811
    (page / ".cache").mkdir()
    (page / ".cache" / "notes").write_text("x")
    said = command("me/de-en", "--space", "me/static", "--web", page)

    assert said == f"The page is at {hub.url}/spaces/me/static\n"
    uploaded = hub.repositories["me/static"].files()
    assert {"index.html", "page.json", "model/onnx/encoder_model.onnx"} <= uploaded.keys()
    assert front_matter(uploaded["README.md"])["sdk"] == "static"
    assert not {"app.py", ".cache/notes"} & uploaded.keys()


def test_page_with_a_secret_a_link_or_nothing_is_not_uploaded(hub, page, tmp_path):  # noqa: F811
    (tmp_path / "empty").mkdir()
    said = command("me/x", "--space", "me/refused", "--web", tmp_path / "empty")
    assert "--web must be a folder made by `export --format web`, got" in said

    for name in ("page.json", "notes.txt", "model/config.json"):
        (page / name).write_text('{"token": "hf_' + "aB3" * 11 + '"}')
        said = command("me/x", "--space", "me/refused", "--web", page)
        assert f"{name}, line 1: a token" in said
        (page / name).unlink()
    (page / "page.json").symlink_to("/etc/hostname")
    said = command("me/x", "--space", "me/refused", "--web", page)
    assert re.search("must be no links, got '.*page.json'", said)
    assert "me/refused" not in hub.repositories


@pytest.mark.slow
def test_folder_runs_with_nothing_but_its_requirements(hub, tmp_path):  # noqa: F811
    model, folder = tmp_path / "model", tmp_path / "space"
    make_model().save_pretrained(model)
    learn(LATIN).save_pretrained(model)
    command("--model", model, "me/runs")
    command("me/runs", "--save_space", folder)
    needed = (folder / "requirements.txt").read_text().splitlines()
    python = build_environment(tmp_path / "environment", needed)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **{"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"},
        "NO_PROXY": "127.0.0.1",
    }
    with subprocess.Popen(
        [python, "app.py"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        address = process.stdout.readline().removeprefix("The page is at ").strip()
        try:
            asked = httpx.post(f"{address}gradio_api/call/translate", json={"data": ["ja", "", {}]})
            answer = httpx.get(
                f"{address}gradio_api/call/translate/{asked.json()['event_id']}", timeout=60
            ).text
        finally:
            process.terminate()

    expected = Page.load([str(model)]).translate("ja", "", {})["text"]
    assert answer.startswith("event: complete")
    assert f'"text": "{expected}"' in answer or repr(expected)[1:-1] in answer
