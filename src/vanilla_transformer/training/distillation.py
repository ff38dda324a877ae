"""Sequence-level knowledge distillation: which outputs of a teacher a student learns from.

Kim and Rush 2016 (D16-1139, arXiv 1606.07947), sections 3.2 and 3.3: the student is trained on the
teacher's outputs instead of the references, or on the output that is nearest to the reference.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from vanilla_transformer.files import read_lines, write_lines


@dataclass(frozen=True)
class Targets:
    """Which targets a student gets.

    Attributes:
        references: Whether it learns from the references too.
        nearest: Of several outputs, keep only the one nearest to the reference: by chrF of the
            sentence, or by BLEU with effective order; None: keep all.
        tokenize: SacreBLEU's tokenizer for BLEU.
    """

    references: bool = False
    nearest: Literal["chrf", "bleu"] | None = None
    tokenize: str = "13a"

    def metric(self) -> Metric | None:
        """Similarity to the reference, if it matters."""
        if self.nearest == "bleu":
            return BLEU(effective_order=True, tokenize=self.tokenize, force=True)
        return CHRF() if self.nearest == "chrf" else None


@dataclass
class Taught:
    """Counts of the pairs that a student learns from.

    Attributes:
        sources: Sources that the teacher was given.
        blank: Sources for which it has written nothing.
        equal: Sources with an output equal to the reference.
        pairs: Pairs for the student.
    """

    sources: int = 0
    blank: int = 0
    equal: int = 0
    pairs: int = 0

    def __str__(self) -> str:
        """What the command prints."""
        return (
            f"{self.pairs:,} pairs from {self.sources:,} sources; the teacher wrote nothing for "
            f"{self.blank:,}, and the reference for {self.equal:,}"
        )


def choose_targets(
    reference: str, outputs: Sequence[str], *, with_reference: bool, metric: Metric | None
) -> list[str]:
    """Targets of one source, each once; blank outputs are left out.

    Args:
        reference: Of the source.
        outputs: Of the teacher, best first.
        with_reference: Whether the reference is a target too; it comes first.
        metric: Keeps only the output with the largest score, of equal ones the first; None: all.
    """
    written = [output for output in outputs if output.strip()]
    if metric and written:
        scores = [metric.sentence_score(output, [reference]).score for output in written]
        written = [written[scores.index(max(scores))]]
    return list(dict.fromkeys([reference] * with_reference + written))


def read_outputs(path: Path, n_best: int) -> Iterator[list[str]]:
    """Outputs of each source, best first, from a file that `translate --n_best` wrote.

    Args:
        path: One row for each output: with `n_best` 1 its text, else number, score and text.
        n_best: Outputs of each source.
    """
    texts = read_lines(path)
    if n_best > 1:
        texts = (row.split("\t", 2)[2] for row in texts)
    while outputs := list(islice(texts, n_best)):
        yield outputs


def write_pairs(
    path: Path, sources: Path, references: Path, outputs: Iterator[list[str]], targets: Targets
) -> Taught:
    """Writes the pairs of a student as JSON lines, which `ParallelText` reads.

    Args:
        path: Of the file to write.
        sources: File of the sources, one a line.
        references: File of their references.
        outputs: Of the teacher, for each source.
        targets: Which of them are used.

    Raises:
        ValueError: If there are no pairs.
    """
    metric = targets.metric()
    taught = Taught()

    def pairs() -> Iterator[str]:
        for source, reference, texts in zip(
            read_lines(sources), read_lines(references), outputs, strict=True
        ):
            chosen = choose_targets(
                reference, texts, with_reference=targets.references, metric=metric
            )
            taught.sources += 1
            taught.blank += not any(map(str.strip, texts))
            taught.equal += reference in texts
            taught.pairs += len(chosen)
            for target in chosen:
                yield json.dumps({"source": source, "target": target}, ensure_ascii=False)

    write_lines(path, pairs())
    if not taught.pairs:
        raise ValueError(
            f"The teacher must translate at least one source, got {taught.sources:,} blank "
            f"outputs beside {str(sources)!r}. Try `translate` with it, and another search."
        )
    return taught
