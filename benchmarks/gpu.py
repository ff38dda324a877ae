#!/usr/bin/env python
"""What one GPU makes of this package: tests, losses, speed and memory, in six commands.

Each command ends within ten minutes on an H100 or H200, and writes COMMAND.json and COMMAND.md into
the folder `--output` as it goes. What fails is named there, the rest is measured, and the status is
1 then. Needs torch, transformers, accelerate and sacrebleu; `recipe` trains by `vanilla-transformer
train` only if `datasets` and `evaluate` are installed too.

  tests       the tests marked `gpu`, and how often the host waits for the device
  loss        the fused loss against float64: error, time, memory
  training    tokens/s, memory and share of the bfloat16 peak, against M2M100
  batches     updates of tiny with batches of 2,048 to 65,536 tokens
  generation  this package's search against Transformers', its static cache, and M2M100
  recipe      updates of `train`, and of FSDP2 with one process

Examples:
  python benchmarks/gpu.py loss training --output results
  python benchmarks/gpu.py all --smoke --output results
"""

import argparse
import importlib
import sys
from pathlib import Path

COMMANDS = ("tests", "loss", "training", "batches", "generation", "recipe")


def parse() -> argparse.Namespace:
    """Reads the options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("commands", nargs="+", choices=(*COMMANDS, "all"), metavar="COMMAND")
    parser.add_argument("--output", type=Path, required=True, help="Folder of the results.")
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="For each command: after them no new measurement begins (default: 9).",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="Toy sizes, also without a GPU: a minute on a CPU."
    )
    return parser.parse_args()


def main() -> int:
    """Runs the commands; returns the exit status."""
    options = parse()

    import torch

    from gpu_report import Report

    if not (options.smoke or torch.cuda.is_available()):
        print(
            "gpu: a CUDA device is needed, and torch finds none. Toy sizes, `--smoke`, run on a "
            "CPU too.",
            file=sys.stderr,
        )
        return 2
    status = 0
    for command in COMMANDS if "all" in options.commands else options.commands:
        module = importlib.import_module(f"gpu_{command}")
        report = Report(command, options.output, options.minutes, module.NOTE)
        report.attempt(command, lambda run=module.run, into=report: run(into, options.smoke))
        report.write()
        print((options.output / f"{command}.md").read_text(encoding="utf-8"), flush=True)
        status = max(status, int(bool(report.failures)))
    return status


if __name__ == "__main__":
    sys.exit(main())
