#!/usr/bin/env python
r"""Training here and in other toolkits: speed, memory, minutes to a BLEU.

All train on the same pieces of words: a model of the preset `tiny`, with the same number of pairs
in an update (on average: ours have a budget of tokens), learning rates, label smoothing, dropout of
the residual connections, Adam and norm of gradients. Biases and initial values are those of each
toolkit. What a user writes for each is in benchmarks/peers/. Products are in float32, and in
vanilla-bf16 in bfloat16.

Speed: each trains on the first 2,000 pairs for an epoch that does not count and for one that does,
in a process of its own, whose start does not count. Tokens are those of both sides, with the ends
of sentences and without padding. Memory is the peak of the process, its children included.

With --until_bleu, each trains on all pairs, one toolkit after another, until its greedy
translations of the validation pairs have this BLEU, which is measured in the same way for all every
200 updates. Minutes count from the start of the process; while a checkpoint is translated, training
is halted, and so is the clock.

Examples:
  python benchmarks/peers.py --data multi30k_tok --environments joeynmt=JOEY/bin/python \
      eole=EOLE/bin/python
  python benchmarks/peers.py --data multi30k_tok --until_bleu 35 --toolkits vanilla m2m100
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path
from string import Template
from typing import Any, TypeVar

import numpy as np
import psutil
from sacrebleu.metrics import BLEU

from lab import Report, benchmark_parser, megabytes, process_memory, speed_cells, take_turns
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerTokenizer
from vanilla_transformer_tools.files import write_lines
from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.text.parallel_text import ParallelText, read_pairs

CONFIGS = Path(__file__).with_name("peers")
SIDES = ("en", "de")
TRAIN, VALIDATION = ([f"{s}.lc.norm.tok.{side}.gz" for side in SIDES] for s in ("train", "val"))
# Pairs for speed, entries of the vocabulary, and tokens of our batches, both sides with padding.
PAIRS, VOCABULARY, TOKENS = 2000, 10_000, 4096
# Updates from one scored checkpoint to the next, and from one report to the next.
SAVE, REPORT = 200, 20
SPEED = ("toolkit", "tokens/s", "range", "speed", "memory, MB")
TIME = ("toolkit", "minutes", "updates", "BLEU", "memory, MB")
FAILED = ("failed", "-", "-", "-")
# What a piece that begins a word begins with.
BLANK = "▁"
# Updates until an end that is never reached.
FAR = 10**6

Result = TypeVar("Result")


@dataclass(frozen=True)
class Toolkit:
    """What a user writes and runs, with placeholders for `string.Template`.

    Attributes:
        config: File in `CONFIGS`, with placeholders.
        train: Command after `python`.
        report: Found in the lines that training prints, one every `$$report` updates.
        checkpoint: Below `$$run`, after `$$update` updates.
        translate: Shell's command after `python` that translates `$$source` to `$$output` greedily.
        batches_by_tokens: Whether its batches hold a budget of tokens, and not of pairs.
        bf16: Whether matrix products are in bfloat16.
    """

    config: str
    train: str
    report: str
    checkpoint: str
    translate: str
    batches_by_tokens: bool = False
    bf16: bool = False


_VANILLA: dict[str, Any] = {
    "config": "vanilla.yaml",
    "train": "-m vanilla_transformer_tools.commands train $config",
    "report": r"^step +[\d,]+/.*loss",
    "checkpoint": "checkpoint-$update",
    "translate": "-m vanilla_transformer_tools.commands translate --model $checkpoint "
    "--num_beams 1 --input $source --output $output",
    "batches_by_tokens": True,
}
# They run in the environment of this package; the others need one of their own.
OWN = ("vanilla", "vanilla-bf16", "m2m100")
# Names of those that have failed in this process, for its exit status.
FAILED: list[str] = []
TOOLKITS = {
    "vanilla": Toolkit(**_VANILLA),
    "vanilla-bf16": Toolkit(**_VANILLA, bf16=True),
    "m2m100": Toolkit(
        "m2m100.yaml",
        "$configs/m2m100.py $config $data",
        r"^\{'loss'",
        "checkpoint-$update",
        "$configs/m2m100_translate.py $checkpoint < $source > $output",
    ),
    "joeynmt": Toolkit(
        "joeynmt.yaml",
        "-m joeynmt train $config --skip-test",
        r"Step: +\d+, Batch Loss",
        "$update.ckpt",
        "-m joeynmt translate $config < $source > $output",
    ),
    "opennmt": Toolkit(
        "opennmt.yaml",
        "-m onmt.bin.train -config $config",
        r"Step +\d+/",
        "model_step_$update.pt",
        "-m onmt.bin.translate -model $checkpoint -src $source -output $output -beam_size 1",
    ),
    "eole": Toolkit(
        "eole.yaml",
        "-m eole.bin.main train -config $config",
        r"Step +\d+/",
        "step_$update",
        "-m eole.bin.main predict -model_path $checkpoint -src $source -output $output "
        "-beam_size 1",
    ),
    "marian": Toolkit(
        "marian.yaml",
        "-c 'import pymarian; pymarian.Trainer(\"-c $config\").train()'",
        r" Up\. \d+ ",
        "../model.iter$update.npz",
        "-c 'import sys, pymarian; "
        'model = pymarian.Translator("-m $checkpoint -v $data/vocab.yml $data/vocab.yml -b 1"); '
        "print(*model.translate(sys.stdin.read().splitlines()), sep=chr(10))' < $source > $output",
    ),
}


@dataclass(frozen=True)
class Text:
    """The text that all toolkits read, cut into the same pieces.

    Attributes:
        folder: Holds `train.en` and `train.de`, `validation.en`, the first pair in `first.en` and
            `first.de`, the pieces in `vocab.txt`, and them as our tokenizer.
        tokenizer: Cuts words into pieces, and joins these.
        lengths: Tokens of each training pair with the ends of sentences, `[pairs, 2]`.
        references: Target lines of the validation pairs.
        updates: Of an epoch, by whether batches hold a budget of tokens; the others hold as many
            pairs as ours on average.
    """

    folder: Path
    tokenizer: VanillaTransformerTokenizer
    lengths: np.ndarray
    references: list[str]
    updates: dict[bool, int]

    def bleu(self, translations: list[str]) -> float:
        """Of the validation pairs, translated in pieces; no tokens are separated any further."""
        if len(translations) != len(self.references):
            raise ValueError(
                f"There must be {len(self.references)} translations, got {len(translations)}."
            )
        to_ids = self.tokenizer.convert_tokens_to_ids
        rows = [[piece.replace(BLANK, " ") for piece in line.split()] for line in translations]
        joined = [self.tokenizer.decode(to_ids(row)) for row in rows]
        return BLEU(tokenize="none", force=True).corpus_score(joined, [self.references]).score


def prepare(folder: Path, train: list[Path], validation: list[Path], max_pairs: int | None) -> Text:
    """Learns a vocabulary and writes the files.

    Args:
        folder: Folder of the files.
        train: Source and target file, in which blanks separate tokens.
        validation: Source and target file for scores.
        max_pairs: Pairs to train on, the first ones; None: all. The vocabulary is that of all.
    """
    pairs, held_out = (
        list(read_pairs(ParallelText(tuple(map(str, files))))) for files in (train, validation)
    )
    tokenizer = VanillaTransformerTokenizer.train(
        chain.from_iterable(pairs), vocab_size=VOCABULARY, pretokenized=True
    )
    sides = (in_pieces(tokenizer, side) for side in zip(*pairs, strict=True))
    cut = list(zip(*sides, strict=True))
    write_vocabulary(folder, chain.from_iterable(cut))

    lengths = np.array([[1 + len(side.split()) for side in pair] for pair in cut])[:max_pairs]
    updates = len(TokenBatchSampler(lengths, TOKENS, seed=0))
    # As many pairs as fill batches of equal numbers.
    lengths = lengths[: len(lengths) // updates * updates]
    ours = len(TokenBatchSampler(lengths, TOKENS, seed=0))
    for name, rows in (("train", cut[: len(lengths)]), ("first", cut[:1])):
        for language, side in zip(SIDES, zip(*rows, strict=True), strict=True):
            write_lines(folder / f"{name}.{language}", side)
    write_lines(
        folder / f"validation.{SIDES[0]}", in_pieces(tokenizer, [source for source, _ in held_out])
    )
    references = [target for _, target in held_out]
    return Text(folder, tokenizer, lengths, references, {False: updates, True: ours})


def in_pieces(tokenizer: VanillaTransformerTokenizer, lines: Sequence[str]) -> list[str]:
    """Lines with blanks between their pieces."""
    rows = tokenizer(list(lines), add_special_tokens=False).input_ids
    return [
        " ".join(piece.replace(" ", BLANK) for piece in tokenizer.convert_ids_to_tokens(row))
        for row in rows
    ]


def write_vocabulary(folder: Path, lines: Iterable[str]) -> None:
    """The pieces as a list, as our tokenizer of whole words, and as Marian's numbers."""
    words = VanillaTransformerTokenizer.train(lines, vocab_size=VOCABULARY, kind="word")
    words.save_pretrained(folder / "tokenizer")
    VanillaTransformerConfig(vocab_size=len(words)).save_pretrained(folder / "tokenizer")
    ids = [i for i in range(len(words)) if i not in words.all_special_ids]
    entries = words.convert_ids_to_tokens(ids)
    write_lines(folder / "vocab.txt", entries)
    # Marian has names of its own. JSON is YAML.
    numbers = {entry: number for number, entry in enumerate(["</s>", "<unk>", *entries])}
    write_lines(folder / "vocab.yml", [json.dumps(numbers)])


