"""Times the contenders of generation in turn, and prints the tables."""

import os
import random
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from generation_contenders import (
    CONTENDERS,
    RANDOM_VOCABULARY,
    Contender,
    Generate,
    Task,
    model_inputs,
    write_folders,
    write_random_model,
)
from memory import Memory, measure_alone
from neighbours import check_same_logits, hardware_line
from ratio_tables import head, megabytes, rate, rate_range, ratio, row
from rounds import take_turns
from vanilla_transformer_tools.files import read_lines
from vanilla_transformer_tools.translation.conversion_cache import CACHE_VARIABLE

RANDOM_SOURCE_TOKENS, RANDOM_TARGET_TOKENS = (20, 30), 32
# Below it, outputs differ by more than ties of floating-point numbers can explain.
LEAST_SAME = 0.95
# What the automatic choice could be, with the same search.
BETTER = ("vanilla", "search-float32")

COLUMNS = ("search", "batch", "contender", "sentences/s", "range", "tokens/s", "speed-up")
COLUMNS += ("same lines", "peak MB", "growth MB")
NOTE = """
Speed-up: M2M100's time divided by the contender's. Tokens: targets, `</s>` counted. Same lines:
outputs equal to vanilla's; those of Translator are tokenised again. Marian is post-norm and cannot
hold our weights: its own are random, and its outputs are as long as our longest one in each batch,
where its beam search stops, while the others search on for something better; our tokens are
counted. CTranslate2 has its defaults: a beam search ends at the first N outputs; with our search,
at the first 2 N. Translator reads text and has its own batches and limits. Growth: what the peak
adds to a process that has imported the packages. Beam search has length penalty 0.6."""


@dataclass(frozen=True)
class Result:
    """The result of one contender.

    Attributes:
        seconds: Of each round.
        outputs: Ids of each sentence.
    """

    seconds: list[float]
    outputs: list[list[int]]


def tables(options: Namespace, labels: dict[str, str], scratch: Path) -> Iterator[str]:
    """Lines of Markdown, yielded as soon as they are known.

    Args:
        options: As parsed by the script.
        labels: Name of each contender in the table.
        scratch: Folder for models.
    """
    disable_progress_bar()
    os.environ[CACHE_VARIABLE] = str(scratch / "cache")
    folder = Path(options.model or scratch / "random")
    if options.preset:
        write_random_model(options.preset, folder)
    lines, sources = read_sources(options, folder)
    names = [name for name in labels if name in options.contenders or name == "vanilla"]
    if options.preset:
        names = [name for name in names if name != "translator"]
    folders = write_folders(folder, names, lines or ["any text"], scratch)
    memory: dict[tuple, Memory] = {}
    for dtype, threads in product(options.dtypes, options.threads):
        torch.set_num_threads(threads)
        contenders = load(folders, dtype, sources)
        yield (
            f"\n{options.model or options.preset}, {dtype}, {len(sources)} sentences, "
            f"median of {options.rounds} rounds; {hardware_line('cpu')}\n\n{head(*COLUMNS)}"
        )
        shares = []
        for num_beams, size in product(options.beams, options.batch_sizes):
            task = make_task(options, lines, sources, num_beams, size)
            chosen = dict(contenders)
            if size != max(options.batch_sizes):
                chosen.pop("translator", None)
            if "auto" in chosen:
                # What users choose whose batches are of this size.
                for file in scratch.glob("cache/ctranslate2/*.json"):
                    file.unlink()
                chosen["auto"] = CONTENDERS["auto"](folders["auto"], dtype)
            where = f"{dtype}, {threads} threads, {num_beams} beams, batch {size}"
            tasks, results = warm_up(chosen, task, where)
            check_same_outputs(results, dtype)
            add_rounds(chosen, tasks, results, options.rounds, where)
            for name in results:
                key = (name, dtype, num_beams, size)
                if not options.no_memory and key not in memory:
                    print(f"{where}: memory of {name}", file=sys.stderr)
                    largest = task.largest_batch()
                    memory[key] = measure_alone(
                        run_once, name, folders[name], dtype, threads, largest
                    )
                batch = "own" if name == "translator" else str(size)
                search = f"beam {num_beams}" if num_beams > 1 else "greedy"
                sizes = ["-", "-"]
                if key in memory:
                    sizes = megabytes((memory[key].peak, memory[key].growth))
                yield row(search, batch, labels[name], *cells(name, results), *sizes)
            if "auto" in results:
                engine = chosen["auto"].engine.name or "both"
                shares.append(f"{search}, batch {size}: {share_of_better(results)} ({engine})")
        if shares:
            yield f"\n--engine auto against the better of {' and '.join(BETTER)}:\n"
            yield "\n".join(f"- {share}" for share in shares)
    yield NOTE
    if options.model:
        yield first_translation(options.model, options.test)


