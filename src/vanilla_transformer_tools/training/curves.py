"""The curves of a run as a picture: losses, validation score and learning rate over time."""

from pathlib import Path

from vanilla_transformer_tools.figures import new_figure, save_figure
from vanilla_transformer_tools.saved_folder import LOG_FILE
from vanilla_transformer_tools.training.run_record import read_log

CURVES_FILE = "curves.svg"


def plot_curves(folder: Path, metric: str) -> Path:
    """Draws the reports in a run's `log.jsonl` over minutes of training.

    Args:
        folder: Of the run.
        metric: Validation score to draw, such as "bleu".

    Returns:
        The picture, `curves.svg` in the folder.

    Raises:
        ImportError: If matplotlib is not installed; the message says how to install it.
        OSError: If the log cannot be read, or the picture cannot be written.
    """
    figure = new_figure(6.4, 7.2)
    panels = {
        "cross-entropy a token, nats": {"loss": "training", "eval_loss": "validation"},
        metric: {f"eval_{metric}": "validation, greedy"},
        "learning rate": {"learning_rate": "schedule"},
    }
    reports = read_log(folder / LOG_FILE)
    for axes, (title, curves) in zip(
        figure.subplots(len(panels), sharex=True), panels.items(), strict=True
    ):
        axes.set_ylabel(title)
        for name, label in curves.items():
            points = [(report["minutes"], report[name]) for report in reports if name in report]
            if points:
                axes.plot(*zip(*points, strict=True), label=label)
                axes.legend()
    axes.set_xlabel("minutes")
    return save_figure(figure, folder / CURVES_FILE)