@dataclass
class Job:
    """A training run of one toolkit, without an end.

    Args:
        toolkit: What is run.
        python: Python of its environment.
        text: Text to train on.
        folder: New folder of the configuration and the model.
        report: Updates between two reports.
        save: Updates between two checkpoints.
        rate: Peak of the learning rate.
    """

    toolkit: Toolkit
    python: str
    text: Text
    folder: Path
    report: int
    save: int = FAR
    rate: float = 0.004
    _last: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    def command(self, arguments: str, **more: object) -> str:
        """A command of the shell, whose configuration is written."""
        config = self.folder / self.toolkit.config
        values = {
            "configs": CONFIGS,
            "config": config,
            "data": self.text.folder,
            "run": self.folder / "model",
            "tokens": TOKENS,
            "pairs": len(self.text.lengths) // self.text.updates[False],
            "bucket": len(self.text.lengths),
            "bf16": str(self.toolkit.bf16).lower(),
            "seed": 1,
            "updates": FAR,
            "report": self.report,
            "threads": os.environ.get("OMP_NUM_THREADS", os.cpu_count()),
            "save": self.save,
            "rate": self.rate,
            "scaled_rate": round(self.rate * (128 * 800) ** 0.5, 6),
            "checkpoint": "",
            **more,
        }
        template = (CONFIGS / config.name).read_text(encoding="utf-8")
        config.write_text(Template(template).substitute(values), encoding="utf-8")
        return f"{shlex.quote(self.python)} {Template(arguments).substitute(values)}"

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """The process, which is ended with its children."""
        self.folder.mkdir()
        process = subprocess.Popen(
            shlex.split(self.command(self.toolkit.train)),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            text=True,
            start_new_session=True,
        )
        with process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def reports(self, process: subprocess.Popen[str]) -> Iterator[int]:
        """The number of updates at each report, as soon as it is printed.

        Raises:
            RuntimeError: If the process ends.
        """
        updates = 0
        for line in process.stdout or ():
            self._last.append(line)
            if re.search(self.toolkit.report, line):
                updates += self.report
                yield updates
        raise RuntimeError(
            f"Training must reach its end, got status {process.wait()} after {updates} updates: "
            f"{' '.join(process.args)}\n{''.join(self._last)}"
        )

    def second_report(self) -> tuple[float, int]:
        """Seconds from the first report to the second, and the peak of memory."""
        with self.running() as process:
            reports = self.reports(process)
            next(reports)
            started = time.perf_counter()
            next(reports)
            return time.perf_counter() - started, peak_of_tree(process.pid)

    def scores(self) -> Iterator[tuple[float, int, float, int]]:
        """Minutes, updates, validation BLEU and the peak of memory, at each checkpoint.

        The minutes are those until the update, from the start of the process, with all that
        training does; while a checkpoint is scored, training is halted, and so is the clock.
        """
        minutes = {}
        paused, started = 0.0, time.perf_counter()
        with self.running() as process:
            for update in self.reports(process):
                now = time.perf_counter()
                minutes[update] = (now - started - paused) / 60
                # A report later, it has been written.
                saved = update - self.report
                if saved and saved % self.save == 0:
                    os.killpg(process.pid, signal.SIGSTOP)
                    score = self.text.bleu(self.translate(saved))
                    yield minutes[saved], saved, score, peak_of_tree(process.pid)
                    paused += time.perf_counter() - now
                    os.killpg(process.pid, signal.SIGCONT)

    def translate(self, update: int) -> list[str]:
        """Greedy translations of the validation sources, in pieces.

        Raises:
            RuntimeError: If the command fails.
        """
        output = self.folder / f"{update}.txt"
        name = Template(self.toolkit.checkpoint).substitute(update=update)
        command = self.command(
            self.toolkit.translate,
            source=self.text.folder / f"validation.{SIDES[0]}",
            output=output,
            # Marian has no folder for its model, so no path may lead through it.
            checkpoint=os.path.normpath(self.folder / "model" / name),
        )
        # Checkpoints of OpenNMT-py 3.0 hold objects, which torch refuses since 2.6.
        environment = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
        given: dict[str, Any] = {"shell": True, "cwd": self.folder, "env": environment}
        given |= {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run(command, check=False, **given)
        if done.returncode:
            raise RuntimeError(
                f"Translating must succeed, got status {done.returncode}: {command}\n"
                f"{done.stderr[-2000:]}"
            )
        return output.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def peak_of_tree(pid: int) -> int:
    """Bytes of a process and its children, each at its peak."""
    process = psutil.Process(pid)
    return sum(
        process_memory(process=one.pid) for one in (process, *process.children(recursive=True))
    )


def main() -> int:
    """Prints one table; returns the exit status."""
    parser = benchmark_parser(__doc__, rounds=2)
    parser.add_argument("--data", type=Path, required=True, help="Folder of the files.")
    add_toolkits(parser)
    parser.add_argument("--until_bleu", type=float, help="Measure the minutes to it instead.")
    parser.add_argument("--limit", type=float, default=60.0, help="Most minutes (default: 60).")
    options = parser.parse_args()
    pythons = pythons_of(parser, options)
    with tempfile.TemporaryDirectory() as folder:
        files = ([options.data / name for name in names] for names in (TRAIN, VALIDATION))
        text = prepare(Path(folder), *files, None if options.until_bleu else PAIRS)
        jobs = {name: partial(Job, TOOLKITS[name], pythons[name], text) for name in pythons}
        pairs, tokens, updates = len(text.lengths), int(text.lengths.sum()), text.updates[False]
        note = f"{pairs:,} pairs, {tokens:,} tokens, {updates:,} updates of {tokens / updates:,.0f}"
        report = Report(options.output)
        if options.until_bleu:
            report.table(note, *TIME)
            minutes_rows(report, text.folder, jobs, options.until_bleu, options.limit)
        else:
            report.table(note, *SPEED)
            speed_rows(report, text, jobs, options.rounds)
    return 1 if FAILED else 0


def add_toolkits(parser: argparse.ArgumentParser) -> None:
    """Adds the options for toolkits and their environments."""
    environments = {"nargs": "*", "default": [], "metavar": "NAME=PYTHON"}
    parser.add_argument("--environments", **environments, help="Toolkits that have their own.")
    parser.add_argument("--toolkits", nargs="+", help="Default: all that have an environment.")


def pythons_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, str]:
    """The Python of each toolkit that the options choose."""
    own = dict(entry.partition("=")[::2] for entry in options.environments)
    pythons = dict.fromkeys(OWN, sys.executable) | own
    chosen = options.toolkits or list(pythons)
    if unknown := [name for name in chosen if name not in pythons or name not in TOOLKITS]:
        parser.error(
            f"--toolkits must be of {', '.join(TOOLKITS)}, got {', '.join(unknown)}; all but "
            f"{', '.join(OWN)} need --environments {unknown[0]}=PYTHON"
        )
    return {name: pythons[name] for name in chosen}


