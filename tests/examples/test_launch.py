"""Two processes under the files of `examples/launch` train the model of one process."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from ..support import run_sharded
from ..support.documents import ROOT
from ..support.launching import free_port, launch
from ..support.scripts import run_script
from .conftest import SOURCES, TARGETS, pairs_of

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
EPOCHS = {
    "finetune_with_trainer.py": "--num_train_epochs",
    "finetune_with_accelerate.py": "--epochs",
}
SIZES = {
    "finetune_with_trainer.py": "--per_device_train_batch_size",
    "finetune_with_accelerate.py": "--batch_size",
}


def launcher(file: str) -> list[str]:
    return ["accelerate.commands.launch", "--config_file", str(EXAMPLES / "launch" / file)]


def machines(file: str) -> list[list[str]]:
    """What each machine adds to the file; there is a launcher on each."""
    if file != "two_machines.yaml":
        return [[]]
    port = str(free_port())
    return [["--machine_rank", rank, "--main_process_port", port] for rank in "01"]


def options(script: str, place: Path, folder: Path, batch_size: int) -> list[str]:
    """Three updates on all sentences, whatever the number of processes."""
    given = ["--model", place / "model", "--output_dir", folder, *pairs_of(place)]
    given += [EPOCHS[script], 3, SIZES[script], batch_size, "--warmup_steps", 1]
    if script == "finetune_with_trainer.py":
        # The last weights, not the best.
        given += ["--load_best_model_at_end", "false"]
    return list(map(str, given))


def logits_of(folder: Path) -> torch.Tensor:
    """For the first sentence. Weights would differ where Adam makes a step out of rounding."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(SOURCES[1], text_target=TARGETS[1], return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits


@pytest.fixture
def shared_cache(tmp_path, monkeypatch):
    """Where the processes keep what they have read."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("file", "script"),
    [
        ("ddp.yaml", "finetune_with_trainer.py"),
        ("ddp.yaml", "finetune_with_accelerate.py"),
        ("fsdp.yaml", "finetune_with_trainer.py"),
        ("fsdp.yaml", "finetune_with_accelerate.py"),
        ("two_machines.yaml", "finetune_with_trainer.py"),
    ],
)
def test_two_processes_train_the_model_of_one(place, tmp_path, shared_cache, file, script):
    alone, together = tmp_path / "alone", tmp_path / "together"
    done = run_script(EXAMPLES / script, *options(script, place, alone, len(SOURCES)))
    assert done.returncode == 0, done.stderr

    command = [str(EXAMPLES / script), *options(script, place, together, len(SOURCES) // 2)]
    if file == "fsdp.yaml":
        command = [run_sharded.__file__, str(tmp_path / "sharded"), *command]
    launchers = [[*launcher(file), *added] for added in machines(file)]
    with ThreadPoolExecutor() as threads:
        ended = [threads.submit(launch, *command, launcher=one) for one in launchers]
    for one in ended:
        one.result()

    expected = logits_of(alone)
    torch.testing.assert_close(logits_of(together), expected, rtol=0, atol=1e-3)
    assert (logits_of(place / "model") - expected).abs().max() > 1e-2
    assert len(list(tmp_path.glob("sharded-*"))) == (2 if file == "fsdp.yaml" else 0)
