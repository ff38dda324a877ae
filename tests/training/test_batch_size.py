"""Tokens of a batch that the user did not choose: on a GPU by its memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer_tools.settings import PRESETS, TrainSettings
from vanilla_transformer_tools.training import plan as module
from vanilla_transformer_tools.training.auto_settings import Decision
from vanilla_transformer_tools.training.plan import (
    PLANNED_SHARE,
    choose_batch_size,
    estimated_memory,
)

from ..conftest import build_variant
from ..support.pretended_device import OnDevice, move, pretended_device, put

GIGABYTE = 10**9
CUDA = torch.device("cuda")


def model_of(preset):
    """A model without values."""
    with torch.device("meta"):
        config = VanillaTransformerConfig(**PRESETS[preset].config(), vocab_size=10_000)
        return VanillaTransformerForConditionalGeneration(config)


def choose(
    monkeypatch,
    gigabytes,
    *,
    accumulated=1,
    processes=1,
    pairs=1_000_000,
    planned=None,
    device=CUDA,
    **settings: Any,
):
    """The choice for a GPU with so much free memory."""
    free = round(gigabytes * GIGABYTE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    arguments = SimpleNamespace(
        device=torch.device(device),
        gradient_accumulation_steps=accumulated,
        world_size=processes,
        bf16=True,
        fp16=False,
    )
    settings = TrainSettings(**settings)
    config = model_of(settings.preset).config
    decisions = [Decision("max_tokens_per_batch", planned, "")] if planned else []
    return choose_batch_size(settings, arguments, config, pairs, decisions)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        # Section 5.1 of the paper, whose rates these presets have.
        ({"preset": "base"}, 50_000),
        ({"preset": "big"}, 50_000),
        ({"preset": "base", "pairs": None}, 50_000),
        ({"preset": "base", "accumulated": 2}, 25_000),
        ({"preset": "base", "accumulated": 16}, 8192),
        ({"preset": "base", "pairs": 999_999}, 8192),
        ({"preset": "small"}, 8192),
        # Its rate was not found with the paper's batch.
        ({"preset": "base", "init_from": "a"}, 8192),
    ],
)
def test_large_gpu_gets_the_batch_that_the_rate_belongs_to(monkeypatch, settings, tokens):
    chosen, reason = choose(monkeypatch, 80, **settings)

    assert chosen == tokens
    assert ("50,000 an update as in the paper" in reason) == (tokens > 8192)
    assert reason.endswith(" fit the GPU's memory")


@pytest.mark.parametrize(
    ("settings", "passes", "copies"),
    [
        ({"preset": "base"}, 1, 0),
        ({"preset": "big"}, 1, 0),
        ({"preset": "base", "r_drop": 5.0}, 2, 0),
        ({"preset": "base", "moving_average": 0.9}, 1, 1),
    ],
)
def test_small_gpu_gets_what_fits(monkeypatch, settings, passes, copies):
    tokens, reason = choose(monkeypatch, 9, **settings)

    model = model_of(settings["preset"])
    memory = estimated_memory(model, CUDA, is_half=True, passes=passes, copies=copies)
    planned = PLANNED_SHARE * 9 * GIGABYTE - memory.fixed
    assert tokens % 1000 == 0
    assert 0 < tokens * memory.per_token <= planned
    assert (tokens + 1000) * memory.per_token > planned
    assert reason == "because 50,000 do not fit 9.0 GB of free memory, by estimate"


@pytest.mark.parametrize(
    ("settings", "tokens"), [({}, 1024), ({"max_length": 640}, 2560), ({"processes": 4}, 4096)]
)
def test_gpu_without_room_gets_the_fewest_tokens_that_hold_all_pairs(monkeypatch, settings, tokens):
    assert choose(monkeypatch, 0.5, preset="big", **settings)[0] == tokens


def test_processes_share_what_fits_the_fullest_gpu(monkeypatch):
    monkeypatch.setattr(module, "gather_object", lambda free: [*free, 4 * GIGABYTE, free[0] + 1])
    tokens, reason = choose(monkeypatch, 6, preset="base", processes=3)

    # Each has a copy of the gradients.
    memory = estimated_memory(model_of("base"), CUDA, is_half=True, copies=1)
    room = 3 * ((PLANNED_SHARE * 4 * GIGABYTE - memory.fixed) / memory.per_token)
    assert tokens == room // 1000 * 1000
    assert "4.0 GB" in reason


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"device": "cpu"}, 8192),
        ({"device": "cpu", "planned": 2048}, 2048),
        ({"planned": 2048}, 2048),
    ],
)
def test_plan_explains_no_choice_where_there_was_none(monkeypatch, given, tokens):
    assert choose(monkeypatch, 80, **given) == (tokens, "")


@pytest.mark.parametrize("sizes", [{}, {"encoder_layers": 1, "decoder_layers": 4}])
def test_estimate_is_near_what_a_step_keeps_for_its_backward_pass(sizes):
    widths = {"d_model": 64, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
    model = build_variant(**widths, dropout=0.1, **sizes).train()
    ids = torch.randint(3, 37, (8, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if isinstance(tensor, OnDevice):
            kept[tensor.on_cpu.untyped_storage().data_ptr()] = tensor.on_cpu
        return tensor

    with pretended_device():
        move(model)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(**put(batch))
        weights = {one.on_cpu.untyped_storage().data_ptr() for one in model.parameters()}
    bytes_kept = sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in kept.items()
        if address not in weights
    )

    estimate = estimated_memory(model, torch.device("cpu"), is_half=False).per_token
    assert 0.6 * estimate < bytes_kept / (2 * ids.numel()) < 1.1 * estimate
