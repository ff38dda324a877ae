"""Guided alignment (Garg et al. 2019, arXiv 1909.02074): one head learns given word alignments."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from transformers import DataCollatorForSeq2Seq
from transformers.modeling_outputs import Seq2SeqLMOutput

from vanilla_transformer.layers_vanilla_transformer import KEY_VALUE, QUERY, CrossAttention
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer_tools.files import read_lines
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.blanks import without_blank_ends
from vanilla_transformer_tools.text.filters import FilteredPairs
from vanilla_transformer_tools.text.parallel_text import ROWS_AT_A_TIME, store, temporary_room
from vanilla_transformer_tools.text.token_ids import source_prefixes
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair, end_length
from vanilla_transformer_tools.text.training_data import TrainingData
from vanilla_transformer_tools.text.units import units_of_tokens
from vanilla_transformer_tools.translation.engines import aligned_layer

# Of the alignment's loss, as in the paper.
WEIGHT = 0.05
# Of the aligned layer.
HEAD = 0
# Links between tokens of a pair: target, source, target, source and so on.
COLUMN = "alignment"

_SCHEMA = pa.schema([(COLUMN, pa.list_(pa.int32()))])
_LINK = re.compile(r"(\d+)-(\d+)")


class AlignedCollator(DataCollatorForSeq2Seq):
    """Transformers' collator, for pairs with links too: `alignment` is `[links, 3]` then.

    A link is a row, a position in `labels` and one in `input_ids`; padding is on the right.
    """

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> Any:
        """The batch of some pairs."""
        rows = [feature[COLUMN] for feature in features if COLUMN in feature]
        others = [
            {name: value for name, value in feature.items() if name != COLUMN}
            for feature in features
        ]
        batch = super().__call__(others, return_tensors)
        if rows:
            links = [
                (number, *link)
                for number, row in enumerate(rows)
                for link in zip(row[::2], row[1::2], strict=True)
            ]
            batch[COLUMN] = torch.tensor(links, dtype=torch.long).view(-1, 3)
        return batch


def guided(
    settings: TrainSettings,
    model: VanillaTransformerForConditionalGeneration,
    tokenizers: TokenizerPair,
    data: TrainingData,
    filtered: FilteredPairs,
    training_pass: Callable[..., Seq2SeqLMOutput] | None,
) -> tuple[TrainingData, Callable[..., Seq2SeqLMOutput]]:
    """Training data with links, and the pass that learns them; the model names its head.

    Args:
        settings: With `alignments`.
        model: Its generation config gets `alignment_heads`, a list with layer and head.
        tokenizers: Of the pairs.
        data: The kept pairs, stored.
        filtered: All pairs.
        training_pass: See `TokenBatchTrainer`.

    Raises:
        ValueError: If the model has talking heads, or the file does not fit the pairs.
    """
    if model.config.talking_heads is not None:
        raise ValueError(
            "--alignments teaches one head, and `talking_heads` mixes all of them, got "
            f"{model.config.talking_heads!r}. Leave one of the two out."
        )
    layer = aligned_layer(model.config.decoder_layers)
    model.generation_config.alignment_heads = [[layer, HEAD]]
    links = _store_links(settings, tokenizers, filtered)
    dataset = concatenate_datasets([data.dataset, links], axis=1)
    attention = model.get_decoder().layers[layer].encoder_attn
    return (
        dataclasses.replace(data, dataset=dataset),
        partial(guided_pass, attention=attention, training_pass=training_pass),
    )


def guided_pass(
    model: Callable[..., Seq2SeqLMOutput],
    *,
    attention: CrossAttention,
    training_pass: Callable[..., Seq2SeqLMOutput] | None = None,
    alignment: Tensor,
    num_items_in_batch: int | Tensor | None = None,
    **inputs: Tensor,
) -> Seq2SeqLMOutput:
    """Calls a model on a batch, with a loss on the attention of one head.

    The loss is the model's own plus `WEIGHT` times the cross-entropy of the head's weights, before
    dropout, with respect to the links, which share the weight of their target evenly (equation 5),
    per target token. Targets without links add nothing.

    Args:
        model: A vanilla Transformer in training mode, wrapped or not.
        attention: Of the layer that learns, in this model.
        training_pass: Function that calls the model and may repeat the batch; None: a plain call.
        alignment: Links, `[links, 3]`, see `AlignedCollator`.
        num_items_in_batch: Divisor of the summed loss; None for the targets of this batch.
        inputs: Tensors of the batch, `[B, ...]` each, including `labels`.

    Returns:
        The model's output with this loss.
    """
    projected = {}

    def keep(module: torch.nn.Module, _: Any, output: Tensor) -> None:
        projected[module] = output

    # Whatever the kernel, it gets these.
    kept = (attention.q_proj, attention.kv_proj)
    handles = [module.register_forward_hook(keep) for module in kept]
    try:
        call = partial(training_pass, model) if training_pass else model
        output = call(num_items_in_batch=num_items_in_batch, **inputs)
    finally:
        for handle in handles:
            handle.remove()
    queries, keys = (projected[module][: len(inputs["labels"])] for module in kept)
    (query,) = attention.split_heads(queries, QUERY)
    key, _ = attention.split_heads(keys, KEY_VALUE)
    scores = (query[:, HEAD] @ key[:, HEAD].mT).float() * attention.scaling
    is_padding = inputs["attention_mask"] == 0
    log_weights = scores.masked_fill(is_padding[:, None], -torch.inf).log_softmax(-1)
    row, target, source = alignment.unbind(-1)
    place = row * scores.shape[1] + target
    shares = 1 / place.bincount(minlength=1).clamp(min=1)[place]
    total = -(log_weights[row, target, source] * shares).sum()
    if num_items_in_batch is None:
        num_items_in_batch = (inputs["labels"] >= 0).sum()
    output.loss = output.loss + WEIGHT * total / torch.as_tensor(num_items_in_batch).clamp(min=1)
    return output


def _store_links(
    settings: TrainSettings, tokenizers: TokenizerPair, filtered: FilteredPairs
) -> Dataset:
    """Links between the tokens of the kept pairs, in an Arrow file.

    Raises:
        ValueError: If the file has another number of lines, or one that is no alignment of its
            pair.
    """
    path = str(settings.alignments)
    verdicts = filtered.verdicts.tolist()
    lines = list(enumerate(read_lines(path, may_be_empty=True), start=1))
    if len(lines) != len(verdicts):
        raise ValueError(
            f"--alignments must have one line for each of the {len(verdicts):,} pairs of --train, "
            f"got {len(lines):,} in {path!r}. Align the same files."
        )
    numbered = iter([line for line, dropped in zip(lines, verdicts, strict=True) if not dropped])

    def batches() -> Iterator[pa.RecordBatch]:
        for table in filtered.kept.with_format("arrow").iter(ROWS_AT_A_TIME):
            pairs = table.to_pydict()
            prefixes = source_prefixes(pairs.get("tag"), len(table), tokenizers)
            sources = _words_of_tokens(
                tokenizers.source, "text", pairs["source"], prefixes, settings.max_length
            )
            targets = _words_of_tokens(
                tokenizers.target, "text_target", pairs["target"], None, settings.max_length
            )
            rows = []
            for words in zip(sources, targets, pairs["source"], pairs["target"], strict=True):
                number, line = next(numbered)
                try:
                    rows.append(list(_links(line, *words)))
                except ValueError as error:
                    raise ValueError(f"{path!r}, line {number}: {error}") from error
            yield pa.record_batch([pa.array(rows, _SCHEMA.field(0).type)], schema=_SCHEMA)

    with temporary_room("the alignments"):
        return store(batches(), _SCHEMA)


def _words_of_tokens(
    tokenizer: Any,
    argument: str,
    texts: Sequence[str],
    prefixes: Sequence[tuple[int, ...]] | None,
    max_length: int,
) -> Iterator[list[set[int]]]:
    """Numbers of the words of each token, for the tokens of each line that are not cut off."""
    texts = list(map(without_blank_ends, texts))
    encoded = tokenizer(**{argument: texts}, return_offsets_mapping=True, verbose=False)
    most = max_length - end_length(tokenizer)
    for number, (text, offsets) in enumerate(zip(texts, encoded["offset_mapping"], strict=True)):
        before: list[set[int]] = [set() for _ in prefixes[number]] if prefixes else []
        yield (before + units_of_tokens(offsets, text))[:most]


def _links(
    line: str, sources: list[set[int]], targets: list[set[int]], source: str, target: str
) -> Iterator[int]:
    """Target and source position of each link between tokens, whose words are given.

    Raises:
        ValueError: If the line is not in Pharaoh format, or links words that are not there.
    """
    counts = len(source.split()), len(target.split())
    linked: dict[int, set[int]] = {}
    for text in line.split():
        found = _LINK.fullmatch(text)
        if not found or int(found[1]) >= counts[0] or int(found[2]) >= counts[1]:
            raise ValueError(
                f"Links must be source-target, such as 0-0 1-2, among {counts[0]} source and "
                f"{counts[1]} target words between blanks, counted from 0, got {text!r:.60}."
            )
        linked.setdefault(int(found[2]), set()).add(int(found[1]))
    places: dict[int, list[int]] = {}
    for place, words in enumerate(sources):
        for word in words:
            places.setdefault(word, []).append(place)
    for target_place, words in enumerate(targets):
        of_source = set(chain.from_iterable(linked.get(word, ()) for word in words))
        for place in sorted(set(chain.from_iterable(places.get(word, ()) for word in of_source))):
            yield target_place
            yield place
