"""What the loss holds in memory, when it calls the output projection, and how it divides."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.utils import logging

from vanilla_transformer import fast_loss_vanilla_transformer
from vanilla_transformer.fast_loss_vanilla_transformer import projected_loss_sum

from ..models import Batch, Model, build_variant, gradients

# No other size of the model, so that a tensor of this width holds logits.
WIDE_VOCABULARY = 499
CHUNK_ROWS = 32

both_paths = pytest.mark.parametrize("path", ["fused", "module"])


def choose_path(projection: nn.Module, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the loss multiply the weights itself, call the module, or believe it is compiled."""
    if path == "module":
        projection.register_forward_hook(lambda module, inputs, output: None)
    if path == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


class RowsOfLogits(TorchDispatchMode):
    """Notes how many rows of logits are in memory at most after any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (WIDE_VOCABULARY,):
                reference = StorageWeakRef(tensor.untyped_storage())
                self.alive[reference.cdata] = reference, tensor.numel() // WIDE_VOCABULARY
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.most = max(self.most, sum(rows for _, rows in self.alive.values()))
        return result


def rows_of_logits_in_memory(model: Model, batch: Batch, **kwargs: Any) -> int:
    with RowsOfLogits() as recorder:
        model.train()(**batch, **kwargs).loss.backward()
    return recorder.most


@pytest.fixture
def wide_model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model whose logits outweigh all else, computed in chunks of `CHUNK_ROWS`."""
    monkeypatch.setattr(fast_loss_vanilla_transformer, "CHUNK_ROWS", CHUNK_ROWS)
    return build_variant(vocab_size=WIDE_VOCABULARY)


@pytest.fixture
def long_batch() -> Batch:
    """N=512 real targets, 16 chunks."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, WIDE_VOCABULARY, (32, 16), generator=generator)
    return {"input_ids": labels[:, :5].clone(), "labels": labels}


@both_paths
@pytest.mark.parametrize(("precision", "r_drop_alpha"), [("float32", 0.0), ("autocast", 5.0)])
def test_training_never_holds_the_logits_of_all_targets(
    wide_model, long_batch, monkeypatch, path, precision, r_drop_alpha
):
    wide_model.config.label_smoothing = 0.1
    choose_path(wide_model.lm_head, path, monkeypatch)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        most_rows = rows_of_logits_in_memory(wide_model, long_batch, r_drop_alpha=r_drop_alpha)

    # A chunk's logits, softmax and gradient in one or two dtypes; [D, V] views of the table.
    assert CHUNK_ROWS <= most_rows <= 8 * CHUNK_ROWS < long_batch["labels"].numel()


def test_recorder_sees_all_logits_when_they_are_returned(wide_model, long_batch):
    # Otherwise the test above says nothing.
    most_rows = rows_of_logits_in_memory(wide_model, long_batch, return_logits=True)

    assert most_rows >= 2 * long_batch["labels"].numel()


@both_paths
def test_loss_projects_real_targets_only(wide_model, long_batch, monkeypatch, path):
    num_targets, num_positions = 32, long_batch["labels"].numel()
    monkeypatch.setattr(fast_loss_vanilla_transformer, "CHUNK_ROWS", num_positions)
    long_batch["labels"][:, 1:] = -100
    choose_path(wide_model.lm_head, path, monkeypatch)

    most_rows = rows_of_logits_in_memory(wide_model, long_batch)

    assert num_targets <= most_rows <= 8 * num_targets < num_positions


CALLS: list[int] = []


class CountingHook(ModelHook):
    """Stands for accelerate's, which brings weights from elsewhere."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(1)
        return super().pre_forward(module, *args, **kwargs)


