#!/usr/bin/env python
r"""Time to a validation loss: this package's training against Trainer with M2M100 and Marian.

Each contender trains for the same time on the same token ids, with the same optimiser, schedule
and number of updates per epoch: vanilla on batches of a token budget, the others through
`Seq2SeqTrainer` with `train_sampling_strategy="group_by_length"`. The table shows when each
reached the loss with which the slowest one ended; evaluations are not counted. Labels are not
smoothed, because M2M100 fails under Trainer's smoothing (docs/contracts.md).

Example:
  python benchmarks/pipeline.py --train train.de.gz train.en.gz \
      --validation dev.de.gz dev.en.gz --minutes 10
"""

import argparse
import tempfile

from ratio_tables import head, row


def parse() -> argparse.Namespace:
    """Reads the options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--train", nargs=2, required=True, help="Source and target file.")
    parser.add_argument("--validation", nargs=2, required=True, help="Source and target file.")
    parser.add_argument("--families", nargs="+", default=["vanilla", "m2m100", "marian"])
    parser.add_argument("--preset", default="tiny", help="Sizes (default: tiny).")
    parser.add_argument("--tokens", type=int, default=4096, help="Of a batch, both sides.")
    parser.add_argument("--minutes", type=float, default=10.0, help="Of each (default: 10).")
    parser.add_argument("--evaluations", type=int, default=20, help="Of each (default: 20).")
    return parser.parse_args()


def main() -> None:
    """Trains the contenders one after another, then prints the table."""
    options = parse()
    from neighbours import hardware_line
    from pipeline_contenders import Corpus, losses_over_time

    corpus = Corpus.load(options.train, options.validation, options.tokens)
    runs: dict[str, list[tuple[float, float]]] = {}
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            runs[family] = losses_over_time(family, corpus, folder, options)
        print(family, " ".join(f"{m:.1f}:{loss:.3f}" for m, loss in runs[family]), flush=True)
    print(f"\n{options.preset}, {options.tokens} tokens a batch; {hardware_line()}")
    print(table(runs))


def table(runs: dict[str, list[tuple[float, float]]]) -> str:
    """When each family reached the loss with which the slowest one ended."""
    from pipeline_contenders import minutes_to

    loss = max(min(loss for _, loss in run) for run in runs.values())
    header = head("model", f"minutes to a validation loss of {loss:.3f}", "loss at the end")
    rows = [
        row(family, f"{minutes_to(loss, run):.2f}", f"{run[-1][1]:.3f}")
        for family, run in runs.items()
    ]
    return "\n".join((header, *rows))


if __name__ == "__main__":
    main()
