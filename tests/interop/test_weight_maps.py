"""Rules that say which tensors make up which: joins, blocks, transposes, and everything wrong."""

import re

import pytest
import torch

from vanilla_transformer_tools.interop.weight_maps import WeightMap, shapes_of

Q, K, V = (torch.full((2, 3), float(value)) for value in range(3))
ROWS = torch.arange(12.0).view(6, 2)


@pytest.mark.parametrize(
    ("rules", "sources", "expected"),
    [
        (
            {"a.{i}.qkv": "b.{i}.{q,k,v}"},
            {"b.1.v": V, "b.1.q": Q, "b.1.k": K},
            {"a.1.qkv": torch.cat([Q, K, V])},
        ),
        ({"x.{n,m}": "y.{n,m}"}, {"y.n": Q, "y.m": V[0]}, {"x.n": Q, "x.m": V[0]}),
        (
            {"q": "in[0/3]", "kv": ["in[1/3]", "in[2/3]"]},
            {"in": ROWS},
            {"q": ROWS[:2], "kv": ROWS[2:]},
        ),
        # Transposed before it is cut.
        ({"a": "t[1/2]^T", "b": "t[0/2]^T"}, {"t": ROWS}, {"a": ROWS.T[1:], "b": ROWS.T[:1]}),
        # One row is a vector.
        ({"a": "row"}, {"row": ROWS[1:2]}, {"a": ROWS[1]}),
        ({"a": "row"}, {"row": ROWS[1:2]}, {"a": ROWS[1:2]}),
    ],
)
def test_tensors_are_made_of_parts_in_memory_of_their_own(rules, sources, expected):
    plan = WeightMap(rules).plan(shapes_of(expected), shapes_of(sources))

    made = plan.carry_out(sources)

    assert plan.faults == []
    assert made.keys() == expected.keys()
    for name, tensor in made.items():
        assert torch.equal(tensor, expected[name])
        assert all(tensor.data_ptr() != one.data_ptr() for one in sources.values())


@pytest.mark.parametrize(
    ("rules", "targets", "sources", "fault"),
    [
        ({"a": "b"}, {"a": (2,), "c": (2,)}, {"b": (2,)}, "c [2]: 0 rules match, 1 is needed"),
        ({"a": "b", "{a,c}": "b"}, {"a": (2,)}, {"b": (2,)}, "a [2]: 2 rules match, 1 is needed"),
        ({"a": "b"}, {"a": (2,)}, {}, "a [2]: the source has no b"),
        ({"a": "b"}, {"a": (2,)}, {"b": (3,)}, "a must be [2], got b [3]"),
        ({"a": "{b,c}"}, {"a": (4, 2)}, {"b": (2, 2), "c": (2, 3)}, "a must be [4, 2], got b [2, "),
        ({"a": "b"}, {"a": (2,)}, {"b": (2,), "x": (5,)}, "x [5] is used by no rule"),
        ({"a": "b[0/2]"}, {"a": (1,)}, {"b": (2,)}, "b [2] is used in part"),
        ({"a": "b^T"}, {"a": (2,)}, {"b": (2,)}, "a must be [2], got b [2]"),
        ({"{a,c}": "b"}, {"a": (2,), "c": (2,)}, {"b": (2,)}, "b is used more than once"),
        ({"a": ["b[0/2]", "b[0/4]"]}, {"a": (3,)}, {"b": (4,)}, "b is used more than once"),
        ({"a": ["b[0/2]", "b[1/2]^T"]}, {"a": (2, 2)}, {"b": (2, 2)}, "b is used more than once"),
    ],
)
def test_fault_is_named(rules, targets, sources, fault):
    found = WeightMap(rules).plan(targets, sources).faults

    assert fault in found[0]


def test_all_faults_are_named_at_once_and_ignored_tensors_are_none():
    targets, sources = {"a": (2,), "c": (1,)}, {"b": (3,), "x": (1,), "e.0.table": (9,)}

    assert len(WeightMap({"a": "b"}, ["e.*.table"]).plan(targets, sources).faults) == 3


TIED = {"head": "table"}
RULES_OF_TIED = {"table": "embed", "head": "project"}


def test_copy_of_a_tied_tensor_must_be_equal_and_may_be_missing():
    weights, targets, table = WeightMap(RULES_OF_TIED), {"table": (2,)}, torch.ones(2)

    alone = weights.plan(targets, {"embed": (2,)}, TIED)
    both = weights.plan(targets, {"embed": (2,), "project": (2,)}, TIED)
    longer = weights.plan(targets, {"embed": (2,), "project": (3,)}, TIED)

    assert alone.faults == both.faults == []
    assert list(both.lines()) == ["table <- embed", "head = table <- project"]
    assert both.carry_out({"embed": table, "project": table.clone()}).keys() == {"table"}
    with pytest.raises(ValueError, match="project must equal embed, because head and table are"):
        both.carry_out({"embed": table, "project": torch.zeros(2)})
    assert longer.faults == ["head must be [2], got project [3]"]


def test_rule_may_name_a_tied_tensor_as_its_original():
    plan = WeightMap({"{table,head}": "embed"}).plan({"table": (2,)}, {"embed": (2,)}, TIED)

    assert plan.faults == []
    assert plan.copies == {}


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
def test_rules_that_cannot_be_read_are_named_at_once(target, source, fault):
    with pytest.raises(ValueError, match=rf"(?s){re.escape(fault)}.*\n.*'d\{{'"):
        WeightMap({target: source, "c": "d{"})
