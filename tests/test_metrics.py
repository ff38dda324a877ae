import logging
import math
import os
import subprocess
import sys

import pytest
import sacrebleu

from vanilla_transformer.metrics import TranslationScores, format_scores

PREDICTIONS = ["A dog runs, quickly.", "Two men sit.", "The Cat sleeps on a mat."]
REFERENCES = ["A dog is running, quickly.", "Two men sit.", "The cat sleeps on the mat."]


@pytest.fixture(scope="module")
def metric():
    return TranslationScores()


def score(metric, predictions=PREDICTIONS, references=REFERENCES, **options):
    return metric.compute(predictions=predictions, references=references, **options)


def test_scores_equal_sacrebleu(metric):
    scores = score(metric)

    assert scores["bleu"] == sacrebleu.corpus_bleu(PREDICTIONS, [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(PREDICTIONS, [REFERENCES]).score


def test_scores_are_100_when_all_lines_are_right(metric):
    scores = score(metric, REFERENCES, REFERENCES)

    assert (scores["bleu"], scores["chrf"], scores["exact_match"]) == pytest.approx((100,) * 3)


def test_scores_count_lines(metric):
    assert score(metric)["lines"] == 3


def test_bleu_is_of_the_prediction_given_the_reference(metric):
    # Only a prediction can be too short; one that is 1.6 times too long loses precision instead.
    short, long = ["a b c d e"], ["a b c d e f g h"]

    assert score(metric, short, long)["bleu"] == pytest.approx(100 * math.exp(1 - 8 / 5))


def test_bleu_signature_says_tokenizer_case_and_version(metric):
    signature = score(metric)["bleu_signature"]

    assert signature == (
        f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    )


def test_chrf_signature_says_orders_and_version(metric):
    signature = score(metric)["chrf_signature"]

    assert signature == (
        f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{sacrebleu.__version__}"
    )


@pytest.mark.parametrize("tokenize", ["none", "char", "intl", "zh"])
def test_tokenize_reaches_bleu_and_its_signature(metric, tokenize):
    scores = score(metric, tokenize=tokenize)

    expected = sacrebleu.BLEU(tokenize=tokenize).corpus_score(PREDICTIONS, [REFERENCES])
    assert scores["bleu"] == expected.score
    assert f"|tok:{tokenize}|" in scores["bleu_signature"]


def test_tokenize_is_refused_when_unknown(metric):
    with pytest.raises(ValueError, match=r"got 'moses'.*13a"):
        score(metric, tokenize="moses")


def test_lowercase_reaches_bleu_and_chrf(metric):
    folded = score(metric, lowercase=True)

    assert folded["bleu"] > score(metric)["bleu"]
    assert folded["chrf"] > score(metric)["chrf"]
    assert "|case:lc|" in folded["bleu_signature"]
    assert "|case:lc|" in folded["chrf_signature"]


def test_lowercase_leaves_exact_match_alone(metric):
    assert score(metric, ["A dog."], ["a dog."], lowercase=True)["exact_match"] == 0


@pytest.mark.parametrize("prediction", ["dog ", " dog", "Dog", "dog\t", "", "dog\u200b"])
def test_exact_match_counts_every_code_point(metric, prediction):
    assert score(metric, [prediction, "cat"], ["dog", "cat"])["exact_match"] == 50


def test_exact_match_tells_composed_from_decomposed(metric):
    assert score(metric, ["u\u0308ber"], ["\u00fcber"])["exact_match"] == 0


def test_exact_match_accepts_empty_lines(metric):
    assert score(metric, ["", "a"], ["", "a"])["exact_match"] == 100


@pytest.mark.parametrize(("predictions", "references"), [(1, 2), (2, 1), (0, 2), (2, 0)])
def test_unequal_counts_are_refused(metric, predictions, references):
    with pytest.raises(ValueError, match=f"got {predictions} and {references}"):
        score(metric, ["a"] * predictions, ["a"] * references)


def test_empty_input_is_refused(metric):
    with pytest.raises(ValueError, match="at least one line each, got 0"):
        score(metric, [], [])


def test_metric_forgets_lines_of_a_refused_call(metric):
    with pytest.raises(ValueError, match="got 'moses'"):
        score(metric, tokenize="moses")
    with pytest.raises(ValueError, match="got 1 and 2"):
        score(metric, ["a"], ["a", "b"])

    assert score(metric)["lines"] == 3


def test_metric_scores_all_batches_added_before(metric):
    for prediction, reference in zip(PREDICTIONS, REFERENCES, strict=True):
        metric.add_batch(predictions=[prediction], references=[reference])

    assert metric.compute() == score(metric)


@pytest.mark.parametrize(("tokenize", "warnings"), [("13a", True), ("none", False)])
def test_tokenised_text_is_warned_of_unless_it_is_declared(metric, caplog, tokenize, warnings):
    with caplog.at_level(logging.WARNING, logger="sacrebleu"):
        score(metric, ["A dog ."] * 100, ["A dog ."] * 100, tokenize=tokenize)

    assert bool(caplog.records) is warnings


def test_metric_writes_no_file_and_opens_no_connection(tmp_path):
    program = (
        "import socket\n"
        "def refuse(*_, **__): raise AssertionError('a connection was opened')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from vanilla_transformer.metrics import TranslationScores\n"
        "TranslationScores().compute(predictions=['a'], references=['a'])\n"
    )
    home = {name: str(tmp_path / name) for name in ("HOME", "HF_HOME", "TMPDIR", "XDG_CACHE_HOME")}
    (tmp_path / "TMPDIR").mkdir()

    subprocess.run(
        [sys.executable, "-B", "-c", program], check=True, cwd=tmp_path, env={**os.environ, **home}
    )

    assert list(tmp_path.rglob("*")) == [tmp_path / "TMPDIR"]


def test_format_scores_gives_one_line_with_every_signature(metric):
    scores = score(metric)

    line = format_scores(scores)

    assert "\n" not in line
    assert f"BLEU {scores['bleu']:.2f} ({scores['bleu_signature']})" in line
    assert f"chrF {scores['chrf']:.2f} ({scores['chrf_signature']})" in line
    assert line.endswith("exact match 33.33 % of 3 lines")
