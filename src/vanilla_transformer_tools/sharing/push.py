"""A saved model on the Hugging Face Hub: what belongs to it, in one commit, and nothing else."""

import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import LocalTokenNotFoundError
from safetensors import safe_open

from vanilla_transformer_tools.saved_folder import (
    CARD_FILE,
    RESULTS_FILE,
    RUN_FILE,
    TARGET_FILES,
    VOCABULARY_FILES,
    load_model,
    read_object,
)
from vanilla_transformer_tools.sharing.model_card import (
    is_ours,
    read_card,
    read_results,
    with_example_for,
    write_model_card,
)
from vanilla_transformer_tools.sharing.privacy import find_disclosures
from vanilla_transformer_tools.text.tokenizer_pair import has_target_vocabulary

# Without these nobody can load the model.
_NEEDED_FILES = ("config.json", "model*.safetensors")

# Named one by one: checkpoints, optimizer states and pickled files are never uploaded.
_SHARED_FILES = (
    *_NEEDED_FILES,
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    *VOCABULARY_FILES,
    *TARGET_FILES,
    "*_vanilla_transformer.py",
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
    """Uploads a saved model with its tokenizer, code, card and record, in one commit.

    The card is uploaded as it is in the folder, with your edits; only the example in its section on
    use is changed, to load the repository instead of the folder.

    Args:
        folder: Of a training run, or of a model and a tokenizer saved by `save_pretrained`.
        repo_id: Repository, `user/name`; made where there is none.
        private: Whether a new repository is private; None: the default of the owner's account.
        revision: Branch to commit to, made where there is none; None: the main one.
        commit_message: First line of the commit.

    Returns:
        The address of the repository.

    Raises:
        ValueError: If the folder lacks something that loading needs or has a model of another kind,
            a file is not regular or a link leads out of the folder, the weights are not complete
            and finite or change meanwhile, a file holds a secret or a home directory, or the Hub
            rejects the card's metadata; nothing is uploaded then.
        LocalTokenNotFoundError: If nobody is logged in.
        HfHubHTTPError: If the Hub rejects the repository or the commit.
    """
    card_file = folder / CARD_FILE
    files = _shared_files(folder)
    _refuse_links(folder, [*files, card_file] if os.path.lexists(card_file) else files)
    _check_needed(folder)
    if not is_ours(folder):
        raise ValueError(
            f"{str(folder)!r} must hold a vanilla Transformer, which the card describes, got a "
            f"model of another kind. Upload it with `hf upload {repo_id} {folder}`."
        )
    check_token()
    weights = {file: _stamp(file) for file in files if file.suffix == ".safetensors"}
    # What is checked is uploaded, even if somebody changes the file meanwhile.
    contents = {file: file.read_bytes() for file in files if file not in weights}
    # Also those that the card does not have yet.
    read_results(folder)
    # A model that nobody could load is not uploaded.
    load_model(str(folder))
    if not card_file.exists():
        write_model_card(folder)
    card = read_card(card_file)
    texts = {file: content.decode("utf-8", errors="replace") for file, content in contents.items()}
    headers = {}
    for file in weights:
        with safe_open(file, framework="pt") as opened:
            headers[file] = json.dumps([opened.metadata(), *opened.keys()])
    checked = {**headers, **texts, card_file: card}
    named = {file.relative_to(folder).as_posix(): text for file, text in checked.items()}
    refuse_disclosures(folder, named)
    api = HfApi()
    repository = api.create_repo(repo_id, private=private, exist_ok=True)
    repo_id = repository.repo_id
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    card = with_example_for(card, repo_id)
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(file.relative_to(folder).as_posix(), contents.get(file, file.resolve()))
        for file in files
    ]
    # The Hub refuses bytes that no longer have the checksums which the operations have.
    if changed := [file for file, stamp in weights.items() if _stamp(file) != stamp]:
        raise ValueError(
            f"{str(changed[0])!r} was changed while it was checked. Push it when nothing writes to "
            "it any more."
        )
    operations.append(CommitOperationAdd(CARD_FILE, card.encode()))
    # An earlier model may have had files that this one has not, such as one file of weights.
    written = {operation.path_in_repo for operation in operations}
    there = filter(_is_shared, api.list_repo_files(repo_id, revision=revision))
    operations += [CommitOperationDelete(name) for name in there if name not in written]
    # Asks the Hub about the card's metadata before it uploads anything.
    api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision)
    return str(repository)


