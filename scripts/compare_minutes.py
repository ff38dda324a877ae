#!/usr/bin/env python
r"""Compares `train --minutes` with the recipes of corpora that are given as many minutes.

For each corpus of the plan, up to three models are trained and scored on all validation pairs:
rules: by `train --minutes`, with nothing but the files and the metric;
left out: the same, but as the rules would be without the experiments on this corpus;
recipe: by the recipe, which is stopped if it takes longer.

Finished runs are not repeated, and one that was stopped begins anew. With --jobs 2, two runs share
the machine; give each one thread with OMP_NUM_THREADS.

Example:
  OMP_NUM_THREADS=1 python scripts/compare_minutes.py scripts/corpora.yaml --data data \
      --output runs/minutes --minutes 15 --jobs 2
"""

import argparse
import fnmatch
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from runs import is_finished, read_plan, slug, table, train

ROOT = Path(__file__).parents[1]
# Name of the scores in `results.json`.
NAME = "validation, whole"


@dataclass(frozen=True)
class Corpus:
    """A corpus of the plan and the folder of its runs.

    Attributes:
        name: Name in the table.
        source: Folder of the files.
        output: Folder of the runs.
        metric: Metric of training and of the table.
        evaluate: Options of `evaluate`.
        train: Source and target file, separated by a blank.
        validation: Source and target file for scores.
        prepare: Words of `prepare_corpus.py`, which makes those files instead.
        recipe: A recipe of this repository, with options if need be.
        left_out: Options that the rules would choose without this corpus.
    """

    RUNS: ClassVar[tuple[str, ...]] = ("rules", "left out", "recipe")

    name: str
    source: Path
    output: Path
    metric: str
    evaluate: str
    train: str = "train.jsonl"
    validation: str = "validation.jsonl"
    prepare: str = ""
    recipe: str = ""
    left_out: str = ""

    @property
    def data(self) -> Path:
        """Folder of the files of `train` and `validation`."""
        return self.output / "data" if self.prepare else self.source

    def make_files(self) -> None:
        """Runs `prepare_corpus.py`, if there is need.

        Raises:
            subprocess.CalledProcessError: If it fails.
        """
        if self.prepare and not (self.data / self.train).exists():
            kind, *words = shlex.split(self.prepare)
            files = [str(self.source / word) if word.endswith(".gz") else word for word in words]
            script = str(ROOT / "scripts/prepare_corpus.py")
            command = [sys.executable, script, kind, *files, "--folder", str(self.data)]
            subprocess.run(command, check=True, stdout=sys.stderr)

    def options(self, run: str, minutes: float) -> list[str] | None:
        """Options of `train`; None if this corpus has no such run."""
        given = ["--data", str(self.data), "--disable_tqdm", "true"]
        if run == "recipe":
            if not self.recipe:
                return None
            recipe, *words = shlex.split(self.recipe)
            return [str(ROOT / recipe), *words, *given, "--max_minutes", str(minutes)]
        if run == "left out" and not self.left_out:
            return None
        files = ["--train", *self.train.split(), "--validation", *self.validation.split()]
        more = shlex.split(self.left_out) if run == "left out" else []
        return [*files, "--minutes", str(minutes), "--metrics", self.metric, *more, *given]

    def scores(self, run: str) -> dict[str, Any]:
        """What was measured with a model, and the record of its training; empty: nothing yet."""
        # Imported late: it loads torch.
        from vanilla_transformer_tools.saved_folder import RESULTS_FILE, RUN_FILE, read_object

        folder = self.output / slug(run)
        scores = read_object(folder / RESULTS_FILE).get(NAME) if is_finished(folder) else None
        return read_object(folder / RUN_FILE) | scores if scores else {}

    def finish(self, run: str, minutes: float) -> int:
        """Trains and scores one model, unless that has been done; returns the exit status."""
        folder, words = self.output / slug(run), self.options(run, minutes)
        if words is None:
            return 0
        if status := train(folder, words):
            return status
        if self.scores(run):
            return 0
        command = [sys.executable, "-m", "vanilla_transformer_tools.commands", "evaluate"]
        command += ["--name", NAME, "--model", str(folder), "--metrics", self.metric]
        command += shlex.split(self.evaluate)
        command += ["--test", *(str(self.data / file) for file in self.validation.split())]
        return subprocess.run(command, check=False, stdout=sys.stderr).returncode


