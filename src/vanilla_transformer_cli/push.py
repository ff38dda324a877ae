"""The `push` command: uploads a saved model to the Hub."""

from pathlib import Path

from vanilla_transformer_cli.command import build_parser, refuse
from vanilla_transformer_cli.settings import PushSettings

_EXAMPLE = """Uploads only weights, tokenizer, code, card, run.json and results.json, and nothing at
all if one of them contains a token, a key or a home directory.

example:
  vanilla-transformer push --model runs/de-en user/de-en
"""


def push(argv: list[str]) -> None:
    """Share a model on the Hugging Face Hub."""
    parser = build_parser(push, PushSettings, _EXAMPLE)
    parser.add_argument("repo_id", metavar="USER/NAME", help="Repository; created if missing.")
    namespace, unknown = parser.parse_known_args(argv)
    refuse(unknown, parser)
    values = vars(namespace)
    repo_id = values.pop("repo_id")
    settings = PushSettings(**values)
    if not settings.model:
        parser.error("--model needs the folder of a model")

    from transformers.utils.logging import disable_progress_bar

    from vanilla_transformer.sharing.push import push as push_model

    disable_progress_bar()
    address = push_model(
        Path(settings.model),
        repo_id,
        private=settings.private or None,
        revision=settings.revision,
        commit_message=settings.commit_message,
    )
    print(f"The model is at {address}")
