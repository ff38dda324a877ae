"""Which divided models are trained, and their tensors beside whole ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vanilla_transformer_tools.training.processes import (
    divided_like,
    gathered,
    is_sharded,
    put_weights,
)

PLUGIN = {"fsdp_version": 2, "activation_checkpointing": False, "cpu_ram_efficient_loading": False}


def trainer_of(*, model=None, deepspeed=False, fsdp=True, **plugin):
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(**PLUGIN | plugin) if fsdp else None)
    return SimpleNamespace(
        is_deepspeed_enabled=deepspeed,
        is_fsdp_enabled=fsdp,
        accelerator=SimpleNamespace(state=state),
        model=model or nn.Linear(1, 1),
    )


@pytest.mark.parametrize("fsdp", [False, True])
def test_model_is_sharded_by_the_second_version_of_fsdp(fsdp):
    assert is_sharded(trainer_of(fsdp=fsdp)) == fsdp


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deepspeed": True, "fsdp": False}, "by FSDP2, got DeepSpeed. Launch"),
        ({"fsdp_version": 1}, "FSDP must have version 2, got 1. Set `fsdp_version: 2`"),
        ({"activation_checkpointing": True}, "Weights must keep their names"),
        ({"cpu_ram_efficient_loading": True}, "must begin with all weights"),
        ({"model": SimpleNamespace(peft_config={})}, "--peft needs whole weights in each process"),
    ],
)
def test_what_training_cannot_follow_is_refused(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        is_sharded(trainer_of(**changes))

    assert len(str(caught.value).splitlines()) == 1


def test_part_is_gathered_and_a_whole_tensor_is_itself():
    whole = torch.ones(2)

    assert gathered(SimpleNamespace(full_tensor=lambda: whole)) is whole
    assert gathered(whole) is whole


def test_tensor_for_a_whole_one_stays_whole():
    weight = torch.ones(2)

    assert divided_like(weight, torch.zeros(2)) is weight


@pytest.mark.parametrize("given", ["a.weight", "b.weight"])
def test_weights_of_tied_layers_are_put_under_any_name_and_others_stay(given):
    model = nn.ModuleDict({name: nn.Linear(1, 1) for name in "abc"})
    model["b"].weight = model["a"].weight
    before = model["c"].weight.item()

    put_weights(model, {given: torch.full((1, 1), 7.0)})

    assert model["a"].weight is model["b"].weight
    assert (model["a"].weight.item(), model["c"].weight.item()) == (7, before)
    assert model["a"].weight.requires_grad
