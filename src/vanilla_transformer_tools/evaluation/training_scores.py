"""Scores of the translations that `Seq2SeqTrainer` generates, for its `compute_metrics`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import EvalPrediction, PreTrainedTokenizerBase
from transformers.utils import logging

from vanilla_transformer_tools.evaluation.bleu_tokenizers import BleuTokenizer
from vanilla_transformer_tools.evaluation.metrics import equal_in_canonical_form, score
from vanilla_transformer_tools.settings import DEFAULT_METRICS
from vanilla_transformer_tools.text.tokenizer_pair import decoded

logger = logging.get_logger(__name__)

Scorer = Callable[[EvalPrediction], dict[str, Any]]


def compute_scores(
    tokenizer: PreTrainedTokenizerBase,
    references: Sequence[str] | None = None,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    tokenize: str | BleuTokenizer = "auto",
) -> Scorer:
    """A function for the `compute_metrics` of `Seq2SeqTrainer` with `predict_with_generate`.

    Args:
        tokenizer: Tokenizer of the target; converts generated ids to text.
        references: Original text of the evaluation set, in its order; None: the labels as text.
        metrics: Names of the scores, see `score`.
        tokenize: sacreBLEU's tokenizer for BLEU; "auto" chooses one.
    """

    def texts(ids: npt.ArrayLike) -> list[str]:
        # Trainer pads batches of different length with -100.
        padded = np.asarray(ids)
        whole = np.where(padded < 0, tokenizer.pad_token_id, padded)
        # As in translations, an unknown token is a wrong one.
        return [decoded(tokenizer, row) for row in whole.tolist()]

    def score_ids(output: EvalPrediction) -> dict[str, Any]:
        expected = texts(output.label_ids) if references is None else references
        # With several processes, the first pairs fill up the last batch.
        outputs = texts(output.predictions)[: len(expected)]
        if equal_in_canonical_form(outputs, expected):
            logger.warning_once(
                "Some validation outputs differ from their references in Unicode's canonical form "
                "alone, which exact match counts as wrong. Outputs are in NFC: convert the "
                "references to it."
            )
        return score(outputs, expected, tokenize=tokenize, metrics=metrics)

    return score_ids
