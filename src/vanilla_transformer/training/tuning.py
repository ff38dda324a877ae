"""`train --tune`: a search around what the rules of `--minutes` choose, by successive halving.

Jamieson and Talwalkar 2016 (arXiv 1502.07943): many candidates are trained for a short time, the
best of them again for a longer one. Each run is from the beginning and its learning rate ends at 0;
a loss before the rate has fallen says more about the rate than about the candidate. The validation
loss decides, because after a short time all translations score near 0.
"""

import gc
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self

import torch
from accelerate import PartialState
from transformers import Seq2SeqTrainingArguments

from vanilla_transformer.model_folder import LOG_FILE
from vanilla_transformer.training.budget import (
    RULES,
    Decision,
    Settings,
    apply,
    choose,
    decide,
    still_open,
)
from vanilla_transformer.training.callbacks import DivergedError
from vanilla_transformer.training.checkpoints import closed_checkpoints
from vanilla_transformer.training.facts import Facts
from vanilla_transformer.training.legs import (
    check_continuation,
    check_free,
    claimed,
    discard_stopped,
)
from vanilla_transformer.training.run import train
from vanilla_transformer.training.run_record import describe_run, read_log
from vanilla_transformer_cli.settings import TrainSettings

if TYPE_CHECKING:
    from optuna import Study

# Share of the minutes that the search has; the rest is for the last run.
_SHARE = 0.5
# One in this number of candidates reaches the next round, whose runs are as many times longer.
_REDUCTION = 4
# A shorter run does little more than read the pairs and warm up.
_LEAST_MINUTES = 0.5

# What is tried beside half and twice the learning rate and the batch that the rules choose.
_DROPOUTS = (0.1, 0.2, 0.3)
# These rules follow the length of a run and the batches of a candidate.
_OF_THE_LENGTH = {"warmup_steps", "max_validation_pairs", "eval_steps"}

TUNING_FOLDER = "tuning"
JOURNAL_FILE = "journal.log"
TABLE_FILE = "trials.csv"

# Values of options.
Candidate = dict[str, Any]
# Settings and Trainer's arguments with some decisions in them.
Build = Callable[[Settings, Sequence[Decision]], tuple[Settings, Seq2SeqTrainingArguments]]


@dataclass(frozen=True)
class Round:
    """One round of a search: the number of its runs, and the minutes of each."""

    runs: int
    minutes: float


def rounds(candidates: int, minutes: float) -> list[Round]:
    """Rounds that take `minutes` together, each about as long as the others."""
    runs = [candidates]
    while runs[-1] > _REDUCTION:
        runs.append(math.ceil(runs[-1] / _REDUCTION))
    shares = [_REDUCTION**number for number in range(len(runs))]
    unit = minutes / sum(share * number for share, number in zip(shares, runs, strict=True))
    return [Round(number, unit * share) for share, number in zip(shares, runs, strict=True)]


def tune(
    settings: Settings,
    arguments: Seq2SeqTrainingArguments,
    given: Iterable[str],
    measure: Callable[[float], Facts],
    build: Build[Settings],
) -> tuple[Settings, list[Decision]]:
    """Searches in OUTPUT_DIR/tuning, or continues there; a last run with the best is left to do.

    Args:
        settings: With what the user gave, and defaults.
        arguments: Trainer's, likewise.
        given: Names of the options that the user gave.
        measure: Facts of data and machine, for a run of this length.
        build: See `Build`.

    Returns:
        Settings of the last run, with the minutes that the search leaves, and what was decided.

    Raises:
        ValueError: If the folder holds something else, the minutes are too few, or there is less to
            choose from than candidates.
        DivergedError: If all candidates diverge.
        StoppedBySignalError: After Ctrl-C or SIGTERM.
    """
    output, given = Path(arguments.output_dir), set(given)
    with claimed(output):
        study = _open(output, describe_run(settings, arguments, 0), settings.resume)
        if "plan" not in study.user_attrs:
            plan = _plan(settings, arguments, given, measure, build)
            study.set_user_attr("plan", asdict(plan))
        plan = _open_plan(_Plan.read(study.user_attrs["plan"]), settings, given, build)
        if settings.minutes is None or settings.minutes <= plan.minutes:
            raise ValueError(
                f"--minutes must be above the {plan.minutes:g} of this folder's search, got "
                f"{settings.minutes}. Give more."
            )
        search = _Search(study, plan, settings, given, build, output / TUNING_FOLDER)
        last = replace(
            settings,
            minutes=settings.minutes - plan.minutes,
            resume=bool(closed_checkpoints(output)),
        )
        if last.resume:
            # Its own record has what was chosen.
            return last, choose(last, arguments, given, [])
        discard_stopped(output)
        return last, search.best(last.minutes or 0.0)


