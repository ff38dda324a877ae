#!/usr/bin/env python
r"""What `import --keep_vocabulary` is worth: NLLB-200's size with all entries and with fewer.

The model is NLLB-200 600M with 2+2 of its 12+12 layers and random weights. Its vocabulary is a
stand-in: a Unigram vocabulary that is learned from the corpus, and words in other scripts up to the
number of NLLB's entries, which no text here uses. Both models train on the same pairs and write
equally many tokens, in rounds that take turns.

Example:
  python benchmarks/trimming.py --corpus train.de.gz train.en.gz
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from ratio_tables import head, rate, row

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COLUMNS = ("model", "entries", "weights, MB", "training, tokens/s", "greedy, tokens/s")
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
# Of Cyrillic, Greek, Armenian and Georgian.
_FOREIGN = "абвгдежзиклмнопрстуфхцчшыьэюяαβγδεζηθικλμνξοπρστυφχψωაბგდევზთიკლმნոպրս"
_LEAST_LIKELY = -30.0
_NEW_TOKENS = 20


def main() -> int:
    """Prints one table; returns the exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--corpus", nargs=2, required=True, help="Source and target file.")
    parser.add_argument("--size", default="nllb", help="As of finetuning.py (default: nllb).")
    parser.add_argument("--learned", type=int, default=32_000, help="(default: 32000)")
    parser.add_argument("--min_count", type=int, default=1, help="Of kept entries (default: 1).")
    parser.add_argument("--pairs", type=int, default=16, help="Of a batch (default: 16).")
    parser.add_argument("--rounds", type=int, default=3, help="Timed rounds (default: 3).")
    options = parser.parse_args()
    # Imported late: it loads torch, and `--help` should answer at once.
    from finetuning_contenders import SIZES, build, describe
    from vanilla_transformer_tools.files import read_lines
    from vanilla_transformer_tools.interop.trimming import Trimming, trim

    if options.size not in SIZES:
        print(f"--size must be of {', '.join(SIZES)}, got {options.size}.", file=sys.stderr)
        return 2
    sides = [list(read_lines(path)) for path in options.corpus]
    entries = SIZES[options.size][2]["vocab_size"]
    tokenizer = stand_in([*sides[0], *sides[1]], options.learned, entries)
    model = build(options.size, "vanilla", drops=True)
    trimmed = trim(model, tokenizer, Trimming(tuple(options.corpus), options.min_count))
    print(f"\n{describe(options.size)}; {options.pairs} pairs, {_NEW_TOKENS} tokens written\n")
    models = {"all entries": (model, tokenizer), "kept": (trimmed.model, trimmed.tokenizer)}
    print_table(models, list(islice(zip(*sides, strict=True), options.pairs)), options.rounds)
    return 0


def stand_in(lines: Iterable[str], learned: int, entries: int) -> "PreTrainedTokenizerBase":
    """A Unigram tokenizer with pieces of these lines, and words of other scripts.

    Args:
        lines: What some pieces are learned from.
        learned: At most how many.
        entries: Of the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        lines,
        trainers.UnigramTrainer(
            vocab_size=learned,
            special_tokens=list(SPECIAL.values()),
            unk_token=SPECIAL["unk_token"],
            show_progress=False,
        ),
    )
    pieces = [(piece, score) for piece, score in json.loads(backend.to_str())["model"]["vocab"]]
    draw = random.Random(0)
    known = {piece for piece, _ in pieces}
    while len(pieces) < entries:
        word = "".join(draw.choices(_FOREIGN, k=draw.randint(3, 9)))
        if word not in known:
            known.add(word)
            pieces.append((word, _LEAST_LIKELY))
    backend.model = models.Unigram(pieces, unk_id=list(SPECIAL).index("unk_token"))
    end = SPECIAL["eos_token"]
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, list(SPECIAL.values()).index(end))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def print_table(
    models: dict[str, tuple["PreTrainedModel", "PreTrainedTokenizerBase"]],
    pairs: list[tuple[str, str]],
    rounds: int,
) -> None:
    """Lets the models take turns, first in training and then in writing."""
    from rounds import take_turns

    batches = {name: batch_of(tokenizer, pairs) for name, (_, tokenizer) in models.items()}
    training = take_turns(
        {name: updates(model, batches[name]) for name, (model, _) in models.items()},
        rounds,
        warm_ups=1,
    )
    writing = take_turns(
        {name: writes(model, batches[name]) for name, (model, _) in models.items()},
        rounds,
        warm_ups=1,
    )
    print(head(*COLUMNS))
    for name, (model, tokenizer) in models.items():
        tokens = int(batches[name]["attention_mask"].sum() + (batches[name]["labels"] >= 0).sum())
        sizes = (f"{len(tokenizer):,}", f"{model.get_memory_footprint() / 1e6:,.0f}")
        speeds = (rate(tokens, training[name]), rate(_NEW_TOKENS * len(pairs), writing[name]))
        print(row(name, *sizes, *speeds))


def batch_of(tokenizer: "PreTrainedTokenizerBase", pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """The pairs in one batch."""
    sources, targets = (list(side) for side in zip(*pairs, strict=True))
    batch = dict(tokenizer(sources, text_target=targets, padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    labels = batch["labels"]
    return {**batch, "labels": labels.masked_fill(labels == tokenizer.pad_token_id, -100)}


def updates(model: "PreTrainedModel", batch: dict[str, Any]) -> Callable[[], float]:
    """One update; gives its seconds."""
    from torch.optim import AdamW

    optimizer = AdamW(model.parameters(), fused=True)

    def update() -> float:
        model.train()
        started = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    return update


def writes(model: "PreTrainedModel", batch: dict[str, Any]) -> Callable[[], float]:
    """A greedy search that ends after a number of tokens; gives its seconds."""
    sources = {name: batch[name] for name in ("input_ids", "attention_mask")}
    lengths = {"min_new_tokens": _NEW_TOKENS, "max_new_tokens": _NEW_TOKENS}

    def write() -> float:
        model.eval()
        started = time.perf_counter()
        model.generate(**sources, **lengths, num_beams=1)
        return time.perf_counter() - started

    return write


if __name__ == "__main__":
    sys.exit(main())
