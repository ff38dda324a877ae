"""The end of a run: by the clock, which a test turns, or by a signal; the rate that falls to 0."""

import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState, get_constant_schedule_with_warmup

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training import plan
from vanilla_transformer_tools.training import run as training
from vanilla_transformer_tools.training.minutes import Decision
from vanilla_transformer_tools.training.schedule import Schedule

from ..support.training_runs import read_json, run_training


def arguments_of(**changes):
    defaults = {"world_size": 1, "save_strategy": "steps", "eval_strategy": "steps"}
    return SimpleNamespace(device=torch.device("cpu"), **defaults | changes)


ARGUMENTS = arguments_of()


class Run:
    """A run of 100 seconds without a model, with a learning rate of 1.

    `reading` is how long it takes to begin.
    """

    def __init__(
        self,
        monkeypatch,
        warmup=0,
        checkpoint=None,
        first=0,
        now=1000.0,
        reading=0.0,
        evaluations=1,
    ):
        self.now = now
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.state = TrainerState(global_step=first, max_steps=10**9)
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        self.scheduler = get_constant_schedule_with_warmup(optimizer, warmup)
        self.control = TrainerControl()
        self.stop = Schedule(TrainSettings(minutes=100 / 60), self.now, checkpoint, evaluations)
        self.now += reading
        self.tell("on_train_begin", lr_scheduler=self.scheduler)

    def tell(self, event, **others):
        getattr(self.stop, event)(ARGUMENTS, self.state, self.control, **others)

    def update(self, seconds):
        """In the order of Trainer; returns the rate of the next update."""
        self.now += seconds
        self.scheduler.optimizer.step()
        self.scheduler.step()
        self.state.global_step += 1
        # As Trainer's own callback, the first one, does.
        self.control.should_training_stop = self.state.global_step >= self.state.max_steps
        self.tell("on_step_end", lr_scheduler=self.scheduler)
        return self.scheduler.get_last_lr()[0]

    def to_the_end(self, seconds):
        rates = []
        while not self.control.should_training_stop:
            rates.append(self.update(seconds))
        return rates


@pytest.mark.parametrize("pace", [0.25, 4.0])
def test_rate_ends_at_zero_with_the_time_at_any_pace(monkeypatch, pace):
    run = Run(monkeypatch)

    rates = run.to_the_end(pace)

    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.9
    assert rates[-1] <= 2 * pace / 100
    # 3 % are reserved.
    assert 97 <= run.now - 1000 <= 97 + pace


def test_rate_rises_to_the_end_of_the_warm_up(monkeypatch):
    run = Run(monkeypatch, warmup=10)

    rates = [run.update(0.5) for _ in range(11)]

    assert rates[:10] == sorted(rates[:10])
    assert rates[0] < 0.2 < 0.9 < rates[9]
    assert rates[10] < rates[9]


@pytest.mark.parametrize(("evaluations", "end"), [(1, 89), (3, 75)])
def test_time_for_the_last_evaluations_and_checkpoint_is_reserved(monkeypatch, evaluations, end):
    run = Run(monkeypatch, evaluations=evaluations)
    run.update(10)
    run.now += 7
    run.tell("on_evaluate")
    run.now += 2
    run.tell("on_save")

    run.to_the_end(0.5)

    # 7 seconds for each, and 2 for a checkpoint and for the folder each.
    assert end < run.now - 1000 <= end + 0.5


def test_evaluation_is_left_out_when_it_leaves_updates_less_time_than_it_takes(monkeypatch):
    run = Run(monkeypatch)
    run.update(10)
    run.now += 7
    run.tell("on_evaluate")

    # The last evaluation begins after 93 seconds.
    for seconds, is_made in ((60, True), (5, False)):
        run.control.should_evaluate = run.control.should_save = True
        run.update(seconds)
        assert (run.control.should_evaluate, run.control.should_save) == (is_made, is_made)


def test_number_of_updates_is_estimated_and_never_the_next_one(monkeypatch):
    run = Run(monkeypatch)

    run.update(0.97)

    assert run.state.max_steps == pytest.approx(100, abs=3)
    while not run.control.should_training_stop:
        run.update(9)
        assert run.state.max_steps > run.state.global_step + 1


def save(run, folder):
    run.state.save_to_json(str(folder / "trainer_state.json"))
    return folder


def test_resumed_run_keeps_to_the_time_that_was_left(monkeypatch, tmp_path):
    run = Run(monkeypatch)
    run.update(48.5)
    checkpoint = save(run, tmp_path)

    resumed = Run(monkeypatch, checkpoint=checkpoint, first=1, now=9e9)

    assert resumed.stop.minutes_left == pytest.approx(51.5 / 60)
    rates = resumed.to_the_end(1.0)
    assert rates[0] == pytest.approx(0.5)
    assert resumed.now - 9e9 == pytest.approx(49, abs=1)


