#!/usr/bin/env python
"""Reranks the best outputs of a model by another one that writes from right to left."""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vanilla_transformer_tools.translation import Translator

# One list for each source: outputs with the scores of both models.
Candidates = list[list[tuple[str, float, float]]]


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__ + "\nThe weight of its score (Liu et al. 2016, N16-1046) is chosen on "
        "the validation\npairs. Prints a Markdown table.",
        epilog="Example:\n"
        "  python scripts/prepare_corpus.py g2p g2p/dut_train.tsv.gz --folder data/dut-rtl \\\n"
        "      --split train --carve 0.05 --right_to_left\n"
        "  vanilla-transformer train recipes/g2p.yaml --data data/dut-rtl --output_dir runs/rtl\n"
        "  python scripts/rerank.py --model runs/dut --reverse runs/rtl --metric wer \\\n"
        "      --validation data/dut/validation.jsonl --test data/dut/dev.jsonl",
    )
    parser.add_argument(
        "--model", nargs="+", required=True, help="Folder of the model; several are an ensemble."
    )
    parser.add_argument(
        "--reverse", nargs="+", required=True, help="The same, trained with --right_to_left."
    )
    parser.add_argument("--validation", type=Path, required=True, help=".jsonl of pairs.")
    parser.add_argument("--test", type=Path, required=True, help=".jsonl of pairs.")
    parser.add_argument("--metric", default="bleu", help="(default: bleu)")
    parser.add_argument(
        "--n_best", type=int, default=10, help="Outputs of each source. (default: 10)"
    )
    parser.add_argument(
        "--weights",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 1.0, 2.0],
        help="(default: 0.25 0.5 1 2)",
    )
    return parser.parse_args()


def find_candidates(
    forward: "Translator", backward: "Translator", sources: list[str]
) -> Candidates:
    """The outputs of each source with their scores, log-probability / length^length_penalty."""
    from vanilla_transformer_tools.translation.engines import TorchEngine
    from vanilla_transformer_tools.translation.read_pairs import encode_source, encode_target

    engine = backward.engine
    assert isinstance(engine, TorchEngine)
    candidates: Candidates = []
    for source, best in zip(sources, forward.translate(sources), strict=True):
        outputs = [best, *best.alternatives]
        reverse = [
            encode_target(backward, " ".join(reversed(output.text.split())))["input_ids"]
            for output in outputs
        ]
        passes = engine.force([encode_source(backward, source)["input_ids"]], reverse)
        candidates.append(
            [
                (
                    output.text,
                    output.score or 0.0,
                    sum(read.log_probs) / len(read.log_probs) ** forward.search.length_penalty,
                )
                for output, read in zip(outputs, passes, strict=True)
            ]
        )
    return candidates


def choose(candidates: Candidates, weight: float) -> list[str]:
    """The output of each source with the best sum of scores."""
    return [
        max(outputs, key=lambda output: output[1] + weight * output[2])[0] for outputs in candidates
    ]


def main() -> int:
    """Prints the scores; returns the exit status."""
    options = parse()
    # Imported late: they load torch, and `--help` should answer at once.
    from vanilla_transformer_tools.evaluation.bleu_tokenizers import resolve
    from vanilla_transformer_tools.evaluation.metrics import METRICS, build_metrics
    from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs
    from vanilla_transformer_tools.translation import Translator

    try:
        if not all(map(math.isfinite, options.weights)):
            raise ValueError(f"--weights must be finite, got {options.weights}.")
        pairs = [
            load_pairs(ParallelText((str(file),))) for file in (options.validation, options.test)
        ]
        tokenizer = resolve("auto", pairs[1]["target"][:]).name
        (metric,) = build_metrics([options.metric], tokenizer).values()
        forward = Translator.from_pretrained(
            options.model,
            engine="torch",
            num_beams=options.n_best,
            num_hypotheses=options.n_best,
            scores=True,
        )
        backward = Translator.from_pretrained(options.reverse, engine="torch")
        found = [find_candidates(forward, backward, list(split["source"])) for split in pairs]
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2

    def score(split: int, weight: float) -> float:
        outputs = choose(found[split], weight)
        return float(metric.corpus_score(outputs, [list(pairs[split]["target"])]).score)

    weights = [0.0, *options.weights]
    on_validation = [score(0, weight) for weight in weights]
    better = min if METRICS[options.metric].is_error_rate else max
    chosen = weights[on_validation.index(better(on_validation))]
    print(f"| weight | {options.metric} on validation | on test |\n| --- | --- | --- |")
    for weight, validation in zip(weights, on_validation, strict=True):
        test = f"{score(1, weight):.2f}" if weight in (0.0, chosen) else ""
        print(f"| {weight:g}{' (chosen)' * (weight == chosen)} | {validation:.2f} | {test} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
