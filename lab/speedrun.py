#!/usr/bin/env python
r"""Minutes until a validation score: one entry of a track against `train --minutes` as it is.

The rules:
1. The plan names the data, which are on the disk before. Validation pairs are for scores alone.
2. A model has at most 3,000,000 parameters.
3. The time is all that passes since the command was started: reading, vocabulary, choices, updates
   and checkpoints. Only evaluations are not counted.
4. The end is the first evaluation with the target, greedy, of all validation pairs. Nothing is
   interpolated: a curve between two evaluations would be a guess.
5. Options of an entry are those of `train`, the same for all seeds. It may have fewer --minutes, so
   that its learning rate ends earlier, but no other data and no other way of scoring.
6. Each seed trains baseline and entry at the same time, with one thread each, so that a machine
   that becomes slower is slower for both.
7. The machine has two cores for them and does nothing else.
8. All seeds must reach the target, the baseline's too. The result is the ratio of the times of a
   seed, entry to baseline: its mean and range over three seeds.
9. A record has a commit, so that it can be repeated.

The plan is YAML as for ablate.py: `options` are those of the baseline, `rows` maps names of entries
to what they add, and `metric` and `target` say when a run has arrived. Finished runs are not
repeated. The row of the entry is printed, and appended to the table of --records.

Example:
  python lab/speedrun.py lab/speedrun.yaml Muon --data data/multi30k_tok \
      --output runs/speedrun --records lab/records.md
"""

import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from runs import OPTIONS_FILE, plan_parser, read_plan, read_rows, run_main, slug, table, train

MOST_PARAMETERS = 3_000_000
MOST_SECONDS_APART = 60
BASELINE = "baseline"
COLUMNS = ("entry", "target", "seeds", "baseline, minutes", "entry, minutes", "ratio", "range")
COLUMNS += ("updates", "parameters", "commit", "hardware")


@dataclass(frozen=True)
class Arrival:
    """When a run reached the target.

    Attributes:
        seconds: Since the command was started, evaluations not counted.
        updates: Updates until then.
        started: When the command was started, in seconds since the epoch.
        run: Its record.
    """

    seconds: float
    updates: int
    started: float
    run: dict[str, object]


def arrival(folder: Path, metric: str, target: float) -> Arrival:
    """When a finished run reached the target.

    Args:
        folder: Folder of the run.
        metric: Name of a validation score.
        target: Its value.

    Raises:
        ValueError: If it did not, has no such score, or too many parameters.
    """
    # Imported late: they load torch.
    from vanilla_transformer_tools.evaluation.metrics import METRICS
    from vanilla_transformer_tools.saved_folder import LOG_FILE, RUN_FILE, read_object
    from vanilla_transformer_tools.training.reports import read_log

    run = read_object(folder / RUN_FILE)
    if run["parameters"] > MOST_PARAMETERS:
        raise ValueError(
            f"{folder} may have {MOST_PARAMETERS:,} parameters, got {run['parameters']:,}. Take a "
            "smaller size or vocabulary."
        )
    reports = read_log(folder / LOG_FILE)
    started = (folder / OPTIONS_FILE).stat().st_mtime
    # The clock of the log starts after vocabulary and choices, and is read once more at its end.
    before = (folder / LOG_FILE).stat().st_mtime - 60 * reports[-1]["minutes"] - started
    sign = -1 if METRICS[metric].is_error_rate else 1
    evaluating, scores = 0.0, []
    for report in reports:
        if f"eval_{metric}" not in report:
            continue
        evaluating += report["eval_runtime"]
        scores.append(report[f"eval_{metric}"])
        if sign * scores[-1] >= sign * target:
            seconds = before + 60 * report["minutes"] - evaluating
            return Arrival(seconds, report["step"], started, run)
    raise ValueError(
        f"{folder} must reach {metric} {target:g}, got {', '.join(f'{x:.2f}' for x in scores)}. "
        "Such an entry is no record; give it more --minutes, or another target to both."
    )


def compare(pairs: list[tuple[Arrival, Arrival]], name: str, goal: str) -> list[str]:
    """Cells of the row of an entry.

    Args:
        pairs: Baseline and entry of each seed.
        name: Name of the entry.
        goal: Score and target.

    Raises:
        ValueError: If two runs of a seed did not begin together.
    """
    for baseline, entry in pairs:
        apart = abs(baseline.started - entry.started)
        if apart > MOST_SECONDS_APART:
            raise ValueError(
                f"The runs of a seed must begin within {MOST_SECONDS_APART} seconds, got "
                f"{apart:.0f} between two of them: machines change. Choose another --output."
            )
    ratios = [entry.seconds / baseline.seconds for baseline, entry in pairs]
    minutes = [f"{mean(run.seconds for run in runs) / 60:.2f}" for runs in zip(*pairs, strict=True)]
    updates = f"{mean(entry.updates for _, entry in pairs):,.0f}"
    run = pairs[0][1].run
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    made = [updates, f"{run['parameters']:,}", str(run["commit"]), str(run["hardware"])]
    return [name, goal, str(len(pairs)), *minutes, f"{mean(ratios):.2f}", spread, *made]


def append_record(path: Path, cells: list[str]) -> None:
    """Adds a row to a table in a file, which is begun if there is none."""
    header, line, row = table(list(COLUMNS), cells).splitlines()
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{row}\n" if header in text else f"\n{header}\n{line}\n{row}\n")


def main() -> None:
    """Trains what is missing, prints and appends the row."""
    parser = plan_parser(__doc__)
    parser.add_argument("entry", help="Name of a row of the plan.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument("--records", type=Path, help="Markdown file that gets the row.")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    plan = read_plan(options.plan)
    metric, target = plan.get("metric"), plan.get("target")
    if not isinstance(metric, str) or not isinstance(target, int | float):
        raise ValueError(
            f"{options.plan} must have a `metric` and a number as `target`, got {metric!r} and "
            f"{target!r}."
        )
    rows = read_rows(options.plan, [options.entry])
    if len(rows) > 1:
        raise ValueError(f"One entry must be named, got {', '.join(rows)}.")
    ((name, words),) = rows.items()
    runs = {BASELINE: shlex.split(plan.get("options") or ""), slug(name): words}
    pairs = []
    for seed in dict.fromkeys(options.seeds):
        folders = [options.output / slug(name) / f"{kind}-{seed}" for kind in runs]
        same = ["--data", str(options.data), "--seed", str(seed), "--disable_tqdm", "true"]
        with ThreadPoolExecutor(len(runs)) as pool:
            list(pool.map(train, folders, ([*given, *same] for given in runs.values())))
        pairs.append(tuple(arrival(folder, metric, target) for folder in folders))
    cells = compare(pairs, name, f"{metric} {target:g}")
    print(table(list(COLUMNS), cells))
    if options.records:
        append_record(options.records, cells)


if __name__ == "__main__":
    run_main(main)