class CountingLinear(nn.Linear):
    """Stands for whatever replaces an output projection: LoRA, a quantised matrix, ..."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        return super().forward(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.register_forward_hook(lambda *_: CALLS.append(1)),
        lambda head: head.register_forward_pre_hook(lambda *_: CALLS.append(1)),
        lambda head: head.register_full_backward_hook(lambda *_: CALLS.append(1)),
        lambda head: head.register_full_backward_pre_hook(lambda *_: CALLS.append(1)),
        lambda head: add_hook_to_module(head, CountingHook()),
        lambda head: setattr(head, "__class__", CountingLinear),
    ],
    ids=["hook", "pre_hook", "backward_hook", "backward_pre_hook", "accelerate", "class"],
)
def test_projection_is_called_when_it_has_hooks_or_another_class(tiny_model, batch, change):
    expected = gradients(tiny_model, batch)
    change(tiny_model.lm_head)
    CALLS.clear()

    actual = gradients(tiny_model, batch)

    assert CALLS
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("num_items_in_batch", [None, torch.tensor(0)])
@pytest.mark.parametrize("path", ["fused", "module", "compiled", "logits"])
def test_loss_and_gradients_are_zero_when_all_labels_are_ignored(
    tiny_model, batch, monkeypatch, num_items_in_batch, path
):
    tiny_model.config.label_smoothing = 0.1
    batch["labels"] = torch.full_like(batch["labels"], -100)
    choose_path(tiny_model.lm_head, path, monkeypatch)
    asked = {"num_items_in_batch": num_items_in_batch, "return_logits": path == "logits"}

    loss = tiny_model.train()(**batch, **asked).loss
    loss.backward()

    assert loss == tiny_model.eval()(**batch, **asked).loss == 0
    for name, parameter in tiny_model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@both_paths
@pytest.mark.parametrize(
    ("tied", "frozen"), [(False, "lm_head"), (False, "model"), (True, "model.shared")]
)
def test_frozen_side_of_the_projection_gets_no_gradient(batch, monkeypatch, path, tied, frozen):
    model = build_variant(tie_word_embeddings=tied)
    expected = gradients(model, batch)
    choose_path(model.lm_head, path, monkeypatch)
    model.get_submodule(frozen).requires_grad_(False)

    actual = gradients(model, batch)

    for name in expected:
        if name.startswith(f"{frozen}."):
            expected[name] = None
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("return_logits", [True, False])
def test_smoothed_loss_and_logits_are_those_of_training_or_evaluation(
    tiny_model, batch, training, return_logits
):
    tiny_model.config.label_smoothing = 0.1
    logits = tiny_model(**batch).logits

    output = tiny_model.train(training)(**batch, return_logits=return_logits)

    if training and not return_logits:
        assert output.logits is None
    else:
        torch.testing.assert_close(output.logits, logits)
    # Only training smooths.
    smoothing = 0.1 if training else 0.0
    expected = F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=smoothing
    )
    torch.testing.assert_close(output.loss, expected)


def test_decoder_inputs_that_the_loss_makes_begin_with_the_start_token(batch):
    model = build_variant(decoder_start_token_id=3)
    expected = F.pad(batch.pop("decoder_input_ids")[:, 1:], (1, 0), value=3)

    made = model.prepare_decoder_input_ids_from_labels(batch["labels"])

    assert torch.equal(made, expected)
    assert torch.equal(model(**batch).loss, model(**batch, decoder_input_ids=expected).loss)


@pytest.mark.parametrize("as_embeddings", [False, True])
def test_loss_keeps_the_decoder_inputs_that_are_given(tiny_model, batch, as_embeddings):
    labels = batch.pop("labels")
    # Others than the labels would make.
    given = batch.pop("decoder_input_ids").flip(0)
    logits = tiny_model(**batch, decoder_input_ids=given).logits
    target = {"decoder_input_ids": given}
    if as_embeddings:
        target = {"decoder_inputs_embeds": tiny_model.get_input_embeddings()(given)}

    loss = tiny_model(**batch, **target, labels=labels).loss

    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize(
    ("kept", "positions"),
    [(0, [0, 1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4]), (torch.tensor([0, 3]), [0, 3])],
)
def test_logits_to_keep_chooses_positions_and_leaves_the_loss_alone(
    tiny_model, batch, kept, positions
):
    of_labels = tiny_model.eval()(**batch, logits_to_keep=kept)
    torch.testing.assert_close(of_labels.loss, tiny_model(**batch).loss)
    del batch["labels"]
    expected = tiny_model(**batch).logits[:, positions]

    actual = tiny_model(**batch, logits_to_keep=kept).logits

    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "shapes"),
    [
        # A start token is put before the target, and its last token stays.
        (slice(None), slice(-1), r"\[3, 4\] and \[3, 5\]"),
        (slice(1), slice(None), r"\[1, 5\] and \[3, 5\]"),
    ],
)
def test_labels_of_another_shape_are_refused(tiny_model, batch, training, rows, columns, shapes):
    labels = batch.pop("labels")
    batch["decoder_input_ids"] = labels.clamp(min=0)
    tiny_model.train(training)

    with pytest.raises(ValueError, match=f"got the shapes {shapes}"):
        tiny_model(**batch, labels=labels[rows, columns])


@pytest.mark.parametrize("return_logits", [True, False])
def test_no_position_of_a_tuple_of_a_training_step_is_taken_for_logits(
    tiny_model, batch, return_logits
):
    output = tiny_model.train()(**batch, return_logits=return_logits)
    as_tuple = tiny_model(**batch, return_logits=return_logits, return_dict=False)

    assert torch.equal(output[0], as_tuple[0])
    assert len(output[:2]) == len(as_tuple[:2]) == 1 + return_logits
    assert output.encoder_last_hidden_state.shape == (3, 7, 24)


def test_r_drop_of_an_odd_batch_is_refused(tiny_model, batch):
    with pytest.raises(ValueError, match="got 3 rows"):
        tiny_model.train()(**batch, r_drop_alpha=1.0)


@pytest.fixture
def transformers_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What Transformers' loggers say; no message was said before."""
    logging.warning_once.cache_clear()
    logging.enable_propagation()
    yield caplog
    logging.disable_propagation()


