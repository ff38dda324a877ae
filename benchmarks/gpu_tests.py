"""The tests marked `gpu`, and how often a step makes the host wait for the device."""

import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor

from gpu_report import Report
from neighbours import build
from vanilla_transformer_tools.settings import PRESETS

# The tests hold the same counts.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.pretended_device import move, pretended_device, put

ROOT = Path(__file__).parents[1]
NOTE = (
    "A wait is an operation whose result the host needs before it continues: counted by its kind "
    "on a device that a CPU pretends to have, and, on a GPU, by CUDA's own reports "
    "(`torch.cuda.set_sync_debug_mode`). Those of a search are means per token."
)
# How many, as CUDA reports them, and the operations.
Waits = tuple[float, float | None, str]
# New tokens of two searches, whose difference is the cost of the tokens between.
SHORT, LONG = 8, 24
VOCABULARY = 1000


def run(report: Report, smoke: bool) -> None:
    """Fills both tables."""
    outcomes = report.table("Tests marked `gpu`", "test", "outcome", "seconds")
    for name, outcome, seconds in report.attempt("pytest", marked_tests) or []:
        report.add(outcomes, name, outcome, seconds)
        if outcome == "failed":
            report.failures[name] = "see above"
    counts = report.table("Waits for the device", "step", "waits", "CUDA's reports", "operations")
    for name, make in {**training_steps(), **decoding_steps()}.items():
        if found := report.attempt(name, make):
            report.add(counts, name, *found)


def marked_tests() -> list[tuple[str, str, float]]:
    """Name, outcome and seconds of each test marked `gpu`."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    ]
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.xml"
        options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *files],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])},
            # Reports belong to stderr here.
            stdout=sys.stderr,
            check=False,
        )
        return read_outcomes(results.read_text(encoding="utf-8"))


def read_outcomes(xml: str) -> list[tuple[str, str, float]]:
    """Name, outcome and seconds of each test of a JUnit report."""
    outcomes = []
    for case in ElementTree.fromstring(xml).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        if "skipped" in kinds:
            outcome = "skipped"
        outcomes.append((case.attrib["name"], outcome, float(case.attrib["time"])))
    return outcomes


def training_steps() -> dict[str, Callable[[], Waits]]:
    """Waits of a forward and backward pass."""

    def count(attention: str, padded: bool) -> Waits:
        batch = toy_batch(padded)

        def step(model: torch.nn.Module, inputs: dict[str, Tensor]) -> None:
            model(**inputs, num_items_in_batch=9).loss.backward()

        reported = None
        if torch.cuda.is_available():
            # `varlen` has kernels for half precision only.
            model = tiny(attention).train().cuda().bfloat16()
            inputs = {name: tensor.cuda() for name, tensor in batch.items()}
            step(model, inputs)
            reported = reported_waits(partial(step, model, inputs))
        with pretended_device() as pretended:
            model, inputs = move(tiny(attention).train()), put(batch)
            pretended.waits.clear()
            step(model, inputs)
            return len(pretended.waits), reported, kinds(pretended.waits, 1)

    return {
        "training, padding": partial(count, "sdpa", padded=True),
        "training, no padding": partial(count, "sdpa", padded=False),
        "training, varlen": partial(count, "varlen", padded=True),
    }


def decoding_steps() -> dict[str, Callable[[], Waits]]:
    """Waits of a token of this package's searches and of Transformers'."""

    def count(num_beams: int, theirs: bool) -> Waits:
        batch = toy_batch(padded=True)
        source = {name: batch[name] for name in ("input_ids", "attention_mask")}
        steps = LONG - SHORT

        def searches(model: Any, inputs: dict[str, Tensor]) -> list[Callable[[], Any]]:
            model.generation_config.use_transformers_search = theirs
            settings = {"num_beams": num_beams, "do_sample": False}
            never = [model.config.eos_token_id]
            search = partial(model.generate, **inputs, **settings, suppress_tokens=never)
            return [partial(search, max_new_tokens=tokens) for tokens in (SHORT, LONG)]

        reported = None
        if torch.cuda.is_available():
            inputs = {name: tensor.cuda() for name, tensor in source.items()}
            short, long = searches(tiny("sdpa").eval().cuda(), inputs)
            long()
            reported = (reported_waits(long) - reported_waits(short)) / steps
        with pretended_device() as pretended:
            counts = []
            for search in searches(move(tiny("sdpa").eval()), put(source)):
                pretended.waits.clear()
                search()
                counts.append(Counter(pretended.waits))
            extra = counts[1] - counts[0]
            return extra.total() / steps, reported, kinds(extra.elements(), steps)

    return {
        f"{'greedy' if num_beams == 1 else f'beam {num_beams}'}, {name}": partial(
            count, num_beams, theirs
        )
        for num_beams in (1, 4)
        for name, theirs in (("our search", False), ("Transformers' search", True))
    }


def reported_waits(work: Callable[[], Any]) -> int:
    """How often CUDA itself reports that the host waits."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(one.message) for one in caught)


def kinds(names: Iterable[str], steps: int) -> str:
    """Operations and how often a step has each."""
    counted = Counter(names)
    return ", ".join(f"{count / steps:.3g} x {name}" for name, count in counted.items()) or "none"


def tiny(attention: str) -> torch.nn.Module:
    """A small model with heads that all kernels take, in float32 on the CPU."""
    torch.manual_seed(0)
    sizes = PRESETS["tiny"].config() | {"vocab_size": VOCABULARY}
    return build("vanilla", **sizes, attn_implementation=attention)


def toy_batch(padded: bool) -> dict[str, Tensor]:
    """Four pairs, of several lengths if padded."""
    generator = torch.Generator().manual_seed(0)
    lengths = (12, 9, 5, 7) if padded else (12, 12, 12, 12)
    ids = torch.randint(4, VOCABULARY, (4, 12), generator=generator)
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    return {
        "input_ids": ids * mask,
        "attention_mask": mask.long(),
        "labels": ids.flip(1).where(mask, -100),
    }
