"""Corpora, their runs and the table of scripts/compare_minutes.py."""

import argparse
import fnmatch
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from ablation import check_folders, is_finished, read_plan, slug, train

ROOT = Path(__file__).parents[1]
# Of the scores in `results.json`.
NAME = "validation, whole"


@dataclass(frozen=True)
class Corpus:
    """A corpus of the plan and the folder of its runs.

    Attributes:
        name: In the table.
        source: Folder of the files.
        output: Folder of the runs.
        metric: Of --metrics, and of the table.
        evaluate: Options of `evaluate`.
        train: Source and target file, separated by a blank.
        validation: The same.
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
            script = ROOT / "scripts/prepare_corpus.py"
            command = [sys.executable, str(script), kind, *files, "--folder", str(self.data)]
            subprocess.run(command, check=True, stdout=sys.stderr)

    def folder(self, run: str) -> Path:
        """Folder of one of `RUNS`."""
        return self.output / slug(run)

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

        folder = self.folder(run)
        scores = read_object(folder / RESULTS_FILE).get(NAME) if is_finished(folder) else None
        return read_object(folder / RUN_FILE) | scores if scores else {}

    def check_minutes(self, run: str, minutes: float) -> None:
        """Compares the minutes of a finished run with those that are asked for.

        Raises:
            ValueError: If they differ.
        """
        from vanilla_transformer_tools.saved_folder import RUN_FILE, read_object

        folder = self.folder(run)
        if is_finished(folder):
            settings = read_object(folder / RUN_FILE)["settings"]
            had = settings["max_minutes" if run == "recipe" else "minutes"]
            if had != minutes:
                raise ValueError(
                    f"{folder} holds a run of {had:g} minutes, and --minutes is {minutes:g}. "
                    "Choose another --output."
                )

    def finish(self, run: str, minutes: float) -> int:
        """Trains and scores one model, unless that has been done; returns the exit status."""
        folder, words = self.folder(run), self.options(run, minutes)
        if words is None:
            return 0
        if status := train(folder, words):
            return status
        if self.scores(run):
            return 0
        command = [
            sys.executable,
            "-m",
            "vanilla_transformer_tools.commands",
            "evaluate",
            "--name",
            NAME,
        ]
        command += ["--model", str(folder), *shlex.split(self.evaluate), "--metrics", self.metric]
        command += ["--test", *(str(self.data / file) for file in self.validation.split())]
        return subprocess.run(command, check=False, stdout=sys.stderr).returncode

    def curve(self, run: str, name: str) -> list[tuple[float, float]]:
        """Minutes and values of what a run reported under a name, if it is finished."""
        from vanilla_transformer_tools.saved_folder import LOG_FILE
        from vanilla_transformer_tools.training.run_record import read_log

        folder = self.folder(run)
        reports = read_log(folder / LOG_FILE) if is_finished(folder) else []
        return [(report["minutes"], report[name]) for report in reports if name in report]


def read_corpora(plan: Path, patterns: list[str], data: Path, output: Path) -> list[Corpus]:
    """The corpora of a plan that match a pattern, in the order of the patterns.

    Raises:
        ValueError: If the plan is wrong, or nothing matches.
        OSError: If it cannot be read.
    """
    try:
        corpora = [
            Corpus(name, data / entry.pop("folder"), output / slug(name), **entry)
            for name, entry in read_plan(plan).items()
        ]
        for corpus in corpora:
            for field in fields(corpus):
                value = getattr(corpus, field.name)
                if not isinstance(value, str | Path):
                    raise TypeError(f"{field.name} of {corpus.name} must be text, got {value!r}")
    except (AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{plan} must be YAML like scripts/corpora.yaml: {error}") from error
    check_folders((corpus.name for corpus in corpora), "corpus")
    # A dict keeps each corpus once, in the order of the patterns.
    chosen = {
        one.name: one for glob in patterns for one in corpora if fnmatch.fnmatch(one.name, glob)
    }
    if not chosen:
        known = ", ".join(corpus.name for corpus in corpora)
        raise ValueError(f"--corpora must match some of {known}, got {patterns}.")
    return list(chosen.values())


def finish(corpora: list[Corpus], options: argparse.Namespace) -> list[tuple[Path, int]]:
    """Runs what is missing; returns the folders of runs that failed, with their statuses.

    Raises:
        ValueError: If a finished run had another number of minutes.
        subprocess.CalledProcessError: If the files of a corpus cannot be made.
    """
    for corpus in corpora:
        for run in options.runs:
            corpus.check_minutes(run, options.minutes)
        corpus.make_files()
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            started = [
                (corpus.folder(run), pool.submit(corpus.finish, run, options.minutes))
                for corpus in corpora
                for run in options.runs
            ]
            ended = [(folder, job.result()) for folder, job in started]
        finally:
            # After Ctrl-C or an error, no other run begins; leaving the block waits for the others.
            pool.shutdown(wait=False, cancel_futures=True)
    return [(folder, status) for folder, status in ended if status]


def table(corpora: list[Corpus]) -> str:
    """Scores in Markdown, with their signatures below."""
    lines = [
        "| corpus | score | rules | left out | recipe | its minutes | rules - recipe |",
        "| --- " * 7 + "|",
    ]
    signatures = set()
    for corpus in corpora:
        found = {run: corpus.scores(run) for run in Corpus.RUNS}
        values = {run: scores.get(corpus.metric) for run, scores in found.items()}
        cells = ["" if value is None else f"{value:.2f}" for value in values.values()]
        rules, recipe = values["rules"], values["recipe"]
        minutes = found["recipe"].get("minutes", "")
        both = rules is not None and recipe is not None
        difference = f"{rules - recipe:+.2f}" if both else ""
        row = [corpus.name, corpus.metric, *cells, minutes, difference]
        lines.append(f"| {' | '.join(map(str, row))} |")
        for scores in filter(None, found.values()):
            signatures.add(f"{corpus.metric}: {scores[f'{corpus.metric}_signature']}")
    return "\n".join([*lines, "", *sorted(signatures)])


def draw(corpora: list[Corpus], path: Path) -> None:
    """Draws the greedy validation score and the learning rate of finished runs over the minutes.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from vanilla_transformer_tools.figures import new_figure, save_figure

    figure = new_figure(4.2 * len(corpora), 5.6)
    columns = figure.subplots(2, len(corpora), sharex="col", squeeze=False).T
    for corpus, (score, rate) in zip(corpora, columns, strict=True):
        score.set_title(corpus.name)
        for axes, label in ((score, f"eval_{corpus.metric}"), (rate, "learning_rate")):
            axes.set_ylabel(label.removeprefix("eval_").replace("_", " "))
            for run in Corpus.RUNS:
                if points := corpus.curve(run, label):
                    axes.plot(*zip(*points, strict=True), label=run)
                    axes.legend()
        rate.set_xlabel("minutes")
    save_figure(figure, path)
