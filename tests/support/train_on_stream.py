"""A run on a stream; `launch` starts it, tests also import it.

Its arguments are a corpus and the folder of the run; the corpus is from
`gradients_of_one_update.write_corpus`.
"""

import sys
from pathlib import Path

import torch

# `launch` starts this file by itself, outside the package of the tests.
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.gradients_of_one_update import PLAIN_DESCENT, build_arguments

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.recipe import recipe
from vanilla_transformer_tools.training.run import train


def train_on_stream(corpus: Path, folder: Path) -> None:
    """Twelve updates, which are several passes over 15 pairs."""
    settings = TrainSettings(
        train=[str(corpus / name) for name in ("source", "target")],
        streaming=True,
        shuffle_buffer=10,
        config=["encoder_layers=1", "decoder_layers=1", "dropout=0"],
        tokenizer_kind="word",
        max_length=6,
        max_tokens_per_batch=64,
    )
    changes = {
        "max_steps": 12,
        "warmup_steps": 0,
        "save_strategy": "no",
        "include_num_input_tokens_seen": "non_padding",
    }
    train(settings, build_arguments(folder, **recipe(settings) | PLAIN_DESCENT | changes))


def main() -> None:
    """Trains in all processes together."""
    train_on_stream(*map(Path, sys.argv[1:]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