def _open(output: Path, run: dict[str, Any], resume: bool) -> "Study":
    """The record of a search, or a new one.

    Args:
        output: Folder of the last run.
        run: Record of this run.
        resume: Whether there is a search to continue.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = output / TUNING_FOLDER
    journal = folder / JOURNAL_FILE
    if resume and not journal.exists():
        raise ValueError(
            f"--resume needs the search in --output_dir, got no {journal}. Leave --resume out."
        )
    if not resume:
        check_free(output)
        if journal.exists():
            raise ValueError(
                f"--output_dir {output} already holds a search. Pass --resume to continue it, "
                f"choose another folder, or delete {folder}."
            )
        folder.mkdir(exist_ok=True)
    _mend(journal)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    study = optuna.create_study(storage=storage, study_name=TUNING_FOLDER, load_if_exists=True)
    if "run" in study.user_attrs:
        check_continuation(study.user_attrs["run"], run)
    else:
        study.set_user_attr("run", run)
    return study


def _mend(journal: Path) -> None:
    """Removes what a kill may leave: the lock, and a line that was not written to its end."""
    Path(f"{journal}.lock").unlink(missing_ok=True)
    if journal.exists():
        os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)


@dataclass(frozen=True)
class _Plan:
    """What a search keeps of its beginning; a leg that continues it measures nothing.

    Attributes:
        facts: For the last run.
        decisions: Of the rules, for the last run.
        candidates: What is compared; the first is what the rules choose.
        minutes: Of the search.
    """

    facts: Facts
    decisions: list[Decision]
    candidates: list[Candidate]
    minutes: float

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`."""
        decisions = [Decision(**decision) for decision in record["decisions"]]
        return cls(**{**record, "facts": Facts(**record["facts"]), "decisions": decisions})


def _plan(
    settings: Settings,
    arguments: Seq2SeqTrainingArguments,
    given: set[str],
    measure: Callable[[float], Facts],
    build: Build[Settings],
) -> _Plan:
    """A plan for a new search."""
    minutes, number = settings.minutes or 0.0, settings.tune or 0
    shortest = rounds(number, _SHARE * minutes)[0].minutes
    if shortest < _LEAST_MINUTES:
        needed = math.ceil(minutes * _LEAST_MINUTES / shortest)
        raise ValueError(
            f"--tune {number} needs --minutes {needed} or more, so that each run has "
            f"{_LEAST_MINUTES:g}, got --minutes {minutes:g}. Give more, or try fewer candidates."
        )
    facts = measure((1 - _SHARE) * minutes)
    decisions = decide(facts, settings, given)
    space = _space(decisions, given, *build(settings, decisions))
    if (most := math.prod(map(len, space.values()))) < number:
        raise ValueError(
            f"--tune {number} needs as many combinations of options to choose from, got {most} of "
            f"{', '.join(space) or 'none'}. Try fewer, or leave more of learning_rate, "
            "max_tokens_per_batch and config dropout to the search."
        )
    decided = {decision.option for decision in decisions}
    decisions += [
        Decision(option, values[0], "the default")
        for option, values in space.items()
        if option not in decided
    ]
    candidates = _candidates(space, arguments.seed)[:number]
    return _Plan(facts, decisions, candidates, _SHARE * minutes)


def _open_plan(plan: _Plan, settings: Settings, given: set[str], build: Build[Settings]) -> _Plan:
    """The plan, without decisions on options that the user gives now, as `--resume` allows.

    Raises:
        ValueError: If one of these options changes an update.
    """
    decisions = still_open(plan.decisions, settings, given)
    if decisions == plan.decisions:
        return plan
    earlier, run = (describe_run(*build(settings, each), 0) for each in (plan.decisions, decisions))
    check_continuation(earlier, run)
    return replace(plan, decisions=decisions)


