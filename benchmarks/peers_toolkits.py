"""Toolkits that train on the same segmented text, each as its user runs it; for peers.py."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from string import Template
from typing import Any, Self

import numpy as np
import psutil
from sacrebleu.metrics import BLEU

from lab import process_memory
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerTokenizer
from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.text.parallel_text import ParallelText, read_pairs

CONFIGS = Path(__file__).with_name("peers")
_SIDES = ("en", "de")
_LAST_LINES, _MANY = 20, 1_000_000
_BLANK = "▁"


@dataclass(frozen=True)
class Toolkit:
    """What a user writes and runs, with placeholders for `string.Template`.

    Attributes:
        files: In `CONFIGS`, written by the user; the first one has placeholders.
        train: Command after `python`.
        report: Found in the lines that training prints, one every `$$report` updates.
        checkpoint: Below `$$run`, after `$$update` updates.
        translate: Command that translates `$$source` greedily.
        reads_input: Whether it reads the source from the standard input.
        writes_output: Whether it writes `$$output`, and not to the standard output.
        environment: Whether it needs an environment of its own.
        batches_by_tokens: Whether its batches hold a budget of tokens, and not of pairs.
        bf16: Whether matrix products are in bfloat16.
    """

    files: tuple[str, ...]
    train: str
    report: str
    checkpoint: str
    translate: str
    reads_input: bool = False
    writes_output: bool = True
    environment: bool = True
    batches_by_tokens: bool = False
    bf16: bool = False

    def lines(self) -> int:
        """Lines that a user writes, without empty ones and comments."""
        text = "\n".join((CONFIGS / name).read_text(encoding="utf-8") for name in self.files)
        comments = ("#", '"""')
        return sum(
            not line.startswith(comments) for line in map(str.strip, text.split("\n")) if line
        )


