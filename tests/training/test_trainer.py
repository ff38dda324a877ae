"""The unmodified `Seq2SeqTrainer` and `DataCollatorForSeq2Seq`, as everybody calls them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from ..conftest import Model, record_calls
from ..support.gradients_of_one_update import (
    KeepGradients,
    build_arguments,
    build_collator,
    build_model,
    ragged_pairs,
)

# The name since 5.21; the older one warns there.
NEW_NAME = "activation_checkpointing"
CHECKPOINTING = (
    NEW_NAME
    if NEW_NAME in Seq2SeqTrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)


def build_trainer(folder: Path, model: Model | None = None, **changes: Any) -> Seq2SeqTrainer:
    """Two updates of four pairs each, unless `changes` say otherwise."""
    model = model or build_model(label_smoothing=0.0)
    defaults: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 4}
    return Seq2SeqTrainer(
        model=model,
        args=build_arguments(folder, **defaults | changes),
        train_dataset=ragged_pairs(),
        eval_dataset=ragged_pairs(),
        data_collator=build_collator(model),
    )


def weights(model: Model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, msg=lambda text, at=name: f"{at}: {text}")


def test_evaluation_gathers_no_cache_when_trainer_takes_the_labels_away(tmp_path, tiny_model):
    # Its own label smoothing does: without labels the model returns a cache, if it shall have one.
    trainer = build_trainer(tmp_path, tiny_model, label_smoothing_factor=0.1, use_cache=True)
    batch = build_collator(tiny_model)(list(ragged_pairs()))

    _, outputs, _ = trainer.prediction_step(tiny_model, batch, prediction_loss_only=False)

    assert all(isinstance(output, torch.Tensor) for output in outputs)


@pytest.mark.parametrize("frozen", [False, True])
def test_checkpointing_changes_no_gradient(tmp_path, frozen):
    def gradients(**changes: Any) -> tuple[dict[str, torch.Tensor], int]:
        model = build_model(label_smoothing=0.0)
        # No gradient then reaches the first layer's input.
        model.get_input_embeddings().requires_grad_(not frozen)
        calls = record_calls(model, ".fc1")
        trainer = build_trainer(tmp_path, model, max_steps=1, **changes)
        keeper = KeepGradients()
        trainer.add_callback(keeper)
        trainer.train()
        return keeper.gradients, len(calls)

    expected, calls_before = gradients()
    actual, calls = gradients(**{CHECKPOINTING: True})

    assert_same(actual, expected)
    assert calls == 2 * calls_before  # each layer ran again in the backward pass


def test_bf16_training_keeps_the_weights_in_float32(tmp_path):
    expected = build_trainer(tmp_path)
    expected.train()
    trainer = build_trainer(tmp_path, bf16=True)
    layer = trainer.model.model.encoder.layers[0]
    computed = []
    layer.fc1.register_forward_hook(lambda module, inputs, output: computed.append(output.dtype))

    trainer.train()

    assert set(computed) == {torch.bfloat16}
    start, end = weights(build_model(label_smoothing=0.0)), weights(expected.model)
    for name, weight in weights(trainer.model).items():
        assert weight.dtype == torch.float32
        # Two updates on gradients of eight bits; a key's bias has rounding noise for a gradient.
        tolerance = 0.1 * (end[name] - start[name]).norm() + 1e-3
        assert (weight - end[name]).norm() < tolerance, name