def _is_shared(name: str) -> bool:
    """Whether a file of a repository has the name of one that an upload may bring."""
    patterns = [one for one in _SHARED_FILES if one.count("/") == name.count("/")]
    return any(map(PurePosixPath(name).match, patterns))


def check_token() -> None:
    """Rejects an upload without a token.

    Raises:
        LocalTokenNotFoundError: If nobody is logged in.
    """
    if get_token() is None:
        raise LocalTokenNotFoundError(
            "An upload needs a token of the Hub, got none. Run `hf auth login`, or set HF_TOKEN."
        )


def _shared_files(folder: Path) -> list[Path]:
    """Files to upload besides the card; hidden ones are left out."""
    return [
        file
        for pattern in _SHARED_FILES
        for file in folder.glob(pattern)
        if not file.name.startswith(".")
    ]


def _refuse_links(folder: Path, files: list[Path]) -> None:
    """Rejects links to files elsewhere, and everything that is no regular file; names all."""
    root = folder.resolve()
    # The files of a snapshot in the Hub's cache are links to the blobs of its repository.
    is_snapshot = root.parent.name == "snapshots" and root.parents[1].name.startswith("models--")
    blobs = root.parents[1] / "blobs" if is_snapshot else None
    faults = []
    for file in files:
        real, name = file.resolve(), file.relative_to(folder).as_posix()
        is_inside = real.parent == blobs
        if real.is_relative_to(root):
            is_inside = not any(part.startswith(".") for part in real.relative_to(root).parts)
        if not is_inside:
            faults.append(f"  {name}: a link to {str(real)!r}")
        elif not real.is_file():
            faults.append(f"  {name}: not a regular file")
    if faults:
        raise ValueError(
            f"{str(folder)!r} must hold all of its model in regular files of its own, got\n"
            + "\n".join(faults)
            + "\nNothing was uploaded. Put copies of the model's files there, and take out others."
        )


def _check_needed(folder: Path) -> None:
    """Rejects a folder without the files that loading needs; names all that it lacks."""
    needed = list(_NEEDED_FILES)
    if not any(file for pattern in VOCABULARY_FILES for file in folder.glob(pattern)):
        needed.append("tokenizer.json")
    config = folder / "config.json"
    # MarianTokenizer and FSMTTokenizer may have both vocabularies.
    has_both = any((folder / name).exists() for name in ("target_vocab.json", "vocab-tgt.json"))
    if not has_both and config.exists() and has_target_vocabulary(read_object(config)):
        needed.append(TARGET_FILES[0])
    missing = [pattern for pattern in needed if not any(folder.glob(pattern))]
    if missing:
        raise ValueError(
            f"{str(folder)!r} must hold a saved model and its tokenizer, got no "
            f"{' and no '.join(missing)}. Give the --output_dir of a finished training run."
        )


def _stamp(file: Path) -> tuple[int, int, int]:
    """Numbers that change when a file is written to or replaced."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def refuse_disclosures(source: Path | str, texts: Mapping[str, str]) -> None:
    """Rejects texts that would reveal something about their user.

    Args:
        source: Where they come from, as the error names it.
        texts: The text of each file by its name; of weights the header.

    Raises:
        ValueError: If a text holds a secret or a home directory; names all, by file and line.
    """
    found = []
    for name, text in texts.items():
        # It holds pieces of the training text, and nothing else that a user wrote.
        is_vocabulary = any(map(PurePosixPath(name).match, ("tokenizer.json", *VOCABULARY_FILES)))
        for disclosure in find_disclosures(text, is_vocabulary=is_vocabulary):
            is_header = name.endswith(".safetensors")
            place = "header" if is_header else f"line {disclosure.line}"
            found.append(f"  {name}, {place}: {disclosure.what}")
    if found:
        raise ValueError(
            f"{str(source)!r} must hold no secrets and no home directories, got\n"
            + "\n".join(found)
            + "\nNothing was uploaded. Cut these paths down to names, take the secrets out, and "
            "revoke those that others have seen."
        )
