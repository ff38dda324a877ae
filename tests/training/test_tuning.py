"""A search by successive halving, with runs that a test makes up; and one real, short search."""

import dataclasses
import json

import pytest

from vanilla_transformer.training import tuning
from vanilla_transformer.training.budget import apply
from vanilla_transformer.training.callbacks import DivergedError, StoppedBySignalError
from vanilla_transformer.training.facts import Speed
from vanilla_transformer.training.recipe import check_settings, recipe
from vanilla_transformer.training.run import train
from vanilla_transformer.training.tuning import Round, rounds, tune
from vanilla_transformer_cli import main

from ..support.training_runs import build_arguments, build_settings, read_json
from .test_budget import CAPTIONS

pytest.importorskip("optuna")


# 16 times 0.9375 minutes of 15.
@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        (2, [Round(2, 7.5)]),
        (4, [Round(4, 3.75)]),
        (8, [Round(8, 0.9375), Round(2, 3.75)]),
        (20, [Round(20, 0.25), Round(5, 1.0), Round(2, 4.0)]),
    ],
)
def test_minutes_are_shared_out_over_rounds(candidates, expected):
    minutes = sum(each.runs * each.minutes for each in expected)

    assert rounds(candidates, minutes) == expected


class Search:
    """Searches in a folder; runs are made up, with the loss of `loss`."""

    def __init__(self, monkeypatch, corpus, folder, **changes):
        monkeypatch.setattr(tuning, "train", self.train)
        self.corpus, self.folder = corpus, folder
        self.changes = {"minutes": 30.0, "tune": 8, "config": [], **changes}
        self.given, self.seed, self.measured = set(), 42, []
        self.runs, self.loss = [], lambda options: 1.0

    def build(self, settings, decisions):
        settings, defaults = apply(decisions, settings)
        given = {"output_dir": str(self.folder), "use_cpu": True, "seed": self.seed}
        arguments = build_arguments(settings, self.folder)
        return settings, type(arguments)(**recipe(settings) | defaults | given)

    def measure(self, minutes):
        self.measured.append(minutes)
        return dataclasses.replace(CAPTIONS, minutes=minutes)

    def __call__(self, **changes):
        settings = build_settings(self.corpus, **self.changes | changes)
        _, arguments = self.build(settings, [])
        return tune(settings, arguments, self.given, self.measure, self.build)

    def train(self, settings, arguments):
        check_settings(settings, arguments)
        options = {
            "learning_rate": arguments.learning_rate,
            "dropout": float(settings.config[-1].removeprefix("dropout=")),
            "max_tokens_per_batch": settings.max_tokens_per_batch,
        }
        self.runs.append((settings, arguments, options))
        folder = self.folder / "tuning" / arguments.output_dir.split("/")[-1]
        folder.mkdir(exist_ok=True)
        loss = self.loss(options)
        logs = [{"eval_loss": each, "step": 1} for each in (9.0, loss, loss + 0.1)]
        text = "".join(json.dumps(log) + "\n" for log in logs)
        (folder / "log.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture
def search(monkeypatch, corpus, tmp_path):
    return Search(monkeypatch, corpus, tmp_path / "out")


def by_batch_and_rate(options):
    """Lowest at twice the batch, with half of the rate."""
    return abs(options["max_tokens_per_batch"] - 4096) / 2048 + options["learning_rate"]


def values_of(decisions):
    return {decision.option: decision.value for decision in decisions}


def test_best_of_the_last_round_is_chosen(search):
    search.loss = by_batch_and_rate

    settings, decisions = search()

    assert [run[0].minutes for run in search.runs] == [0.9375] * 8 + [3.75] * 2
    tried = [options for _, _, options in search.runs]
    assert tried[8] == min(tried[:8], key=by_batch_and_rate)
    assert tried[9] == sorted(tried[:8], key=by_batch_and_rate)[1]
    chosen = values_of(decisions)
    assert {name: chosen[name] for name in tried[8]} == tried[8]
    assert settings.minutes == 15.0
    assert not settings.resume
    reasons = {decision.option: decision.reason for decision in decisions}
    lowest = f"lowest validation loss of 8 candidates, {by_batch_and_rate(tried[8]):.3f} after 3.8"
    assert reasons["max_tokens_per_batch"] == f"{lowest} minutes; 2048 by the rules"
    assert "by the rules" not in reasons["vocab_size"]


def test_candidates_differ_and_begin_with_the_rules(search):
    search()

    tried = [options for _, _, options in search.runs[:8]]
    assert tried[0] == {"learning_rate": 0.003, "dropout": 0.1, "max_tokens_per_batch": 2048}
    assert len({tuple(options.values()) for options in tried}) == 8
    for options in tried:
        assert options["learning_rate"] in (0.0015, 0.003, 0.006)
        assert options["dropout"] in (0.1, 0.2, 0.3)
        assert options["max_tokens_per_batch"] in (1024, 2048, 4096)


@pytest.mark.parametrize(("seed", "same"), [(42, True), (43, False)])
def test_seed_decides_on_the_candidates(monkeypatch, corpus, tmp_path, search, seed, same):
    other = Search(monkeypatch, corpus, tmp_path / "other")
    other.seed = seed
    other()
    monkeypatch.setattr(tuning, "train", search.train)
    search()

    tried = [[options for _, _, options in each.runs[:8]] for each in (search, other)]
    assert (tried[0] == tried[1]) == same


def test_given_options_are_not_searched(search):
    search.given = {"learning_rate", "max_tokens_per_batch"}

    _, decisions = search(tune=3)

    assert sorted(options["dropout"] for _, _, options in search.runs) == [0.1, 0.2, 0.3]
    assert {options["max_tokens_per_batch"] for _, _, options in search.runs} == {800}
    assert "learning_rate" not in values_of(decisions)


def test_longest_pair_fits_into_every_batch(search):
    search(max_length=600)

    assert {options["max_tokens_per_batch"] for _, _, options in search.runs} == {2048, 4096}


def test_rate_of_a_larger_preset_is_searched_too(search):
    search.given = {"preset"}
    search.loss = lambda options: options["learning_rate"]

    _, decisions = search(preset="small")

    assert values_of(decisions)["learning_rate"] == 2.5e-4


def test_runs_of_the_search_are_scored_by_loss_alone_and_have_their_own_length(search):
    search(finish_within=3.0)

    folders = set()
    for settings, arguments, _ in search.runs:
        assert (arguments.metric_for_best_model, arguments.predict_with_generate) == ("loss", False)
        assert not arguments.greater_is_better
        assert settings.finish_within is None
        folders.add(arguments.output_dir)
    assert len(folders) == 10
    steps = [arguments.eval_steps for _, arguments, options in search.runs[:1] + search.runs[8:9]]
    # Longer runs have as many evaluations, three, at the same pace.
    assert steps[1] == pytest.approx(4 * steps[0], abs=3)


def test_last_run_has_the_rules_for_its_length_and_batch(search):
    search.loss = lambda options: -options["max_tokens_per_batch"]

    _, decisions = search()

    chosen = values_of(decisions)
    updates = 15 * 60 * 10_000 * 0.85 / 4096
    assert chosen["max_tokens_per_batch"] == 4096
    assert chosen["warmup_steps"] == round(updates / 10)
    assert search.measured == [15.0]


def test_runs_are_deleted_and_the_table_is_kept(search):
    search.loss = by_batch_and_rate

    search()

    kept = {path.name for path in (search.folder / "tuning").iterdir()}
    assert kept == {"journal.log", "trials.csv"}
    header, *lines = (search.folder / "tuning" / "trials.csv").read_text().splitlines()
    assert {"value", "params_learning_rate", "user_attrs_round"} <= set(header.split(","))
    assert len(lines) == 10


def test_losses_are_printed(search, capsys):
    search(tune=2)

    printed = capsys.readouterr().out
    options = "learning_rate 0.003, dropout 0.1, max_tokens_per_batch 2048"
    assert f"tuned       round 1, candidate 1: {options}; validation loss 1.000" in printed


def test_candidate_that_diverges_is_the_worst(search):
    def loss(options):
        if options["learning_rate"] > 0.002:
            raise DivergedError("the loss is not finite")
        return 100.0

    search.loss = loss

    _, decisions = search()

    assert values_of(decisions)["learning_rate"] == 0.0015


def test_search_without_a_finite_loss_is_an_error(search):
    def diverge(options):
        raise DivergedError("the loss is not finite")

    search.loss = diverge

    with pytest.raises(DivergedError, match=r"All candidates of --tune diverged, see .*trials.csv"):
        search()


# Continuing


def interrupt_after(search, runs):
    """Ctrl-C in the next run, which has a checkpoint."""

    def loss(options):
        if len(search.runs) <= runs:
            return by_batch_and_rate(options)
        checkpoint = search.folder / "tuning" / "round-1-candidate-4" / "checkpoint-7"
        checkpoint.mkdir()
        (checkpoint / "files.json").write_text("{}")
        raise StoppedBySignalError(2)

    search.loss = loss
    with pytest.raises(StoppedBySignalError):
        search()


def test_search_continues_where_it_stopped(search, monkeypatch, corpus, tmp_path):
    interrupt_after(search, 3)
    search.loss = by_batch_and_rate

    continued = search(resume=True)

    # The fourth run is continued.
    assert [run[0].resume for run in search.runs] == [False] * 4 + [True] + [False] * 6
    assert search.measured == [15.0]
    whole = Search(monkeypatch, corpus, tmp_path / "whole")
    whole.loss = by_batch_and_rate
    assert values_of(whole()[1]) == values_of(continued[1])


def test_journal_that_a_kill_has_cut_is_mended(search):
    interrupt_after(search, 3)
    journal = search.folder / "tuning" / "journal.log"
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 4, "wor')
    journal.with_name("journal.log.lock").symlink_to(journal)
    search.loss = by_batch_and_rate

    search(resume=True)

    assert len(search(resume=True)[1]) > 3
    assert len(search.runs) == 11


def test_search_that_is_over_trains_nothing(search):
    first = search()
    runs = len(search.runs)

    assert search(resume=True) == first
    assert len(search.runs) == runs


def test_added_minutes_are_those_of_the_last_run(search):
    interrupt_after(search, 3)
    search.loss = by_batch_and_rate

    settings, _ = search(resume=True, minutes=40.0)

    assert settings.minutes == 25.0
    assert search.runs[4][0].minutes == 0.9375


def test_last_run_that_has_begun_keeps_what_was_chosen(search):
    _, decisions = search()
    checkpoint = search.folder / "checkpoint-5"
    checkpoint.mkdir()
    (checkpoint / "files.json").write_text("{}")
    record = {"decisions": [dataclasses.asdict(decision) for decision in decisions[:3]]}
    (search.folder / "run.json").write_text(json.dumps(record), encoding="utf-8")

    settings, kept = search(resume=True, minutes=50.0)

    assert kept == decisions[:3]
    assert (settings.resume, settings.minutes) == (True, 35.0)


def test_run_without_a_checkpoint_is_begun_anew(search):
    models = [
        search.folder / "config.json",
        search.folder / "tuning/round-1-candidate-1/config.json",
    ]

    def stop(options):
        for model in models:
            model.write_text("{}", encoding="utf-8")
            record = json.dumps({"settings": {}, "weights": "last update", "interrupted": True})
            (model.parent / "run.json").write_text(record, encoding="utf-8")
        raise StoppedBySignalError(2)

    search.loss = stop
    with pytest.raises(StoppedBySignalError):
        search()
    seen = []
    search.loss = lambda options: seen.append(models[1].exists()) or 1.0

    settings, _ = search(resume=True)

    assert not settings.resume
    assert seen == [False] * 10
    assert not models[0].exists()


def test_resumed_search_needs_more_minutes_than_it_takes(search):
    interrupt_after(search, 3)

    with pytest.raises(ValueError, match=r"must be above the 15 of this folder's search, got 12"):
        search(resume=True, minutes=12.0)


def test_resumed_search_follows_options_that_may_change(search):
    interrupt_after(search, 3)
    search.loss = by_batch_and_rate
    search.given = {"average_last"}

    settings, decisions = search(resume=True, average_last=3)

    assert settings.average_last == 3
    assert not search.given & values_of(decisions).keys()
    assert {run[0].average_last for run in search.runs[4:]} == {3}


def test_option_that_a_search_has_chosen_is_refused_when_it_is_resumed(search):
    interrupt_after(search, 3)
    # The default of its preset.
    search.given = {"learning_rate"}

    with pytest.raises(ValueError, match=r"--learning_rate was 0.003, got 0.005"):
        search(resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "already holds a search. Pass --resume"),
        ({"resume": True, "tune": 4}, "--tune was 8, got 4"),
        ({"resume": True, "max_length": 99}, "--max_length was 256, got 99"),
        ({"resume": True, "max_validation_pairs": 7}, "--max_validation_pairs was None, got 7"),
    ],
)
def test_another_search_in_the_folder_is_refused(search, changes, message):
    interrupt_after(search, 3)

    with pytest.raises(ValueError, match=message):
        search(**changes)


