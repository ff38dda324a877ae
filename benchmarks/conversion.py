#!/usr/bin/env python
"""Speed of translation in this package's layers against `generate` of the weights' own class.

Both engines get the same batches of ids and the same search, as `Translator` gives them. The speed
is relative to the class of Transformers; same lines are outputs with equal ids. --sizes are those
of benchmarks/finetuning.py, with random weights, random sources and outputs of 32 tokens.

Example:
  python benchmarks/conversion.py --sizes opus nllb
  python benchmarks/conversion.py --model Helsinki-NLP/opus-mt-de-en --test test.de
"""

import argparse
import random
from functools import partial
from itertools import islice, product

from transformers import AutoTokenizer

from finetuning import SIZES, build
from lab import Report, benchmark_parser, best_device, seconds_of, speed_cells, take_turns
from vanilla_transformer_tools.files import read_lines
from vanilla_transformer_tools.interop.importing import convert
from vanilla_transformer_tools.saved_folder import load_model
from vanilla_transformer_tools.translation import Search
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

COLUMNS = ("search", "batch", "engine", "sentences/s", "range", "speed", "same lines")
# Tokens of a random source, the last one included, and of its output.
RANDOM_SOURCE_TOKENS, RANDOM_TARGET_TOKENS = (20, 30), 32
# Longest output of a trained model, in tokens.
LIMIT = 100


def main() -> None:
    """Prints a table for each model."""
    parser = benchmark_parser(__doc__, sizes=("opus", "nllb"), known=SIZES, rounds=3)
    parser.add_argument("--model", help="Folder or Hub name, instead of --sizes.")
    parser.add_argument("--test", help="Source lines for --model.")
    for name, default, text in (
        ("beams", [1, 4], "Hypotheses per sentence; 1 is greedy (default: 1 4)."),
        ("batch_sizes", [1, 16], "Sentences per batch (default: 1 16)."),
    ):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default, help=text)
    text = "Number of sentences (default: 64)."
    parser.add_argument("--sentences", type=int, default=64, help=text)
    options = parser.parse_args()
    if options.model and not options.test:
        parser.error("--model needs --test, a file of source lines")
    report = Report(options.output)
    try:
        for name in [options.model] if options.model else options.sizes:
            compare(report, name, options)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def compare(report: Report, name: str, options: argparse.Namespace) -> None:
    """Adds the table of a model."""
    if options.model:
        original = load_model(name).float()
        lines = islice(filter(str.strip, read_lines(options.test)), options.sentences)
        sources = AutoTokenizer.from_pretrained(name)(list(lines))["input_ids"]
        limit, shortest = LIMIT, 0
    else:
        original = build(name, "in-tree")
        draw, size = random.Random(0), original.config.vocab_size - 1
        sizes = [draw.randint(*RANDOM_SOURCE_TOKENS) for _ in range(options.sentences)]
        end = original.config.eos_token_id
        sources = [[*draw.choices(range(4, size), k=one - 1), end] for one in sizes]
        limit = shortest = RANDOM_TARGET_TOKENS
    models = {"`generate` of its class": original, "this package": convert(original)}
    engines = {label: TorchEngine(model.to(best_device())) for label, model in models.items()}
    report.table(f"{name}, float32, {len(sources)} sentences", *COLUMNS)
    for num_beams, size in product(options.beams, options.batch_sizes):
        search = Search(num_beams=num_beams, min_length=shortest)
        batches = [sources[first : first + size] for first in range(0, len(sources), size)]
        runs = {
            label: partial(run, engine, batches, limit, search) for label, engine in engines.items()
        }
        found = take_turns(runs, options.rounds, warm_ups=1)
        seconds = {label: [each for each, _ in rounds] for label, rounds in found.items()}
        (own, expected), (_, outputs) = ((key, rounds[-1][1]) for key, rounds in found.items())
        same = f"{sum(map(list.__eq__, outputs, expected)) / len(expected):.1%}"
        for label in engines:
            cells = speed_cells(len(sources), seconds[label], seconds[own], decimals=2)
            label_of_search = f"beam {num_beams}" if num_beams > 1 else "greedy"
            report.row(label_of_search, size, label, *cells, same)


def run(
    engine: TorchEngine, batches: list[list[list[int]]], limit: int, search: Search
) -> tuple[float, list[list[int]]]:
    """Seconds, and ids of the outputs."""
    outputs: list[list[int]] = []

    def translate() -> None:
        for batch in batches:
            rows = engine.translate_batch(batch, [[] for _ in batch], [limit] * len(batch), search)
            outputs.extend(best.tokens for best, *_ in rows)

    return seconds_of(translate), outputs


if __name__ == "__main__":
    main()
