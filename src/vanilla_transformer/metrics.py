"""Scores of translations: BLEU, chrF and exact match, each said with what makes it comparable."""

from collections.abc import Sequence
from typing import TypedDict

import evaluate
from datasets import Features, Value
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF


class Scores(TypedDict):
    """What `TranslationScores.compute` returns; every score is a percentage, 0 to 100.

    Attributes:
        bleu: Corpus BLEU (Papineni et al., 2002) as sacreBLEU computes it.
        bleu_signature: sacreBLEU's record of tokenizer, case, smoothing and version.
        chrf: Corpus chrF2 (Popović, 2015): character n-grams up to 6, no word n-grams.
        chrf_signature: The same record for chrF.
        exact_match: Share of predictions that equal their reference in every code point.
        lines: Count of predictions.
    """

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str
    exact_match: float
    lines: int


class TranslationScores(evaluate.Metric):
    """BLEU, chrF and exact match of a list of translations; needs no network and no disk.

    `TranslationScores().compute(predictions=[...], references=[...])` gives a `Scores`. The two
    lists hold detokenised text, one reference per prediction. `compute` also takes:

    - `tokenize`: sacreBLEU's tokenizer for BLEU, "13a" unless told. "none" is for text whose
      tokens are already separated by blanks, "zh" or "char" for scripts without blanks.
      "spm", "flores101", "flores200" and "spBLEU-1K" download a model on first use.
    - `lowercase`: Lower-cases both sides for BLEU and chrF. Exact match never alters the text:
      case, blanks at the ends and Unicode composition all count.
    """

    def __init__(self) -> None:
        # On disk, processes that score at the same time would compete for one cache file.
        super().__init__(keep_in_memory=True)

    def _build_data_dir(self) -> str:
        # The base class makes a cache folder even for a metric that is kept in memory, and so
        # fails where the home folder is read-only.
        return ""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="BLEU and chrF as sacreBLEU computes them, and exact match.",
            citation="",
            features=Features({"predictions": Value("string"), "references": Value("string")}),
            reference_urls=["https://github.com/mjpost/sacrebleu"],
        )

    def add_batch(self, *, predictions: Sequence[str], references: Sequence[str]) -> None:
        """Stores lines for the next `compute()`; `compute` stores its own lines with it too."""
        if len(predictions) != len(references):
            raise ValueError(
                "`predictions` and `references` must have the same number of lines, got "
                f"{len(predictions)} and {len(references)}. "
                "Check that both belong to the same source lines."
            )
        super().add_batch(predictions=predictions, references=references)

    def _compute(
        self,
        *,
        predictions: list[str],
        references: list[str],
        tokenize: str = "13a",
        lowercase: bool = False,
    ) -> Scores:
        if not predictions:
            raise ValueError(
                "`predictions` and `references` must hold at least one line each, got 0. "
                "Check that the files to score are not empty."
            )
        if tokenize not in BLEU.TOKENIZERS:
            raise ValueError(
                f"`tokenize` must be one of sacreBLEU's tokenizers, got {tokenize!r}. "
                f"Choose from: {', '.join(BLEU.TOKENIZERS)}."
            )
        # Who says "none" knows that the text is tokenised: no need for sacreBLEU's warning.
        bleu = BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none")
        chrf = CHRF(lowercase=lowercase)
        pairs = zip(predictions, references, strict=True)
        identical = sum(prediction == reference for prediction, reference in pairs)
        return {
            "bleu": bleu.corpus_score(predictions, [references]).score,
            "bleu_signature": str(bleu.get_signature()),
            "chrf": chrf.corpus_score(predictions, [references]).score,
            "chrf_signature": str(chrf.get_signature()),
            "exact_match": 100 * identical / len(predictions),
            "lines": len(predictions),
        }


def format_scores(scores: Scores) -> str:
    """One line for people, in which BLEU and chrF never go without their signatures."""
    return (
        f"BLEU {scores['bleu']:.2f} ({scores['bleu_signature']}), "
        f"chrF {scores['chrf']:.2f} ({scores['chrf_signature']}), "
        f"exact match {scores['exact_match']:.2f} % of {scores['lines']:,} lines"
    )
