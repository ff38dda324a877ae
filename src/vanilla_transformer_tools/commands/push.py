"""The `push` command: uploads a saved model to the Hub."""

from pathlib import Path

from vanilla_transformer_tools.commands.command import build_parser, parse
from vanilla_transformer_tools.settings import PushSettings

_EXAMPLE = """Uploads only weights, tokenizer, code, card, run.json and results.json, and nothing at
all if one of them contains a token, a key, a password or a home directory, or is a link
out of the folder.

example:
  vanilla-transformer push --model runs/de-en user/de-en
  vanilla-transformer push --model runs/de-en user/de-en --space user/de-en-page
  vanilla-transformer push user/de-en --space user/de-en-web --web page
"""


def push(argv: list[str]) -> None:
    """Share a model on the Hugging Face Hub."""
    parser = build_parser(push, PushSettings, _EXAMPLE)
    parser.add_argument("repo_id", metavar="USER/NAME", help="Repository; created if missing.")
    values = parse(parser, argv)
    repo_id = values.pop("repo_id")
    settings = PushSettings(**values)
    if settings.space and settings.save_space:
        parser.error("--space and --save_space exclude each other: leave one out")
    if settings.web and not settings.space:
        parser.error("--web needs --space, the repository to upload it to")
    private = settings.private or None
    if settings.save_space:
        from vanilla_transformer_tools.sharing.space import save_space

        save_space(Path(settings.save_space), repo_id)
        print(f"The page of {repo_id} is in {settings.save_space}; `python app.py` there opens it")
        return
    if not (settings.model or settings.space):
        parser.error("--model needs the folder of a model")
    if settings.model:
        from vanilla_transformer_tools.sharing.push import push as push_model

        address = push_model(
            Path(settings.model),
            repo_id,
            private=private,
            revision=settings.revision,
            commit_message=settings.commit_message,
        )
        print(f"The model is at {address}")
    if settings.space:
        from vanilla_transformer_tools.sharing.space import push_space

        web = Path(settings.web) if settings.web else None
        print(f"The page is at {push_space(settings.space, repo_id, web=web, private=private)}")
