"""Updates of tiny with batches of several sizes: how large must they be to fill a GPU?"""

from dataclasses import replace

import gpu_training
from gpu_report import Report

NOTE = (
    "As `training`. The time of a small update is that of launching its kernels, which does not "
    "depend on the batch; `--minutes` therefore measures two sizes."
)
CONTENDERS = ("vanilla", "vanilla, no padding", "vanilla, no padding, compiled layers")
TOKENS = (2048, 4096, 8192, 16_384, 32_768, 65_536)
FULL = replace(
    gpu_training.FULL,
    presets=("tiny",),
    contenders=CONTENDERS,
    vocabulary=10_000,
    changes={"dropout": 0.3},
)
SMOKE = replace(gpu_training.SMOKE, contenders=CONTENDERS)


def run(report: Report, smoke: bool) -> None:
    """Fills a table for each size."""
    for tokens in (400, 800) if smoke else TOKENS:
        gpu_training.compare(report, replace(SMOKE if smoke else FULL, tokens=tokens))