def test_resuming_needs_a_search(search):
    with pytest.raises(ValueError, match=r"--resume needs the search .* got no .*journal.log"):
        search(resume=True)


def test_too_few_minutes_are_refused(search):
    with pytest.raises(ValueError, match=r"--tune 8 needs --minutes 16 or more.*got --minutes 9"):
        search(minutes=9.0)


def test_too_many_candidates_are_refused(search):
    search.given = {"learning_rate", "max_tokens_per_batch"}

    with pytest.raises(ValueError, match=r"--tune 4 needs as many .* got 3 of dropout"):
        search(tune=4)


# The command


def test_command_searches_and_trains_with_the_best(corpus, tmp_path, monkeypatch):
    search = Search(monkeypatch, corpus, tmp_path)
    search.loss = by_batch_and_rate
    last = []
    monkeypatch.setattr(
        "vanilla_transformer.training.run.train", lambda *given, **others: last.append(given)
    )
    monkeypatch.setattr(
        "vanilla_transformer.training.facts.training_speed", lambda arguments: Speed(10_000.0)
    )

    main(["train", *options(corpus, tmp_path), "--minutes", "20", "--tune", "3"])

    assert len(search.runs) == 3
    best = min((run[2] for run in search.runs), key=by_batch_and_rate)
    ((settings, arguments),) = last
    assert (settings.minutes, arguments.output_dir) == (10.0, str(tmp_path))
    assert arguments.learning_rate == best["learning_rate"]
    assert settings.max_tokens_per_batch == best["max_tokens_per_batch"]
    assert settings.config[-1] == f"dropout={best['dropout']}"
    assert arguments.predict_with_generate


def options(corpus, folder):
    words = []
    for split in ("train", "validation"):
        words += [f"--{split}", f"{corpus}/{split}.de", f"{corpus}/{split}.en"]
    return [*words, "--output_dir", str(folder), "--use_cpu", "--bf16", "false"]


@pytest.mark.slow
def test_short_search_trains_candidates_and_then_the_best(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_LEAST_MINUTES", 0.0)
    runs = []

    def stop_in_the_third(*given):
        runs.append(given)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return train(*given)

    monkeypatch.setattr(tuning, "train", stop_in_the_third)
    argv = ["train", *options(corpus, tmp_path), "--minutes", "0.6", "--tune", "3"]
    argv += ["--vocab_size", "320", "--logging_steps", "1", "--max_validation_pairs", "5"]

    with pytest.raises(SystemExit):
        main(argv)
    main([*argv, "--resume"])

    assert len(runs) == 4
    run = read_json(tmp_path / "run.json")
    assert run["settings"]["minutes"] == pytest.approx(0.3)
    reasons = [decision["reason"] for decision in run["decisions"]]
    assert sum("validation loss of 3 candidates" in reason for reason in reasons) == 3
    assert "validation" in read_json(tmp_path / "results.json")
