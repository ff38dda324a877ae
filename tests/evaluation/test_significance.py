import pytest
import sacrebleu
from sacrebleu.significance import PairedTest

from vanilla_transformer_tools.evaluation.metrics import TranslationScores
from vanilla_transformer_tools.evaluation.significance import (
    Comparison,
    compare,
    format_comparisons,
)

REFERENCES = [f"w{i} w{i * i} w{i + 1} a b c d" for i in range(60)]


def with_faults(every, shift=0):
    """Translations of which every n-th has a token too many."""
    return [f"{line} x" if (i + shift) % every == 0 else line for i, line in enumerate(REFERENCES)]


def compared(first, second, *metrics, bootstrap=200):
    return compare(first, second, REFERENCES, metrics=metrics, bootstrap=bootstrap)


def test_scores_of_both_systems_are_their_own_and_in_the_order_asked_for():
    first, second = with_faults(3), with_faults(4, shift=1)

    per, bleu = compared(first, second, "per", "bleu")

    for system, scores in ((first, (per.first, bleu.first)), (second, (per.second, bleu.second))):
        expected = TranslationScores().compute(
            predictions=system, references=REFERENCES, metrics=["per", "bleu"]
        )
        assert scores == (expected["per"], expected["bleu"])
    assert (per.title, bleu.title) == ("PER", "BLEU")


def test_p_values_of_bleu_and_chrf_are_those_of_sacrebleu():
    first, second = with_faults(3), with_faults(4, shift=1)

    bleu, chrf = compared(first, second, "bleu", "chrf")

    _, table = PairedTest(
        [("first", first), ("second", second)],
        {"BLEU": sacrebleu.BLEU(), "chrF": sacrebleu.CHRF()},
        [REFERENCES],
        test_type="bs",
        n_samples=200,
    )()
    assert [bleu.p_value, chrf.p_value] == [table[name][1].p_value for name in ("BLEU", "chrF2")]
    assert 0.01 < bleu.p_value < 0.99


@pytest.mark.parametrize("metric", ["bleu", "wer"])
def test_p_value_is_small_of_a_better_system_and_1_against_itself(metric):
    (better,) = compared(REFERENCES, with_faults(2), metric)
    (itself,) = compared(with_faults(3), with_faults(3), metric)

    assert (better.p_value, itself.p_value) == (pytest.approx(1 / 201), 1)


def test_tokenizer_and_case_reach_the_comparison():
    upper = [line.upper() for line in REFERENCES]

    (cased,) = compare(upper, REFERENCES, REFERENCES, metrics=["bleu"], bootstrap=40)
    (lowered,) = compare(
        upper, REFERENCES, REFERENCES, metrics=["bleu"], bootstrap=40, lowercase=True
    )
    assert cased.first < 1
    assert lowered.first == pytest.approx(100)
    with pytest.raises(ValueError, match="got 'moses'"):
        compare(upper, upper, upper, metrics=["bleu"], tokenize="moses")


@pytest.mark.parametrize(
    ("counts", "got"),
    [((1, 2, 2), "got 1 and 2"), ((2, 1, 2), "got 1 and 2"), ((0, 0, 0), "got 0")],
)
def test_unequal_counts_and_no_lines_are_refused(counts, got):
    first, second, references = (["a"] * count for count in counts)

    with pytest.raises(ValueError, match=got):
        compare(first, second, references, metrics=["bleu"])


def test_format_gives_a_table_and_the_meaning_of_p():
    comparisons = [
        Comparison("BLEU", 40.5, 38.25, 0.0123),
        Comparison("exact match", 1.0, 11.0, 1.0),
    ]

    heading, *rows = format_comparisons(comparisons, "runs/a", "b", 1000).split("\n")

    assert heading.split() == ["runs/a", "b", "difference", "p"]
    assert rows[0].split() == ["BLEU", "40.50", "38.25", "+2.25", "0.012"]
    assert rows[1].split() == ["exact", "match", "1.00", "11.00", "-10.00", "1.000"]
    assert len({len(row) for row in (heading, *rows[:2])}) == 1
    assert rows[2].startswith("p: ")
    assert "1,000 resamples" in " ".join(rows[2:])