def read_sources(options: Namespace, folder: Path) -> tuple[list[str], list[list[int]]]:
    """Sentences as text and as ids with `</s>`; random ids, and no text, for a preset."""
    if options.preset:
        draw = random.Random(0)
        ids = range(4, RANDOM_VOCABULARY)
        lengths = [draw.randint(*RANDOM_SOURCE_TOKENS) for _ in range(options.sentences)]
        return [], [[*draw.choices(ids, k=length - 1), 2] for length in lengths]
    columns = (line.split("\t")[0] for line in read_lines(options.test))
    lines = list(islice((line for line in columns if line.strip()), options.sentences))
    return lines, AutoTokenizer.from_pretrained(folder)(lines)["input_ids"]


def make_task(
    options: Namespace, lines: list[str], sources: list[list[int]], num_beams: int, size: int
) -> Task:
    """Sentences in the order of the file, cut into batches."""
    batches = [sources[first : first + size] for first in range(0, len(sources), size)]
    is_forced = options.preset is not None
    limit = RANDOM_TARGET_TOKENS if is_forced else options.max_new_tokens
    return Task(lines, batches, [limit] * len(batches), is_forced, num_beams)


def load(folders: dict[str, Path], dtype: str, sources: list[list[int]]) -> dict[str, Contender]:
    """All contenders available in this dtype; in float32 their outputs have been compared."""
    contenders = {
        name: CONTENDERS[name](folder, dtype)
        for name, folder in folders.items()
        if dtype == "float32" or issubclass(CONTENDERS[name], Generate)
    }
    if dtype == "float32" and "m2m100" in contenders:
        ours, theirs = contenders["vanilla"].model, contenders["m2m100"].model
        check_same_logits(ours, theirs, model_inputs(sources[:16]))
    return contenders


def warm_up(
    contenders: dict[str, Contender], task: Task, where: str
) -> tuple[dict[str, Task], dict[str, Result]]:
    """The task of each contender, and its outputs in a first round."""
    tasks, results = {}, {}
    for name, contender in contenders.items():
        # With random weights, outputs would end anywhere.
        is_marian = name == "marian" and not task.is_forced
        tasks[name] = task.forced_to(results["vanilla"].outputs) if is_marian else task
        seconds, outputs = contender.run(tasks[name])
        print(f"{where}: {name} took {seconds:.1f} s to warm up", file=sys.stderr)
        results[name] = Result([], outputs)
    return tasks, results


def add_rounds(
    contenders: dict[str, Contender],
    tasks: dict[str, Task],
    results: dict[str, Result],
    rounds: int,
    where: str,
) -> None:
    """Runs the contenders in turn, and adds their seconds to their results."""
    runs = {name: partial(seconds_of, one, tasks[name]) for name, one in contenders.items()}
    for name, seconds in take_turns(runs, rounds, where=where).items():
        results[name].seconds.extend(seconds)


def seconds_of(contender: Contender, task: Task) -> float:
    """Seconds of one run."""
    return contender.run(task)[0]


def check_same_outputs(results: dict[str, Result], dtype: str) -> None:
    """Refuses to compare the speed of different functions.

    Raises:
        ValueError: If a contender that must equal ours in float32 translates differently.
    """
    for name in results.keys() & {"inherited", "m2m100"}:
        share = share_of_same(results[name], results["vanilla"])
        if dtype == "float32" and share < LEAST_SAME:
            raise ValueError(
                f"{name} must translate at least {LEAST_SAME:.0%} of the sentences as we do (all, "
                f"apart from ties of floating-point numbers), got {share:.1%}."
            )


def share_of_same(result: Result, reference: Result) -> float:
    """Share of the sentences with the same output."""
    pairs = zip(result.outputs, reference.outputs, strict=True)
    return sum(one == other for one, other in pairs) / len(reference.outputs)


def share_of_better(results: dict[str, Result]) -> str:
    """Speed of the automatic choice, divided by that of the faster engine."""
    better = min(
        (results[name].seconds for name in BETTER if name in results), key=statistics.median
    )
    return ratio(better, results["auto"].seconds)


def cells(name: str, results: dict[str, Result]) -> list[str]:
    """Speed of one contender, M2M100's time divided by its own, and share of the same outputs."""
    result = results[name]
    # Tokens that Marian is forced to write beyond our outputs do not count.
    useful = results["vanilla" if name == "marian" else name].outputs
    return [
        rate(len(useful), result.seconds, decimals=2),
        rate_range(len(useful), result.seconds, decimals=2),
        rate(sum(map(len, useful)), result.seconds),
        ratio(results["m2m100"].seconds, result.seconds) if "m2m100" in results else "-",
        "-" if name == "marian" else f"{share_of_same(result, results['vanilla']):.1%}",
    ]


def run_once(name: str, folder: Path, dtype: str, threads: int, task: Task) -> None:
    """Loads a contender and runs it, in a process of its own."""
    disable_progress_bar()
    torch.set_num_threads(threads)
    CONTENDERS[name](folder, dtype).run(task)


def first_translation(model: str, test: str) -> str:
    """Seconds from the shell to the translation of one line, imports included."""
    line = next(iter(read_lines(test))).split("\t")[0]
    command = [
        sys.executable,
        "-m",
        "vanilla_transformer_tools.commands",
        "translate",
        "--model",
        model,
        line,
    ]
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    middle = statistics.median(seconds)
    return f"\nFrom the shell to the first translation: {middle:.1f} s (median of 3 runs)."
