"""The `push` command: uploads a saved model to the Hub."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vanilla_transformer_tools.commands.command import build_parser, parse
from vanilla_transformer_tools.settings import option

_EXAMPLE = """Uploads only weights, tokenizer, code, card, run.json and results.json, and nothing at
all if one of them contains a token, a key, a password or a home directory.

example:
  vanilla-transformer push --model runs/de-en user/de-en
"""


# Options of one group in `--help`.
_repository = partial(option, group="repository")


@dataclass(frozen=True)
class PushSettings:
    """Settings of an upload to the Hub."""

    model: str = option("Folder of a model, the --output_dir of its training.")
    private: bool = _repository("Makes the repository private if it is new.", False)
    revision: str | None = _repository("Branch to commit to, created if missing. Default: main.")
    commit_message: str = _repository("First line of the commit.", "Upload model")


def push(argv: list[str]) -> None:
    """Share a model on the Hugging Face Hub."""
    parser = build_parser(push, PushSettings, _EXAMPLE)
    parser.add_argument("repo_id", metavar="USER/NAME", help="Repository; created if missing.")
    values = parse(parser, argv)
    repo_id = values.pop("repo_id")
    settings = PushSettings(**values)
    if not settings.model:
        parser.error("--model needs the folder of a model")
    os.listdir(settings.model)
    from vanilla_transformer_tools.sharing.push import push as push_model

    address = push_model(
        Path(settings.model),
        repo_id,
        private=settings.private or None,
        revision=settings.revision,
        commit_message=settings.commit_message,
    )
    print(f"The model is at {address}")
