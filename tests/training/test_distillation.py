"""Which outputs of a teacher a student learns from."""

import pytest
import torch
import torch.nn.functional as F
from sacrebleu.metrics import BLEU, CHRF
from torch import nn

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer_tools.text.parallel_text import ParallelText, read_pairs
from vanilla_transformer_tools.training.distillation import (
    choose_targets,
    read_outputs,
    word_level,
    write_pairs,
)

from ..models import redraw_parameters


@pytest.mark.parametrize(
    ("outputs", "with_reference", "expected"),
    [
        (["b", "c"], True, ["a", "b", "c"]),
        (["b", "b", "a"], True, ["a", "b"]),
        (["b", " ", "a", "b", ""], False, ["b", "a"]),
        (["", " "], True, ["a"]),
    ],
)
def test_targets_are_written_outputs_each_once(outputs, with_reference, expected):
    assert choose_targets("a", outputs, with_reference, None) == expected


# chrF counts parts of words, BLEU whole words only.
@pytest.mark.parametrize(
    ("similarity", "expected"),
    [(CHRF(), "houses that stood therein"), (BLEU(effective_order=True), "a house there")],
    ids=["chrf", "bleu"],
)
def test_nearest_output_depends_on_the_score(similarity, expected):
    outputs = ["the sun", "houses that stood therein", "a house there"]

    assert choose_targets("a house stood there", outputs, False, similarity) == [expected]


def test_outputs_are_read_in_groups(write):
    rows = ["1\t-0.5\ta\tb", "1\t-1.0\tc", "2\t-0.1\t", "2\t-0.2\td"]

    assert list(read_outputs(write("outputs", *rows), 2)) == [["a\tb", "c"], ["", "d"]]
    assert list(read_outputs(write("outputs", "a\tb", ""), 1)) == [["a\tb"], [""]]


@pytest.fixture
def write_some(write, tmp_path):
    """Writes the pairs of these outputs for two sources; gives paths and counts."""

    def write_some_pairs(*outputs, **targets):
        sources, references = write("sources", "s", "ß\tt"), write("references", "a", "b")
        paths = [tmp_path / "de", tmp_path / "en"]
        return paths, write_pairs(paths, sources, references, iter(outputs), **targets)

    return write_some_pairs


def test_pairs_are_read_as_they_were_written(write_some):
    paths, counts = write_some(["a", "x"], ["y\tz", " "], with_references=True)

    pairs = [("s", "a"), ("s", "x"), ("ß\tt", "b"), ("ß\tt", "y\tz")]
    assert list(read_pairs(ParallelText(tuple(map(str, paths))))) == pairs
    assert counts == (
        "4 pairs from 2 sources; the teacher wrote nothing for 0, and the reference for 1"
    )
    paths, counts = write_some([" ", ""], ["b", "c"])
    assert [path.read_text("utf-8") for path in paths] == ["ß\tt\n" * 2, "b\nc\n"]
    assert counts.startswith("2 pairs from 2 sources; the teacher wrote nothing for 1, and")


@pytest.fixture
def taught(tiny_model, tiny_config, batch):
    """A student in training mode, two teachers, and a batch."""
    teachers = [VanillaTransformerForConditionalGeneration(tiny_config).eval() for _ in range(2)]
    for teacher in teachers:
        redraw_parameters(teacher)
    for module in tiny_model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return tiny_model.train(), teachers, batch


def test_word_level_loss_is_the_weighted_cross_entropy_to_the_mean_of_the_teachers(taught):
    weight = 0.3
    student, teachers, batch = taught
    is_target = batch["labels"] != -100
    with torch.no_grad():
        targets = sum(one(**batch).logits.double().softmax(-1) for one in teachers) / 2
    plain = student(**batch, return_logits=True)
    words = F.cross_entropy(plain.logits.double()[is_target], targets[is_target])

    loss = word_level(student, teachers, weight, **batch).loss

    torch.testing.assert_close(loss, ((1 - weight) * plain.loss + weight * words).float())


def test_word_level_loss_is_divided_by_the_targets_of_the_whole_update(taught):
    student, teachers, batch = taught
    count = (batch["labels"] != -100).sum()

    loss = word_level(student, teachers, 0.5, **batch).loss
    halved = word_level(student, teachers, 0.5, **batch, num_items_in_batch=2 * count).loss

    torch.testing.assert_close(2 * halved, loss)
    loss.backward()
    assert all(weight.grad is None for one in teachers for weight in one.parameters())
