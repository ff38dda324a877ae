"""Muon for the matrices of the layers and Adam for the rest, in one optimizer."""

import copy
import re

import pytest
import torch
from torch import nn
from transformers import Trainer, get_linear_schedule_with_warmup

from vanilla_transformer.layers_vanilla_transformer import split_heads
from vanilla_transformer_tools.training.optimizer import (
    MuonAndAdam,
    cut_up,
    matrices_of_layers,
    muon_and_adam,
    orthogonalized,
)
from vanilla_transformer_tools.training.rules import check_settings

from ..models import build_variant
from ..support.training_runs import build_arguments, build_settings

MUON = {"optimizer": "muon"}
UNTIED = {
    "share_encoder_decoder_embeddings": False,
    "tie_word_embeddings": False,
    "position_embedding_type": "learned",
    "talking_heads": "both",
}
LINEAR = r"model\.\w+\.layers\.\d+\..*(qkv_proj|q_proj|kv_proj|out_proj|fc1|fc2)\.weight"


def build_optimizer(model, folder="unused", **changes):
    """The optimizer of a run on a model."""
    settings = build_settings(folder, validated=False)
    arguments = build_arguments(settings, folder, **changes)
    return muon_and_adam(Trainer(model, arguments))


@pytest.mark.parametrize("changes", [{}, UNTIED], ids=["tied", "untied"])
def test_matrices_are_those_of_the_layers_and_no_tables(changes):
    model = build_variant(**changes)

    found = matrices_of_layers(model)

    names = {name for name, parameter in model.named_parameters() if parameter in found}
    assert names == {name for name in dict(model.named_parameters()) if re.fullmatch(LINEAR, name)}


def test_each_head_has_matrices_of_its_own():
    model = build_variant(d_k=5, d_v=3, attention_bias=False)
    cuts, layer = matrices_of_layers(model), model.model.decoder.layers[0]
    x = torch.randn(1, 3, model.config.d_model)

    for attention, names in (
        (layer.self_attn, ["qkv_proj"]),
        (layer.encoder_attn, ["q_proj", "kv_proj"]),
    ):
        projections = [getattr(attention, name) for name in names]
        inputs = [cut_up(each.weight, *cuts[each.weight]) for each in projections]
        output = attention.out_proj.weight
        outputs = cut_up(output, *cuts[output])

        projected = torch.cat([each(x) for each in projections], dim=-1)
        parts = projected.split(attention.widths, dim=-1)
        heads = [
            head
            for part, shape in zip(parts, attention.head_shapes, strict=True)
            for head in split_heads(part, shape)[0]
        ]
        matrices = [matrix for part in inputs for matrix in part]
        torch.testing.assert_close([x[0] @ matrix.T for matrix in matrices], heads)
        values = heads[-len(outputs) :]
        joined = sum(head @ part.T for head, part in zip(values, outputs, strict=True))
        torch.testing.assert_close(joined, attention.out_proj(torch.cat(values, dim=-1)))


@pytest.mark.parametrize("changes", [{}, UNTIED], ids=["tied", "untied"])
def test_each_parameter_has_one_rule(tmp_path, changes):
    model = build_variant(**changes)

    optimizer = build_optimizer(model, tmp_path, weight_decay=0.5, learning_rate=0.01)

    _, tables, matrices = optimizer.param_groups
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {*grouped} == {*model.parameters()}
    assert len(grouped) == len({*grouped})
    embeddings = [each.weight for each in model.modules() if isinstance(each, nn.Embedding)]
    assert {*tables["params"]} == {*embeddings, model.lm_head.weight}
    assert {*matrices["params"]} == {*matrices_of_layers(model)}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0, 0.5]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02, 0.01]
    assert (tables["betas"], tables["eps"]) == ((0.9, 0.98), 1e-9)


