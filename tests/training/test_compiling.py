"""Layers compiled one by one: the same training, in two graphs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from vanilla_transformer import fast_vanilla_transformer
from vanilla_transformer_tools.training.start import compile_layers

from ..models import Batch, Model, build_variant, gradients

# Torch's compiler imports torch's own deprecated modules.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture
def graphs() -> Iterator[list[fx.GraphModule]]:
    """Graphs that `count` has been given."""
    torch.compiler.reset()
    yield []
    torch.compiler.reset()


def counting(graphs: list[fx.GraphModule]) -> Any:
    """A backend of `torch.compile` that runs graphs as they are and counts."""

    def count(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return count


def ragged(number: int) -> Batch:
    """A batch with padding on both sides, whose sizes depend on the number."""
    generator = torch.Generator().manual_seed(number)
    rows, source, target = 3 + number % 4, 5 + 2 * number, 4 + number
    input_ids = torch.randint(3, 37, (rows, source), generator=generator)
    labels = torch.randint(3, 37, (rows, target), generator=generator)
    input_ids[1, -2:], labels[1, -1:] = 0, -100
    return {"input_ids": input_ids, "attention_mask": (input_ids != 0).long(), "labels": labels}


@pytest.mark.slow
def test_all_shapes_share_graphs_and_give_the_same_gradients(graphs):
    plain, compiled = build_variant(), build_variant()
    compile_layers(compiled, counting(graphs))
    batches = [ragged(number) for number in range(6)]
    for batch in batches[3:]:
        batch["input_ids"] = batch["input_ids"].clamp(min=3)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])

    for batch, count in zip(batches, (2, 2, 2, 4, 4, 4), strict=True):
        torch.testing.assert_close(gradients(compiled, batch), gradients(plain, batch))
        # Batches without padding have graphs of their own.
        assert len(graphs) == count

    with torch.compiler.set_stance("fail_on_recompile"):
        compiled.train()(**ragged(11)).loss.backward()


def test_compiled_layers_leave_no_trace_in_a_saved_folder(tmp_path, graphs, tiny_model):
    names = list(tiny_model.state_dict())

    compile_layers(tiny_model, counting(graphs))

    tiny_model.save_pretrained(tmp_path)
    assert list(tiny_model.state_dict()) == names
    loaded = Model.from_pretrained(tmp_path)
    assert all(layer._compiled_call_impl is None for layer in loaded.model.encoder.layers)


@pytest.mark.parametrize(("device", "compiler"), [("cuda", "inductor"), ("cpu", None)])
def test_loss_is_compiled_on_a_gpu(tiny_model, monkeypatch, device, compiler):
    given = []

    def compute(lm_head, hidden_states, labels, terms, compiler):
        given.append(compiler)
        return hidden_states.sum()

    monkeypatch.setattr(fast_vanilla_transformer, "projected_loss_sum", compute)
    compile_layers(tiny_model)

    with FakeTensorMode():
        hidden_states = torch.ones(2, 3, 24, device=device)
        labels = torch.ones(2, 3, dtype=torch.long, device=device)
        tiny_model._loss(hidden_states, None, labels, 6, r_drop_alpha=0.0)

    assert given == [compiler]
