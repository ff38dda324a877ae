"""Gradients through Trainer do not depend on how an update is cut into batches and processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from ..models import record_calls
from ..support import gradients_of_one_update as one_update
from ..support.gradients_of_one_update import SHARED, gradients_of_one_update
from ..support.launching import launch

# The name since 5.21; the older one warns there.
NEW_NAME = "activation_checkpointing"
CHECKPOINTING = (
    NEW_NAME
    if NEW_NAME in Seq2SeqTrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)


def expected_gradients(label_smoothing: float) -> dict[str, Tensor]:
    """Gradients of torch's mean over all targets of the sixteen pairs, in one piece."""
    model = one_update.build_model(label_smoothing=0.0)
    batch = one_update.build_collator(model)(list(one_update.ragged_pairs()))
    labels = batch.pop("labels")
    loss = F.cross_entropy(
        model(**batch).logits.flatten(0, 1), labels.flatten(), label_smoothing=label_smoothing
    )
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def in_force(by_config: float, by_trainer: float) -> float:
    """The smoothing that a run trains with."""
    return by_trainer or by_config


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal to 1e-5 of the largest entry: keys' biases have rounding noise for a gradient."""
    assert actual.keys() == expected.keys()
    tolerance = 1e-5 * max(value.abs().max().item() for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=tolerance, msg=lambda text, at=name: f"{at} {text}"
        )


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of the helper script on two processes."""
    folder = tmp_path_factory.mktemp("two_processes")
    one_update.write_corpus(folder)
    launch(one_update.__file__, folder)
    return folder


@pytest.mark.parametrize(("split", "smoothing"), SHARED)
def test_gradients_are_those_of_one_mean_when_batches_are_accumulated(tmp_path, split, smoothing):
    gradients = gradients_of_one_update(tmp_path, split, smoothing)

    assert_same(gradients, expected_gradients(in_force(*smoothing)))


@pytest.mark.slow
@pytest.mark.parametrize(("split", "smoothing"), SHARED)
def test_gradients_are_those_of_one_mean_when_processes_share_batches(
    of_two_processes, split, smoothing
):
    gradients = torch.load(of_two_processes / "gradients-0.pt")

    assert_same(gradients[split, smoothing], expected_gradients(in_force(*smoothing)))


@pytest.mark.slow
def test_training_gives_the_same_model_and_scores_on_two_processes(tmp_path, of_two_processes):
    one_update.train_on_token_batches(of_two_processes, tmp_path)

    both = [of_two_processes / "model", tmp_path]
    assert_same(*(load_file(folder / "model.safetensors") for folder in both))
    runs, results = (
        [json.loads((folder / name).read_text()) for folder in both]
        for name in ("run.json", "results.json")
    )
    assert runs[0]["updates"] == runs[1]["updates"] > 4
    for score in ("bleu", "chrf", "exact_match", "lines"):
        assert results[0]["validation"][score] == results[1]["validation"][score]
    losses = [result["validation"]["loss"] for result in results]
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.slow
def test_all_processes_stop_together_when_one_is_interrupted(of_two_processes):
    updates = [torch.load(of_two_processes / f"updates-{rank}.pt") for rank in range(2)]

    assert updates == [1, 1]


# The unmodified `Seq2SeqTrainer`


def build_trainer(folder: Path, model: nn.Module, **changes: Any) -> Seq2SeqTrainer:
    """One update of four pairs."""
    return Seq2SeqTrainer(
        model=model,
        args=one_update.build_arguments(
            folder, max_steps=1, per_device_train_batch_size=4, **changes
        ),
        train_dataset=one_update.ragged_pairs(),
        data_collator=one_update.build_collator(model),
    )


def test_evaluation_gathers_no_cache_when_trainer_takes_the_labels_away(tmp_path, tiny_model):
    # Its own label smoothing does: without labels the model returns a cache, if it shall have one.
    trainer = build_trainer(tmp_path, tiny_model, label_smoothing_factor=0.1, use_cache=True)
    batch = one_update.build_collator(tiny_model)(list(one_update.ragged_pairs()))

    _, outputs, _ = trainer.prediction_step(tiny_model, batch, prediction_loss_only=False)

    assert all(isinstance(output, Tensor) for output in outputs)


def test_checkpointing_changes_no_gradient(tmp_path):
    def gradients(**changes: Any) -> tuple[dict[str, Tensor], int]:
        model = one_update.build_model(label_smoothing=0.0)
        # No gradient then reaches the first layer's input.
        model.get_input_embeddings().requires_grad_(False)
        calls = record_calls(model, ".fc1")
        trainer = build_trainer(tmp_path, model, **changes)
        keeper = one_update.KeepGradients()
        trainer.add_callback(keeper)
        trainer.train()
        return keeper.gradients, len(calls)

    expected, calls_before = gradients()
    actual, calls = gradients(**{CHECKPOINTING: True})

    assert_same(actual, expected)
    assert calls == 2 * calls_before  # each layer ran again in the backward pass
