#!/usr/bin/env python
"""Speed of translation on a CPU: ours against M2M100 and CTranslate2.

M2M100 gets our weights and our position table, so it computes the same function, which is checked.
All contenders translate the same batches, tokenised beforehand and in the file's order. The speed
is relative to M2M100, or without it to this package's `generate`; same lines are outputs equal to
ours. Tokens are targets, `</s>` counted. CTranslate2 searches as our Translator does with it.
--sizes has random weights and sources, and outputs of 32 tokens. Beam search has length penalty
0.6. With the contender marian, which needs `pip install pymarian`, the model of --sizes is one that
Marian can hold, with the norms after the sublayers.

Example:
  python benchmarks/generation.py --model runs/de-en --test test.de.gz --threads 1
  python benchmarks/generation.py --sizes base --sentences 16 --batch_sizes 1 16
  python benchmarks/generation.py --sizes tiny base --contenders vanilla marian --dtypes float32
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING

from lab import PRESETS, Report, benchmark_parser, speed_cells, take_turns

if TYPE_CHECKING:
    from generation_contenders import Contender, Task

LABELS = {
    "vanilla": "vanilla",
    "inherited": "vanilla, Transformers' search",
    "m2m100": "M2M100, our weights",
    "ctranslate2-float32": "CTranslate2 float32",
    "ctranslate2-int8": "CTranslate2 int8",
    "auto": "--engine auto",
    "marian": "Marian",
}
# Contenders for which the model must be one of theirs.
ON_REQUEST = {"marian"}
COLUMNS = ("search", "batch", "contender", "sentences/s", "range", "speed", "tokens/s")
COLUMNS += ("same lines",)
# Below it, outputs differ by more than ties of floating-point numbers can explain.
LEAST_SAME = 0.95


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = benchmark_parser(__doc__, sizes=("base",), known=PRESETS, rounds=3)
    parser.add_argument("--model", help="Folder of a trained model, instead of --sizes.")
    parser.add_argument("--test", help="Source lines for --model, plain or .gz.")
    default = [name for name in LABELS if name not in ON_REQUEST]
    names = {"nargs": "+", "choices": LABELS, "default": default, "metavar": "NAME"}
    text = f"From {', '.join(LABELS)} (all but {', '.join(ON_REQUEST)})."
    parser.add_argument("--contenders", **names, help=text)
    types = ["float32", "bfloat16"]
    parser.add_argument("--dtypes", nargs="+", choices=types, default=types, help="Both (default).")
    for name, default, text in (
        ("beams", [1, 5], "Hypotheses per sentence; 1 is greedy (default: 1 5)."),
        ("batch_sizes", [1, 16, 64], "Sentences per batch (default: 1 16 64)."),
        ("threads", [1, 2], "CPU threads, at most OMP_NUM_THREADS (default: 1 2)."),
        ("sentences", 200, "Number of lines to translate (default: 200)."),
        ("max_new_tokens", 100, "Longest output in tokens, for --model (default: 100)."),
    ):
        count = {"nargs": "+"} if isinstance(default, list) else {}
        parser.add_argument(f"--{name}", type=int, default=default, help=text, **count)
    options = parser.parse_args()
    most = int(os.environ.get("OMP_NUM_THREADS", max(options.threads)))
    options.threads = [number for number in options.threads if number <= most]
    if options.model and not options.test:
        parser.error("--model needs --test, a file of source lines")
    if "marian" in options.contenders and (options.model or "m2m100" in options.contenders):
        parser.error("--contenders marian needs --sizes, and a model that m2m100 cannot compute")
    if not options.threads:
        parser.error(f"--threads must be at most OMP_NUM_THREADS, which is {most}")
    return options


def main() -> int:
    """Prints a table for each model, dtype and number of threads; returns the exit status."""
    options = parse()
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    report = Report(options.output)
    try:
        for model in [options.model] if options.model else options.sizes:
            with tempfile.TemporaryDirectory() as scratch:
                compare(report, model, options, Path(scratch))
    except (ValueError, OSError) as error:
        print(f"generation: {error}", file=sys.stderr)
        return 2
    return 0


def compare(report: Report, model: str, options: argparse.Namespace, scratch: Path) -> None:
    """Adds the tables of a model.

    Args:
        report: Receives the tables.
        model: Folder, or the preset of random weights.
        options: Options of the command line.
        scratch: Empty folder for models.
    """
    import torch

    import generation_contenders as contenders
    from vanilla_transformer_tools.files import CACHE_VARIABLE

    folder, lines, limit = Path(model), ["any text"], options.max_new_tokens
    if options.model:
        lines, sources = read_sources(options.test, options.sentences, folder)
    else:
        folder, limit = scratch / "random", contenders.RANDOM_TARGET_TOKENS
        if "marian" in options.contenders:
            contenders.write_random_marian(model, folder)
            lengths = contenders.MARIAN_SOURCE_TOKENS
            sources = contenders.random_sources(options.sentences, lengths, end=0)
        else:
            contenders.write_random_model(model, folder)
            sources = contenders.random_sources(options.sentences)
    names = [name for name in LABELS if name in options.contenders or name == "vanilla"]
    folders = contenders.write_folders(folder, names, lines, scratch)
    for dtype, threads in product(options.dtypes, options.threads):
        torch.set_num_threads(threads)
        loaded = contenders.load(folders, dtype, sources)
        report.table(f"{model}, {dtype}, {threads} threads, {len(sources)} sentences", *COLUMNS)
        for num_beams, size in product(options.beams, options.batch_sizes):
            batches = [sources[first : first + size] for first in range(0, len(sources), size)]
            task = contenders.Task(batches, limit, not options.model, num_beams)
            if "auto" in loaded:
                # What users choose whose batches are of this size.
                os.environ[CACHE_VARIABLE] = str(scratch / f"cache-{num_beams}-{size}")
                loaded["auto"] = contenders.CONTENDERS["auto"](folders["auto"], dtype)
            seconds, outputs = measure(loaded, task, options.rounds)
            if dtype == "float32":
                check_same_outputs(outputs)
            search = f"beam {num_beams}" if num_beams > 1 else "greedy"
            for name in outputs:
                report.row(search, size, LABELS[name], *cells(name, seconds, outputs))


def read_sources(test: str, count: int, folder: Path) -> tuple[list[str], list[list[int]]]:
    """The first sentences as text, and as ids with `</s>`; of a .tsv the first column."""
    from transformers import AutoTokenizer

    from vanilla_transformer_tools.files import read_lines

    columns = (line.split("\t")[0] for line in read_lines(test))
    lines = list(islice((line for line in columns if line.strip()), count))
    return lines, AutoTokenizer.from_pretrained(folder)(lines)["input_ids"]


def measure(
    contenders: Mapping[str, "Contender"], task: "Task", rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    """Seconds of each round, and the outputs of a first run, which warms up."""
    outputs = {name: contender.run(task)[1] for name, contender in contenders.items()}
    runs = {name: partial(seconds_for, one, task) for name, one in contenders.items()}
    return take_turns(runs, rounds), outputs


def seconds_for(contender: "Contender", task: "Task") -> float:
    """Seconds of one run."""
    return contender.run(task)[0]


def check_same_outputs(outputs: Mapping[str, list[list[int]]]) -> None:
    """Refuses to compare the speed of different functions.

    Raises:
        ValueError: If a contender that must equal ours in float32 translates differently.
    """
    for name in outputs.keys() & {"inherited", "m2m100", "marian"}:
        share = share_of_same(outputs[name], outputs["vanilla"])
        if share < LEAST_SAME:
            raise ValueError(
                f"{name} must translate at least {LEAST_SAME:.0%} of the sentences as we do (all, "
                f"apart from ties of floating-point numbers), got {share:.1%}."
            )


def share_of_same(outputs: list[list[int]], reference: list[list[int]]) -> float:
    """Share of the sentences with the same output."""
    return sum(map(list.__eq__, outputs, reference)) / len(reference)


def cells(
    name: str, seconds: Mapping[str, list[float]], outputs: Mapping[str, list[list[int]]]
) -> list[str]:
    """Speed of one contender, relative to M2M100 if it is there, and its share of our outputs."""
    found, own = outputs[name], seconds[name]
    reference = seconds.get("m2m100", seconds["vanilla"])
    return [
        *speed_cells(len(found), own, reference, decimals=2),
        speed_cells(sum(map(len, found)), own, own)[0],
        f"{share_of_same(found, outputs['vanilla']):.1%}",
    ]


if __name__ == "__main__":
    sys.exit(main())
