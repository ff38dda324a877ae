"""Rules that say which tensors make up which: joins, blocks, transposes, and everything wrong."""

import re

import pytest
import torch

from vanilla_transformer_tools.interop.weight_maps import WeightMap, shapes_of


def carry_out(rules, targets, **tensors):
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    plan = WeightMap(rules).plan(targets, shapes_of(named))
    assert plan.faults == []
    return plan.carry_out(named)


def faults(rules, targets, sources, ignored=()):
    return WeightMap(rules, ignored).plan(targets, sources).faults


def test_tensors_are_joined_in_the_order_of_the_rule():
    q, k, v = (torch.full((2, 3), float(value)) for value in range(3))

    made = carry_out(
        {"a.{i}.qkv": "b.{i}.{q,k,v}"}, {"a.1.qkv": (6, 3)}, b__1__v=v, b__1__q=q, b__1__k=k
    )

    assert torch.equal(made["a.1.qkv"], torch.cat([q, k, v]))


def test_alternatives_of_the_target_are_those_of_the_source():
    rules = {"x.{weight,bias}": "y.{weight,bias}"}

    made = carry_out(
        rules,
        {"x.weight": (2, 2), "x.bias": (2,)},
        y__weight=torch.ones(2, 2),
        y__bias=torch.zeros(2),
    )

    assert made["x.weight"].sum() == 4
    assert made["x.bias"].sum() == 0


def test_blocks_of_a_fused_tensor_are_taken_apart():
    fused = torch.arange(12.0).view(6, 2)
    rules = {"q": "in[0/3]", "kv": ["in[1/3]", "in[2/3]"]}

    made = carry_out(rules, {"q": (2, 2), "kv": (4, 2)}, **{"in": fused})

    assert torch.equal(made["q"], fused[:2])
    assert torch.equal(made["kv"], fused[2:])


def test_tensor_is_transposed_before_it_is_cut():
    tensor = torch.arange(6.0).view(3, 2)

    made = carry_out({"a": "t[1/2]^T", "b": "t[0/2]^T"}, {"a": (1, 3), "b": (1, 3)}, t=tensor)

    assert made["a"].tolist() == [[1, 3, 5]]


@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_tensor_of_one_row_becomes_what_is_needed(shape):
    made = carry_out({"bias": "final"}, {"bias": shape}, final=torch.arange(4.0)[None])

    assert made["bias"].shape == shape
    assert made["bias"].flatten().tolist() == [0, 1, 2, 3]


def test_results_share_no_memory_with_the_source():
    tensor = torch.ones(2, 2)

    carry_out({"a": "b"}, {"a": (2, 2)}, b=tensor)["a"].zero_()

    assert tensor.sum() == 4


@pytest.mark.parametrize(
    ("rules", "targets", "sources", "fault"),
    [
        ({"a": "b"}, {"a": (2,), "c": (2,)}, {"b": (2,)}, "c [2]: 0 rules match, 1 is needed"),
        ({"a": "b", "{a,c}": "b"}, {"a": (2,)}, {"b": (2,)}, "a [2]: 2 rules match, 1 is needed"),
        ({"a": "b"}, {"a": (2,)}, {}, "a [2]: the source has no b"),
        ({"a": "b"}, {"a": (2,)}, {"b": (3,)}, "a must be [2], got b [3]"),
        (
            {"a": "{b,c}"},
            {"a": (4, 2)},
            {"b": (2, 2), "c": (2, 3)},
            "a must be [4, 2], got b [2, 2], c",
        ),
        ({"a": "b"}, {"a": (2,)}, {"b": (2,), "x": (5,)}, "x [5] is used by no rule"),
        ({"a": "b[0/2]"}, {"a": (1,)}, {"b": (2,)}, "b [2] is used in part"),
        ({"a": "b^T"}, {"a": (2,)}, {"b": (2,)}, "a must be [2], got b [2]"),
        ({"{a,c}": "b"}, {"a": (2,), "c": (2,)}, {"b": (2,)}, "b is used more than once"),
        (
            {"a": "b[0/2]", "c": ["b[0/4]", "b[3/4]"]},
            {"a": (2,), "c": (2,)},
            {"b": (4,)},
            "b is used more than once",
        ),
        (
            {"a": "b[0/2]", "c": "b[1/2]^T"},
            {"a": (1, 2), "c": (1, 2)},
            {"b": (2, 2)},
            "b is used more than once",
        ),
        (
            {"a": "b[0/2]", "c": "b[0/2]"},
            {"a": (1,), "c": (1,)},
            {"b": (2,)},
            "b is used more than once",
        ),
    ],
)
def test_fault_is_named(rules, targets, sources, fault):
    found = faults(rules, targets, sources)

    assert fault in found[0]


