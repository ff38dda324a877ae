"""The end of a run: candidates for its weights, the chosen ones, and the folder of the model."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import safe_open
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from vanilla_transformer.tokenization_vanilla_transformer import language_tags
from vanilla_transformer_tools.files import scratch_folder, share_weights
from vanilla_transformer_tools.saved_folder import (
    describe_model_files,
    load_model,
    shards_in,
    write_run,
)
from vanilla_transformer_tools.settings import VALIDATION
from vanilla_transformer_tools.sharing.model_card import (
    forget_results,
    record_results,
    write_model_card,
)
from vanilla_transformer_tools.text.filters import FilteredPairs
from vanilla_transformer_tools.training.checkpoints import (
    checkpoint_folder,
    closed_checkpoints,
    failed_writes_named,
    read_state,
    update_of,
    with_intact_weights,
)
from vanilla_transformer_tools.training.ranking import metric_of
from vanilla_transformer_tools.training.reports import Progress
from vanilla_transformer_tools.training.schedule import Schedule, StoppedBySignalError
from vanilla_transformer_tools.training.trainer import DivergedError, TokenBatchTrainer


@dataclass
class Candidate:
    """Weights that a run may end with, or that it has ended with.

    Attributes:
        name: Human-readable description.
        load: Returns the weights by name; of tied ones, any name will do.
        scores: Their validation scores; None: not evaluated yet.
    """

    name: str
    load: Callable[[], dict[str, Tensor]]
    scores: dict[str, Any] | None = None


def finished(
    trainer: TokenBatchTrainer, schedule: Schedule, log: TrainerCallback
) -> tuple[Candidate, BaseException | None]:
    """Trains, and puts the best weights into the model.

    Returns them, and what ended the run early: a signal, divergence, or None.
    """
    plan = trainer.plan
    for theirs in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
        trainer.remove_callback(theirs)
    trainer.add_callback(log)
    trainer.add_callback(schedule)
    try:
        with ExitStack() as stack, failed_writes_named(plan.folder):
            trainer.add_callback(Progress(trainer.data, schedule, stack))
            if not _is_over(trainer, schedule):
                trainer.train(resume_from_checkpoint=plan.checkpoint and str(plan.checkpoint))
            trainer.check_weights()
            interrupted = schedule.is_interrupted(trainer.args)
            chosen = choose_weights(trainer, compares=not interrupted)
    except StoppedBySignalError as error:
        trainer.check_weights()
        return Candidate("last update", trainer.model.state_dict), error
    except DivergedError as error:
        return back_to_last_checkpoint(trainer, error)
    return chosen, StoppedBySignalError(schedule.signum) if schedule.interrupted else None


def _is_over(trainer: TokenBatchTrainer, schedule: Schedule) -> bool:
    """Whether a resumed run has nothing left to train; the trainer is then as it was saved."""
    plan = trainer.plan
    if not plan.checkpoint:
        return False
    state, patience = read_state(plan.checkpoint), plan.settings.early_stopping_patience
    is_over = schedule.is_over
    is_over |= 0 < plan.arguments.max_steps <= state.global_step
    is_over |= patience is not None and trainer.ranking.since_best(state) >= patience
    if is_over:
        trainer.state = state
        trainer.model.load_state_dict(average_checkpoints([plan.checkpoint]), strict=False)
        if trainer.moving_average:
            trainer.moving_average.on_train_begin(trainer.args, state, model=trainer.model)
    return is_over


def choose_weights(trainer: TokenBatchTrainer, *, compares: bool = True) -> Candidate:
    """Puts the best candidate into the model.

    Each candidate takes the place of those before it if it is better in score or loss. Without
    scores, the mean of the last checkpoints is taken if it was asked for, else the last weights.

    Args:
        trainer: After training.
        compares: Whether there is time to evaluate; otherwise the best evaluation stays.
    """
    evaluates = compares and trainer.args.eval_strategy != "no"
    if evaluates and trainer.ranking.of_update(trainer.state, trainer.state.global_step) is None:
        trainer.evaluate()
    chosen, *others = candidates(trainer)
    for candidate in others if compares else ():
        if chosen.scores is None or _is_better(candidate, chosen, trainer):
            chosen = candidate
    # Of tied weights, any name will do.
    trainer.model.load_state_dict(chosen.load(), strict=False)
    return chosen


def _is_better(candidate: Candidate, other: Candidate, trainer: TokenBatchTrainer) -> bool:
    """Whether a candidate is better than one with scores; evaluates it, and prints both."""
    if candidate.scores is None:
        trainer.model.load_state_dict(candidate.load(), strict=False)
        candidate.scores = {
            name.removeprefix("mean_"): value
            for name, value in trainer.evaluate(metric_key_prefix="mean").items()
        }
    metric = metric_of(trainer.args)
    shown = "; ".join(
        f"{scores[metric]:.4g}, loss {scores['loss']:.4g} ({name})"
        for scores, name in ((other.scores, other.name), (candidate.scores, candidate.name))
        if scores
    )
    PartialState().print(f"{metric:<11} {shown}")
    return trainer.ranking.is_better(candidate.scores, other.scores or {})


def candidates(trainer: TokenBatchTrainer) -> Iterator[Candidate]:
    """Candidates for the weights of a run, in the order in which they are compared.

    With `--minutes`, whose learning rate ends at 0, the last weights are the best on average, and
    what is better in the score of some hundred pairs alone is better partly by luck: so they are
    compared like an average.
    """
    plan, ranking, state = trainer.plan, trainer.ranking, trainer.state
    weights = copy.deepcopy(trainer.model.state_dict())
    scores = ranking.of_update(state, state.global_step)
    last = Candidate("last update", lambda: weights, scores)
    best = (_best(trainer, last) if plan.arguments.load_best_model_at_end else None) or last
    yield best
    if best.load is not last.load and plan.settings.minutes is not None and scores:
        yield last
    saved = closed_checkpoints(plan.folder)[-plan.averaged :] if plan.averaged > 1 else []
    if len(averaged := with_intact_weights(saved)) > 1:
        name = f"mean of the last {len(averaged)} checkpoints"
        yield Candidate(name, lambda: average_checkpoints(averaged))
    if (average := trainer.moving_average) and scores:
        yield Candidate(f"exponential moving average, {average.decay}", lambda: average.weights)


def _best(trainer: TokenBatchTrainer, last: Candidate) -> Candidate | None:
    """The best evaluation whose weights are there; None if none has been scored."""
    plan, ranked = trainer.plan, trainer.ranking.from_best(trainer.state)
    for scores in ranked:
        step = scores["step"]
        if step == trainer.state.global_step:
            name = "best checkpoint" if scores is ranked[0] else last.name
            return Candidate(name, last.load, scores)
        if not step:
            base = str(plan.settings.init_from)
            load = load_model(base, dtype=torch.float32).state_dict
            return Candidate("start, which no update made better", load, scores)
        folder = checkpoint_folder(plan.folder, step)
        if folder in closed_checkpoints(plan.folder) and with_intact_weights([folder]):
            # Of one checkpoint, the mean is what it holds.
            return Candidate("best checkpoint", partial(average_checkpoints, [folder]), scores)
    return None


def average_checkpoints(checkpoints: Sequence[Path]) -> dict[str, Tensor]:
    """Mean of the weights of several checkpoints of one run, by name, in the dtype of its files.

    The files are read one tensor at a time, so no whole checkpoint is in memory next to the result.
    Tied tensors occur once in a file and once in the result.
    """
    with ExitStack() as stack:
        models = [_open(folder, stack) for folder in checkpoints]
        return {name: _mean([each[name].get_tensor(name) for each in models]) for name in models[0]}


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor of a saved model."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    names = sorted({*shards_in(index).values()}) if index.exists() else [SAFE_WEIGHTS_NAME]
    files = [stack.enter_context(safe_open(folder / name, framework="pt")) for name in names]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return (total / len(tensors)).to(tensors[0].dtype)


def back_to_last_checkpoint(
    trainer: TokenBatchTrainer, error: DivergedError
) -> tuple[Candidate, DivergedError]:
    """Loads the last finite weights of a run that diverged; returns them and the error to raise."""
    folder = Path(trainer.args.output_dir)
    advice = (
        f"Lower --learning_rate, now {trainer.args.learning_rate:g}, or lengthen --warmup_steps, "
        f"now {trainer.args.warmup_steps:g}, and train again in another folder"
    )
    # The last update may have a checkpoint, and a validation loss that is not finite.
    before = [
        checkpoint
        for checkpoint in closed_checkpoints(folder)
        if update_of(checkpoint.name) < trainer.state.global_step
    ]
    checkpoints = with_intact_weights(before)
    if not checkpoints:
        raise DivergedError(
            f"Training diverged: {error}, before there was a checkpoint. {folder} holds no model. "
            f"{advice}."
        ) from error
    last = checkpoints[-1]
    weights = average_checkpoints([last])
    trainer.model.load_state_dict(weights, strict=False)
    trainer.state = read_state(last)
    scores = trainer.ranking.of_update(trainer.state, trainer.state.global_step)
    name = f"{last.name}, before training diverged"
    return Candidate(name, lambda: weights, scores), DivergedError(
        f"Training diverged: {error}. {folder} holds the weights of {last.name}, the last finite "
        f"ones. {advice}, from here with --init_from {folder}."
    )


def results(
    trainer: TokenBatchTrainer,
    filtered: FilteredPairs,
    chosen: Candidate,
    minutes: float,
    interruption: BaseException | None,
) -> dict[str, Any]:
    """What `run.json` states of a run that has ended."""
    return {
        **trainer.data.record(trainer.state.epoch or 0),
        "dropped_pairs": filtered.dropped,
        "target_languages": list(language_tags(trainer.tokenizers.source)),
        "trained_parameters": trainer.model.num_parameters(only_trainable=True),
        "updates": trainer.state.global_step,
        "weights": chosen.name,
        "minutes": round(minutes, 1),
        "interrupted": isinstance(interruption, StoppedBySignalError),
    }


def save_folder(trainer: TokenBatchTrainer, run: Mapping[str, Any], chosen: Candidate) -> None:
    """Writes the model's folder; each file appears whole or not at all."""
    if not trainer.is_world_process_zero():
        return
    folder, model = Path(trainer.args.output_dir), trainer.model
    with scratch_folder(folder, ".saving-") as unfinished:
        with failed_writes_named(folder):
            model.save_pretrained(unfinished)
            trainer.tokenizers.save_pretrained(unfinished)
            share_weights(unfinished)
        run = {**run, "parameters": model.num_parameters()}
        # Earlier checksums do not match the files that now replace the old ones.
        write_run(folder, {**run, "files": {}})
        files = describe_model_files(unfinished)
        for file in sorted(unfinished.rglob("*")):
            place = folder / file.relative_to(unfinished)
            if file.is_dir():
                place.mkdir(exist_ok=True)
            else:
                file.replace(place)
    write_run(folder, {**run, "files": files})
    if run.get("files", files) != files:
        # Earlier scores are of the weights, or of the vocabulary, that have just been replaced.
        forget_results(folder)
    # The card has no row for a loss alone.
    if chosen.scores and trainer.compute_metrics:
        beams = trainer.args.generation_num_beams or 1
        search = f"beam {beams}" if beams > 1 else "greedy"
        how = {"search": f"{search}, {chosen.name}"}
        record_results(folder, VALIDATION, chosen.scores | how)
    else:
        write_model_card(folder)
