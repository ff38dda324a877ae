"""Scores of translations, each with its signature; `settings.METRICS` defines them."""

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from itertools import chain
from typing import Any
from unicodedata import normalize

import evaluate
from datasets import Features, Value
from datasets import Sequence as Several
from sacrebleu.metrics.base import Metric, Score, Signature
from sacrebleu.metrics.bleu import BLEU, BLEUScore
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from vanilla_transformer.text_vanilla_transformer import without_blank_ends
from vanilla_transformer_tools.evaluation.bleu_tokenizers import BleuTokenizer, resolve
from vanilla_transformer_tools.settings import DEFAULT_METRICS, METRICS

# What `score` returns, ready for JSON.
Scores = dict[str, Any]


class Ratio(Metric):
    """A percentage of things counted over all lines, with sacreBLEU's bootstrap and paired test.

    Args:
        name: Of the score.
        count: Returns, for a prediction and its references, the count and the total.
        definition: Text of the signature about `count`.
    """

    def __init__(
        self,
        name: str,
        count: Callable[[str, Sequence[str]], tuple[int, int]],
        definition: dict[str, str],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.count = count
        self.definition = definition

    def get_signature(self) -> Signature:
        """The definition and the version of this package, in the form of sacreBLEU's."""
        signature = super().get_signature()
        for key, value in self.definition.items():
            signature.update(key, value)
        signature.update("version", version("vanilla-transformer"))
        return signature

    def _preprocess_segment(self, sent: str) -> str:
        return sent

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        return {"references": refs}

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[int]:
        return list(self.count(hypothesis, ref_kwargs["references"]))

    def _aggregate_and_compute(self, stats: list[list[int]]) -> Score:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])

    def _compute_score_from_stats(self, stats: Sequence[float]) -> Score:
        counted, total = stats
        # If the references are empty, the total counts as one.
        return Score(self.name, 100 * counted / max(total, 1))


