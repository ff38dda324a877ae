#!/usr/bin/env python
r"""Scores translations by source length: how well a model does beyond the lengths of training.

Prints a Markdown table: mean and range over the models.

Example, three seeds of a model that was trained on words of up to 8 letters:
  python lab/score_by_length.py runs/learned-1 runs/learned-2 runs/learned-3 \
      --test data/dut/validation.jsonl --up_to 8 10 12
"""

import argparse
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from statistics import mean

from runs import run_main, table


def main() -> None:
    """Prints a row for each group."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("models", nargs="+", help="Folders of models, one for each seed.")
    parser.add_argument("--test", type=Path, required=True, help=".jsonl of sources and targets.")
    text = """Longest source of each group, in tokens separated by blanks; one more group has the
    rest."""
    parser.add_argument("--up_to", type=int, nargs="+", required=True, help=text)
    parser.add_argument("--metric", default="wer", help="(default: wer)")
    parser.add_argument("--num_beams", type=int, default=1, help="(default: 1)")
    options = parser.parse_args()
    # Imported late: they load torch, and `--help` should answer at once.
    from vanilla_transformer_tools.evaluation.bleu_tokenizers import resolve
    from vanilla_transformer_tools.evaluation.metrics import build_metrics
    from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs
    from vanilla_transformer_tools.translation import Translator

    edges = sorted(set(options.up_to))
    groups: list[list[tuple[str, str]]] = [[] for _ in range(len(edges) + 1)]
    pairs = load_pairs(ParallelText((str(options.test),)))
    tokenizer = resolve("auto", pairs["target"][:]).name
    (metric,) = build_metrics([options.metric], tokenizer).values()
    for source, target in zip(pairs["source"], pairs["target"], strict=True):
        groups[bisect_left(edges, len(source.split()))].append((source, target))
    translators = [
        Translator.from_pretrained(model, num_beams=options.num_beams) for model in options.models
    ]
    rows = [["source tokens", "lines", options.metric, "range"]]
    for (shortest, longest), group in zip(pairwise([0, *edges, None]), groups, strict=True):
        if not group:
            continue
        sources, targets = zip(*group, strict=True)
        scores = []
        for translator in translators:
            outputs = [output.text for output in translator.translate(sources)]
            scores.append(metric.corpus_score(outputs, [targets]).score)
        name = f"{shortest + 1} and more" if longest is None else f"{shortest + 1} to {longest}"
        spread = f"{min(scores):.2f}-{max(scores):.2f}"
        rows.append([name, f"{len(group):,}", f"{mean(scores):.2f}", spread])
    print(table(*rows))


if __name__ == "__main__":
    run_main(main)
