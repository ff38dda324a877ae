"""What happens between updates, without a model to train."""

import signal
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerControl, TrainerState

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.averaging import MOVING_AVERAGE_FILE, MovingAverage
from vanilla_transformer_tools.training.stopping import (
    StopOnRequest,
    StoppedBySignalError,
    interrupts_stop,
)

ARGUMENTS = {"world_size": 1, "device": torch.device("cpu"), "save_strategy": "steps"}


def arguments_of(**changes):
    return SimpleNamespace(**{**ARGUMENTS, "eval_strategy": "steps", **changes})


# The moving average


def test_moving_average_of_bfloat16_weights_is_in_float32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    average = MovingAverage(0.999)

    for weight in (1.0, 2.0):
        nn.init.constant_(model.weight, weight)
        average.on_step_end(model=model)

    # In bfloat16 it would have stayed at 1.
    torch.testing.assert_close(average.weights["weight"], torch.full((1, 1), 1.001))


def test_moving_average_is_taken_up_by_name(tmp_path):
    model = nn.ModuleDict({"b": nn.Linear(1, 1, bias=False), "a": nn.Linear(1, 1, bias=False)})
    (tmp_path / "checkpoint-7").mkdir()
    saved = {"a.weight": torch.full((1, 1), 1.0), "b.weight": torch.full((1, 1), 2.0)}
    save_file(saved, tmp_path / "checkpoint-7" / MOVING_AVERAGE_FILE)
    average, state = MovingAverage(0.5), TrainerState(global_step=7)
    arguments = arguments_of(output_dir=tmp_path)

    average.on_train_begin(arguments, state, TrainerControl(), model=model)
    for name, weight in (("a", 0.0), ("b", 4.0)):
        nn.init.constant_(model[name].weight, weight)
    average.on_step_end(model=model)

    (tmp_path / "new").mkdir()
    average.save(tmp_path / "new", writes=True)
    expected = {"a.weight": torch.full((1, 1), 0.5), "b.weight": torch.full((1, 1), 3.0)}
    torch.testing.assert_close(load_file(tmp_path / "new" / MOVING_AVERAGE_FILE), expected)


# Ending early


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test turns, in seconds."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize(("minutes", "seconds", "is_over"), [(1.5, 89, False), (1.5, 91, True)])
def test_minutes_of_a_run_are_minutes(clock, minutes, seconds, is_over):
    stop, control = StopOnRequest(TrainSettings(max_minutes=minutes)), TrainerControl()
    stop.on_train_begin(arguments_of(), TrainerState(), control)
    clock.now += seconds

    stop.on_step_end(arguments_of(), TrainerState(), control)

    assert control.should_training_stop == is_over
    assert stop.signum == signal.SIGTERM


@pytest.mark.parametrize(
    ("changes", "interrupted", "done", "saves", "scores"),
    [
        ({}, False, [], True, True),
        ({}, True, [], True, False),
        ({}, False, ["on_save"], False, True),
        ({}, False, ["on_evaluate"], True, False),
        ({"save_strategy": "no"}, False, [], False, True),
        ({"eval_strategy": "no"}, False, [], True, False),
    ],
)
def test_early_end_is_saved_and_scored_once(clock, changes, interrupted, done, saves, scores):
    arguments, state, control = arguments_of(**changes), TrainerState(), TrainerControl()
    stop = StopOnRequest(TrainSettings(max_minutes=0.0))
    stop.interrupted = interrupted
    stop.on_train_begin(arguments, state, control)
    clock.now += 1
    state.global_step = 5
    for event in done:
        getattr(stop, event)(arguments, state, control)

    stop.on_step_end(arguments, state, control)
    stop.on_epoch_end(arguments, state, control)

    assert (control.should_save, control.should_evaluate) == (saves, scores)


def test_first_signal_only_asks_a_run_that_can_finish(capsys):
    stop = StopOnRequest(TrainSettings(finish_within=3))

    with interrupts_stop(stop):
        signal.raise_signal(signal.SIGINT)
        assert (stop.asked, stop.interrupted) == (True, False)
        assert "Finishing within 3 minutes. Repeat" in capsys.readouterr().out
        signal.raise_signal(signal.SIGINT)
        assert stop.interrupted
        assert "Stopping after this update" in capsys.readouterr().out
        with pytest.raises(StoppedBySignalError):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("world_size", [1, 2])
def test_processes_finish_when_all_know_that_one_was_asked(monkeypatch, world_size):
    here, there = (StopOnRequest(TrainSettings(finish_within=3)) for _ in range(2))
    there.asked = True
    votes = torch.tensor([0, 0, 1])
    monkeypatch.setattr("vanilla_transformer_tools.training.stopping.reduce", lambda *_: votes)
    control = TrainerControl()
    assert not there.finishing

    for stop in (here, there):
        stop.on_step_end(arguments_of(world_size=world_size), TrainerState(), control)

    assert there.finishing
    # A signal that comes now is the second one.
    assert (here.finishing, here.asked) == (world_size == 2, world_size == 2)
    assert not control.should_training_stop
