#!/usr/bin/env python
"""Speed of translation, on a GPU if there is one: ours, M2M100 and CTranslate2.

M2M100 gets our weights and our position table, so it computes the same function; in float32, that
is checked. All contenders translate the same batches, tokenised beforehand and in the file's order.
The speed is relative to M2M100, or without it to this package's `generate`; same lines are outputs
equal to ours. Tokens are targets, `</s>` counted. CTranslate2 searches as our Translator does with
it. --sizes has random weights and sources, and outputs of 32 tokens. Beam search has length penalty
0.6.

Example:
  python benchmarks/generation.py --model runs/de-en --test test.de.gz --threads 1
  python benchmarks/generation.py --sizes base --sentences 16 --batch_sizes 1 16
  python benchmarks/generation.py --sizes base --contenders vanilla inherited m2m100
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from lab import PRESETS, Report, benchmark_parser, best_device, seconds_of, speed_cells, take_turns
from neighbours import build, copy_into_m2m100, use_our_positions
from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.exports.export import export_model
from vanilla_transformer_tools.files import read_lines
from vanilla_transformer_tools.text.batches import padded
from vanilla_transformer_tools.training.start import LENGTH_PENALTY
from vanilla_transformer_tools.translation import Search
from vanilla_transformer_tools.translation.ctranslate2_engine import CTranslate2Engine
from vanilla_transformer_tools.translation.engine import Hypothesis

RANDOM_VOCABULARY, RANDOM_TARGET_TOKENS = 32_000, 32
# Least and most tokens.
RANDOM_SOURCE_TOKENS = (20, 30)
# Longest output of a trained model, in tokens.
LIMIT = 100
# Idle OpenMP threads spin for this long, and would slow down the next contender.
SECONDS_TO_SETTLE = 0.3
COLUMNS = ("search", "batch", "contender", "sentences/s", "range", "speed", "tokens/s")
COLUMNS += ("same lines",)
# Below it, outputs differ by more than ties of floating-point numbers can explain.
LEAST_SAME = 0.95


@dataclass(frozen=True)
class Task:
    """What to translate, and how.

    Attributes:
        batches: Ids of the sources, with `</s>`.
        limit: Longest output, in tokens.
        is_forced: Whether all outputs have exactly this length.
        num_beams: Hypotheses of a sentence; 1 is greedy.
    """

    batches: list[list[list[int]]]
    limit: int
    is_forced: bool
    num_beams: int


class Contender:
    """Something that translates; it is built from the folder of `prepare`, in a dtype."""

    label: str

    @classmethod
    def prepare(cls, ours: Path, folder: Path, lines: list[str]) -> Path:
        """The folder that this contender loads: that of our model, or a new one made from it.

        Args:
            ours: Folder of our model.
            folder: Folder that may be created.
            lines: Text on which an export is compared with our model.

        Raises:
            ImportError: If the contender's package is missing.
        """
        return ours

    def calls(self, task: Task) -> list[Callable[[], Any]]:
        """What is timed: a call for each batch, with its input prepared."""
        raise NotImplementedError

    def outputs(self, found: Any) -> list[list[int]]:
        """Ids, including `</s>`, of the output of a call."""
        raise NotImplementedError

    def run(self, task: Task) -> tuple[float, list[list[int]]]:
        """Seconds and outputs."""
        calls, found = self.calls(task), []
        time.sleep(SECONDS_TO_SETTLE)
        seconds = seconds_of(lambda: found.extend(call() for call in calls))
        return seconds, list(chain.from_iterable(map(self.outputs, found)))


class Generate(Contender):
    """`generate` of a saved model, ours or another of Transformers."""

    label = "vanilla"

    def __init__(self, folder: Path, dtype: str) -> None:
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype)
        self.model = model.to(best_device()).eval()
        config = self.model.config
        names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
        ids = {name: getattr(config, name) for name in names}
        never = [[ids["pad_token_id"]], [ids["bos_token_id"]]]
        self.model.generation_config = GenerationConfig(**ids, bad_words_ids=never)

    def calls(self, task: Task) -> list[Callable[[], Any]]:
        """A `generate` for each batch."""
        options: dict[str, Any] = {"num_beams": task.num_beams, "do_sample": False}
        if task.num_beams > 1:
            options |= {"length_penalty": LENGTH_PENALTY, "early_stopping": False}
        if task.is_forced:
            options["suppress_tokens"] = [self.model.config.eos_token_id]
        inputs = map(model_inputs, task.batches)
        generate = partial(self.model.generate, max_new_tokens=task.limit, **options)
        return [partial(generate, **batch) for batch in inputs]

    def outputs(self, found: Tensor) -> list[list[int]]:
        """Rows without start token and padding."""
        end = self.model.config.eos_token_id
        rows = [row[1:] for row in found.tolist()]
        return [row[: row.index(end) + 1] if end in row else row for row in rows]


class Inherited(Generate):
    """Our model with Transformers' own searches."""

    label = "vanilla, Transformers' search"

    def __init__(self, folder: Path, dtype: str) -> None:
        super().__init__(folder, dtype)
        self.model.generation_config.use_transformers_search = True


