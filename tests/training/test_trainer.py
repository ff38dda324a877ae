"""The unmodified `Seq2SeqTrainer` and `DataCollatorForSeq2Seq`, as everybody calls them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from vanilla_transformer import VanillaTransformerTokenizer

from ..conftest import Model, record_calls, redraw_parameters
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


def test_evaluation_loss_is_the_unsmoothed_mean_over_targets(tmp_path):
    model = build_model(label_smoothing=0.2).eval()
    redraw_parameters(model)
    batch = build_collator(model)(list(ragged_pairs()))
    labels = batch.pop("labels")
    expected = F.cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten())

    # One batch: of several, Trainer reports the mean of the means.
    trainer = build_trainer(tmp_path, model, per_device_eval_batch_size=16)

    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item())


def test_evaluation_gathers_no_cache_when_trainer_takes_the_labels_away(tmp_path, tiny_model):
    # Its own label smoothing does: without labels the model returns a cache, if it shall have one.
    trainer = build_trainer(tmp_path, tiny_model, label_smoothing_factor=0.1, use_cache=True)
    batch = build_collator(tiny_model)(list(ragged_pairs()))

    _, outputs, _ = trainer.prediction_step(tiny_model, batch, prediction_loss_only=False)

    assert all(isinstance(output, torch.Tensor) for output in outputs)


def test_metrics_get_translations_and_references_that_decode(tmp_path, tiny_model):
    words = [f"w{index}" for index in range(33)]
    tokenizer = VanillaTransformerTokenizer.train([" ".join(words)], kind="word", vocab_size=37)
    sources = [" ".join(words[index * index : index * index + 5 - index]) for index in range(5)]
    targets = [" ".join(words[9 + index : 11 + 2 * index]) for index in range(5)]
    seen = {}

    def compute_metrics(results: Any) -> dict[str, float]:
        for name, ids in (("predictions", results.predictions), ("references", results.label_ids)):
            ids[ids == -100] = tokenizer.pad_token_id
            seen[name] = tokenizer.batch_decode(ids, skip_special_tokens=True)
        return {"count": len(results.predictions)}

    trainer = Seq2SeqTrainer(
        model=tiny_model,
        args=build_arguments(
            tmp_path,
            predict_with_generate=True,
            generation_num_beams=3,
            generation_max_length=7,
            per_device_eval_batch_size=2,
        ),
        eval_dataset=Dataset.from_dict(dict(tokenizer(sources, text_target=targets))),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=tiny_model),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    metrics = trainer.evaluate()

    alone = [
        tiny_model.generate(**tokenizer([text], return_tensors="pt"), num_beams=3, max_length=7)[0]
        for text in sources
    ]
    assert metrics["eval_count"] == len(sources)
    assert seen["references"] == targets
    assert seen["predictions"] == tokenizer.batch_decode(alone, skip_special_tokens=True)
    assert len(set(seen["predictions"])) > 1


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


def test_resumed_training_ends_with_the_weights_of_one_in_one_go(tmp_path):
    def trainer(folder: str) -> Seq2SeqTrainer:
        model = build_model(label_smoothing=0.1)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
        changes = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2}
        return build_trainer(tmp_path / folder, model, max_steps=5, **changes)

    whole = trainer("whole")
    whole.train()
    resumed = trainer("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))

    assert resumed.state.global_step == 5
    assert_same(weights(resumed.model), weights(whole.model))


def test_best_model_is_loaded_at_the_end_with_its_ties(tmp_path):
    trainer = build_trainer(
        tmp_path,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        # The first update is "best": the weights must change back.
        greater_is_better=True,
    )

    trainer.train()

    best = tmp_path / "checkpoint-1"
    assert trainer.state.best_model_checkpoint == str(best)
    assert_same(weights(trainer.model), load_file(best / "model.safetensors"))
    assert trainer.model.lm_head.weight is trainer.model.model.encoder.embed_tokens.weight


def test_checkpoint_of_the_model_alone_loads(tmp_path):
    trainer = build_trainer(tmp_path, save_strategy="steps", save_steps=2, save_only_model=True)

    trainer.train()

    checkpoint = tmp_path / "checkpoint-2"
    assert not {path.name for path in checkpoint.iterdir()} & {"optimizer.pt", "scheduler.pt"}
    loaded = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    assert_same(weights(loaded), weights(trainer.model))


@pytest.mark.parametrize("frozen", ["model.shared", "model.encoder"])
def test_frozen_part_stays_as_it_is_while_the_rest_trains(tmp_path, frozen):
    model = build_model(label_smoothing=0.1)
    part = model.get_encoder() if frozen.endswith("encoder") else model.get_input_embeddings()
    part.requires_grad_(False)
    start = weights(model)

    build_trainer(tmp_path, model).train()

    # The encoder reads the table that all share.
    kept = (frozen, "model.shared")
    for name, weight in weights(model).items():
        assert torch.equal(weight, start[name]) == name.startswith(kept), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_training_gives_the_same_weights(tmp_path):
    eager, compiled = (
        # Generating C++ would take minutes.
        build_trainer(tmp_path, torch_compile=flag, torch_compile_backend=backend)
        for flag, backend in ((False, None), (True, "aot_eager"))
    )

    for trainer in (eager, compiled):
        trainer.train()

    assert_same(weights(compiled.model), weights(eager.model))
