"""A saved model on the Hugging Face Hub: what belongs to it, in one commit, and nothing else."""

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, get_token, hf_hub_url
from huggingface_hub.errors import LocalTokenNotFoundError
from safetensors import safe_open

from vanilla_transformer_tools.files import read_lines
from vanilla_transformer_tools.saved_folder import (
    CARD_FILE,
    RESULTS_FILE,
    RUN_FILE,
    TARGET_FILES,
    VOCABULARY_FILES,
    load_model,
)
from vanilla_transformer_tools.sharing.model_card import is_ours, name_repository, write_model_card
from vanilla_transformer_tools.sharing.privacy import find_disclosures
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

# Named one by one: checkpoints, optimizer states and pickled files are never uploaded.
_SHARED_FILES = (
    "config.json",
    "model*.safetensors",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    *VOCABULARY_FILES,
    *TARGET_FILES,
    "*_vanilla_transformer.py",
    CARD_FILE,
    RUN_FILE,
    RESULTS_FILE,
)


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
) -> str:
    """Uploads a model with its tokenizer, code, card and record in one commit; returns its address.

    The card is uploaded with your edits; only the example in its section on use is changed, in the
    folder too, to load the repository instead of the folder.

    Args:
        folder: Folder of a training run, or of a model and a tokenizer saved by `save_pretrained`.
        repo_id: Repository, `user/name`; made where there is none.
        private: Whether a new repository is private; None: the default of the owner's account.
        revision: Branch to commit to, made where there is none; None: the main one.
        commit_message: First line of the commit.

    Raises:
        ValueError: If the folder lacks something that loading needs or has a model of another kind,
            the weights are not complete and finite, a file holds a secret or a home directory, the
            card is not UTF-8, or the Hub rejects its metadata; nothing is uploaded then.
        LocalTokenNotFoundError: If nobody is logged in.
        HfHubHTTPError: If the Hub rejects the repository or the commit.
    """
    _check_shareable(folder, repo_id)
    if not (folder / CARD_FILE).exists():
        write_model_card(folder)
    # Its example is changed once the repository exists, which needs its text.
    list(read_lines(folder / CARD_FILE, may_be_empty=True))
    names = _shared_files(folder)
    refuse_disclosures(folder, {name: _text_of(folder / name) for name in names})
    api = HfApi()
    repository = api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repository.repo_id, branch=revision, exist_ok=True)
    name_repository(folder, repository.repo_id)
    # Asks the Hub about the card's metadata before it uploads anything.
    api.upload_folder(
        repo_id=repository.repo_id,
        folder_path=folder,
        allow_patterns=names,
        # An earlier model may have had files that this one has not, such as one file of weights.
        delete_patterns=[pattern for pattern in _SHARED_FILES if not pattern.startswith("*")],
        commit_message=commit_message,
        revision=revision,
    )
    return str(repository)


def _check_shareable(folder: Path, repo_id: str) -> None:
    """Rejects a folder that nobody could load, or an upload by nobody or to no possible name."""
    # Raises if no repository can have this name.
    hf_hub_url(repo_id, CARD_FILE)
    if not is_ours(folder):
        got = "a model of another kind" if (folder / "config.json").exists() else "no config.json"
        raise ValueError(
            f"{str(folder)!r} must hold a vanilla Transformer, which the card describes, got "
            f"{got}. Upload other models with `hf upload {repo_id} {folder}`."
        )
    if get_token() is None:
        raise LocalTokenNotFoundError(
            "An upload needs a token of the Hub, got none. Run `hf auth login`, or set HF_TOKEN."
        )
    load_model(str(folder))
    TokenizerPair.from_pretrained(str(folder))


def _shared_files(folder: Path) -> list[str]:
    """Names of the files to upload; hidden ones are left out."""
    return [
        file.relative_to(folder).as_posix()
        for pattern in _SHARED_FILES
        for file in folder.glob(pattern)
        if file.is_file() and not file.name.startswith(".")
    ]


def _text_of(file: Path) -> str:
    """The text of a file; of weights the names and notes in their header."""
    if file.suffix != ".safetensors":
        return file.read_text(encoding="utf-8", errors="replace")
    with safe_open(file, framework="pt") as opened:
        return json.dumps([opened.metadata(), *opened.keys()])


def refuse_disclosures(source: Path | str, texts: Mapping[str, str]) -> None:
    """Rejects texts, by the names of their files, that would reveal something about their user.

    Raises:
        ValueError: If a text holds a secret or a home directory; names all, by file and line.
    """
    found = []
    for name, text in texts.items():
        # It holds pieces of the training text, and nothing else that a user wrote.
        is_vocabulary = any(map(PurePosixPath(name).match, ("tokenizer.json", *VOCABULARY_FILES)))
        found += [
            f"  {name}, line {line}: {what}"
            for line, what in find_disclosures(text, is_vocabulary=is_vocabulary)
        ]
    if found:
        raise ValueError(
            f"{str(source)!r} must hold no secrets and no home directories, got\n"
            + "\n".join(found)
            + "\nNothing was uploaded. Cut these paths down to names, take the secrets out, and "
            "revoke those that others have seen."
        )
