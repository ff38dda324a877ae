"""The model card of a saved folder, filled from measurements."""

import json
import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.utils import CONFIG_NAME

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer_tools.files import write_lines, written_whole
from vanilla_transformer_tools.saved_folder import (
    CARD_FILE,
    RESULTS_FILE,
    RUN_FILE,
    TARGET_FILES,
    TARGET_FOLDER,
    read_object,
)
from vanilla_transformer_tools.settings import METRICS

# The template at the top of the repository, linked into the package.
TEMPLATE = Path(__file__).with_name("model_card.md")
# Sections between marks hold sizes, use, scores and training; the rest of a card is the user's.
_SECTION = re.compile(
    r"<!-- vanilla_transformer:begin (\w+) -->\r?\n.*?<!-- vanilla_transformer:end \1 -->",
    re.DOTALL,
)
logger = logging.getLogger(__name__)


def record_results(folder: Path, name: str, scores: dict[str, Any]) -> None:
    """Adds the scores of one test set to the folder's results and, of our models, to its card.

    They are those of `metrics.score`, and say how the text was generated.
    """
    before = read_results(folder)
    results = {**before, name: scores}
    write_lines(folder / RESULTS_FILE, [json.dumps(results, indent=2, ensure_ascii=False)])
    if is_ours(folder):
        write_model_card(folder, _signed(before))


def is_ours(folder: Path) -> bool:
    """Whether a folder holds a model of this package, which our card can describe."""
    model_type = _load(folder / CONFIG_NAME).get("model_type")
    return bool(model_type == VanillaTransformerConfig.model_type)


def read_results(folder: Path) -> dict[str, Any]:
    """The scores of each test set that a folder holds so far.

    Raises:
        ValueError: If its results.json is damaged.
    """
    return _load(folder / RESULTS_FILE)


def forget_results(folder: Path) -> None:
    """Takes the scores of earlier weights out of the results, and ours out of a card."""
    earlier = read_results(folder)
    if not earlier:
        return
    (folder / RESULTS_FILE).unlink()
    if is_ours(folder) and (folder / CARD_FILE).exists():
        write_model_card(folder, _signed(earlier))


def write_model_card(folder: Path, forgotten: Collection[tuple[str, str]] = ()) -> None:
    """Fills the template from `config.json`, `run.json` and `results.json` of a saved model.

    In a card that exists, only the marked sections and the scores in its metadata are rewritten. A
    card without marks is the user's own: it stays as it is, with a warning. Scores that are
    forgotten, by test set and metric, leave the metadata.
    """
    file = folder / CARD_FILE
    card = _filled_template(folder, folder.resolve().name, read_results(folder))
    if file.exists():
        try:
            card = _updated(ModelCard.load(file), card, forgotten)
        except (ValueError, yaml.YAMLError) as error:
            logger.warning("%s stays as it is: %s", file, error)
            return
    with written_whole(file) as temporary:
        card.save(temporary)


def name_repository(folder: Path, repo_id: str) -> None:
    """Makes the examples in our own section of a card load a repository instead of a folder."""
    file = folder / CARD_FILE
    card = file.read_bytes().decode("utf-8")
    called = re.compile(r'(from_pretrained\(|--model )"[^"]*"')
    card = _SECTION.sub(lambda section: called.sub(rf'\1"{repo_id}"', section[0]), card)
    with written_whole(file) as temporary:
        temporary.write_bytes(card.encode("utf-8"))


def _updated(
    card: ModelCard, fresh: ModelCard, forgotten: Collection[tuple[str, str]]
) -> ModelCard:
    """A card with the marked sections and the scores of a fresh one, without forgotten scores."""
    if not _SECTION.search(card.text):
        raise ValueError(
            "it has none of the marks between which scores are written. Delete or rename it to "
            "have a card written."
        )
    sections = {section[1]: section[0] for section in _SECTION.finditer(fresh.text)}
    line_end = "\r\n" if "\r\n" in card.text else "\n"
    card.text = _SECTION.sub(
        lambda section: sections.get(section[1], section[0]).replace("\n", line_end), card.text
    )
    theirs, ours = cast(ModelCardData, card.data), cast(ModelCardData, fresh.data)
    results = list(ours.eval_results or [])
    known = {(one.dataset_name, one.metric_type) for one in results} | {*forgotten}
    results += [
        one for one in theirs.eval_results or [] if (one.dataset_name, one.metric_type) not in known
    ]
    metrics = theirs.metrics or []
    metrics = metrics if isinstance(metrics, list) else [metrics]
    theirs.metrics = list(dict.fromkeys([*metrics, *(ours.metrics or [])])) or None
    theirs.eval_results = results or None
    theirs.model_name = theirs.model_name or ours.model_name
    return card


def _signed(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Test set and metric of each score that can be repeated, which the metadata of a card has."""
    return [
        (test_set, metric)
        for test_set, scores in results.items()
        for metric in METRICS
        if f"{metric}_signature" in scores
    ]


def _load(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    return read_object(file) if file.exists() else {}


def _filled_template(folder: Path, name: str, results: dict[str, Any]) -> ModelCard:
    """The card that a model of this name gets in a folder without one."""
    config, run = (_load(folder / file) for file in (CONFIG_NAME, RUN_FILE))
    settings = run.get("settings", {})
    origin = run.get("imported_from")
    # An import has no settings of a training.
    is_new = bool(settings) and not settings.get("init_from")
    signed = [(test_set, metric, results[test_set]) for test_set, metric in _signed(results)]
    data = ModelCardData(
        language=settings.get("language") or None,
        license=settings.get("license"),
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vanilla_transformer", "encoder-decoder"]
        + ["imported"] * (origin is not None)
        + ["trained-from-scratch"] * is_new,
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
    card: ModelCard = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        config=config,
        # The record of an import says nothing about its training.
        run={} if origin else run,
        settings=settings,
        origin=origin,
        results=results,
        titles={name: metric.title for name, metric in METRICS.items()},
        target_folder=TARGET_FOLDER if (folder / TARGET_FILES[0]).exists() else None,
    )
    card.text = card.text.rstrip("\n") + "\n"
    return card
