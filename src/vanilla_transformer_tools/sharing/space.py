"""A page for a shared model on the Hugging Face Hub: the files of a Space."""

import re
from contextlib import suppress
from importlib import metadata
from importlib.resources import files
from pathlib import Path

import yaml
from huggingface_hub import CommitOperationAdd, HfApi

from vanilla_transformer_tools.files import names_below, new_folder
from vanilla_transformer_tools.saved_folder import CARD_FILE
from vanilla_transformer_tools.sharing.push import check_token, refuse_disclosures

APP_FILE, REQUIREMENTS_FILE = "app.py", "requirements.txt"
# They travel with the page, so that a Space needs no release of them in a package index.
_PACKAGES = ("vanilla_transformer", "vanilla_transformer_tools")
_SUFFIXES = (".py", ".html", ".css", ".js", ".md", ".yaml", ".typed")
# The Hub shows no more.
_LONGEST_TITLE = 60
_HIDDEN = re.compile(r"(^|/)\.")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)

_APP = '''"""A page to try {model}: `pip install -r requirements.txt`, then `python app.py`."""

from vanilla_transformer_tools.page.app import launch
from vanilla_transformer_tools.page.page import Page

app, address = launch(Page.load(["{model}"]))
print("The page is at", address, flush=True)
app.block_thread()
'''

_CARD = """A page to try [{model}](https://huggingface.co/{model}): translations with scores, the
probability of each token, word links and attention. `app.py` opens it with `vanilla_transformer`,
which is in this repository too: `pip install -r requirements.txt`, then `python app.py`.
"""


def space_files(model: str) -> dict[str, bytes]:
    """The files of a Space for a model on the Hub, by path; they run in an empty environment.

    Args:
        model: Repository of the model, `user/name`.

    Raises:
        ValueError: If that is not the name of a repository, Gradio is not installed, or a file of
            the installed package is a link or holds a secret or a home directory.
    """
    if not _REPOSITORY.fullmatch(model):
        raise ValueError(f"The model of a Space must be one of the Hub, user/name, got {model!r}.")
    front_matter = _front_matter(
        model,
        sdk="gradio",
        sdk_version=_version("gradio"),
        python_version="3.11",
        app_file=APP_FILE,
        short_description="Translations, probabilities, word links, attention",
    )
    # Requirements of the package without extras, and Gradio, in the installed releases.
    requirements = metadata.requires("vanilla-transformer") or []
    needed = [re.split(r"[^\w.-]", line)[0] for line in requirements if "extra ==" not in line]
    texts = {
        APP_FILE: _APP.format(model=model),
        REQUIREMENTS_FILE: "".join(
            f"{name}=={_version(name)}\n" for name in sorted([*needed, "gradio"])
        ),
        CARD_FILE: f"{front_matter}\n# {_title(model)}\n\n{_CARD.format(model=model)}",
    }
    contents = {name: text.encode() for name, text in texts.items()}
    for package in _PACKAGES:
        code = _contents(Path(str(files(package))), _SUFFIXES)
        contents |= {f"{package}/{name}": content for name, content in code.items()}
    refuse_disclosures("vanilla_transformer", {n: text.decode() for n, text in contents.items()})
    return contents


def save_space(folder: Path, model: str) -> list[Path]:
    """Writes the files of `space_files` to a new folder; returns their paths.

    Raises:
        ValueError: If there is something in the folder, or `space_files` refuses the model.
        OSError: If they cannot be written; there is no folder then.
    """

    def check_empty(folder: Path) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"--save_space needs an empty folder, got {str(folder)!r}. Name a new one."
            )

    with new_folder(folder, "Space", check_empty) as new:
        contents = space_files(model)
        for name, content in contents.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(content)
    return [folder / name for name in contents]


def push_space(
    space: str, model: str, *, web: Path | None = None, private: bool | None = None
) -> str:
    """Uploads a page of a model in one commit.

    Args:
        space: Repository of the Space, `user/name`; made where there is none.
        model: Repository of the model.
        web: Folder of a page that `export --format web` made; None: the page of `space_files`.
        private: Whether a new Space is private; None: the default of the owner's account.

    Returns:
        The address of the Space.

    Raises:
        ValueError: As `space_files`, or if the folder holds no page, a link, a secret or a home.
        LocalTokenNotFoundError: If nobody is logged in.
        HfHubHTTPError: If the Hub rejects the repository or the commit.
    """
    contents = _web_files(web, model) if web else space_files(model)
    check_token()
    api = HfApi()
    repository = api.create_repo(
        space,
        repo_type="space",
        space_sdk="static" if web else "gradio",
        private=private,
        exist_ok=True,
    )
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    api.create_commit(
        repository.repo_id, operations, commit_message=f"Page of {model}", repo_type="space"
    )
    return str(repository)


def _web_files(folder: Path, model: str) -> dict[str, bytes]:
    """The files of a page that `export --format web` made, with a card."""
    if not (folder / "index.html").is_file() or not (folder / "model").is_dir():
        raise ValueError(
            f"--web must be a folder made by `export --format web`, got {str(folder)!r}."
        )
    contents = _contents(folder)
    card = _front_matter(model, sdk="static", short_description="Runs in your browser")
    contents[CARD_FILE] = card.encode()
    texts = {}
    for name, content in contents.items():
        # Those of runtime/ are of released packages.
        if not name.startswith("runtime/"):
            with suppress(UnicodeDecodeError):
                texts[name] = content.decode("utf-8")
    refuse_disclosures(str(folder), texts)
    return contents


def _version(name: str) -> str:
    try:
        # Package indexes have no builds such as 2.13.0+cpu.
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError as error:
        raise ValueError(
            f"A Space has the installed release of each package, got none of {name}. Install it: "
            "pip install -e '.[demo]'"
        ) from error


def _title(model: str) -> str:
    return f"Translate with {model.partition('/')[2]}"[:_LONGEST_TITLE]


def _front_matter(model: str, **fields: str) -> str:
    """Metadata of a Space for the Hub."""
    described = {
        "title": _title(model),
        "emoji": "🔁",
        "colorFrom": "blue",
        "colorTo": "indigo",
        **fields,
        "license": "apache-2.0",
        "models": [model],
        "tags": ["translation", "vanilla_transformer"],
    }
    return f"---\n{yaml.safe_dump(described, sort_keys=False, allow_unicode=True)}---\n"


def _contents(folder: Path, suffixes: tuple[str, ...] = ("",)) -> dict[str, bytes]:
    """The files of a folder by path, without hidden ones; a link may lead to a private file."""
    contents: dict[str, bytes] = {}
    for name in names_below(folder):
        path = folder / name
        if _HIDDEN.search(name) or not name.endswith(suffixes):
            continue
        if path.is_symlink():
            raise ValueError(
                f"The files of a Space must be no links, got {str(path)!r}. Replace it by a copy."
            )
        # What is checked is uploaded, even if somebody changes the file meanwhile.
        contents[name] = path.read_bytes()
    return contents
