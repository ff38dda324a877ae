#!/usr/bin/env python
"""Converts the files of public corpora to pairs, and splits off a validation set.

Writes FOLDER/SPLIT.jsonl with the columns source and target. With --carve, a share of the sources
goes to FOLDER/validation.jsonl, each with all its targets. The choice depends only on the seed and
the source.

Example:
  python scripts/prepare_corpus.py g2p dut_train.tsv.gz --folder data/dut --split train --carve 0.05
"""

import argparse
import hashlib
import json
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from vanilla_transformer_tools.files import read_lines, write_lines


def parse() -> argparse.Namespace:
    """Reads the options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    kinds = """g2p: word and phonemes; the letters of the word are separated by blanks, and _
    replaces a blank. scan: `IN: command OUT: actions`. pairs: left as they are."""
    parser.add_argument("kind", choices=["g2p", "scan", "pairs"], help=kinds)
    parser.add_argument("files", nargs="+", help="one file, or one for each side; plain or .gz")
    parser.add_argument("--folder", type=Path, required=True, help="where the files go")
    parser.add_argument("--split", required=True, help="name of the file: train, test, ...")
    parser.add_argument("--carve", type=float, default=0.0, help="share of the sources, 0 to 1")
    parser.add_argument("--seed", default="0", help="for the choice of --carve (default: 0)")
    apart = """for g2p: letters and their accents, and the parts of a syllable of Hangul, are
    separated too (NFD). The same words are carved"""
    parser.add_argument("--apart", action="store_true", help=apart)
    unseen = """leaves out pairs whose exact source occurs in one of these files; .jsonl, .tsv or
    .parquet"""
    parser.add_argument("--unseen_in", nargs="+", default=[], metavar="FILE", help=unseen)
    return parser.parse_args()


def read(kind: str, files: list[str]) -> Iterable[tuple[str, str]]:
    """Pairs of a corpus."""
    # Imported late: it loads torch, and `--help` should answer at once.
    from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs

    if kind == "scan":
        for number, line in enumerate(read_lines(files[0]), start=1):
            command, separator, actions = line.removeprefix("IN: ").partition(" OUT: ")
            if not separator:
                raise ValueError(f"Line {number} of {files[0]!r} has no ` OUT: `, got {line!r:.60}")
            yield command, actions
        return
    pairs = load_pairs(ParallelText(tuple(files)))
    for source, target in zip(pairs["source"], pairs["target"], strict=True):
        yield " ".join(source.replace(" ", "_")) if kind == "g2p" else source, target


def check(given: argparse.Namespace, outputs: Iterable[Path]) -> None:
    """Refuses options that do not go together, and an output that is an input.

    Raises:
        ValueError: If there are any; the message names all.
    """
    faults = []
    if not 0 <= given.carve < 1:
        faults.append(f"--carve must be at least 0 and below 1, got {given.carve}.")
    if given.carve and given.split == "validation":
        faults.append("--carve writes validation.jsonl, got --split validation too. Name another.")
    if given.apart and given.kind != "g2p":
        faults.append(f"--apart is for g2p, got {given.kind}.")
    if given.kind == "scan" and len(given.files) > 1:
        faults.append(f"scan takes one file, got {len(given.files)}: {', '.join(given.files)}.")
    inputs = {Path(file).resolve() for file in (*given.files, *given.unseen_in)}
    faults += [
        f"{path} is an input, and would be overwritten. Choose another --folder or --split."
        for path in outputs
        if path.resolve() in inputs
    ]
    if faults:
        raise ValueError("\n".join(faults))


def main() -> None:
    """Writes the files and prints their sizes."""
    given = parse()
    splits: dict[str, list[str]] = {given.split: []}
    if given.carve:
        splits["validation"] = []
    paths = {split: given.folder / f"{split}.jsonl" for split in splits}
    check(given, paths.values())
    seen = {source for file in given.unseen_in for source, _ in read("pairs", [file])}
    left_out = 0
    for source, target in read(given.kind, given.files):
        written = source
        if given.apart:
            written = " ".join(unicodedata.normalize("NFD", source).replace(" ", ""))
        if not seen.isdisjoint((source, written)):
            left_out += 1
            continue
        digest = hashlib.sha256(f"{given.seed} {source}".encode()).digest()
        is_carved = int.from_bytes(digest[:8], "big") < given.carve * 2**64
        row = json.dumps({"source": written, "target": target}, ensure_ascii=False)
        splits["validation" if is_carved else given.split].append(row)
    for split, rows in splits.items():
        if not rows:
            raise ValueError(
                f"{split}.jsonl needs at least one pair, got none: {left_out} were left out by "
                f"--unseen_in, and --carve is {given.carve}. Nothing was written."
            )
    given.folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        write_lines(paths[split], rows)
    for split, rows in splits.items():
        print(f"{paths[split]}\t{len(rows)} pairs")
    if seen:
        print(f"left out\t{left_out} pairs")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