class M2M100(Generate):
    """M2M100 with our weights and our positions."""

    label = "M2M100, our weights"

    def __init__(self, folder: Path, dtype: str) -> None:
        super().__init__(folder, dtype)
        use_our_positions(self.model)

    @classmethod
    def prepare(cls, ours: Path, folder: Path, lines: list[str]) -> Path:
        """A folder of M2M100 with our weights."""
        model = AutoModelForSeq2SeqLM.from_pretrained(ours, dtype="float32")
        copy_into_m2m100(model).save_pretrained(folder)
        return folder


class CTranslate2(Contender):
    """The engine of our Translator; where outputs are forced, it has the limit alone."""

    label = "CTranslate2 float32"
    quantization = "float32"

    def __init__(self, folder: Path, dtype: str) -> None:
        self.end = AutoTokenizer.from_pretrained(folder).eos_token_id
        self.engine = CTranslate2Engine(folder, device="auto")

    @classmethod
    def prepare(cls, ours: Path, folder: Path, lines: list[str]) -> Path:
        """An export."""
        export_model(str(ours), folder, quantization=cls.quantization, sample=lines)
        return folder

    def calls(self, task: Task) -> list[Callable[[], Any]]:
        """A batch of ids without prefixes for each batch."""
        config = GenerationConfig(length_penalty=LENGTH_PENALTY)
        search = Search.of(config, num_beams=task.num_beams)
        translate = self.engine.translate_batch
        return [
            partial(translate, batch, [[] for _ in batch], [task.limit] * len(batch), search)
            for batch in task.batches
        ]

    def outputs(self, found: list[list[Hypothesis]]) -> list[list[int]]:
        """Ids of the best hypotheses."""
        return [best.tokens + [self.end] * (not best.reached_limit) for best, *_ in found]


class CTranslate2Int8(CTranslate2):
    """The same with quantised weights."""

    label = "CTranslate2 int8"
    quantization = "int8"


CONTENDERS: dict[str, type[Contender]] = {
    "vanilla": Generate,
    "inherited": Inherited,
    "m2m100": M2M100,
    "ctranslate2-float32": CTranslate2,
    "ctranslate2-int8": CTranslate2Int8,
}


def main() -> None:
    """Prints a table for each model, dtype and number of threads."""
    parser = benchmark_parser(__doc__, sizes=("base",), rounds=3)
    parser.add_argument("--model", help="Folder of a trained model, instead of --sizes.")
    parser.add_argument("--test", help="Source lines for --model, plain or .gz.")
    names = {"nargs": "+", "choices": CONTENDERS, "default": [*CONTENDERS], "metavar": "NAME"}
    text = f"From {', '.join(CONTENDERS)} (default: all)."
    parser.add_argument("--contenders", **names, help=text)
    types = ["float32", "bfloat16"]
    parser.add_argument("--dtypes", nargs="+", choices=types, default=types, help="Both (default).")
    for name, default, text in (
        ("beams", [1, 5], "Hypotheses per sentence; 1 is greedy (default: 1 5)."),
        ("batch_sizes", [1, 16, 64], "Sentences per batch (default: 1 16 64)."),
        ("threads", [1, 2], "CPU threads, at most OMP_NUM_THREADS (default: 1 2)."),
    ):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default, help=text)
    text = "Number of lines to translate (default: 200)."
    parser.add_argument("--sentences", type=int, default=200, help=text)
    options = parser.parse_args()
    most = int(os.environ.get("OMP_NUM_THREADS", max(options.threads)))
    options.threads = [number for number in options.threads if number <= most]
    if options.model and not options.test:
        parser.error("--model needs --test, a file of source lines")
    if not options.threads:
        parser.error(f"--threads must be at most OMP_NUM_THREADS, which is {most}")
    disable_progress_bar()
    report = Report(options.output)
    try:
        for model in [options.model] if options.model else options.sizes:
            with tempfile.TemporaryDirectory() as scratch:
                compare(report, model, options, Path(scratch))
    except (ValueError, OSError) as error:
        parser.error(str(error))


