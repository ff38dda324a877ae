"""A saved model on the Hugging Face Hub: what belongs to it, in one commit, and nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import LocalTokenNotFoundError
from safetensors import safe_open

from vanilla_transformer.model_folder import (
    CARD_FILE,
    RESULTS_FILE,
    RUN_FILE,
    TARGET_FILES,
    VOCABULARY_FILES,
    load_model,
    read_object,
)
from vanilla_transformer.sharing.model_card import (
    is_ours,
    mark_card,
    read_card,
    with_example_for,
    write_model_card,
)
from vanilla_transformer.sharing.privacy import Disclosure, find_disclosures
from vanilla_transformer.tokenization.tokenizer_pair import has_target_vocabulary

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
            the weights are not complete and finite, a file holds a secret or a home directory, or
            the Hub refuses the card's metadata; nothing is uploaded then.
        LocalTokenNotFoundError: If nobody is logged in.
        HfHubHTTPError: If the Hub refuses the repository or the commit.
    """
    files = _shared_files(folder)
    if not is_ours(folder):
        raise ValueError(
            f"{str(folder)!r} must hold a vanilla Transformer, which the card describes, got a "
            f"model of another kind. Upload it with `hf upload {repo_id} {folder}`."
        )
    check_token()
    # A model that nobody could load is not uploaded.
    load_model(str(folder))
    if (folder / CARD_FILE).exists():
        mark_card(folder)
    else:
        write_model_card(folder)
    _refuse_disclosures(folder, [*files, folder / CARD_FILE])
    card = read_card(folder / CARD_FILE)
    api = HfApi()
    repository = api.create_repo(repo_id, private=private, exist_ok=True)
    repo_id = repository.repo_id
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    card = with_example_for(card, repo_id)
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(file.relative_to(folder).as_posix(), file) for file in files
    ]
    operations.append(CommitOperationAdd(CARD_FILE, card.encode()))
    # An earlier model may have had files that this one has not, such as one file of weights.
    written = {operation.path_in_repo for operation in operations}
    for name in api.list_repo_files(repo_id, revision=revision):
        if name not in written and _is_shared(PurePosixPath(name)):
            operations.append(CommitOperationDelete(name))
    # Asks the Hub about the card's metadata before it uploads anything.
    api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision)
    return str(repository)


def _is_shared(name: PurePosixPath) -> bool:
    """Whether a file of a repository has the name of one that an upload may bring."""
    patterns = map(PurePosixPath, _SHARED_FILES)
    return any(
        len(pattern.parts) == len(name.parts) and name.match(str(pattern)) for pattern in patterns
    )


def check_token() -> None:
    """Refuses an upload by nobody.

    Raises:
        LocalTokenNotFoundError: If nobody is logged in.
    """
    if get_token() is None:
        raise LocalTokenNotFoundError(
            "An upload needs a token of the Hub, got none. Run `hf auth login`, or set HF_TOKEN."
        )


def _shared_files(folder: Path) -> list[Path]:
    """Files to upload besides the card.

    Raises:
        ValueError: If a file that loading needs is missing.
    """
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
    return [file for pattern in _SHARED_FILES for file in folder.glob(pattern)]


def _refuse_disclosures(folder: Path, files: list[Path]) -> None:
    """Refuses files that would reveal something about their user.

    Raises:
        ValueError: If a file holds a secret or a home directory; names all, by file and line.
    """
    found = [
        f"  {file.relative_to(folder).as_posix()}, {place}: {disclosure.what}"
        for file in files
        for place, disclosure in _disclosures(file)
    ]
    if found:
        raise ValueError(
            f"{str(folder)!r} must hold no secrets and no home directories, got\n"
            + "\n".join(found)
            + "\nNothing was uploaded. Cut these paths down to names, take the secrets out, and "
            f"revoke those that others have seen. A {RUN_FILE} of an earlier release, which still "
            "records paths, may also be deleted."
        )


def _disclosures(file: Path) -> Iterator[tuple[str, Disclosure]]:
    """What a file discloses, and where: the line, or the header of weights."""
    if is_weights := file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as weights:
            text = json.dumps([weights.metadata(), *weights.keys()])
    else:
        text = file.read_text(encoding="utf-8", errors="replace")
    # It holds pieces of the training text, and nothing else that a user wrote.
    is_vocabulary = any(map(file.match, ("tokenizer.json", *VOCABULARY_FILES)))
    for disclosure in find_disclosures(text, is_vocabulary=is_vocabulary):
        yield "header" if is_weights else f"line {disclosure.line}", disclosure
