import logging
import math
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
import sacrebleu

from vanilla_transformer_tools.evaluation import metrics
from vanilla_transformer_tools.evaluation.metrics import TranslationScores, format_scores
from vanilla_transformer_tools.settings import METRICS

PREDICTIONS = ["A dog runs, quickly.", "Two men sit.", "The Cat sleeps on a mat."]
REFERENCES = ["A dog is running, quickly.", "Two men sit.", "The cat sleeps on the mat."]


def score(predictions=PREDICTIONS, references=REFERENCES, **options):
    return metrics.score(predictions, references, **options)


@pytest.fixture(scope="module")
def many():
    """Predictions of which every third is right, and references."""
    numbers = [f"{i} {i * i} {i + 1} {i % 7} b c d" for i in range(60)]
    return [line if i % 3 else f"{line} x" for i, line in enumerate(numbers)], numbers


def test_scores_and_signatures_are_those_of_sacrebleu():
    scores = score()

    assert scores["bleu"] == sacrebleu.corpus_bleu(PREDICTIONS, [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(PREDICTIONS, [REFERENCES]).score
    version = f"version:{sacrebleu.__version__}"
    assert scores["bleu_signature"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|{version}"
    assert scores["chrf_signature"] == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|{version}"
    assert scores["lines"] == 3


@pytest.mark.parametrize("tokenize", ["none", "char"])
def test_tokenize_reaches_bleu_and_its_signature(tokenize):
    scores = score(tokenize=tokenize)

    expected = sacrebleu.BLEU(tokenize=tokenize).corpus_score(PREDICTIONS, [REFERENCES])
    assert scores["bleu"] == expected.score
    assert f"|tok:{tokenize}|" in scores["bleu_signature"]


def test_tokenize_is_refused_when_its_package_is_missing(monkeypatch):
    # As if it were not installed.
    monkeypatch.setitem(sys.modules, "MeCab", None)
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)

    with pytest.raises(ValueError, match="`tokenize` 'ja-mecab' cannot be used here: Japanese"):
        score(tokenize="ja-mecab")


def test_lowercase_reaches_bleu_and_chrf_but_not_exact_match():
    scores, folded = score(), score(lowercase=True)

    for name in ("bleu", "chrf"):
        assert folded[name] > scores[name]
        assert "|case:lc|" in folded[f"{name}_signature"]
    assert score(["A dog."], ["a dog."], lowercase=True)["exact_match"] == 0


# A composed character is not its decomposed form; the second line, which is empty, is right.
@pytest.mark.parametrize("prediction", ["\u00fc ber", "\u00dcber", "", "u\u0308ber"])
def test_exact_match_counts_every_code_point(prediction):
    assert score([prediction, ""], ["\u00fcber", ""])["exact_match"] == 50


# `translate` copies them from the source, and validation strips them.
def test_exact_match_ignores_blanks_at_the_ends():
    assert score(["\u00fcber", " a\ufeff"], [" \u00fcber\u3000", "a"])["exact_match"] == 100


@pytest.mark.parametrize(
    ("predictions", "references", "options", "message"),
    [
        (["a"] * 2, ["a"], {}, "got 2 and 1"),
        ([], [], {}, "at least one line each, got 0"),
        (["a"], ["a"], {"tokenize": "moses"}, r"got 'moses'.*13a"),
        (["a"], ["a"], {"metrics": ["bleu", "meteor"]}, r"got 'meteor'.*: bleu, .*codexglue_bleu"),
        (["a", "b"], [["a"], ["a", "b"]], {}, r"same number of references.* got 1 to 2"),
        (["a"], ["a"], {"bootstrap": 39}, r"at least 40 resamples, or 0 .*got 39"),
    ],
)
def test_call_that_cannot_be_scored_is_refused(predictions, references, options, message):
    with pytest.raises(ValueError, match=message):
        score(predictions, references, **options)


def test_metric_of_the_library_evaluate_gives_these_scores():
    metric = TranslationScores(keep_in_memory=True)
    lines = {"predictions": PREDICTIONS, "references": REFERENCES}

    assert metric.compute(**lines, bootstrap=40) == score(bootstrap=40)
    several = [[line, "Two."] for line in REFERENCES]
    assert metric.compute(predictions=PREDICTIONS, references=several) == score(references=several)


# Which scores


def test_metrics_that_are_described_can_be_built():
    assert list(METRICS) == list(metrics.BUILDERS), (
        "A metric has a row in METRICS (settings.py) and one in the same place of BUILDERS "
        "(evaluation/metrics.py)."
    )


@pytest.mark.parametrize("name", METRICS)
def test_metric_has_a_test_of_its_definition_and_the_direction_that_it_says(name):
    right, wrong = (score([line], ["a b c d"], metrics=[name])[name] for line in ("a b c d", "x"))

    assert METRICS[name].is_error_rate == (right < wrong), (
        f"{name!r} is {right} of a right line and {wrong} of a wrong one: correct `is_error_rate` "
        "of its row in METRICS (settings.py)."
    )
    assert not name.endswith(("_ci", "_signature")), "This is a field of another metric."
    assert f'"{name}"' in Path(__file__).read_text("utf-8"), (
        f"Add cases of {name!r}, computed by hand, to test_score_is_that_of_its_definition."
    )


def test_metrics_are_computed_and_written_as_asked_and_in_that_order(many):
    scores = score(*many, metrics=["per", "bleu"], bootstrap=50)

    of_bleu = ["bleu", "bleu_signature", "bleu_ci", "bleu_tokenizer"]
    assert {*scores} == {"per", "per_signature", "per_ci", *of_bleu, "lines"}
    assert [name for name in scores if name in ("per", "bleu")] == ["per", "bleu"]
    per, bleu, tokenizer, lines = format_scores(scores).split("\n")
    assert per == f"PER {scores['per']:.2f} ± {scores['per_ci']:.2f} ({scores['per_signature']})"
    assert bleu.startswith(f"BLEU {scores['bleu']:.2f} ± {scores['bleu_ci']:.2f} (nrefs")
    assert tokenizer == "  tokenizer 13a: the references have blanks between words"
    assert lines == "60 lines"
    plain = score()
    shown = f"exact match 33.33 ({plain['exact_match_signature']})"
    assert format_scores(plain).split("\n")[3] == shown


@pytest.mark.parametrize(
    ("name", "definition"),
    [
        ("exact_match", "unit:line|equal:code-points"),
        ("wer", "unit:line|tok:blank"),
        ("per", "unit:token|tok:blank|distance:levenshtein"),
    ],
)
def test_signature_says_what_is_counted_and_by_which_release(name, definition):
    signature = score(metrics=[name])[f"{name}_signature"]

    assert signature == f"nrefs:1|{definition}|version:{version('vanilla-transformer')}"


@pytest.mark.parametrize("lowercase", [False, True])
def test_ter_and_chrf_with_words_are_those_of_sacrebleu(lowercase):
    scores = score(metrics=["ter", "chrf++"], lowercase=lowercase, bootstrap=40)

    chrf = sacrebleu.CHRF(word_order=2, lowercase=lowercase)
    for name, theirs in (("ter", sacrebleu.TER()), ("chrf++", chrf)):
        expected = theirs.corpus_score(PREDICTIONS, [REFERENCES], n_bootstrap=40)
        assert scores[name] == pytest.approx(expected.score)
        assert scores[f"{name}_signature"] == str(theirs.get_signature())


# Several references


def test_scores_take_several_references():
    others = ["A dog runs quickly.", "Two men are sitting.", "The Cat sleeps on a mat."]
    references = list(zip(REFERENCES, others, strict=True))

    scores = score(references=references, metrics=["bleu", "chrf", "ter"])

    streams = [REFERENCES, others]
    assert scores["bleu"] == sacrebleu.corpus_bleu(PREDICTIONS, streams).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(PREDICTIONS, streams).score
    assert scores["ter"] == sacrebleu.corpus_ter(PREDICTIONS, streams).score
    assert scores["bleu_signature"].startswith("nrefs:2|")


@pytest.mark.parametrize(
    ("name", "expected"), [("exact_match", 100 / 3), ("wer", 200 / 3), ("per", 100 * 3 / 10)]
)
def test_best_reference_of_a_line_counts(name, expected):
    # Of the last line, one has the fewest edits, and the other the lowest rate: 2 of 4.
    references = [("x y", "a b"), ("a b c x", "u v w x y z"), ("a", "a b c d")]

    scores = score(["a b", "a b c d", "a b"], references, metrics=[name])
    assert scores[name] == pytest.approx(expected)


# Error rates of spelling to phonemes


@pytest.mark.parametrize(
    ("name", "predictions", "references", "expected"),
    [
        # The share of lines with any wrong token.
        ("wer", ["k æ t", "d ɔ g", "b ɜ d z", "f i"], ["k æ t", "d ɒ g", "b ɜ d", "f i ʃ"], 75),
        # One phoneme of two letters is not two phonemes; more blanks are not more tokens.
        ("wer", ["t ʃ a", "  k æ  t "], ["tʃ a", "k æ t"], 50),
        # A replaced token of 3, an added and a lost one of 3 and 2, none of 2.
        ("per", ["d ɔ g", "b ɜ d z", "ʃ", "o n"], ["d ɒ g", "b ɜ d", "f ʃ", "o n"], 100 * 3 / 10),
        ("per", ["a b c d"], ["x"], 400),
        # Deleting at one end and adding at the other beats replacing all.
        ("per", ["a b c d e f"], ["b c d e f g"], 100 * 2 / 6),
        # Empty references: what was predicted counts.
        ("per", ["a b", ""], ["", ""], 200),
        ("per", ["", ""], ["", ""], 0),
        ("codexglue_bleu", [""], ["a b"], 0),
    ],
)
def test_score_is_that_of_its_definition(name, predictions, references, expected):
    assert score(predictions, references, metrics=[name])[name] == pytest.approx(expected)


# BLEU of CodeXGLUE


def codexglue_bleu(predictions, references):
    """The definition in `evaluator/bleu.py` of CodeXGLUE's code-to-code-trans, in percent."""
    pairs = [(p.split(), r.split()) for p, r in zip(predictions, references, strict=True)]
    log_precisions = []
    for order in range(1, 5):
        matches = total = 0
        for prediction, reference in pairs:
            found, expected = (
                Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))
                for tokens in (prediction, reference)
            )
            matches += sum((found & expected).values())
            total += sum(found.values())
        log_precisions.append(math.log((matches + 1) / (total + 1)))
    length, reference_length = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
    ratio = length / reference_length
    brevity_penalty = 1 if ratio > 1 else math.exp(1 - 1 / ratio)
    return 100 * brevity_penalty * math.exp(sum(log_precisions) / 4)


