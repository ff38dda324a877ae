"""Layers without padding: they see real tokens only, and every result stays the same."""

import pytest
import torch
from torch import Tensor, nn

from vanilla_transformer import packing_vanilla_transformer as packing
from vanilla_transformer_tools.training.r_drop import r_drop

from ..conftest import LEARNED, Batch, Model, build_variant, gradients, pad, real_rows, source_of
from .test_attention_backends import flash_attn_varlen_func


@pytest.fixture
def ragged(batch: Batch) -> Batch:
    """Sources padded on the left and two positions too wide; a label inside a target is no target.

    Sixteen real source tokens and twelve real target positions.
    """
    sources = real_rows(batch["input_ids"], batch["attention_mask"])
    input_ids, attention_mask = pad(sources, "left", extra=2)
    labels = batch["labels"].clone()
    labels[0, 0] = labels[2, 1] = -100
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "decoder_input_ids": batch["decoder_input_ids"],
        "labels": labels,
    }


def shapes_of_inputs(model: Model, suffix: str) -> list[tuple[int, ...]]:
    """Shapes of what the submodules ending in `suffix` get, appended at each call."""
    shapes: list[tuple[int, ...]] = []
    for name, module in model.named_modules():
        if name.endswith(suffix):
            module.register_forward_pre_hook(lambda _, inputs: shapes.append((*inputs[0].shape,)))
    return shapes


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """torch's kernel, which needs a GPU, in plain torch."""
    assert window_size in ((-1, -1), (-1, 0))
    longest_q, longest_k = (int(starts.diff().max()) for starts in (cu_seq_q, cu_seq_k))
    # To know the longest exactly would mean waiting for the GPU.
    assert longest_q <= max_q
    assert longest_k <= max_k
    lengths = (cu_seq_q, cu_seq_k, longest_q, longest_k)
    return flash_attn_varlen_func(query, key, value, *lengths, 0.0, scale, window_size == (-1, 0))


