"""Several processes: how long they wait, what a loss does, and that none has a part of a model."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import distributed

from vanilla_transformer_tools.training.trainer import limit_waiting

from ..support import lose_a_process
from ..support.gradients_of_one_update import build_arguments
from ..support.launching import run_processes
from ..support.training_runs import run_training, training_options


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


def test_divided_model_is_refused(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")

    with pytest.raises(
        ValueError,
        match=r"whole model in each process, got FSDP or DeepSpeed\. Launch .*ddp\.yaml, or",
    ):
        run_training(corpus, tmp_path, max_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [("killed", r"(closed|reset) by peer|Broken pipe"), ("silent", "Timed out waiting 5000ms")],
)
def test_run_ends_with_a_message_when_a_process_is_lost(corpus, tmp_path, how, reason):
    options = [*map(str, training_options(corpus)), "--max_steps", "1000", "--save_strategy", "no"]

    done = run_processes(lose_a_process.__file__, tmp_path, how, *options)

    assert (tmp_path / "status-0").read_text() == "2"
    assert re.search(f"vanilla-transformer: lost another process: .*({reason})", done.stderr)
    assert "Traceback" not in done.stderr