def compare(report: Report, model: str, options: argparse.Namespace, scratch: Path) -> None:
    """Adds the tables of a model.

    Args:
        report: Receives the tables.
        model: Folder, or the preset of random weights.
        options: Options of the command line.
        scratch: Empty folder for models.
    """
    folder, lines, limit = Path(model), ["any text"], LIMIT
    if options.model:
        found = (line for line in read_lines(options.test) if line.strip())
        lines = list(islice(found, options.sentences))
        sources = AutoTokenizer.from_pretrained(folder)(lines)["input_ids"]
    else:
        folder, limit = scratch / "random", RANDOM_TARGET_TOKENS
        write_random_model(model, folder)
        sources = random_sources(options.sentences)
    names = [name for name in CONTENDERS if name in options.contenders or name == "vanilla"]
    folders = prepare(folder, names, lines, scratch)
    for dtype, threads in product(options.dtypes, options.threads):
        torch.set_num_threads(threads)
        contenders = load(folders, dtype)
        report.table(f"{model}, {dtype}, {threads} threads, {len(sources)} sentences", *COLUMNS)
        for num_beams, size in product(options.beams, options.batch_sizes):
            batches = [sources[first : first + size] for first in range(0, len(sources), size)]
            task = Task(batches, limit, not options.model, num_beams)
            runs = {name: partial(each.run, task) for name, each in contenders.items()}
            found = take_turns(runs, options.rounds, warm_ups=1)
            seconds = {name: [each for each, _ in rounds] for name, rounds in found.items()}
            outputs = {name: rounds[-1][1] for name, rounds in found.items()}
            if dtype == "float32":
                check_same_outputs(outputs)
            search = f"beam {num_beams}" if num_beams > 1 else "greedy"
            for name in outputs:
                label = CONTENDERS[name].label
                report.row(search, size, label, *cells(name, seconds, outputs))


def write_random_model(preset: str, folder: Path) -> None:
    """A folder with a model of random weights, and a tokenizer with as many invented words.

    Args:
        preset: Sizes of the model.
        folder: Folder to write.
    """
    torch.manual_seed(0)
    size = RANDOM_VOCABULARY
    build("vanilla", vocab_size=size, **PRESETS[preset].config()).save_pretrained(folder)
    # Four entries are special tokens.
    words = [f"word{number}" for number in range(size - 4)]
    tokenizer = VanillaTransformerTokenizer.train(words, vocab_size=size, kind="word")
    tokenizer.save_pretrained(folder)


def random_sources(count: int) -> list[list[int]]:
    """Ids of sentences with `</s>`, the same at each call."""
    draw = random.Random(0)
    ids = range(4, RANDOM_VOCABULARY)
    sizes = [draw.randint(*RANDOM_SOURCE_TOKENS) for _ in range(count)]
    return [[*draw.choices(ids, k=size - 1), 2] for size in sizes]


def model_inputs(rows: list[list[int]]) -> dict[str, Tensor]:
    """Ids, padded on the right with 0, and mask (1 = real token), `[B, S]`."""
    ids, mask = (tensor.to(best_device()) for tensor in padded(rows, 0))
    return {"input_ids": ids, "attention_mask": mask}


def prepare(ours: Path, names: list[str], lines: list[str], scratch: Path) -> dict[str, Path]:
    """The folder that each contender loads; those whose package is missing are named and left out.

    Args:
        ours: Folder of our model.
        names: Keys of `CONTENDERS`.
        lines: Text on which exports are compared.
        scratch: Folder in which those of the others are created.
    """
    folders = {}
    for name in names:
        print(f"preparing {name}", file=sys.stderr)
        try:
            folders[name] = CONTENDERS[name].prepare(ours, scratch / name, lines)
        except ImportError as error:
            print(f"without {name}: {error}", file=sys.stderr)
    return folders


def load(folders: dict[str, Path], dtype: str) -> dict[str, Contender]:
    """All contenders available in this dtype."""
    return {
        name: CONTENDERS[name](folder, dtype)
        for name, folder in folders.items()
        if dtype == "float32" or issubclass(CONTENDERS[name], Generate)
    }


def check_same_outputs(outputs: Mapping[str, list[list[int]]]) -> None:
    """Refuses to compare the speed of different functions.

    Raises:
        ValueError: If a contender that must equal ours in float32 translates differently.
    """
    for name in outputs.keys() & {"inherited", "m2m100"}:
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
    main()
