"""On a GPU no operation mixes devices, and the host waits seldom: the GPU is idle after a wait."""

from typing import Any

import pytest
import torch

from vanilla_transformer_tools.search import Search
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

from ..models import LEARNED, RECTANGULAR, UNTIED, Batch, Model, build_variant, gradients
from ..support.observed import observe
from ..support.pretended_device import DEVICE, move, pretended_device, put

CHANGES: dict[str, dict[str, Any]] = {
    "default": {"label_smoothing": 0.1},
    "learned_untied_bias": {**LEARNED, **UNTIED, "position_offset": 2, "lm_head_bias": True},
    # Under eager attention.
    "talking": RECTANGULAR,
}


@pytest.fixture
def pairs(batch: Batch) -> Batch:
    """What the collator makes of sentence pairs."""
    return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_gradients_of_a_gpu_are_those_of_a_cpu(pairs, changes):
    model = build_variant(**changes)
    expected = gradients(model, pairs)

    with pretended_device():
        found = gradients(move(model), put(pairs))

        torch.testing.assert_close({name: x.cpu() for name, x in found.items()}, expected)


def test_mixed_devices_raise(tiny_model, pairs):
    with pretended_device(), pytest.raises(RuntimeError, match="tensors of lazy:0 and of the CPU"):
        move(tiny_model)(**pairs)


def waits_of_a_step(model: Model, pairs: Batch, **arguments: Any) -> list[str]:
    with pretended_device() as device:
        model, inputs = move(model).train(), put(pairs)
        device.waits.clear()
        model(**inputs, num_items_in_batch=9, **arguments).loss.backward()
        return device.waits


def without_padding(pairs: Batch) -> Batch:
    """The second pair, which has the longest source, up to its last label."""
    return {name: rows[1:2, : 3 if name == "labels" else None] for name, rows in pairs.items()}


@pytest.mark.parametrize(("changes", "is_padded"), [({}, True), ({}, False), (LEARNED, True)])
def test_training_step_waits_for_the_device_three_times(pairs, changes, is_padded):
    waits = waits_of_a_step(
        build_variant(**changes), pairs if is_padded else without_padding(pairs)
    )

    # Whether the sources have padding, asked by Transformers in each stack; where the targets are.
    assert waits == ["_local_scalar_dense"] * 2 + ["nonzero"]


LEARNED_13 = LEARNED | {"max_position_embeddings": 13}
# Changes of the model, then settings of the search.
SEARCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy_with_constraints": ({}, {"num_beams": 1, "min_length": 6, "suppress_tokens": [7, 9]}),
    "beam_with_constraints": ({}, {"num_beams": 3, "repetition_penalty": 1.5, "min_length": 6}),
    "several": ({}, {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True}),
    "two_ends": ({}, {"num_beams": 3, "eos_token_id": [2, 17]}),
    "of_transformers": ({}, {"num_beams": 3, "use_transformers_search": True}),
    # They end where the positions do.
    "greedy_learned": (LEARNED_13, {"num_beams": 1, "max_length": 13, "suppress_tokens": [2]}),
    "beam_learned": (LEARNED_13, {"num_beams": 3, "max_length": 13, "suppress_tokens": [2]}),
}
QUICK_SEARCHES = ("greedy_with_constraints", "beam_learned")


@pytest.fixture
def sources(batch: Batch) -> Batch:
    """Eight sources, so that some leave the batch."""
    more = torch.randint(3, 37, (5, 7), generator=torch.Generator().manual_seed(5))
    ids = torch.cat((batch["input_ids"], more))
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.parametrize(
    ("changes", "search"),
    [
        pytest.param(*case, marks=() if name in QUICK_SEARCHES else pytest.mark.slow, id=name)
        for name, case in SEARCHES.items()
    ],
)
def test_searches_of_a_gpu_find_what_those_of_a_cpu_find(sources, changes, search):
    model = build_variant(**changes)
    search = {"max_length": 11, **search}
    expected = model.generate(**sources, **search)

    with pretended_device():
        found = move(model).generate(**put(sources), **search)

        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(("num_beams", "reads"), [(1, 1), (3, 3)])
def test_search_waits_for_the_device_in_every_eighth_step(tiny_model, sources, num_beams, reads):
    steps: list[str] = []
    with pretended_device() as device:
        model, inputs = move(tiny_model), put(sources)
        device.waits = steps
        observe(model.lm_head, lambda *_: steps.append("step"))
        model.generate(**inputs, num_beams=num_beams, max_length=17, suppress_tokens=[2])

    first, last = steps.index("step"), len(steps) - steps[::-1].index("step")
    look = ["_to_copy from the device"] * reads
    assert steps[first:last] == ["step"] * 8 + look + ["step"] * 8


@pytest.mark.parametrize(
    ("models", "num_beams"), [(1, 3), pytest.param(2, 1, marks=pytest.mark.slow)]
)
def test_engine_translates_alike_on_a_gpu(tiny_model, sources, num_beams, models):
    engine = TorchEngine(*(build_variant(label_smoothing=0.1 * one) for one in range(models)))
    rows = [row[row != 0].tolist() for row in sources["input_ids"]]
    arguments = (rows, [[]] * len(rows), [14] * len(rows))
    search = Search(num_beams=num_beams, scores=True)
    expected = engine.translate_batch(*arguments, search)

    with pretended_device():
        for model in engine.models:
            move(model)

        found = engine.translate_batch(*arguments, search)

    assert engine.model.device == DEVICE
    for row, expected_row in zip(found, expected, strict=True):
        assert [one.tokens for one in row] == [one.tokens for one in expected_row]
        assert [one.score for one in row] == pytest.approx([one.score for one in expected_row])
