"""A saved model's folder: the names of its files, and where to find them, on disk or on the Hub."""

from pathlib import Path

from transformers.utils import cached_file

# Written by training beside weights, tokenizer and code.
RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
CARD_FILE = "README.md"
RESULTS_FILE = "results.json"

# The target's own tokenizer has a folder inside the model's; the source's is beside the weights.
TARGET_FOLDER = "target_tokenizer"
TARGET_FILES = tuple(
    f"{TARGET_FOLDER}/{name}" for name in ("tokenizer.json", "tokenizer_config.json")
)


def find_file(model_name_or_path: str, name: str, revision: str | None = None) -> Path | None:
    """A file of a model, fetched from the Hub if need be; None where there is none."""
    file = cached_file(
        model_name_or_path,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)