class CorpusBLEU(BLEU):
    """sacreBLEU's; if no reference has four tokens, of the orders of n-grams that there are.

    With four orders even a perfect translation would score 0. The signature has `eff:yes` then.
    """

    def _cache_references(self, references: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        cache: list[dict[str, Any]] = super()._cache_references(references)
        longest = max(max(line["ref_lens"]) for line in cache)
        self.effective_order = longest < self.max_ngram_order
        return cache


class CodeXGlueBLEU(BLEU):
    """BLEU of CodeXGLUE's code translation (Lu et al., 2021); tokens are separated by blanks.

    Its `evaluator.py` adds one to matches and totals of all four orders (Lin and Och, 2004, leave
    out the first, as sacreBLEU's `add-k` does).
    """

    def __init__(self) -> None:
        super().__init__(tokenize="none", smooth_method="none", force=True)

    def get_signature(self) -> Signature:
        """SacreBLEU's signature, with a smoothing that sacreBLEU does not have."""
        signature = super().get_signature()
        signature.update("smooth", "add-1-to-all-orders")
        return signature

    def _compute_score_from_stats(self, stats: list[int]) -> BLEUScore:
        lengths, matches_and_totals = stats[:2], stats[2:]
        smoothed = [count + 1 for count in matches_and_totals]
        score = super()._compute_score_from_stats([*lengths, *smoothed])
        score.name = "CodeXGLUE BLEU"
        return score


class ResampledCHRF(CHRF):
    """sacreBLEU's chrF, whose score is always a number of Python.

    sacreBLEU's is 0.0 or, of a resample, one of NumPy; Python's mean refuses both together.
    """

    def _compute_f_score(self, statistics: list[int]) -> float:
        return float(super()._compute_f_score(statistics))


def edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Fewest tokens to insert, delete and replace between two sequences (Levenshtein)."""
    distances = list(range(len(second) + 1))
    for row, left in enumerate(first, 1):
        above, distances = distances, [row]
        for column, right in enumerate(second, 1):
            replaced = above[column - 1] + (left != right)
            distances.append(min(replaced, above[column] + 1, distances[-1] + 1))
    return distances[-1]


def _equal_lines(prediction: str, references: Sequence[str]) -> tuple[int, int]:
    # As in validation: `translate` copies blanks at the ends from the source.
    return int(without_blank_ends(prediction) in map(without_blank_ends, references)), 1


def _wrong_words(prediction: str, references: Sequence[str]) -> tuple[int, int]:
    tokens = prediction.split()
    return int(all(tokens != reference.split() for reference in references)), 1


def _wrong_tokens(prediction: str, references: Sequence[str]) -> tuple[int, int]:
    return fewest_edits(prediction.split(), [reference.split() for reference in references])


def fewest_edits(tokens: Sequence[str], references: Iterable[Sequence[str]]) -> tuple[int, int]:
    """Edits and length of the reference with the lowest rate."""
    counts = [(edit_distance(tokens, reference), len(reference)) for reference in references]
    return min(counts, key=lambda count: count[0] / max(count[1], 1))


def _build_ter(tokenize: str, lowercase: bool) -> TER:
    # sacreBLEU lower-cases for TER by default, as Tercom does.
    apart = tokenize in ("zh", "ja-mecab", "char", "flores200")
    return TER(normalized=apart, asian_support=apart)


# How to build each score, with a tokenizer, or lower-cased.
BUILDERS: dict[str, Callable[[str, bool], Metric]] = {
    # With "none" the text is known to be tokenised, and sacreBLEU need not warn.
    "bleu": lambda tokenize, lowercase: CorpusBLEU(
        tokenize=tokenize, lowercase=lowercase, force=tokenize == "none"
    ),
    "chrf": lambda _, lowercase: ResampledCHRF(lowercase=lowercase),
    "chrf++": lambda _, lowercase: ResampledCHRF(word_order=2, lowercase=lowercase),
    "ter": _build_ter,
    "exact_match": lambda *_: Ratio(
        "exact match", _equal_lines, {"unit": "line", "equal": "code-points"}
    ),
    "wer": lambda *_: Ratio("WER", _wrong_words, {"unit": "line", "tok": "blank"}),
    "per": lambda *_: Ratio(
        "PER", _wrong_tokens, {"unit": "token", "tok": "blank", "distance": "levenshtein"}
    ),
    "codexglue_bleu": lambda *_: CodeXGlueBLEU(),
}


def build_metrics(
    names: Iterable[str], tokenize: str = "13a", lowercase: bool = False
) -> dict[str, Metric]:
    """Metrics by name, in the order given; `score` describes the arguments.

    Raises:
        ValueError: If a name or the tokenizer is unknown, or the tokenizer needs a package that is
            not installed, or a model that cannot be downloaded.
    """
    names = list(names)
    if unknown := [name for name in names if name not in METRICS]:
        raise ValueError(
            f"`metrics` must be names of scores, got {unknown[0]!r}. "
            f"Choose from: {', '.join(METRICS)}."
        )
    if tokenize not in BLEU.TOKENIZERS:
        raise ValueError(
            f"`tokenize` must be one of sacreBLEU's tokenizers, got {tokenize!r}. "
            f"Choose from: auto, {', '.join(BLEU.TOKENIZERS)}."
        )
    try:
        return {name: BUILDERS[name](tokenize, lowercase) for name in names}
    # The download of a tokenizer's model may fail.
    except (ImportError, RuntimeError, OSError) as error:
        raise ValueError(
            f"`tokenize` {tokenize!r} cannot be used here: {' '.join(str(error).split())}"
        ) from error


def score(
    predictions: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    tokenize: str | BleuTokenizer = "auto",
    language: str | None = None,
    lowercase: bool = False,
    bootstrap: int = 0,
) -> Scores:
    """Scores of a list of translations; needs no network and no disk.

    Every score is a percentage under its name, next to `NAME_signature`, which defines it; `lines`
    is the number of lines.

    Args:
        predictions: Detokenised text, one line each.
        references: A line for each prediction, or several lines each.
        metrics: Names of the scores.
        tokenize: sacreBLEU's tokenizer for BLEU; "auto" chooses one, see `bleu_tokenizers`. "none"
            is for text whose tokens are already separated by blanks. "spm", "flores101",
            "flores200" and "spBLEU-1K" download a model on first use.
        language: Code of the target language, for "auto"; None: the script decides.
        lowercase: Lower-cases both sides for BLEU and chrF. The others but TER never alter the
            text: case and Unicode composition count.
        bootstrap: Resamples of the lines, for 95 % confidence intervals (Koehn, 2004) as sacreBLEU
            computes them: `NAME_ci` is half the width of each. 1,000 are usual; 0: no intervals.
            All resamples are in memory together; for chrF they take 72 bytes per line and resample.

    Raises:
        ValueError: If there are no lines, their numbers differ, or an option is impossible.
    """
    streams = transposed(predictions, references)
    check_bootstrap(bootstrap)
    tokenizer = resolve(tokenize, list(chain(*streams)), [language])
    scores: Scores = {}
    for name, metric in build_metrics(metrics, tokenizer.name, lowercase).items():
        result = metric.corpus_score(predictions, streams, n_bootstrap=bootstrap)
        scores[name] = float(result.score)
        if bootstrap:
            scores[f"{name}_ci"] = float(result._ci)
        scores[f"{name}_signature"] = str(metric.get_signature())
        if name == "bleu" and tokenizer.reason:
            scores["bleu_tokenizer"] = str(tokenizer)
    return scores | {"lines": len(predictions)}


def equal_in_canonical_form(
    predictions: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]
) -> int:
    """Number of predictions that differ from a reference in canonical form (NFC) alone."""
    streams = transposed(predictions, references)
    return sum(
        normalize("NFC", prediction) in (normalize("NFC", line) for line in lines)
        for prediction, *lines in zip(predictions, *streams, strict=True)
        if prediction not in lines
    )


def transposed(
    predictions: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]
) -> list[list[str]]:
    """References as sacreBLEU takes them: the first one of each line, the second ones, and so on.

    Raises:
        ValueError: If the numbers of lines differ, or there are none.
    """
    if len(predictions) != len(references):
        raise ValueError(
            "`predictions` and `references` must have the same number of lines, got "
            f"{len(predictions)} and {len(references)}. "
            "Check that both belong to the same source lines."
        )
    if not predictions:
        raise ValueError(
            "`predictions` and `references` must hold at least one line each, got 0. "
            "Check that the files to score are not empty."
        )
    lines = [[line] if isinstance(line, str) else list(line) for line in references]
    if len(numbers := {len(line) for line in lines}) > 1 or 0 in numbers:
        raise ValueError(
            "Each prediction must have the same number of references, at least one, got "
            f"{min(numbers)} to {max(numbers)}."
        )
    return [list(stream) for stream in zip(*lines, strict=True)]


class TranslationScores(evaluate.Metric):
    """`score` as a metric of the library `evaluate`; `compute` takes its arguments by name."""

    def _info(self) -> evaluate.MetricInfo:
        lines = Value("string")
        return evaluate.MetricInfo(
            description=score.__doc__,
            citation="",
            features=[
                Features({"predictions": lines, "references": kind})
                for kind in (lines, Several(lines))
            ],
        )

    def _compute(self, **arguments: Any) -> Scores:
        return score(**arguments)


def check_bootstrap(resamples: int) -> None:
    """Rejects a number of resamples that leaves none at either end of a 95 % interval.

    Raises:
        ValueError: If there are some, but fewer than 40.
    """
    if resamples and resamples < 40:
        raise ValueError(
            f"`bootstrap` must be at least 40 resamples, or 0 for none, got {resamples}. "
            "1,000 are usual."
        )


def format_scores(scores: Scores) -> str:
    """A human-readable line for each score, with its signature."""
    lines = []
    for name in (name for name in scores if name in METRICS):
        interval = f" ± {scores[f'{name}_ci']:.2f}" if f"{name}_ci" in scores else ""
        signature = scores[f"{name}_signature"]
        lines.append(f"{METRICS[name].title} {scores[name]:.2f}{interval} ({signature})")
        if name == "bleu" and "bleu_tokenizer" in scores:
            lines.append(f"  tokenizer {scores['bleu_tokenizer']}")
    return "\n".join([*lines, f"{scores['lines']:,} lines"])