def test_resumed_run_without_time_is_over(monkeypatch, tmp_path):
    run = Run(monkeypatch)
    assert not run.stop.is_over
    run.to_the_end(30)

    assert Run(monkeypatch, checkpoint=save(run, tmp_path), first=4).stop.is_over


def test_new_run_without_time_is_refused(monkeypatch):
    message = r"The 1.66667 minutes .* over before .* took 98 seconds, and 3 are reserved"
    with pytest.raises(ValueError, match=message):
        Run(monkeypatch, reading=98)

    assert Run(monkeypatch, reading=96).stop.share_left == pytest.approx(1 / 97)


def test_one_clock_decides_the_rate_of_all_processes(monkeypatch):
    run = Run(monkeypatch)
    monkeypatch.setattr(
        "vanilla_transformer_tools.training.schedule.broadcast", lambda clock: 0 * clock + 0.25
    )
    monkeypatch.setattr(
        "vanilla_transformer_tools.training.schedule.reduce", lambda votes, _: votes
    )
    monkeypatch.setattr(ARGUMENTS, "world_size", 2)

    run.update(1)

    assert run.update(1) == pytest.approx(0.25)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test turns, in seconds."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize(("minutes", "seconds", "is_over"), [(1.5, 89, False), (1.5, 91, True)])
def test_minutes_of_a_run_are_minutes(clock, minutes, seconds, is_over):
    stop, control = Schedule(TrainSettings(max_minutes=minutes)), TrainerControl()
    stop.on_train_begin(ARGUMENTS, TrainerState(), control)
    clock.now += seconds

    stop.on_step_end(ARGUMENTS, TrainerState(), control)

    assert control.should_training_stop == is_over
    assert stop.signum == signal.SIGTERM


@pytest.mark.parametrize(
    ("changes", "epoch", "done", "saves", "scores"),
    [
        ({}, 1.5, [], True, False),
        ({}, 1.5, ["on_save"], False, False),
        ({}, 2.0, [], True, False),
        ({"eval_strategy": "epoch"}, 2.0, [], True, True),
        ({"eval_strategy": "epoch", "save_strategy": "no"}, 2.0, [], False, True),
    ],
)
def test_early_end_is_saved_and_scored_later_unless_that_was_planned(
    clock, changes, epoch, done, saves, scores
):
    arguments, state = arguments_of(**changes), TrainerState(epoch=epoch)
    control = TrainerControl()
    stop = Schedule(TrainSettings(max_minutes=0.0))
    stop.on_train_begin(arguments, state, control)
    clock.now += 1
    state.global_step = 5
    for event in done:
        getattr(stop, event)(arguments, state, control)

    stop.on_step_end(arguments, state, control)
    # As Trainer's own callback does at the end of an epoch.
    control.should_evaluate = control.should_save = True
    stop.on_epoch_end(arguments, state, control)

    assert (control.should_save, control.should_evaluate) == (saves, scores)


# Runs


def test_run_of_minutes_counts_all_of_them_and_records_what_was_chosen(
    corpus, tmp_path, monkeypatch, capsys
):
    passed, left, monotonic = [0.0], [], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + sum(passed))

    def end(self, args, state, control, **_):
        left.append((self.minutes_left, self.evaluations))
        control.should_training_stop = True

    monkeypatch.setattr(Schedule, "on_step_end", end)
    monkeypatch.setattr(training, "training_speed", lambda *_: None)
    # Reading the text takes half of the time.
    monkeypatch.setattr(training, "look", lambda *_: passed.append(300.0) or SimpleNamespace())
    decisions = (Decision("vocab_size", 320, "few pairs"),)
    monkeypatch.setattr(plan, "decide", lambda *_: decisions)

    settings = {"minutes": 10.0, "vocab_size": 10_000}
    run_training(corpus, tmp_path, settings, num_train_epochs=1_000_000)

    # Time is left for the scores of the last update and of the mean.
    assert left == [(pytest.approx(5, abs=0.5), 2)]
    run = read_json(tmp_path / "run.json")
    assert (run["updates"], run["weights"]) == (1, "best checkpoint")
    assert run["settings"]["vocab_size"] == 320
    assert run["decisions"] == [{"option": "vocab_size", "value": 320, "reason": "few pairs"}]
    assert "validation" in read_json(tmp_path / "results.json")
    printed = capsys.readouterr().out
    assert "chosen      --vocab_size 320: few pairs" in printed
    assert re.search(r"time +the run ends on \w+day, \d\d:\d\d ", printed)
