"""From pairs to a saved model and the record of its run; `train` is for Python."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple


class Trained(NamedTuple):
    """What a training leaves.

    Attributes:
        folder: Folder of the model, for `from_pretrained`.
        scores: Scores of the saved weights on the validation pairs, with their signatures; empty
            without such pairs.
    """

    folder: Path
    scores: dict[str, Any]


def train(*, quiet: bool = False, **options: Any) -> Trained:
    """Trains tokenizer and model on parallel text, as the command `train` does.

    Args:
        quiet: Prints nothing but warnings.
        options: Those of the command, by name: data, sizes and vocabulary, and every field of
            `Seq2SeqTrainingArguments`. `config` is a mapping.

    Raises:
        TypeError: If an option is unknown.
        ValueError: If settings, data and folder do not fit together; before any training.
        OSError: If a file cannot be read or written.
        ArithmeticError: If the loss or the weights are no longer finite; the folder then holds the
            last finite checkpoint, if there is one.
    """
    from transformers import Seq2SeqTrainingArguments

    from vanilla_transformer_tools.settings import VALIDATION, TrainSettings
    from vanilla_transformer_tools.sharing.model_card import read_results
    from vanilla_transformer_tools.training.options import consistent_defaults, recipe
    from vanilla_transformer_tools.training.run import train as train_model

    ours, theirs = (
        {field.name for field in fields(kind)} for kind in (TrainSettings, Seq2SeqTrainingArguments)
    )
    if unknown := sorted(options.keys() - ours - theirs):
        raise TypeError(
            f"`train` has no option {unknown[0]!r}; its options are those of "
            "`vanilla-transformer train --help-all`, without their dashes."
        )
    given = {name: options[name] for name in ours & options.keys()}
    if isinstance(config := given.get("config"), dict):
        given["config"] = [
            f"{name}={value if isinstance(value, str) else json.dumps(value)}"
            for name, value in config.items()
        ]
    settings = TrainSettings(**given)
    of_trainer = {name: options[name] for name in theirs & options.keys()}
    defaults = recipe(settings) | {"disable_tqdm": quiet}
    arguments = Seq2SeqTrainingArguments(**consistent_defaults(defaults, of_trainer) | of_trainer)
    with _silence() if quiet else nullcontext():
        folder = train_model(settings, arguments, given=options.keys())
    return Trained(folder, read_results(folder).get(VALIDATION, {}))


@contextmanager
def _silence() -> Iterator[None]:
    """Hides standard output, and the progress bars of Transformers."""
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stdout(nothing):
            yield
    finally:
        if had_bars:
            logging.enable_progress_bar()
