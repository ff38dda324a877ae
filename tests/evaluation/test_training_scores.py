"""Scores of the ids that `Seq2SeqTrainer` generates."""

import numpy as np
import pytest
from transformers import EvalPrediction

from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.evaluation import training_scores
from vanilla_transformer_tools.evaluation.training_scores import compute_scores


@pytest.fixture
def tokenizer():
    return VanillaTransformerTokenizer.train(["\u00fcber ja nein"], kind="char", vocab_size=30)


def output_of(tokenizer, predictions, labels):
    """What Trainer gives: rows of unequal length, padded with -100."""
    rows = [tokenizer(text_target=lines)["input_ids"] for lines in (predictions, labels)]
    # Predictions are padded to the longest output, labels to the longest label.
    padded = (
        [row + [-100] * (longest - len(row)) for row in side]
        for side, longest in zip(rows, (9, 7), strict=True)
    )
    return EvalPrediction(*map(np.array, padded))


def test_labels_are_the_references_unless_there_is_their_text(tokenizer):
    output = output_of(tokenizer, ["\u00fcber", "ja", "nein"], ["\u00fcber", "ja", "ja"])
    metrics = {"metrics": ["exact_match"]}

    of_labels = compute_scores(tokenizer, **metrics)(output)
    of_text = compute_scores(tokenizer, ["\u00fcber", "nein"], **metrics)(output)

    assert of_labels["exact_match"] == pytest.approx(200 / 3)
    assert of_labels["lines"] == 3
    # A row more than there are pairs, as several processes have it.
    assert of_text["exact_match"] == 50
    assert of_text["lines"] == 2
    unknown = output_of(tokenizer, ["jax", "ja"], ["ja", "ja"])
    assert compute_scores(tokenizer, **metrics)(unknown)["exact_match"] == 50


def test_validation_warns_once_of_references_in_another_canonical_form(tokenizer, caplog):
    type(training_scores.logger).warning_once.cache_clear()
    output = output_of(tokenizer, ["\u00fcber", "ja"], ["ja", "ja"])

    for references in (["\u00fcber", "nein"], ["u\u0308ber", "ja"], ["u\u0308ber", "ja"]):
        compute_scores(tokenizer, references, metrics=["exact_match"])(output)

    assert [record.message.count("canonical form") for record in caplog.records] == [1]