def test_all_faults_are_named_at_once():
    assert len(faults({"a": "b"}, {"a": (2,), "c": (1,)}, {"b": (3,), "x": (1,)})) == 3


def test_ignored_tensors_need_no_rule():
    assert faults({"a": "b"}, {"a": (2,)}, {"b": (2,), "e.0.table": (9,)}, ["e.*.table"]) == []


TIED = {"head": "table"}
RULES_OF_TIED = {"table": "embed", "head": "project"}


def test_copy_of_a_tied_tensor_is_used_and_may_be_missing():
    weights, targets, table = WeightMap(RULES_OF_TIED), {"table": (2,)}, torch.ones(2)

    alone = weights.plan(targets, {"embed": (2,)}, TIED)
    both = weights.plan(targets, {"embed": (2,), "project": (2,)}, TIED)

    assert alone.faults == both.faults == []
    assert list(both.lines()) == ["table <- embed", "head = table <- project"]
    assert both.carry_out({"embed": table, "project": table.clone()}).keys() == {"table"}


def test_copy_that_differs_is_refused():
    plan = WeightMap(RULES_OF_TIED).plan({"table": (2,)}, {"embed": (2,), "project": (2,)}, TIED)

    with pytest.raises(ValueError, match="project must equal embed, because head and table are"):
        plan.carry_out({"embed": torch.ones(2), "project": torch.zeros(2)})


def test_copy_of_another_shape_is_a_fault():
    plan = WeightMap(RULES_OF_TIED).plan({"table": (2,)}, {"embed": (2,), "project": (3,)}, TIED)

    assert plan.faults == ["head must be [2], got project [3]"]


def test_rule_may_name_a_tied_tensor_as_its_original():
    plan = WeightMap({"table": "embed", "head": "embed"}).plan(
        {"table": (2,)}, {"embed": (2,)}, TIED
    )

    assert plan.faults == []
    assert plan.copies == {}


OLDER = {"{q,k}.{i}": "{q,k}_of.{i}", "norm": "fused[1/2]", "bias": "fused[0/2]"}


def test_source_may_have_the_tensors_of_an_older_release():
    weights = WeightMap({"both.{i}": "{q,k}.{i}", "{norm,bias}": "{norm,bias}"}, (), OLDER)
    targets = {"both.3": (4,), "norm": (1,), "bias": (1,)}

    plan = weights.plan(targets, {"q.3": (2,), "k_of.3": (2,), "fused": (2,)})

    assert plan.faults == []
    assert list(plan.lines()) == [
        "both.3 <- q.3 + k_of.3",
        "norm <- fused[1/2]",
        "bias <- fused[0/2]",
    ]


def test_fault_names_the_tensor_of_the_newest_release():
    plan = WeightMap({"a": "norm"}, (), OLDER).plan({"a": (1,)}, {})

    assert plan.faults == ["a [1]: the source has no norm"]


@pytest.mark.parametrize(
    ("target", "source", "fault"),
    [
        ("a.{i", "b", "'a.{i' must be the name of a tensor, with pairs of braces"),
        ("a", "b.{x,y", "'b.{x,y' must be the name of a tensor"),
        ("a.{i}.{i}", "b.{i}", "'a.{i}.{i}' must have each number in braces once"),
        ("a.{i}", "b.{j}", "'b.{j}' must have numbers of its target 'a.{i}' only, got {j}"),
        ("a", "b[3/3]", "'b[3/3]' must name a tensor or a block of it"),
    ],
)
def test_rule_that_cannot_be_read_is_refused(target, source, fault):
    with pytest.raises(ValueError, match=re.escape(fault)):
        WeightMap({target: source})


def test_rules_that_cannot_be_read_are_named_at_once():
    with pytest.raises(ValueError, match=r"(?s)'a\{' must .*'c\{' must "):
        WeightMap({"a{": "b", "c{": "d"})
