"""Minimum Bayes risk: expected utilities and what they rank."""

import pytest
from sacrebleu.metrics.chrf import CHRF

from vanilla_transformer_tools.translation import Search
from vanilla_transformer_tools.translation.bayes_risk import expected_utilities, rank_by_utility
from vanilla_transformer_tools.translation.engines import Hypothesis

TEXTS = ["ein alter hund", "ein alter mann", "kein hund"]


def chrf(text, reference):
    return CHRF().sentence_score(text, [reference]).score


def test_utility_is_the_mean_of_chrf_against_all_candidates():
    found = expected_utilities(TEXTS, [1, 1, 1])

    assert found == pytest.approx([sum(chrf(text, other) for other in TEXTS) / 3 for text in TEXTS])
    # chrF is not symmetric: what is text and what is reference matters.
    assert chrf(TEXTS[0], TEXTS[2]) != pytest.approx(chrf(TEXTS[2], TEXTS[0]))


def test_repeated_and_empty_candidates_count_each():
    assert expected_utilities(["", "", "x"], [1, 1, 1]) == pytest.approx(
        [200 / 3, 200 / 3, 100 / 3]
    )
    assert expected_utilities([*TEXTS, TEXTS[2]], [1, 1, 1, 1])[:3] == pytest.approx(
        expected_utilities(TEXTS, [1, 1, 2])
    )


def candidates(scores, lengths):
    return [
        (Hypothesis([9] * (length - 1), score, end=2), text)
        for text, score, length in zip(TEXTS, scores, lengths, strict=True)
    ]


def test_samples_all_have_one_weight():
    ranked = rank_by_utility(candidates([-9.0, -1.0, -5.0], [3, 3, 3]), 0, Search(do_sample=True))

    assert {text: hypothesis.score for hypothesis, text in ranked} == pytest.approx(
        dict(zip(TEXTS, expected_utilities(TEXTS, [1, 1, 1]), strict=True))
    )
    utilities = [hypothesis.score for hypothesis, _ in ranked]
    assert utilities == sorted(utilities, reverse=True)


@pytest.mark.parametrize("prefix_length", [0, 1])
def test_best_hypotheses_count_by_their_probabilities(prefix_length):
    # Probabilities 0.2, 0.1 and 0.4, of texts of unlike length.
    lengths = [3, 5, 9]
    log_probs = [-1.6094, -2.3026, -0.9163]
    scores = [
        log_prob / (length - prefix_length) ** 0.6
        for log_prob, length in zip(log_probs, lengths, strict=True)
    ]
    search = Search(num_beams=3, num_hypotheses=3, length_penalty=0.6)

    ranked = rank_by_utility(candidates(scores, lengths), prefix_length, search)

    assert {text: hypothesis.score for hypothesis, text in ranked} == pytest.approx(
        dict(zip(TEXTS, expected_utilities(TEXTS, [2, 1, 4]), strict=True)), rel=1e-3
    )


def test_equal_samples_come_after_the_different_ones():
    samples = candidates([-1.0, -1.0, -1.0], [3, 3, 3])

    ranked = rank_by_utility([*samples[:2], *samples], 0, Search(do_sample=True))

    texts = [text for _, text in ranked]
    assert sorted(texts[:3]) == sorted(TEXTS)
    assert sorted(texts[3:]) == sorted(TEXTS[:2])
