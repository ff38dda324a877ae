#!/usr/bin/env python
"""Speed and memory of translation on a CPU: ours against M2M100, Marian and CTranslate2.

M2M100 gets our weights and our position table, so it computes the same function, which is checked.
In each round, all contenders translate the same batches in turn, tokenised beforehand and in the
file's order. Tables show the median, the slowest and the fastest round. Peak memory is that of the
largest batch, in a process for each. --preset: random weights and sources, 32 tokens of output.
The contender auto chooses anew for each search and batch size, and needs 32 sentences to do so.

Example:
  python benchmarks/generation.py --model runs/de-en --test test.de.gz --threads 1
  python benchmarks/generation.py --preset base --sentences 16 --batch_sizes 1 16
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

CONTENDERS = {
    "vanilla": "vanilla",
    "inherited": "vanilla, Transformers' search",
    "m2m100": "M2M100, our weights",
    "marian": "Marian, random weights",
    "ctranslate2-float32": "CTranslate2 float32",
    "ctranslate2-int8": "CTranslate2 int8",
    "search-float32": "CTranslate2 float32, our search",
    "auto": "--engine auto",
    "translator": "Translator, CTranslate2 int8",
}


def parse() -> argparse.Namespace:
    """Reads the options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="Folder of a trained model; needs --test.")
    model.add_argument("--preset", choices=("tiny", "small", "base", "big"), help="Random weights.")
    parser.add_argument("--test", help="Source lines, plain or .gz; the first column of a .tsv.")
    names = {"nargs": "+", "choices": CONTENDERS, "default": list(CONTENDERS), "metavar": "NAME"}
    parser.add_argument("--contenders", **names, help=f"From {', '.join(CONTENDERS)} (all).")
    types = ["float32", "bfloat16"]
    parser.add_argument("--dtypes", nargs="+", choices=types, default=types, help="Both (default).")
    for name, default, text in (
        ("beams", [1, 5], "Hypotheses per sentence; 1 is greedy (default: 1 5)."),
        ("batch_sizes", [1, 16, 64], "Sentences per batch (default: 1 16 64)."),
        ("threads", [1, 2], "CPU threads, at most OMP_NUM_THREADS (default: 1 2)."),
        ("sentences", 200, "Number of lines to translate (default: 200)."),
        ("max_new_tokens", 100, "Longest output in tokens, for --model (default: 100)."),
        ("rounds", 3, "Timed rounds (default: 3)."),
    ):
        count = {"nargs": "+"} if isinstance(default, list) else {}
        parser.add_argument(f"--{name}", type=int, default=default, help=text, **count)
    parser.add_argument("--no_memory", action="store_true", help="Times only: no peak memory.")
    options = parser.parse_args()
    most = int(os.environ.get("OMP_NUM_THREADS", max(options.threads)))
    options.threads = [number for number in options.threads if number <= most]
    if options.model and not options.test:
        parser.error("--model needs --test, a file of source lines")
    if not options.threads:
        parser.error(f"--threads must be at most OMP_NUM_THREADS, which is {most}")
    return options


def main() -> None:
    """Prints one table for each dtype and number of threads."""
    options = parse()

    from generation_rounds import tables

    with tempfile.TemporaryDirectory() as scratch:
        try:
            for line in tables(options, CONTENDERS, Path(scratch)):
                print(line, flush=True)
        except (ValueError, OSError) as error:
            print(f"generation: {error}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
