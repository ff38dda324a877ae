"""Knowledge distillation: targets of a student from a teacher (Kim and Rush 2016, D16-1139).

Sections 3.2 and 3.3 of arXiv 1606.07947, sequence level: the student is trained on the teacher's
outputs instead of the references, or on the output that is nearest to the reference. Section 3.1,
word level: its distribution over the vocabulary is compared with the teacher's at each target.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from sacrebleu.metrics.base import Metric
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import Seq2SeqLMOutput

from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.plain_vanilla_transformer import IGNORED
from vanilla_transformer_tools.files import opened_whole, read_lines
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
        num_items_in_batch: Divisor of the summed loss; None: the number of targets in this batch.
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
        names: Folders or Hub names of the teachers.
        student: Saved model whose tokenizers the student has.
        device: Device of the teachers.

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


def choose_targets(
    reference: str, outputs: Sequence[str], with_reference: bool, similarity: Metric | None
) -> list[str]:
    """Targets of one source, each once; blank outputs are left out.

    Args:
        reference: Reference of the source.
        outputs: The teacher's outputs, best first; of equally near ones the first is kept.
        with_reference: Whether the student learns from the reference too, which then comes first.
        similarity: Score of a sentence, by which only the output nearest to the reference is kept;
            None: all outputs are kept.
    """
    written = [output for output in outputs if output.strip()]
    if similarity and written:
        score = similarity.sentence_score
        written = [max(written, key=lambda output: score(output, [reference]).score)]
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
    with_references: bool = False,
    similarity: Metric | None = None,
) -> str:
    """Writes the pairs of a student as two files with a text a line, which `ParallelText` reads.

    Args:
        paths: Files for the sources and for the targets.
        sources: File of the sources, one a line.
        references: File of their references.
        outputs: The teacher's outputs of each source.
        with_references: Whether the student learns from the references too.
        similarity: Score that keeps one output of each source, see `choose_targets`.

    Returns:
        Counts of the pairs, in words.

    Raises:
        ValueError: If there are no pairs.
    """
    counts: Counter[str] = Counter()
    columns = read_lines(sources), read_lines(references), outputs
    with opened_whole(paths) as (of_sources, of_targets):
        for source, reference, texts in zip(*columns, strict=True):
            chosen = choose_targets(reference, texts, with_references, similarity)
            counts["sources"] += 1
            counts["blank"] += not any(map(str.strip, texts))
            counts["equal"] += reference in texts
            counts["pairs"] += len(chosen)
            of_sources.writelines(f"{source}\n" for _ in chosen)
            of_targets.writelines(f"{target}\n" for target in chosen)
        if not counts["pairs"]:
            raise ValueError(
                f"The teacher must translate at least one source, got {counts['sources']:,} blank "
                f"outputs for {str(sources)!r}. Try `translate` with it, and another search."
            )
    return (
        f"{counts['pairs']:,} pairs from {counts['sources']:,} sources; the teacher wrote nothing "
        f"for {counts['blank']:,}, and the reference for {counts['equal']:,}"
    )
