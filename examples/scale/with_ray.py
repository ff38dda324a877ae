"""Translates a column of a Parquet corpus with Ray Data; each of its actors has a model.

python examples/scale/with_ray.py --model runs/de-en --input corpus --output translated --workers 2
"""

import argparse

import ray
from ray.data import ActorPoolStrategy

from vanilla_transformer_tools.translation import Translator


class TranslateColumn:
    """Adds the column `translation` to a batch of rows; each row is one line of text."""

    def __init__(self, model: str, column: str) -> None:
        self.translator, self.column = Translator.from_pretrained(model), column

    def __call__(self, batch: dict) -> dict:
        """Columns as arrays."""
        lines = batch[self.column].tolist()
        return batch | {"translation": [found.text for found in self.translator.translate(lines)]}


def main() -> None:
    """Ray starts a lost actor again and repeats its batch; rows come in any order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Folder or Hub name of a model.")
    parser.add_argument("--input", required=True, help="Folder of Parquet files.")
    parser.add_argument("--output", required=True, help="Folder of the results; a new one.")
    parser.add_argument("--column", default="text", help="Column with the text.")
    parser.add_argument("--workers", type=int, default=1, help="Actors; on CPUs one for each core.")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of an actor, such as 1 or 0.5.")
    parser.add_argument("--batch_size", type=int, default=2048, help="Rows of a batch.")
    given = parser.parse_args()
    translated = ray.data.read_parquet(given.input).map_batches(
        TranslateColumn,
        fn_constructor_args=(given.model, given.column),
        batch_size=given.batch_size,
        compute=ActorPoolStrategy(size=given.workers),
        # As many actors as cores would leave none for reading and writing, and all would wait.
        num_cpus=0.5,
        num_gpus=given.gpus,
    )
    translated.write_parquet(given.output, mode="error")


if __name__ == "__main__":
    main()
