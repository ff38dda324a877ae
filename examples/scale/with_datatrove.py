"""Translates a column of a Parquet corpus with datatrove; each task takes some of the files.

python examples/scale/with_datatrove.py --model runs/de-en --input corpus --output translated \
    --logs logs --tasks 8 --workers 2
"""

import argparse
from itertools import tee

from datatrove.data import DocumentsPipeline
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.writers import ParquetWriter

from vanilla_transformer_tools.translation import Translator


class Translate(PipelineStep):
    """Adds the metadata `translation` to documents, each of which is one line of text."""

    name, type = "Translate", "TRANSLATE"

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Reads ahead as many documents as a `Translator` sorts by length."""
        documents, ahead = tee(data)
        translator = Translator.from_pretrained(self.model)
        found = translator.translate(document.text for document in ahead)
        for document, translation in zip(documents, found, strict=True):
            document.metadata["translation"] = translation.text
            yield document


def main() -> None:
    """A task that was lost is repeated by the same command; finished ones are not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Folder or Hub name of a model.")
    parser.add_argument("--input", required=True, help="Folder of Parquet files.")
    parser.add_argument("--output", required=True, help="Folder of the results.")
    parser.add_argument("--logs", required=True, help="Folder that says which tasks are done.")
    parser.add_argument("--column", default="text", help="Column with the text.")
    parser.add_argument("--tasks", type=int, default=1, help="Parts; at most one for each file.")
    parser.add_argument("--workers", type=int, default=1, help="Tasks that run at a time.")
    given = parser.parse_args()
    reader = ParquetReader(given.input, text_key=given.column)
    writer = ParquetWriter(given.output, expand_metadata=True)
    pipeline = [reader, Translate(given.model), writer]
    LocalPipelineExecutor(
        pipeline, tasks=given.tasks, workers=given.workers, logging_dir=given.logs
    ).run()


if __name__ == "__main__":
    main()