def _space(
    decisions: Sequence[Decision],
    given: set[str],
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
) -> dict[str, list[Any]]:
    """Values of each option that the user did not give, that of the rules first.

    Args:
        decisions: Of the rules.
        given: Names of the options that the user gave.
        settings: With the decisions in them.
        arguments: Trainer's, likewise.
    """
    space: dict[str, list[Any]] = {}
    chosen = {decision.option: decision.value for decision in decisions}
    if "learning_rate" not in given:
        rate = arguments.learning_rate
        space["learning_rate"] = [rate, rate / 2, 2 * rate]
    if dropout := chosen.get("dropout"):
        space["dropout"] = [dropout, *(value for value in _DROPOUTS if value != dropout)]
    if batch := chosen.get("max_tokens_per_batch"):
        # The longest pair must fit.
        smaller = [batch // 2] * (batch // 2 >= 2 * settings.max_length)
        space["max_tokens_per_batch"] = [batch, *smaller, 2 * batch]
    return space


def _candidates(space: Mapping[str, Sequence[Any]], seed: int) -> list[Candidate]:
    """All combinations, the first of each option together, the others in the order of the seed."""
    import optuna
    from optuna.distributions import CategoricalDistribution

    study = optuna.create_study(sampler=optuna.samplers.GridSampler(dict(space), seed))
    choices = {name: CategoricalDistribution(values) for name, values in space.items()}
    drawn = [study.ask(choices).params for _ in range(math.prod(map(len, space.values())))]
    first = {name: values[0] for name, values in space.items()}
    return sorted(drawn, key=lambda candidate: candidate != first)


class _Search(Generic[Settings]):
    """A search that has a plan.

    Args:
        study: Its record.
        plan: What was decided at its beginning.
        settings: With what the user gave, and defaults.
        given: Names of the options that the user gave.
        build: See `Build`.
        folder: Of its runs.
    """

    def __init__(
        self,
        study: "Study",
        plan: _Plan,
        settings: Settings,
        given: set[str],
        build: Build[Settings],
        folder: Path,
    ) -> None:
        self.study, self.plan, self.settings = study, plan, settings
        self.given, self.build, self.folder = given, build, folder

    def best(self, minutes: float) -> list[Decision]:
        """Does what is left of the search; returns the decisions for a last run of `minutes`."""
        candidates = self.plan.candidates
        places = list(range(len(candidates)))
        for number, each in enumerate(rounds(len(candidates), self.plan.minutes), start=1):
            losses = {
                place: self._loss(number, place, each.minutes) for place in places[: each.runs]
            }
            places = sorted(losses, key=losses.__getitem__)
        table = self.folder / TABLE_FILE
        self.study.trials_dataframe().to_csv(table, index=False)
        best = places[0]
        if math.isinf(losses[best]):
            raise DivergedError(
                f"All candidates of --tune diverged, see {table}. Lower --learning_rate, and train "
                "anew in another folder."
            )
        reason = (
            f"lowest validation loss of {len(candidates)} candidates, {losses[best]:.3f} after "
            f"{each.minutes:.1f} minutes"
        )
        return [
            replace(decision, reason=f"{reason}; {candidates[0][decision.option]} by the rules")
            if decision.option in candidates[0]
            else decision
            for decision in self._decisions(candidates[best], minutes)
        ]

    def _decisions(self, candidate: Candidate, minutes: float) -> list[Decision]:
        """What is decided for a run of a candidate: its values, then the rules that follow them."""
        fixed = [
            replace(decision, value=candidate.get(decision.option, decision.value))
            for decision in self.plan.decisions
            if decision.option not in _OF_THE_LENGTH
        ]
        settings, _ = apply(fixed, self.settings)
        taken = self.given | (RULES.keys() - _OF_THE_LENGTH)
        return [*fixed, *decide(replace(self.plan.facts, minutes=minutes), settings, taken)]

    def _loss(self, number: int, place: int, minutes: float) -> float:
        """Validation loss of a candidate in a round; infinite if it diverges or does not fit."""
        from optuna.distributions import CategoricalDistribution
        from optuna.trial import TrialState, create_trial

        run = {"round": number, "candidate": place + 1}
        for trial in self.study.trials:
            if run.items() <= trial.user_attrs.items():
                return math.inf if trial.value is None else trial.value
        candidate = self.plan.candidates[place]
        options = ", ".join(f"{name} {value}" for name, value in candidate.items())
        say, name = PartialState().print, f"round {number}, candidate {place + 1}"
        say(f"\ntuning      {name}: {options}; {minutes:.1f} minutes")
        folder = self.folder / name.replace(", ", "-").replace(" ", "-")
        try:
            loss = self._train(folder, candidate, minutes)
        except (DivergedError, torch.OutOfMemoryError) as error:
            say(str(error))
            loss = math.inf
        failed = math.isinf(loss)
        self.study.add_trial(
            create_trial(
                state=TrialState.FAIL if failed else TrialState.COMPLETE,
                value=None if failed else loss,
                params=candidate,
                distributions={
                    option: CategoricalDistribution([value]) for option, value in candidate.items()
                },
                user_attrs={**run, "minutes": minutes},
            )
        )
        say(f"tuned       {name}: {options}; validation loss {loss:.3f}")
        shutil.rmtree(folder, ignore_errors=True)
        # A trainer refers to itself, so its model would stay in the memory of a GPU.
        gc.collect()
        return loss

    def _train(self, folder: Path, candidate: Candidate, minutes: float) -> float:
        """Trains a candidate, or continues; returns its lowest validation loss."""
        settings, arguments = self.build(self.settings, self._decisions(candidate, minutes))
        discard_stopped(folder)
        resume = bool(closed_checkpoints(folder))
        settings = replace(settings, minutes=minutes, finish_within=None, resume=resume)
        arguments.output_dir = str(folder)
        arguments.predict_with_generate = False
        arguments.metric_for_best_model, arguments.greater_is_better = "loss", False
        train(settings, arguments)
        return min(
            report["eval_loss"] for report in read_log(folder / LOG_FILE) if "eval_loss" in report
        )
