"""A run that was killed five times and resumed ends with the bits of one that was not."""

import random
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from vanilla_transformer_tools.training.run_record import read_log

from ..support.commands import command_server
from ..support.training_runs import read_json, training_options

pytestmark = pytest.mark.slow

UPDATES = 300
KILLS = 5

VALIDATED = ["--eval_strategy", "steps", "--eval_steps", "20", "--metric_for_best_model", "loss"]
VALIDATED += ["--predict_with_generate", "false", "--max_validation_pairs", "4"]
VALIDATED += ["--moving_average", "0.9"]
DRAWN = ["--bpe_dropout", "0.1", "--r_drop", "1"]
STREAMED = ["--streaming", "--shuffle_buffer", "90", "--tokenizer_pairs", "300"]

RUNS = {
    "float32": (["--bf16", "false", *DRAWN], True),
    "bf16_stream": (["--bf16", "true", *STREAMED, "--gradient_accumulation_steps", "2"], False),
}


@pytest.fixture(scope="module")
def server():
    with command_server() as server:
        yield server


def options_of(corpus, options, *, validated):
    given = [*training_options(corpus, "d_model=40"), "--max_tokens_per_batch", "600"]
    given += ["--logging_steps", "1", "--max_steps", UPDATES]
    given += ["--save_strategy", "steps", "--save_steps", "20"]
    if validated:
        pair = [corpus / f"validation.{language}" for language in ("de", "en")]
        given += ["--validation", *pair, *VALIDATED]
    return [*given, *options]


def state_of(folder):
    """All numbers that a run ends with."""
    checkpoint = folder / f"checkpoint-{UPDATES}"
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    state = {
        f"{number} {name}": value
        for number, values in optimizer.items()
        for name, value in values.items()
    }
    for file in (folder / "model.safetensors", *checkpoint.glob("*.safetensors")):
        tensors = load_file(file)
        state |= {f"{file.relative_to(folder)} {name}": value for name, value in tensors.items()}
    return state


def losses_of(folder):
    reports = read_log(folder / "log.jsonl")
    return [(report["step"], report["loss"]) for report in reports if "loss" in report]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_resumed_run_is_bit_equal_when_it_was_killed_five_times(server, corpus, tmp_path, name):
    changes, validated = RUNS[name]
    options = options_of(corpus, changes, validated=validated)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    # One kill in each part of the run, long before its end.
    draw = random.Random(name)
    moments = [50 * part + draw.randrange(25, 48) for part in range(KILLS)]

    undisturbed = server.run(tmp_path, "train", *options, "--output_dir", whole)
    assert undisturbed.status == 0, undisturbed.errors
    for number, moment in enumerate(moments):
        resume = ["--resume"] * bool(number)
        command = server.start(tmp_path, "train", *options, "--output_dir", killed, *resume)
        command.wait_until(partial(reached, killed, moment))
        command.signal(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL, command.errors
    last = server.run(tmp_path, "train", *options, "--output_dir", killed, "--resume")

    assert last.status == 0, last.errors
    assert len(read_json(killed / "run.json")["previous_runs"]) == KILLS
    assert losses_of(killed) == losses_of(whole)
    torch.testing.assert_close(state_of(killed), state_of(whole), rtol=0, atol=0)


def reached(folder, update):
    return any(report["step"] >= update for report in read_log(folder / "log.jsonl"))
