"""Minimum Bayes risk: of several candidates, the one most similar to all others."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from sacrebleu.metrics.chrf import CHRF

from vanilla_transformer_tools.translation.engines import Hypothesis
from vanilla_transformer_tools.translation.search import Search


def rank_by_utility(
    candidates: Sequence[tuple[Hypothesis, str]], uncounted: int, search: Search
) -> list[tuple[Hypothesis, str]]:
    """Candidates with their expected utilities as scores, best first, and repeats at the end.

    Minimum Bayes risk decoding (Kumar & Byrne 2004, N04-1022) chooses the first. Candidates are
    either the best ones that a search found, weighted by their probabilities, or unbiased samples
    of equal weight (Eikema & Aziz 2020, arXiv 2005.10283, and 2022, arXiv 2108.04718).

    Args:
        candidates: Candidates of one source, with their texts.
        uncounted: Tokens of each output that its length does not count: the prefix.
        search: The search that found the candidates.
    """
    weights = [1.0] * len(candidates)
    if not search.do_sample:
        lengths = [len(hypothesis.ended) - uncounted for hypothesis, _ in candidates]
        log_probs = [
            hypothesis.score * length**search.length_penalty
            for (hypothesis, _), length in zip(candidates, lengths, strict=True)
        ]
        weights = [math.exp(log_prob - max(log_probs)) for log_prob in log_probs]
    utilities = expected_utilities([text for _, text in candidates], weights)
    ranked = [
        (replace(hypothesis, score=utility), text)
        for (hypothesis, text), utility in zip(candidates, utilities, strict=True)
    ]
    ranked.sort(key=lambda candidate: -candidate[0].score)
    # Samples may be equal: an n-best list begins with the different ones.
    texts = [text for _, text in ranked]
    order = sorted(range(len(ranked)), key=lambda place: texts.index(texts[place]) < place)
    return [ranked[place] for place in order]


def expected_utilities(candidates: Sequence[str], weights: Sequence[float]) -> list[float]:
    """Expected utility of each candidate, with all candidates as references.

    The utility is sacreBLEU's chrF of the sentence, 0 to 100. The time grows with the square of the
    number of different candidates.

    Args:
        candidates: Translations of one source.
        weights: Probability of each; only their ratios matter.
    """
    mass: dict[str, float] = defaultdict(float)
    for candidate, weight in zip(candidates, weights, strict=True):
        mass[candidate] += weight
    score = CHRF().sentence_score
    total = sum(mass.values())
    utilities = {
        candidate: sum(
            # chrF of nothing against nothing would be 0.
            weight * (100.0 if candidate == reference else score(candidate, [reference]).score)
            for reference, weight in mass.items()
        )
        / total
        for candidate in mass
    }
    return [utilities[candidate] for candidate in candidates]
