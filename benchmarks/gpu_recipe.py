"""Updates of `vanilla-transformer train`, and of Seq2SeqTrainer with and without FSDP2."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_report import Report
from memory import measure_alone
from neighbours import COMMON, best_device, build
from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.settings import PRESETS

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from number_words import write_corpus

NOTE = (
    "German number words to English ones. `train` has its own recipe and batches; the two of "
    "Seq2SeqTrainer have the same batches, so their losses must agree. MB: the peak of the GPU's "
    "memory, or of the process without a GPU."
)
COLUMNS = ("run", "updates", "seconds", "first loss", "last loss", "MB")
NEEDED = ("vanilla-transformer", "datasets", "evaluate")
VOCABULARY = 400
ALONE, SHARDED = "Seq2SeqTrainer", "Seq2SeqTrainer, FSDP2 of one process"
# Of the last loss: half precision rounds in other places.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Sizes:
    """What is trained.

    Attributes:
        preset: Key of `PRESETS`.
        updates: Of each run.
        reports: Number of losses that a run reports.
        pairs: Of the corpus.
        batch_size: Pairs of a batch of Seq2SeqTrainer.
        max_tokens: Tokens of a batch of `train`.
    """

    preset: str
    updates: int
    reports: int
    pairs: int
    batch_size: int
    max_tokens: int


FULL = Sizes("base", 300, 6, 40_000, 512, 25_000)
SMOKE = Sizes("tiny", 4, 2, 60, 8, 400)

# Seconds of a run, and the losses that it reported, in their order.
Losses = tuple[float, list[float]]


def run(report: Report, smoke: bool) -> None:
    """Fills a table."""
    sizes = SMOKE if smoke else FULL
    table = report.table(f"{sizes.preset}, {sizes.updates} updates", *COLUMNS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_corpus(folder, train=sizes.pairs, validation=4, test=1)
        runs = {
            "train": partial(command, folder, sizes),
            ALONE: partial(by_trainer, folder, sizes, shard=False),
            SHARDED: partial(by_trainer, folder, sizes, shard=True),
        }
        if missing := [name for name in NEEDED if not is_installed(name)]:
            report.left_out["train"] = f"{', '.join(missing)} not installed"
            del runs["train"]
        last = {}
        for name, work in runs.items():
            if done := report.attempt(name, work):
                (seconds, losses), megabytes = done
                last[name] = losses[-1]
                report.add(table, name, sizes.updates, seconds, losses[0], last[name], megabytes)
    if last.keys() >= {ALONE, SHARDED}:
        report.attempt("losses", partial(check_same, last[ALONE], last[SHARDED]))


def check_same(alone: float, sharded: float) -> None:
    """Refuses other losses.

    Raises:
        ValueError: If they differ by more than `TOLERANCE`.
    """
    # Written so that NaN fails.
    if not abs(sharded - alone) <= TOLERANCE * alone:
        raise ValueError(
            f"The last loss under FSDP2 must be that without, within {TOLERANCE:.0%}, got "
            f"{sharded:.4g} and {alone:.4g}."
        )


def is_installed(package: str) -> bool:
    """Whether pip knows the package."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def command(folder: Path, sizes: Sizes) -> tuple[Losses, None]:
    """A run of the command line."""
    output = folder / "model"
    options = {
        "output_dir": output,
        "preset": sizes.preset,
        "vocab_size": VOCABULARY,
        "max_tokens_per_batch": sizes.max_tokens,
        "max_steps": sizes.updates,
        "logging_steps": sizes.updates // sizes.reports,
        "save_strategy": "no",
        "report_to": "none",
    }
    given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    files = [str(folder / f"train.{language}") for language in ("de", "en")]
    started = time.perf_counter()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "vanilla_transformer_tools.commands",
            "train",
            "--train",
            *files,
            *given,
        ],
        stdout=sys.stderr,
        check=False,
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"`train` must end with status 0, got {done.returncode}; see above")
    log = (output / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return (seconds, losses_of(map(json.loads, log))), None


def losses_of(reports: Any) -> list[float]:
    """Training losses among the reports of a Trainer."""
    return [report["loss"] for report in reports if "loss" in report]


def by_trainer(folder: Path, sizes: Sizes, shard: bool) -> tuple[Losses, float]:
    """A run of Seq2SeqTrainer in a process of its own, and its peak of memory in MB.

    Raises:
        RuntimeError: If weights that should be sharded are not.
    """
    memory = measure_alone(train_in_this_process, folder, sizes, shard)
    seconds, losses, sharded, on_gpu = memory.result
    if shard and not sharded:
        raise RuntimeError("FSDP2 must shard every weight, and left some of them whole")
    return (seconds, losses), (on_gpu or memory.peak) / 1e6


def train_in_this_process(
    folder: Path, sizes: Sizes, shard: bool
) -> tuple[float, list[float], bool, int]:
    """Seconds, losses, whether every weight was sharded, and the bytes of the GPU's memory.

    Args:
        folder: Of the corpus.
        sizes: Of model and run.
        shard: Trains by FSDP2, as the only process of its group.
    """
    if shard:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"} | address
    import torch
    from accelerate import DistributedType, PartialState
    from torch.distributed.tensor import DTensor
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    arguments = Seq2SeqTrainingArguments(
        str(folder / f"trainer-{shard}"),
        max_steps=sizes.updates,
        per_device_train_batch_size=sizes.batch_size,
        logging_steps=sizes.updates // sizes.reports,
        learning_rate=5e-4,
        bf16=best_device() == "cuda",
        use_cpu=best_device() == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **{"fsdp": True} if shard else {},
    )
    if shard and best_device() == "cpu":
        # There accelerate drops the request in silence; all that follows can shard.
        PartialState().distributed_type = DistributedType.MULTI_GPU
    tokenizer, pairs = encoded(folder)
    torch.manual_seed(0)
    # Without dropout both runs have the same losses.
    changes = PRESETS[sizes.preset].config() | {"dropout": 0.0, "vocab_size": len(tokenizer)}
    model = build("vanilla", **COMMON | changes)
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=pairs,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    sharded = all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    if shard:
        torch.distributed.destroy_process_group()
    on_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return seconds, losses_of(trainer.state.log_history), sharded, on_gpu


def encoded(folder: Path) -> tuple[VanillaTransformerTokenizer, list[dict[str, list[int]]]]:
    """A joint vocabulary of the corpus, and its token ids."""
    sources, targets = (
        (folder / f"train.{language}").read_text(encoding="utf-8").splitlines()
        for language in ("de", "en")
    )
    tokenizer = VanillaTransformerTokenizer.train([*sources, *targets], vocab_size=VOCABULARY)
    columns = (tokenizer(lines)["input_ids"] for lines in (sources, targets))
    return tokenizer, [
        {"input_ids": source, "labels": target} for source, target in zip(*columns, strict=True)
    ]


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
