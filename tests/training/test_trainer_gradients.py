"""Gradients through Trainer do not depend on how an update is cut into batches and processes."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Seq2SeqTrainer

from ..support import gradients_of_one_update as one_update
from ..support.gradients_of_one_update import SHARED, gradients_of_one_update
from ..support.launching import launch


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
def test_all_processes_stop_together_when_one_is_interrupted(of_two_processes):
    updates = [torch.load(of_two_processes / f"updates-{rank}.pt") for rank in range(2)]

    assert updates == [1, 1]


def test_evaluation_gathers_no_cache_when_trainer_takes_the_labels_away(tmp_path, tiny_model):
    # Its own label smoothing does: without labels the model returns a cache, if it shall have one.
    given = {"label_smoothing_factor": 0.1, "use_cache": True}
    trainer = Seq2SeqTrainer(tiny_model, one_update.build_arguments(tmp_path, **given))
    batch = one_update.build_collator(tiny_model)(list(one_update.ragged_pairs()))

    _, outputs, _ = trainer.prediction_step(tiny_model, batch, prediction_loss_only=False)

    assert all(isinstance(output, Tensor) for output in outputs)