def read_corpora(plan: Path, patterns: list[str], data: Path, output: Path) -> list[Corpus]:
    """The corpora of a plan that match a pattern.

    Raises:
        ValueError: If the plan is wrong, or nothing matches.
        OSError: If it cannot be read.
    """
    corpora = {}
    for name, entry in read_plan(plan).items():
        try:
            corpora[name] = Corpus(name, data / entry.pop("folder"), output / slug(name), **entry)
        except (AttributeError, TypeError, KeyError) as error:
            raise ValueError(
                f"{plan}, {name}: must be like scripts/corpora.yaml: {error}"
            ) from error
    chosen = [
        name for name in corpora if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]
    if not chosen:
        raise ValueError(f"--corpora must match some of {', '.join(corpora)}, got {patterns}.")
    return [corpora[name] for name in chosen]


def finish(corpora: list[Corpus], options: argparse.Namespace) -> int:
    """Runs what is missing, and names the runs that failed; returns the exit status."""
    for corpus in corpora:
        corpus.make_files()
    jobs = [(corpus, run) for corpus in corpora for run in options.runs]
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            started = [pool.submit(corpus.finish, run, options.minutes) for corpus, run in jobs]
            statuses = [job.result() for job in started]
        finally:
            # After Ctrl-C or an error, no other run begins; leaving the block waits for the others.
            pool.shutdown(wait=False, cancel_futures=True)
    for (corpus, run), status in zip(jobs, statuses, strict=True):
        if status:
            print(f"{corpus.output / slug(run)}: ended with status {status}.", file=sys.stderr)
    return int(any(statuses))


def score_table(corpora: list[Corpus]) -> str:
    """Scores in Markdown, with their signatures below."""
    rows = [["corpus", "score", *Corpus.RUNS, "its minutes", "rules - recipe"]]
    signatures = set()
    for corpus in corpora:
        found = {run: corpus.scores(run) for run in Corpus.RUNS}
        values = {run: scores.get(corpus.metric) for run, scores in found.items()}
        cells = ["" if value is None else f"{value:.2f}" for value in values.values()]
        rules, recipe = values["rules"], values["recipe"]
        both = rules is not None and recipe is not None
        difference = f"{rules - recipe:+.2f}" if both else ""
        minutes = str(found["recipe"].get("minutes", ""))
        rows.append([corpus.name, corpus.metric, *cells, minutes, difference])
        for scores in filter(None, found.values()):
            signatures.add(f"{corpus.metric}: {scores[f'{corpus.metric}_signature']}")
    return "\n".join([table(*rows), "", *sorted(signatures)])


def main() -> int:
    """Runs what is missing, then prints the table in Markdown; returns the exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("plan", type=Path, help="YAML file.")
    parser.add_argument("--data", type=Path, required=True, help="Folder of the corpora.")
    parser.add_argument("--output", type=Path, required=True, help="Folder for the runs.")
    parser.add_argument("--minutes", type=float, default=15.0, help="Of each run (default: 15).")
    parser.add_argument("--corpora", nargs="+", default=["*"], help="Patterns. Default: all.")
    runs = {"nargs": "+", "default": list(Corpus.RUNS), "choices": Corpus.RUNS}
    parser.add_argument("--runs", **runs, help="Default: all.")
    parser.add_argument("--jobs", type=int, default=1, help="Runs at the same time (default: 1).")
    parser.add_argument("--table", action="store_true", help="Only print the finished runs.")
    options = parser.parse_args()
    try:
        corpora = read_corpora(options.plan, options.corpora, options.data, options.output)
        status = 0 if options.table else finish(corpora, options)
        print(score_table(corpora))
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
