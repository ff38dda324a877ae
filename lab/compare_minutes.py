#!/usr/bin/env python
r"""Compares `train --minutes` with the recipes of corpora that are given as many minutes.

For each corpus of the plan, up to four models are trained and scored on all validation pairs:
rules: by `train --minutes`, with nothing but the files and the metric;
adam: the same, but with Adam;
left out: as the first, but as the rules would be without the experiments on this corpus;
recipe: by the recipe, which is stopped if it takes longer.

Finished runs are not repeated, and one that was stopped begins anew. With --jobs 2, two runs share
the machine; give each one thread with OMP_NUM_THREADS.

Example:
  OMP_NUM_THREADS=1 python lab/compare_minutes.py lab/corpora.yaml --data data \
      --output runs/minutes --minutes 15 --jobs 2
"""

import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs import (
    is_finished,
    matching,
    plan_parser,
    read_plan,
    run_command,
    run_main,
    scores_of,
    slug,
    table,
    train,
)

ROOT = Path(__file__).parents[1]
RUNS = ("rules", "adam", "left out", "recipe")
# Name of the scores in `results.json`.
NAME = "validation, whole"


@dataclass(frozen=True)
class Corpus:
    """A corpus of the plan.

    Attributes:
        source: Folder of the files.
        output: Folder of the runs.
        minutes: Minutes of each run.
        metric: Metric of training and of the table.
        evaluate: Options of `evaluate`.
        train: Source and target file, separated by a blank.
        validation: Source and target file for scores.
        prepare: Words of `prepare_corpus.py`, which makes those files instead.
        recipe: A recipe of this repository, with options if need be.
        left_out: Options that the rules would choose without this corpus.
    """

    source: Path
    output: Path
    minutes: float
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

    def runs(self) -> dict[str, list[str]]:
        """Options of `train` for those of `RUNS` that this corpus has."""
        files = ["--train", *self.train.split(), "--validation", *self.validation.split()]
        rules = [*files, "--minutes", str(self.minutes), "--metrics", self.metric]
        runs = {"rules": rules, "adam": [*rules, "--optimizer", "adam"]}
        if self.left_out:
            runs["left out"] = [*rules, *shlex.split(self.left_out)]
        if self.recipe:
            recipe, *words = shlex.split(self.recipe)
            runs["recipe"] = [str(ROOT / recipe), *words, "--max_minutes", str(self.minutes)]
        shared = ["--data", str(self.data), "--disable_tqdm", "true"]
        return {run: [*words, *shared] for run, words in runs.items()}

    def finish(self, run: str) -> int:
        """Trains and scores one model, unless that has been done; returns the exit status."""
        folder = self.output / slug(run)
        words = ["--name", NAME, "--model", str(folder), "--metrics", self.metric]
        words += [*shlex.split(self.evaluate), "--test"]
        words += [str(self.data / file) for file in self.validation.split()]
        try:
            train(folder, self.runs()[run])
            if not scores_of(folder, NAME):
                run_command("evaluate", *words)
        except subprocess.CalledProcessError as error:
            print(error, file=sys.stderr)
            return 1
        return 0

    def scores(self, run: str) -> dict[str, Any]:
        """What was measured with a model, and the record of its training; empty: nothing yet."""
        folder, words = self.output / slug(run), self.runs().get(run)
        return scores_of(folder, NAME) if words and is_finished(folder, words) else {}


def read_corpora(
    plan: Path, patterns: list[str], data: Path, output: Path, minutes: float
) -> dict[str, Corpus]:
    """The corpora of a plan that match a pattern, by name.

    Raises:
        ValueError: If the plan is wrong, or nothing matches.
        OSError: If it cannot be read.
    """
    entries, corpora = read_plan(plan), {}
    for name in matching(entries, patterns, plan):
        entry = entries[name]
        try:
            corpora[name] = Corpus(
                data / entry.pop("folder"), output / slug(name), minutes, **entry
            )
        except (AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"{plan}, {name}: must be like lab/corpora.yaml: {error}") from error
    return corpora


def score_table(corpora: dict[str, Corpus]) -> str:
    """Scores in Markdown, with their signatures below."""
    rows = [["corpus", "score", *RUNS, "its minutes", "rules - recipe"]]
    signatures = set()
    for name, corpus in corpora.items():
        metric, found = corpus.metric, {run: corpus.scores(run) for run in RUNS}
        values = {run: scores[metric] for run, scores in found.items() if scores}
        cells = [f"{values[run]:.2f}" if run in values else "" for run in RUNS]
        minutes = str(found["recipe"].get("minutes", ""))
        both = {"rules", "recipe"} <= values.keys()
        difference = f"{values['rules'] - values['recipe']:+.2f}" if both else ""
        rows.append([name, metric, *cells, minutes, difference])
        signatures |= {f"{metric}: {found[run][f'{metric}_signature']}" for run in values}
    return "\n".join([table(*rows), "", *sorted(signatures)])


def main() -> int:
    """Runs what is missing, then prints the table in Markdown; returns the exit status."""
    parser = plan_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="Of each run (default: 15).")
    parser.add_argument("--corpora", nargs="+", default=["*"], help="Patterns. Default: all.")
    parser.add_argument("--runs", nargs="+", default=RUNS, choices=RUNS, help="Default: all.")
    parser.add_argument("--jobs", type=int, default=1, help="Runs at the same time (default: 1).")
    parser.add_argument("--table", action="store_true", help="Only print the finished runs.")
    options = parser.parse_args()
    place = (options.data, options.output)
    corpora = read_corpora(options.plan, options.corpora, *place, options.minutes)
    status = 0
    if not options.table:
        for corpus in corpora.values():
            corpus.make_files()
        jobs = [(c, run) for c in corpora.values() for run in options.runs if run in c.runs()]
        with ThreadPoolExecutor(options.jobs) as pool:
            # After Ctrl-C or an error, no other run begins; this waits for the others.
            status = max(pool.map(lambda job: job[0].finish(job[1]), jobs), default=0)
    print(score_table(corpora))
    return status


if __name__ == "__main__":
    run_main(main)
