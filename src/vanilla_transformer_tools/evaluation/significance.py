"""Whether two systems differ: paired tests on the same lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

from sacrebleu.significance import PairedTest, Result

from vanilla_transformer_tools.evaluation.bleu_tokenizers import BleuTokenizer, resolve
from vanilla_transformer_tools.evaluation.metrics import build_metrics, check_bootstrap, transposed
from vanilla_transformer_tools.settings import METRICS


@dataclass(frozen=True)
class Comparison:
    """A score of two systems on the same lines.

    Attributes:
        title: Human-readable name of the score.
        first: Score of the first system, a percentage.
        second: Score of the second system.
        p_value: Of the paired bootstrap test.
    """

    title: str
    first: float
    second: float
    p_value: float


def compare(
    first: Sequence[str],
    second: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    metrics: Sequence[str],
    tokenize: str | BleuTokenizer = "auto",
    lowercase: bool = False,
    bootstrap: int = 1000,
) -> list[Comparison]:
    """Paired bootstrap test (Koehn, 2004) as sacreBLEU computes it, on the same resamples for all.

    Differs from sacreBLEU:
        Systems with the same score have p = 1; sacreBLEU gives the smallest possible p.

    Args:
        first: Translations of one system.
        second: Translations of another.
        references: A line for each translation, or several lines each.
        metrics: Names of scores in `settings.METRICS`.
        tokenize: SacreBLEU's tokenizer for BLEU; "auto" chooses one by the script.
        lowercase: Lower-cases both sides for BLEU and chrF.
        bootstrap: Resamples of the lines.

    Returns:
        A comparison for each of `metrics`, in their order.

    Raises:
        ValueError: If numbers of lines differ or are 0, a name is unknown, or resamples are few.
    """
    check_bootstrap(bootstrap)
    if not bootstrap:
        raise ValueError("`bootstrap` must be at least 40 resamples for a test, got 0.")
    # It rejects other numbers of lines.
    transposed(second, references)
    streams = transposed(first, references)
    tokenizer = resolve(tokenize, list(chain(*streams)))
    built = build_metrics(metrics, tokenizer.name, lowercase)
    systems = [("first", first), ("second", second)]
    _, table = PairedTest(systems, built, streams, test_type="bs", n_samples=bootstrap)()
    del table["System"]
    comparisons = []
    for name, results in zip(built, table.values(), strict=True):
        one, other = cast(list[Result], results)
        p_value = 1.0 if one.score == other.score else cast(float, other.p_value)
        comparisons.append(Comparison(METRICS[name].title, one.score, other.score, p_value))
    return comparisons


def format_comparisons(
    comparisons: Sequence[Comparison], first: str, second: str, bootstrap: int
) -> str:
    """A human-readable table of two systems, and what its last column means."""
    rows = [("", first, second, "difference", "p")]
    for row in comparisons:
        difference = f"{row.first - row.second:+.2f}"
        rows.append(
            (row.title, f"{row.first:.2f}", f"{row.second:.2f}", difference, f"{row.p_value:.3f}")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return "\n".join(
        [
            *lines,
            "p: how often the mere choice of test lines would move the difference by more than",
            f"its own size (paired bootstrap of {bootstrap:,} resamples, Koehn 2004). Below 0.05,",
            "a difference is usually considered more than an accident of the test set.",
        ]
    )
