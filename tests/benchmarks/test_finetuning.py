"""`benchmarks/finetuning.py`: its tables, and what both contenders have in common."""

import sys
from argparse import Namespace

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

from ..support.documents import ROOT
from ..support.scripts import run_script

sys.path.insert(0, str(ROOT / "benchmarks"))

import finetuning
import finetuning_contenders
import memory
from finetuning_contenders import (
    KINDS,
    SIZES,
    Contender,
    Losses,
    build,
    losses_of,
    pad,
    random_pairs,
    run_round,
    tokens_of,
)
from memory import Memory


def test_speeds_and_memory_are_compared_with_the_class_of_transformers():
    seconds = {"in-tree": [6.0, 1.0, 7.0], "vanilla": [3.0, 2.0, 10.0]}
    used = {
        "in-tree": Memory(start=10_000_000, peak=100_000_000, result=30_000_000),
        "vanilla": Memory(start=20_000_000, peak=65_000_000, result=30_000_000),
    }

    cells = finetuning.speed_cells(1200, seconds, used)

    assert finetuning.SPEED[1:4] == ("tokens/s", "range", "speed")
    assert finetuning.SPEED[4:] == ("growth MB", "memory", "state MB")
    assert cells == {
        "in-tree": ["200", "171-1,200", "1.00", "60", "1.00", "30"],
        # Twice as fast, with a quarter of the memory.
        "vanilla": ["400", "120-600", "2.00", "15", "0.25", "30"],
    }


def test_losses_are_compared_update_by_update():
    first = Losses([6.0, 5.0, 4.0], [0.5, 9.0, 9.0])
    found = Losses([6.0, 5.25, 4.125], [2.0, 1.0, 1.0])

    assert finetuning.loss_cells(found, first) == ["6.0000", "4.1250", "2.5e-01", "2.000", "4.000"]


def test_unknown_sizes_are_refused():
    done = run_script(ROOT / "benchmarks" / "finetuning.py", "--sizes", "nllb", "bart")

    assert done.returncode == 2
    assert "must be of opus, nllb, minute, got bart" in done.stderr


def test_sizes_are_those_of_the_models_that_people_have():
    for size, count in (("opus", 74_000_000), ("nllb", 321_000_000)):
        config_class, model_class, fields = SIZES[size]
        with torch.device("meta"):
            model = model_class(config_class(**fields))
        assert model.num_parameters() == pytest.approx(count, rel=0.01)


def test_both_contenders_begin_with_the_same_weights_and_dropout():
    theirs, ours = (build("minute", kind, drops=True) for kind in KINDS)

    assert torch.equal(theirs.model.shared.weight, ours.model.shared.weight)
    assert theirs.config.dropout == ours.config.dropout > 0
    assert build("minute", "vanilla", drops=False).config.dropout == 0


def test_tokens_are_counted_on_both_sides_without_padding():
    pairs = random_pairs("minute", 3)
    batch = pad(list(pairs), 1)

    assert tokens_of(pairs) == batch["attention_mask"].sum() + (batch["labels"] != -100).sum()
    assert pairs["input_ids"] != pairs["labels"]
    # The ends of sentences are tokens too.
    assert all(ids[-1] == 2 for ids in pairs["labels"])


def test_state_is_four_numbers_of_four_bytes_for_each_parameter():
    pairs = random_pairs("minute", 2)

    state = run_round("minute", "vanilla", pairs, 2)

    assert state == 16 * build("minute", "vanilla", drops=True).num_parameters()


def test_round_trains_on_all_pairs():
    contender = Contender("minute", "in-tree", random_pairs("minute", 6), 2)

    assert contender.run() > 0
    assert len(contender.report.losses) == 3


def test_losses_are_equal_until_they_are_accumulated():
    pairs = random_pairs("minute", 12)
    (theirs, ours), (theirs_in_parts, ours_in_parts) = (
        [losses_of("minute", kind, pairs, 4, parts) for kind in KINDS] for parts in (1, 4)
    )

    assert len(theirs.losses) == 3
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-4)
    assert ours_in_parts.losses == pytest.approx(theirs.losses, abs=1e-4)
    assert ours_in_parts.norms == pytest.approx(theirs.norms, rel=1e-3)
    # A mean of each part is taken, and nobody divides by their number.
    assert theirs_in_parts.norms[0] > 3 * theirs.norms[0]


def test_tables_have_a_row_for_each_contender(monkeypatch, capsys):
    disable_progress_bar()
    monkeypatch.setattr(
        memory,
        "measure_alone",
        lambda work, *setting: Memory(0, 5_000_000 if setting[1] == "vanilla" else 9_000_000, 0),
    )
    monkeypatch.setattr(Contender, "run", lambda self: 2.0 if "Vanilla" in name(self) else 6.0)
    monkeypatch.setattr(
        finetuning_contenders,
        "losses_of",
        lambda size, kind, pairs, count, parts: Losses([1.0 * parts], [3.0 * parts]),
    )
    options = Namespace(sizes=["minute"], pairs=4, rounds=1, batches=1, updates=1)

    finetuning.print_speeds("minute", options)
    finetuning.print_losses("minute", options)

    lines = capsys.readouterr().out.splitlines()
    tokens = tokens_of(random_pairs("minute", 4))
    assert lines[1].endswith(f"; 4 pairs, {tokens:,} tokens a round")
    each = [f"{tokens / seconds:,.0f}" for seconds in (6, 2)]
    assert lines[4:6] == [
        f"| in-tree | {each[0]} | {each[0]}-{each[0]} | 1.00 | 9 | 1.00 | 0 |",
        f"| vanilla | {each[1]} | {each[1]}-{each[1]} | 3.00 | 5 | 0.56 | 0 |",
    ]
    assert lines[-4:] == [
        "| in-tree | 1 | 1.0000 | 1.0000 | 0.0e+00 | 3.000 | 1.000 |",
        "| vanilla | 1 | 1.0000 | 1.0000 | 0.0e+00 | 3.000 | 1.000 |",
        "| in-tree | 4 | 4.0000 | 4.0000 | 3.0e+00 | 12.000 | 4.000 |",
        "| vanilla | 4 | 4.0000 | 4.0000 | 3.0e+00 | 12.000 | 4.000 |",
    ]


def name(contender: Contender) -> str:
    return type(contender.trainer.model).__name__
