#!/usr/bin/env python
"""Speed with the entries of a vocabulary that a text uses, against all of them.

The vocabulary is a stand-in for NLLB's: `--learned` pieces of the corpus, and words in other
scripts up to its number of entries. Both models train on the same pairs, and write 20 tokens greedily.

Example:
  python benchmarks/trimming.py --corpus train.de.gz train.en.gz
"""

import json
import random
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from lab import Report, benchmark_parser, megabytes, seconds_of, speed_cells, take_turns

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

COLUMNS = ("size", "model", "entries", "weights, MB", "training, tokens/s", "greedy, tokens/s")
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
# Letters of Cyrillic, Greek, Armenian and Georgian.
_FOREIGN = "абвгдежзиклмнопрстуфхцчшыьэюяαβγδεζηθικλμνξοπρστυφχψωაბგდევზთიკლმნოպրս"
_LEAST_LIKELY = -30.0
_NEW_TOKENS = 20


def main() -> None:
    """Prints a table."""
    parser = benchmark_parser(__doc__, sizes=("nllb",), known=("nllb", "minute"), rounds=3)
    parser.add_argument("--corpus", nargs=2, required=True, help="Source and target file.")
    parser.add_argument("--learned", type=int, default=32_000, help="(default: 32000)")
    parser.add_argument("--pairs", type=int, default=16, help="Pairs of a batch (default: 16).")
    options = parser.parse_args()
    # Imported late: it loads torch, and `--help` should answer at once.
    from finetuning_contenders import SIZES, build
    from vanilla_transformer.files import read_lines
    from vanilla_transformer.interop.trimming import Trimming, trim

    sides = [list(read_lines(path)) for path in options.corpus]
    pairs = list(islice(zip(*sides, strict=True), options.pairs))
    report = Report(options.output)
    report.table(f"float32, {options.pairs} pairs, {_NEW_TOKENS} tokens written", *COLUMNS)
    for size in options.sizes:
        tokenizer = stand_in([*sides[0], *sides[1]], options.learned, SIZES[size]["vocab_size"])
        model = build(size, "vanilla")
        kept = trim(model, tokenizer, Trimming(tuple(options.corpus), 1))
        models = {"all entries": (model, tokenizer), "kept": (kept.model, kept.tokenizer)}
        for name, cells in measure(models, pairs, options.rounds).items():
            report.row(size, name, *cells)


def stand_in(lines: Iterable[str], learned: int, entries: int) -> "PreTrainedTokenizerBase":
    """A Unigram tokenizer with pieces of these lines, and words of other scripts.

    Args:
        lines: Text from which some pieces are learned.
        learned: Most pieces that are learned.
        entries: Entries of the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = list(SPECIAL.values())
    settings = {"special_tokens": special, "unk_token": "<unk>", "show_progress": False}
    trainer = trainers.UnigramTrainer(vocab_size=learned, **settings)
    backend.train_from_iterator(lines, trainer)
    pieces = [(piece, score) for piece, score in json.loads(backend.to_str())["model"]["vocab"]]
    draw = random.Random(0)
    known = {piece for piece, _ in pieces}
    while len(pieces) < entries:
        word = "".join(draw.choices(_FOREIGN, k=draw.randint(3, 9)))
        if word not in known:
            known.add(word)
            pieces.append((word, _LEAST_LIKELY))
    backend.model = models.Unigram(pieces, unk_id=special.index("<unk>"))
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", special.index("</s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def measure(
    models: dict[str, tuple["PreTrainedModel", "PreTrainedTokenizerBase"]],
    pairs: list[tuple[str, str]],
    rounds: int,
) -> dict[str, list[str]]:
    """The cells of each model; they take turns, first in training and then in writing."""
    from neighbours import Training, tokens_of

    batches = {name: batch_of(tokenizer, pairs) for name, (_, tokenizer) in models.items()}
    updates = {name: Training(model, [batches[name]]).run for name, (model, _) in models.items()}
    training = take_turns(updates, rounds, warm_ups=1)
    calls = {name: partial(write, model, batches[name]) for name, (model, _) in models.items()}
    searches = {name: partial(seconds_of, call) for name, call in calls.items()}
    writing = take_turns(searches, rounds, warm_ups=1)
    cells = {}
    for name, (model, tokenizer) in models.items():
        trained = speed_cells(tokens_of([batches[name]]), training[name], training[name])[0]
        written = speed_cells(_NEW_TOKENS * len(pairs), writing[name], writing[name])[0]
        weights = megabytes(model.get_memory_footprint())
        cells[name] = [f"{len(tokenizer):,}", *weights, trained, written]
    return cells


def batch_of(tokenizer: "PreTrainedTokenizerBase", pairs: list[tuple[str, str]]) -> "BatchEncoding":
    """The pairs in one batch."""
    from transformers import DataCollatorForSeq2Seq

    rows = [
        {"input_ids": tokenizer(source).input_ids, "labels": tokenizer(target).input_ids}
        for source, target in pairs
    ]
    return DataCollatorForSeq2Seq(tokenizer)(rows)


def write(model: "PreTrainedModel", batch: "BatchEncoding") -> None:
    """A greedy search that ends after a number of tokens."""
    sources = {name: batch[name] for name in ("input_ids", "attention_mask")}
    lengths = {"min_new_tokens": _NEW_TOKENS, "max_new_tokens": _NEW_TOKENS}
    model.eval().generate(**sources, **lengths, num_beams=1)
    model.train()


if __name__ == "__main__":
    main()