_VANILLA: dict[str, Any] = {
    "files": ("vanilla.yaml",),
    "train": "-m vanilla_transformer_tools.commands train $config",
    "report": r"^step +[\d,]+/.*loss",
    "checkpoint": "checkpoint-$update",
    "translate": "-m vanilla_transformer_tools.commands translate --model $checkpoint "
    "--num_beams 1 --input $source --output $output",
    "environment": False,
    "batches_by_tokens": True,
}
TOOLKITS = {
    "vanilla": Toolkit(**_VANILLA),
    "vanilla-bf16": Toolkit(**_VANILLA, bf16=True),
    "m2m100": Toolkit(
        ("m2m100.yaml", "m2m100.py"),
        "$configs/m2m100.py $config $data",
        r"^\{'loss'",
        "checkpoint-$update",
        "$configs/m2m100_translate.py $checkpoint",
        reads_input=True,
        writes_output=False,
        environment=False,
    ),
    "joeynmt": Toolkit(
        ("joeynmt.yaml",),
        "-m joeynmt train $config --skip-test",
        r"Step: +\d+, Batch Loss",
        "$update.ckpt",
        "-m joeynmt translate $config",
        reads_input=True,
        writes_output=False,
    ),
    "opennmt": Toolkit(
        ("opennmt.yaml",),
        "-m onmt.bin.train -config $config",
        r"Step +\d+/",
        "model_step_$update.pt",
        "-m onmt.bin.translate -model $checkpoint -src $source -output $output -beam_size 1",
    ),
    "eole": Toolkit(
        ("eole.yaml",),
        "-m eole.bin.main train -config $config",
        r"Step +\d+/",
        "step_$update",
        "-m eole.bin.main predict -model_path $checkpoint -src $source -output $output "
        "-beam_size 1",
    ),
    "marian": Toolkit(
        ("marian.yaml",),
        "-c 'import pymarian; pymarian.Trainer(\"-c $config\").train()'",
        r" Up\. \d+ ",
        "../model.iter$update.npz",
        "-c 'import sys, pymarian; "
        'model = pymarian.Translator("-m $checkpoint -v $data/vocab.yml $data/vocab.yml -b 1"); '
        "print(*model.translate(sys.stdin.read().splitlines()), sep=chr(10))'",
        reads_input=True,
        writes_output=False,
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
        max_tokens: Of our batches, on both sides, padding counted.
        pairs_per_update: As many as ours have on average.
        updates: Of an epoch, by whether batches hold a budget of tokens.
    """

    folder: Path
    tokenizer: VanillaTransformerTokenizer
    lengths: np.ndarray
    references: list[str]
    max_tokens: int
    pairs_per_update: int
    updates: dict[bool, int]

    @classmethod
    def prepare(
        cls,
        folder: Path,
        train: list[str],
        validation: list[str],
        *,
        vocab_size: int,
        max_tokens: int,
        max_pairs: int | None,
    ) -> Self:
        """Learns a vocabulary and writes the files.

        Args:
            folder: Folder of the files.
            train: Source and target file, in which blanks separate tokens.
            validation: Source and target file for scores.
            vocab_size: Most pieces, and special tokens.
            max_tokens: Tokens of our batches.
            max_pairs: Pairs to train on, the first ones; None: all. The vocabulary is that of all.
        """
        pairs = list(read_pairs(ParallelText(tuple(train))))
        tokenizer = VanillaTransformerTokenizer.train(
            chain.from_iterable(pairs), vocab_size=vocab_size, pretokenized=True
        )
        sides = (_in_pieces(tokenizer, side) for side in zip(*pairs, strict=True))
        cut = list(zip(*sides, strict=True))
        _write_vocabulary(folder, chain.from_iterable(cut), vocab_size)

        lengths = np.array([[1 + len(side.split()) for side in pair] for pair in cut])
        lengths, updates = _whole_batches(lengths[:max_pairs], max_tokens)
        held_out = list(read_pairs(ParallelText(tuple(validation))))
        sources = _in_pieces(tokenizer, [source for source, _ in held_out])
        for name, rows in (("train", cut[: len(lengths)]), ("first", cut[:1])):
            for language, side in zip(_SIDES, zip(*rows, strict=True), strict=True):
                _write_lines(folder / f"{name}.{language}", side)
        _write_lines(folder / f"validation.{_SIDES[0]}", sources)
        return cls(
            folder,
            tokenizer,
            lengths,
            [target for _, target in held_out],
            max_tokens,
            len(lengths) // updates[False],
            updates,
        )

    def bleu(self, translations: list[str]) -> float:
        """Of the validation pairs, translated in pieces; no tokens are separated any further."""
        if len(translations) != len(self.references):
            raise ValueError(
                f"There must be {len(self.references)} translations, got {len(translations)}."
            )
        to_ids = self.tokenizer.convert_tokens_to_ids
        rows = [[piece.replace(_BLANK, " ") for piece in line.split()] for line in translations]
        joined = [self.tokenizer.decode(to_ids(row)) for row in rows]
        return BLEU(tokenize="none", force=True).corpus_score(joined, [self.references]).score


def _whole_batches(lengths: np.ndarray, max_tokens: int) -> tuple[np.ndarray, dict[bool, int]]:
    """As many pairs as fill batches of equal numbers, and both kinds of updates of an epoch."""
    updates = len(TokenBatchSampler(lengths, max_tokens, seed=0))
    lengths = lengths[: len(lengths) // updates * updates]
    return lengths, {
        False: updates,
        True: len(TokenBatchSampler(lengths, max_tokens, seed=0)),
    }


def _in_pieces(tokenizer: VanillaTransformerTokenizer, lines: Sequence[str]) -> list[str]:
    rows = tokenizer(list(lines), add_special_tokens=False).input_ids
    # Pieces that begin a word begin with a blank.
    return [
        " ".join(piece.replace(" ", _BLANK) for piece in tokenizer.convert_ids_to_tokens(row))
        for row in rows
    ]


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _write_vocabulary(folder: Path, lines: Iterable[str], vocab_size: int) -> None:
    """As a list, and as our tokenizer of whole words."""
    words = VanillaTransformerTokenizer.train(lines, vocab_size=vocab_size, kind="word")
    words.save_pretrained(folder / "tokenizer")
    VanillaTransformerConfig(vocab_size=len(words)).save_pretrained(folder / "tokenizer")
    ids = [i for i in range(len(words)) if i not in words.all_special_ids]
    entries = words.convert_ids_to_tokens(ids)
    _write_lines(folder / "vocab.txt", entries)
    # Marian's has numbers, and names of its own. JSON is YAML.
    numbers = {entry: number for number, entry in enumerate(["</s>", "<unk>", *entries])}
    _write_lines(folder / "vocab.yml", [json.dumps(numbers)])


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
    """

    toolkit: Toolkit
    python: str
    text: Text
    folder: Path
    report: int
    save: int
    _last: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))

    def _values(self, **more: object) -> dict[str, object]:
        return {
            "configs": CONFIGS,
            "config": self.folder / self.toolkit.files[0],
            "data": self.text.folder,
            "run": self.folder / "model",
            "tokens": self.text.max_tokens,
            "pairs": self.text.pairs_per_update,
            "bucket": len(self.text.lengths),
            "bf16": str(self.toolkit.bf16).lower(),
            "seed": 1,
            "updates": _MANY,
            "report": self.report,
            "save": self.save,
            "checkpoint": "",
            **more,
        }

    def _command(self, arguments: str, values: Mapping[str, object]) -> list[str]:
        template = CONFIGS / self.toolkit.files[0]
        text = Template(template.read_text(encoding="utf-8")).substitute(values)
        Path(str(values["config"])).write_text(text, encoding="utf-8")
        return [self.python, *shlex.split(Template(arguments).substitute(values))]

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """The process, which is ended with its children."""
        self.folder.mkdir()
        process = subprocess.Popen(
            self._command(self.toolkit.train, self._values()),
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
        source, output = self.text.folder / "validation.en", self.folder / f"{update}.txt"
        name = Template(self.toolkit.checkpoint).substitute(update=update)
        checkpoint = self.folder / "model" / name
        config = self.folder / f"translate-{self.toolkit.files[0]}"
        values = self._values(source=source, output=output, checkpoint=checkpoint, config=config)
        command = self._command(self.toolkit.translate, values)
        with source.open() if self.toolkit.reads_input else open(os.devnull) as lines:
            done = subprocess.run(
                command,
                cwd=self.folder,
                stdin=lines,
                capture_output=True,
                # Checkpoints of OpenNMT-py 3.0 hold objects, which torch refuses since 2.6.
                env={**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
                text=True,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(
                f"Translating must succeed, got status {done.returncode}: {' '.join(command)}\n"
                f"{done.stderr[-2000:]}"
            )
        text = output.read_text(encoding="utf-8") if self.toolkit.writes_output else done.stdout
        return text.removesuffix("\n").split("\n")


def peak_of_tree(pid: int) -> int:
    """Bytes of a process and its children, each at its peak."""
    process = psutil.Process(pid)
    return sum(
        process_memory(process=one.pid) for one in (process, *process.children(recursive=True))
    )