@pytest.mark.parametrize(
    ("settings", "decay"),
    [(MUON, 0.5), ({}, 0.0), ({**MUON, "init_from": "runs/saved"}, 0.0)],
    ids=["new", "Adam", "saved"],
)
def test_matrices_of_a_new_model_decay(tmp_path, settings, decay):
    arguments = build_arguments(build_settings(tmp_path, **settings), tmp_path)

    assert arguments.weight_decay == decay


class Stacked(nn.Module):
    """A table, and two matrices of 3 and 5 rows in one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.stacked = nn.Linear(4, 8)

    def forward(self, ids):
        return self.stacked(self.table(ids)).square().sum()


@pytest.fixture
def stacked():
    torch.manual_seed(0)
    return Stacked()


RULE = {"lr": 0.1, "weight_decay": 0.3}


def build_adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, betas=(0.9, 0.98), weight_decay=0.0)


def both_rules(model, columns=(4,)):
    adam = build_adam([model.table.weight, model.stacked.bias])
    return MuonAndAdam(adam, {model.stacked.weight: ((3, 5), columns)}, **RULE)


def take_steps(model, optimizers, steps=3):
    for ids in torch.arange(6).split(6 // steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(ids).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("columns", [(4,), (2, 2)])
def test_updates_are_those_of_muon_on_each_matrix_and_of_adam(stacked, columns):
    matrix, others = stacked.stacked.weight, [stacked.table.weight, stacked.stacked.bias]
    parts = [nn.Parameter(part.clone()) for part in cut_up(matrix.detach(), (3, 5), columns)]
    copies = [nn.Parameter(other.detach().clone()) for other in others]
    start, optimizer = matrix.detach().clone(), both_rules(stacked, columns)
    muon = torch.optim.Muon(parts, **RULE, adjust_lr_fn="match_rms_adamw")
    adam = build_adam(copies)

    for _ in range(3):
        for parameter in (matrix, *others):
            parameter.grad = torch.randn_like(parameter)
        gradients = [*cut_up(matrix.grad, (3, 5), columns), *(other.grad for other in others)]
        for parameter, gradient in zip([*parts, *copies], gradients, strict=True):
            parameter.grad = gradient
        for each in (optimizer, muon, adam):
            each.step()

    torch.testing.assert_close(others, copies, rtol=0, atol=0)
    # Torch's rounds to bfloat16.
    way = (matrix - start).abs().mean().item()
    now = cut_up(matrix.detach(), (3, 5), columns)
    torch.testing.assert_close(now, [*parts], rtol=0, atol=0.05 * way)


def test_zero_gradients_move_nothing():
    assert not orthogonalized([torch.zeros(2, 3)], torch.bfloat16).any()


def test_all_rates_follow_the_schedule(stacked):
    optimizer = both_rules(stacked)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, 4)

    take_steps(stacked, [optimizer])
    schedule.step()
    before = stacked.stacked.weight.clone()
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(0.075)
    for _ in range(3):
        schedule.step()
    take_steps(stacked, [optimizer], steps=1)

    assert schedule.get_last_lr() == [0, 0]
    torch.testing.assert_close(stacked.stacked.weight, before, rtol=0, atol=0)


def test_scaled_gradients_are_divided_and_infinite_ones_skip_an_update(stacked):
    exact = copy.deepcopy(stacked)
    take_steps(exact, [both_rules(exact)], steps=1)
    optimizer = both_rules(stacked)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    for loss in (stacked(torch.arange(6)) * float("inf"), stacked(torch.arange(6))):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for name, weight in exact.named_parameters():
        torch.testing.assert_close(stacked.get_parameter(name), weight)


# Refused


def test_runs_that_it_does_not_fit_are_refused(tmp_path):
    model = build_variant()
    for matrix in matrices_of_layers(model):
        matrix.requires_grad = False
    settings = build_settings(tmp_path, **MUON)
    arguments = build_arguments(settings, tmp_path, optim="adafactor")

    with pytest.raises(ValueError, match="--freeze leaves none of them"):
        build_optimizer(model, tmp_path)
    with pytest.raises(ValueError, match=r"goes with Adam, .*got adafactor"):
        check_settings(settings, arguments)
