"""The model card of a saved folder, filled from what was measured."""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from vanilla_transformer.files import write_lines
from vanilla_transformer.model_folder import (
    CARD_FILE,
    RESULTS_FILE,
    RUN_FILE,
    TARGET_FILES,
    TARGET_FOLDER,
)
from vanilla_transformer_cli.settings import METRIC_TITLES

# The template at the top of the repository, linked into the package.
TEMPLATE = Path(__file__).with_name("model_card.md")


def record_results(folder: Path, name: str, scores: dict[str, Any]) -> None:
    """Adds the scores of one test set to the folder's results and rewrites its card.

    Args:
        folder: Of a saved model, with the `run.json` of its training where there is one.
        name: Of the test set.
        scores: As `metrics.TranslationScores` gives them, and how the text was generated.
    """
    file = folder / RESULTS_FILE
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    results[name] = scores
    write_lines(file, [json.dumps(results, indent=2, ensure_ascii=False)])
    write_model_card(folder)


def write_model_card(folder: Path) -> None:
    """Fills the template from `config.json`, `run.json` and `results.json` of a saved model."""
    config, run, results = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for file in (folder / name for name in ("config.json", RUN_FILE, RESULTS_FILE))
    )
    settings = run.get("settings", {})
    # An earlier release gave exact match no signature.
    signed = [
        (test_set, metric, scores)
        for test_set, scores in results.items()
        for metric in METRIC_TITLES
        if f"{metric}_signature" in scores
    ]
    name = folder.resolve().name
    data = ModelCardData(
        language=settings.get("language") or None,
        license=settings.get("license"),
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vanilla_transformer", "encoder-decoder", "trained-from-scratch"],
        datasets=settings.get("dataset_tags") or None,
        metrics=list(dict.fromkeys(metric for _, metric, _ in signed)) or None,
        model_name=name,
        eval_results=[
            EvalResult(
                task_type="translation",
                # The Hub takes the form of a dataset's id only.
                dataset_type=re.sub(r"[^a-zA-Z0-9_.-]+", "-", test_set),
                dataset_name=test_set,
                metric_type=metric,
                metric_value=round(scores[metric], 2),
                metric_args={"signature": scores[f"{metric}_signature"]},
            )
            for test_set, metric, scores in signed
        ]
        or None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        config=config,
        run=run,
        results=results,
        titles=METRIC_TITLES,
        target_folder=TARGET_FOLDER if (folder / TARGET_FILES[0]).exists() else None,
    )
    write_lines(folder / CARD_FILE, [str(card).rstrip("\n")])