def attempt(name: str, run: Callable[[], Result]) -> Result | None:
    """The result of a run; None, and a message, if the toolkit fails."""
    try:
        return run()
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"{name} failed. {error}", file=sys.stderr)
        FAILED.append(name)
        return None


def speed_rows(
    report: Report, text: Text, jobs: dict[str, Callable[..., Job]], rounds: int
) -> None:
    """Trains the toolkits in turn; speeds are compared with the first that did not fail."""
    numbers = count()

    def run(name: str) -> tuple[float, int] | None:
        # A report for each epoch.
        updates = text.updates[TOOLKITS[name].batches_by_tokens]
        job = jobs[name](text.folder / f"run-{next(numbers)}", updates)
        return attempt(name, job.second_report)

    measured = take_turns({name: partial(run, name) for name in jobs}, rounds)
    found = {name: list(zip(*each, strict=True)) for name, each in measured.items() if all(each)}
    for name in jobs:
        cells: Sequence[str] = FAILED
        if name in found:
            seconds, peaks = found[name]
            first, _ = next(iter(found.values()))
            speeds = speed_cells(int(text.lengths.sum()), seconds, first)
            cells = [*speeds, *megabytes(max(peaks))]
        report.row(name, *cells)


def minutes_rows(
    report: Report, folder: Path, jobs: dict[str, Callable[..., Job]], goal: float, limit: float
) -> None:
    """Trains one toolkit after another to the BLEU."""
    for name, make in jobs.items():
        job = make(folder / name, REPORT, SAVE)
        cells = attempt(name, partial(minutes_cells, job, goal, limit))
        report.row(name, *(cells or FAILED))


def minutes_cells(job: Job, goal: float, limit: float) -> list[str]:
    """Minutes, updates, BLEU and memory at the goal; the best BLEU if the limit comes first."""
    best = 0.0
    for minutes, updates, bleu, peak in job.scores():
        print(f"{minutes:.1f} minutes, {updates:,} updates: BLEU {bleu:.1f}", file=sys.stderr)
        best = max(best, bleu)
        if bleu >= goal or minutes >= limit:
            reached = f"{minutes:.1f}" if bleu >= goal else f"more than {minutes:.1f}"
            return [reached, f"{updates:,}", f"{best:.1f}", *megabytes(peak)]
    raise AssertionError("`scores` has no end")


if __name__ == "__main__":
    sys.exit(main())