TAKEN_OUTSIDE = (
    "`config.label_smoothing` is 0.25 and has no effect: the loss is computed outside the model, "
    "by Trainer's `label_smoothing_factor` or a loss function. Set `config.label_smoothing` to 0 "
    "to silence this warning, or leave both arguments out to train with it."
)


@pytest.mark.parametrize(
    ("by_config", "arguments", "in_force", "warnings"),
    [
        (0.0, {}, 0.0, []),
        (0.25, {}, 0.25, []),
        (0.25, {"label_smoothing_factor": 0.0}, 0.25, []),
        (0.0, {"label_smoothing_factor": 0.1}, 0.1, []),
        (0.25, {"label_smoothing_factor": 0.1}, 0.1, [TAKEN_OUTSIDE]),
    ],
)
def test_trainers_label_smoothing_replaces_that_of_the_config(
    tiny_model, batch, tmp_path, transformers_log, by_config, arguments, in_force, warnings
):
    logits = tiny_model(**batch).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, batch["labels"].flatten(), label_smoothing=in_force)
    (expected_gradient,) = torch.autograd.grad(expected, tiny_model.model.shared.weight)
    tiny_model.config.label_smoothing = by_config
    options = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", **arguments
    )
    trainer = Seq2SeqTrainer(tiny_model.train(), options)
    count = (batch["labels"] != -100).sum()

    for _ in range(2):
        loss = trainer.compute_loss(tiny_model, dict(batch), num_items_in_batch=count)
        (gradient,) = torch.autograd.grad(loss, tiny_model.model.shared.weight)

        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradient, expected_gradient)
    assert transformers_log.messages == warnings


@pytest.mark.parametrize("training", [True, False])
def test_loss_function_of_the_user_is_warned_of_in_training_when_the_config_smooths(
    tiny_model, batch, transformers_log, training
):
    tiny_model.config.label_smoothing = 0.25
    del batch["labels"]

    output = tiny_model.train(training)(**batch, num_items_in_batch=12)

    assert output.logits.shape == (3, 5, 37)
    # The model would smooth no evaluation anyway.
    assert transformers_log.messages == [TAKEN_OUTSIDE] * training


def test_loss_of_a_target_whose_probability_underflows_is_finite():
    projection = nn.Linear(1, 3, bias=False)
    projection.weight.data = torch.tensor([[0.0], [200.0], [0.0]])

    loss = projected_loss_sum(projection, torch.ones(1, 1, 1), torch.tensor([[2]]))

    assert loss == 200


@both_paths
def test_narrow_projection_has_its_loss_and_gradient_summed_in_float32(monkeypatch, path):
    monkeypatch.setattr(fast_loss_vanilla_transformer, "CHUNK_ROWS", 1)
    projection = nn.Linear(1, 3, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(projection.weight)
    choose_path(projection, path, monkeypatch)
    states = torch.ones(1, 600, 1, dtype=torch.bfloat16)
    labels = torch.zeros(1, 600, dtype=torch.long)

    loss = projected_loss_sum(projection, states, labels)
    loss.backward()

    # In bfloat16 sums would stop near 2^8.
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(600 * math.log(3), rel=1e-4)
    if path == "fused":
        # Each target adds a third to the ids that it is not. A third itself and the sum are
        # rounded once.
        expected = torch.tensor([[-400.0], [200.0], [200.0]])
        torch.testing.assert_close(projection.weight.grad.float(), expected, rtol=2**-7, atol=0)


# Torch's compiler imports torch's own deprecated modules.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_training_step_equals_eager(tiny_model, batch, monkeypatch):
    monkeypatch.setattr(fast_loss_vanilla_transformer, "CHUNK_ROWS", 6)
    tiny_model.config.label_smoothing = 0.1
    expected = gradients(tiny_model, batch)

    # Traced whole, forward and backward; generating C++ for it would take minutes.
    tiny_model.compile(backend="aot_eager", fullgraph=True)
    actual = gradients(tiny_model, batch)

    torch.testing.assert_close(actual, expected)