@pytest.mark.parametrize(
    "predictions",
    [
        ["int x = 0 ; return x ;", "void F ( ) { }"],
        # No token is right; too short; too long.
        ["nothing right", "here"],
        ["int x", "void F"],
        ["int x = 0 ; return x ; return x ; return x ;", "void F ( ) { } { } { }"],
    ],
)
def test_codexglue_bleu_equals_its_definition(predictions):
    references = ["int x = 0 ; return x ;", "void F ( ) { return ; }"]

    # It takes no tokenizer and no case.
    scores = score(
        predictions, references, metrics=["codexglue_bleu"], tokenize="char", lowercase=True
    )

    assert scores["codexglue_bleu"] == pytest.approx(codexglue_bleu(predictions, references))
    definition = "nrefs:1|case:mixed|eff:no|tok:none|smooth:add-1-to-all-orders|"
    assert scores["codexglue_bleu_signature"].startswith(definition)


# Confidence intervals


@pytest.mark.parametrize(("name", "theirs"), [("bleu", sacrebleu.BLEU), ("chrf", sacrebleu.CHRF)])
def test_interval_is_that_of_sacrebleu(many, name, theirs):
    predictions, references = many
    scores = score(predictions, references, bootstrap=100)

    scorer = theirs()
    expected = scorer.corpus_score(predictions, [references], n_bootstrap=100)
    # Its text is all that sacreBLEU tells publicly of an interval.
    assert f"± {scores[f'{name}_ci']:.2f})" in str(expected)
    assert scores[f"{name}_ci"] > 0
    assert scores[f"{name}_signature"] == str(scorer.get_signature())
    # It moves no score, and is left out unless it is asked for.
    plain = score(predictions, references)
    assert plain[name] == scores[name]
    assert f"{name}_ci" not in plain
    assert "bs:" not in plain[f"{name}_signature"]


def test_interval_counts_resamples_without_anything_in_common():
    scores = score(["abcdefg", "", "z"], ["abcdefg", "x", "c"], bootstrap=100)

    assert 0 < scores["chrf_ci"] <= 50


# Tokens


def test_ter_finds_the_words_of_chinese():
    # One of six characters, instead of one of one word.
    scores = score(["我喜欢小猫。"], ["我喜欢大猫。"], metrics=["ter"])

    assert scores["ter"] == pytest.approx(100 / 6)


@pytest.mark.parametrize(("tokenize", "warnings"), [("13a", True), ("none", False)])
def test_tokenised_text_is_warned_of_unless_it_is_declared(caplog, tokenize, warnings):
    with caplog.at_level(logging.WARNING, logger="sacrebleu"):
        score(["A dog ."] * 100, ["A dog ."] * 100, tokenize=tokenize)

    assert bool(caplog.records) is warnings
