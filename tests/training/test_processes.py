"""Several processes: how long they wait, what a loss does, and which divided models are trained."""

import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn

from vanilla_transformer_tools.training.processes import is_sharded, limit_waiting, put_weights

from ..support import lose_a_process
from ..support.gradients_of_one_update import build_arguments, write_corpus
from ..support.launching import run_processes

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


@pytest.mark.parametrize("given", ["a.weight", "b.weight"])
def test_weights_of_tied_layers_are_put_under_any_name_and_others_stay(given):
    model = nn.ModuleDict({name: nn.Linear(1, 1) for name in "abc"})
    model["b"].weight = model["a"].weight
    before = model["c"].weight.item()

    put_weights(model, {given: torch.full((1, 1), 7.0)})

    assert model["a"].weight is model["b"].weight
    assert (model["a"].weight.item(), model["c"].weight.item()) == (7, before)
    assert model["a"].weight.requires_grad


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def seconds_to_wait() -> float:
    backend = distributed.group.WORLD._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()


def test_processes_wait_as_long_as_asked_for(group, tmp_path):
    assert seconds_to_wait() == 30 * 60

    limit_waiting(build_arguments(tmp_path, ddp_timeout=7))

    assert seconds_to_wait() == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [("killed", r"(closed|reset) by peer|Broken pipe"), ("silent", "Timed out waiting 5000ms")],
)
def test_run_ends_with_a_message_when_a_process_is_lost(tmp_path, how, reason):
    write_corpus(tmp_path)

    done = run_processes(lose_a_process.__file__, tmp_path, how)

    assert (tmp_path / "status-0").read_text() == "2"
    assert re.search(f"vanilla-transformer: lost another process: .*({reason})", done.stderr)
    assert "Traceback" not in done.stderr
