"""Knowledge distillation: what a student learns from a teacher (Kim and Rush 2016, D16-1139).

Sections 3.2 and 3.3 of arXiv 1606.07947, sequence level: the student is trained on the teacher's
outputs instead of the references, or on the output that is nearest to the reference. Section 3.1,
word level: its distribution over the vocabulary is compared with the teacher's at each target.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import Seq2SeqLMOutput

from vanilla_transformer.loss_vanilla_transformer import IGNORED
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer_tools.files import read_lines, rows_written
from vanilla_transformer_tools.saved_folder import load_model
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair


def word_level(
    model: Callable[..., Seq2SeqLMOutput],
    teachers: Sequence[PreTrainedModel],
    weight: float,
    *,
    num_items_in_batch: int | Tensor | None = None,
    **inputs: Tensor,
) -> Seq2SeqLMOutput:
    """Calls a model on a batch, with a loss on how its distributions differ from the teachers'.

    The loss is (1 - weight) times the model's own plus weight times the cross-entropy of the
    model's distribution with respect to the teachers', whose probabilities are averaged, per target
    token (section 3.1, L_WORD-KD). It takes the memory of all logits of the batch.

    Args:
        model: A vanilla Transformer in training mode, wrapped or not.
        teachers: Models in evaluation mode with the same vocabulary.
        weight: Between 0 and 1.
        num_items_in_batch: Divisor of the summed loss; None for the targets of this batch.
        inputs: Tensors of the batch, `[B, ...]` each, including `labels`.

    Returns:
        The model's output, with its logits and this loss.
    """
    labels = inputs["labels"]
    is_target = labels != IGNORED
    # Without labels, teachers compute no losses, and without a cache they copy no keys and values.
    given = {name: tensor for name, tensor in inputs.items() if name != "labels"}

    def probabilities_of(teacher: PreTrainedModel) -> Tensor:
        targets = teacher.prepare_decoder_input_ids_from_labels(labels)
        output = teacher(**{"decoder_input_ids": targets, **given}, use_cache=False)
        # In float32, as the loss of the model.
        return output.logits[is_target].float().softmax(-1)

    with torch.no_grad():
        probabilities = sum(map(probabilities_of, teachers)) / len(teachers)
    output = model(**inputs, num_items_in_batch=num_items_in_batch, return_logits=True)
    log_probabilities = output.logits[is_target].float().log_softmax(-1)
    count = is_target.sum() if num_items_in_batch is None else num_items_in_batch
    difference = -(probabilities * log_probabilities).sum() / torch.as_tensor(count).clamp(min=1)
    output.loss = (1 - weight) * output.loss + weight * difference
    return output


def load_teachers(
    names: Sequence[str], student: str, device: torch.device
) -> list[PreTrainedModel]:
    """Teachers that compare distributions with a student.

    Args:
        names: Their folders or Hub names.
        student: Saved model that the student has its tokenizers from.
        device: Where they run.

    Raises:
        ValueError: If one has another vocabulary, or is no model of this package.
    """
    vocabulary = TokenizerPair.from_pretrained(student).contents
    teachers = []
    for name in names:
        teacher = load_model(name).eval().requires_grad_(False).to(device)
        is_ours = isinstance(teacher, VanillaTransformerForConditionalGeneration)
        if not is_ours or TokenizerPair.from_pretrained(name).contents != vocabulary:
            raise ValueError(
                f"--word_level needs teachers of this package with the tokenizers of {student!r}, "
                f"got {name!r}. Leave it out, or train a teacher with these tokenizers."
            )
        teachers.append(teacher)
    return teachers


@dataclass(frozen=True)
class Targets:
    """Which targets a student gets.

    Attributes:
        references: Whether it learns from the references too.
        nearest: How the only output that is kept is like the reference: by chrF of the
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
class PairCounts:
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
        reference: Reference of the source.
        outputs: Outputs of the teacher, best first.
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
    paths: Sequence[Path],
    sources: Path,
    references: Path,
    outputs: Iterator[list[str]],
    targets: Targets,
) -> PairCounts:
    """Writes the pairs of a student as two files with a text a line, which `ParallelText` reads.

    Args:
        paths: Files of the sources and of the targets.
        sources: File of the sources, one a line.
        references: File of their references.
        outputs: Outputs of the teacher, for each source.
        targets: Which of them are used.

    Raises:
        ValueError: If there are no pairs.
    """
    metric = targets.metric()
    counts = PairCounts()

    def pairs() -> Iterator[tuple[str, str]]:
        for source, reference, texts in zip(
            read_lines(sources), read_lines(references), outputs, strict=True
        ):
            chosen = choose_targets(
                reference, texts, with_reference=targets.references, metric=metric
            )
            counts.sources += 1
            counts.blank += not any(map(str.strip, texts))
            counts.equal += reference in texts
            counts.pairs += len(chosen)
            for target in chosen:
                yield source, target

    with rows_written(paths, pairs()):
        if not counts.pairs:
            raise ValueError(
                f"The teacher must translate at least one source, got {counts.sources:,} blank "
                f"outputs beside {str(sources)!r}. Try `translate` with it, and another search."
            )
    return counts