@pytest.fixture(params=["padded again for sdpa", "torch's kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The two ways that attention takes."""
    if request.param == "torch's kernel":
        monkeypatch.setattr(packing, "_fits_kernel", lambda *_: True)
        monkeypatch.setattr(packing, "varlen_attn", varlen_attn)
    return request.param


def test_layers_see_real_tokens_only(tiny_model, ragged):
    tiny_model.set_attn_implementation("varlen")
    shapes = shapes_of_inputs(tiny_model, ".fc1")

    tiny_model.train()(**ragged)

    assert shapes == [(1, 14, 24)] * 2 + [(1, 12, 24)] * 3


def assert_gradients_are_those_of_a_padded_batch(model: Model, batch: Batch) -> None:
    model.set_attn_implementation("eager")
    expected = gradients(model, batch)

    model.set_attn_implementation("varlen")

    torch.testing.assert_close(gradients(model, batch), expected)


@pytest.mark.parametrize("changes", [{}, {"pre_norm": False}, LEARNED], ids=str)
@pytest.mark.usefixtures("kernel")
def test_gradients_are_those_of_a_padded_batch(ragged, changes):
    model = build_variant(**changes, label_smoothing=0.1)

    assert_gradients_are_those_of_a_padded_batch(model, ragged)


def test_gradients_with_heads_of_two_sizes_are_those_of_a_padded_batch(ragged):
    assert_gradients_are_those_of_a_padded_batch(build_variant(d_k=16, d_v=3), ragged)


def test_source_without_a_mask_has_no_padding_to_leave_out(tiny_model, ragged):
    del ragged["attention_mask"]

    assert_gradients_are_those_of_a_padded_batch(tiny_model, ragged)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.usefixtures("kernel")
def test_gradients_are_the_same_when_layers_are_computed_again(tiny_model, ragged):
    tiny_model.set_attn_implementation("varlen")
    expected = gradients(tiny_model, ragged)

    tiny_model.gradient_checkpointing_enable()

    torch.testing.assert_close(gradients(tiny_model, ragged), expected)


@pytest.mark.usefixtures("kernel")
def test_mask_of_the_target_is_that_of_the_caller_if_there_is_one(tiny_model, ragged):
    target = torch.tensor([[0, 0, 1, 6, 33], [1, 25, 7, 4, 9]])
    inputs = {name: tensor[:2] for name, tensor in source_of(ragged).items()}
    inputs |= {"decoder_input_ids": target, "decoder_attention_mask": (target != 0).long()}
    inputs["labels"] = target.masked_fill(target == 0, -100)
    shapes = shapes_of_inputs(tiny_model, "decoder.layers.0.fc1")

    assert_gradients_are_those_of_a_padded_batch(tiny_model, inputs)

    assert shapes[-1] == (1, 8, 24)


@pytest.mark.usefixtures("kernel")
def test_evaluation_gives_the_same_loss_and_logits(tiny_model, ragged):
    tiny_model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = tiny_model(**ragged)
        tiny_model.set_attn_implementation("varlen")
        actual = tiny_model(**ragged)

    is_target = ragged["labels"] != -100
    torch.testing.assert_close(actual.loss, expected.loss)
    torch.testing.assert_close(actual.logits[is_target], expected.logits[is_target])


@pytest.mark.usefixtures("kernel")
def test_logits_after_the_last_target_are_those_of_a_padded_batch(tiny_model, batch):
    target = torch.tensor([[1, 25, 7, 4, 9]] * 3)
    inputs = source_of(batch) | {"decoder_input_ids": target, "labels": target.clone()}
    inputs["labels"][:, 2:] = -100
    logits = {}
    for kernel in ("eager", "varlen"):
        tiny_model.set_attn_implementation(kernel)
        with torch.no_grad():
            logits[kernel] = tiny_model(**inputs).logits

    torch.testing.assert_close(logits["varlen"], logits["eager"])


def test_r_drop_is_that_of_a_padded_batch(tiny_model, ragged):
    def loss() -> Tensor:
        torch.manual_seed(0)
        return r_drop(tiny_model.train(), 2.0, **ragged).loss

    tiny_model.set_attn_implementation("eager")
    expected = loss()
    tiny_model.set_attn_implementation("varlen")

    torch.testing.assert_close(loss(), expected)


def test_states_that_are_asked_for_keep_the_shape_of_the_batch(tiny_model, ragged):
    tiny_model.set_attn_implementation("varlen")

    states = tiny_model.train()(**ragged, output_hidden_states=True)

    assert {state.shape for state in states.encoder_hidden_states} == {(3, 9, 24)}
    assert {state.shape for state in states.decoder_hidden_states} == {(3, 5, 24)}


def test_dropout_of_attention_weights_is_kept(tiny_model, ragged):
    tiny_model.set_attn_implementation("varlen")
    without = tiny_model.train()(**ragged).loss
    for module in tiny_model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5

    with_dropout = tiny_model(**ragged).loss

    assert not torch.isclose(with_dropout, without)


@pytest.mark.usefixtures("kernel")
def test_sentence_of_padding_alone_gives_finite_gradients(tiny_model, ragged):
    ragged["attention_mask"][1] = 0
    tiny_model.set_attn_implementation("varlen")

    found = gradients(tiny_model, ragged)

    assert all(gradient.isfinite().all() for gradient in found.values())


def test_batch_without_any_target_has_no_loss(tiny_model, ragged):
    ragged["labels"][:] = -100
    tiny_model.set_attn_implementation("varlen")

    shapes = shapes_of_inputs(tiny_model, "decoder.layers.0.fc1")

    assert tiny_model.train()(**ragged).loss == 0

    # No kernel is asked for attention among no tokens.
    assert shapes == [(3, 5, 24)]


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"dtype": torch.float16, "capability": (9, 0)}, True),
        ({"dtype": torch.float32}, False),
        ({"device": "cpu"}, False),
        ({"capability": (7, 5)}, False),
        ({"key_size": 12, "value_size": 12}, False),
        ({"key_size": 264, "value_size": 264}, False),
        ({"value_size": 16}, False),
        ({"dropout": 0.1}, False),
    ],
)
def test_kernel_of_torch_runs_where_it_can(monkeypatch, changes, fits):
    setting = {"device": "cuda", "dtype": torch.bfloat16, "key_size": 8, "value_size": 8}
    setting |= {"capability": (8, 0), "dropout": 0.0, **changes}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: setting["capability"])

    device = torch.device(setting["device"])

    sizes = (setting["key_size"], setting["value_size"])
    assert packing._fits_kernel(device, setting["dtype"], *sizes, setting["dropout"]) == fits


# Torch's compiler imports torch's own deprecated modules.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_model_keeps_its_padding(tiny_model, ragged):
    tiny_model.set_attn_implementation("varlen")
    expected = gradients(tiny_model, ragged)

    tiny_model.compile(backend="aot_eager", fullgraph=True)

    torch.testing.assert_close(gradients(tiny_model, ragged), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's kernel needs a GPU")
def test_kernel_of_torch_is_eager_attention(ragged):
    # Heads of 8 and 16 entries.
    model = build_variant(d_model=32, encoder_attention_heads=2).cuda().bfloat16().train()
    inputs = {name: tensor.cuda() for name, tensor in ragged.items()}
    calls = shapes_of_inputs(model, ".fc1")

    def flat_gradients() -> Tensor:
        found = gradients(model, inputs)
        return torch.cat([gradient.flatten().float() for gradient in found.values()])

    model.set_attn_implementation("eager")
    expected = flat_gradients()
    model.set_attn_implementation("varlen")
    actual = flat_gradients()

    assert calls[5:] == [(1, 14, 32)] * 2 + [(1, 12, 32)] * 3
    # Both round to eight bits, in other places.
    assert nn.functional.cosine_similarity(actual, expected, dim=0) > 0.99
