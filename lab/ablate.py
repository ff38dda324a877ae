#!/usr/bin/env python
"""Trains each row of an ablation with several seeds and prints a table of means and ranges.

The plan is YAML: `options` are those of `vanilla-transformer train` that all runs share, and `rows`
maps names to the options in which each run differs. Finished runs are not repeated, so a plan can
be stopped, continued and extended; a run that was stopped begins anew. Options of a row follow the
shared ones; if those end in `--config`, the row continues its list.

Example:
  python lab/ablate.py lab/ablations/norms.yaml --data data/dut --output runs/norms --seeds 1 2 3
"""

from itertools import product
from pathlib import Path
from statistics import mean

from runs import is_finished, plan_parser, read_rows, run_main, scores_of, slug, table, train


def cells(folders: list[Path], metric: str) -> list[str]:
    """Mean and range over the seeds, on the validation pairs.

    Raises:
        ValueError: If a run has no such score.
    """
    runs = [scores_of(folder, "validation") for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        if metric not in run:
            raise ValueError(
                f"{folder} has no score {metric!r} of translations of validation pairs. Name "
                "another --metric, or train with --validation and --predict_with_generate true."
            )
    score, loss, minutes = (mean(run[name] for run in runs) for name in (metric, "loss", "minutes"))
    values = [run[metric] for run in runs]
    spread = f"{min(values):.2f}-{max(values):.2f}"
    sizes = (f"{runs[0]['parameters']:,}", f"{runs[0]['updates']:,}")
    return [f"{score:.2f}", spread, f"{loss:.3f}", str(len(runs)), *sizes, f"{minutes:.1f}"]


def main() -> None:
    """Runs what is missing, then prints the table in Markdown."""
    parser = plan_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: 1 2 3)")
    text = "Rows to run, as patterns such as '6 layers*'. Default: all."
    parser.add_argument("--rows", nargs="+", default=["*"], help=text)
    parser.add_argument("--metric", default="wer", help="Score of the table (default: wer).")
    parser.add_argument("--table", action="store_true", help="Only print finished runs.")
    options = parser.parse_args()
    rows = read_rows(options.plan, options.rows)
    finished: dict[str, list[Path]] = {name: [] for name in rows}
    for seed, name in product(dict.fromkeys(options.seeds), rows):
        folder = options.output / f"{slug(name)}-{seed}"
        words = [*rows[name], "--data", str(options.data), "--seed", str(seed)]
        if not options.table:
            train(folder, words)
        if is_finished(folder, words):
            finished[name].append(folder)
    columns = [options.metric, "range", "loss", "runs", "parameters", "updates", "minutes"]
    lines = [[name, *cells(found, options.metric)] for name, found in finished.items() if found]
    print(table(["", *columns], *lines))


if __name__ == "__main__":
    run_main(main)
