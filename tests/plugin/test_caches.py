"""Caches: decoding with any of them equals decoding without, and the source is projected once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from transformers import CompileConfig
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from ..conftest import (
    Batch,
    Model,
    both_attentions,
    build_variant,
    source_of,
    without_labels,
)

# Encoder and decoder layers; a cache sized by the wrong stack fails on one of them.
depths = pytest.mark.parametrize("depths", [(1, 3), (3, 1)], ids=str)
both_widths = pytest.mark.parametrize("num_beams", [1, 3])
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU is absent"),
]


def build_model(depths: tuple[int, int]) -> Model:
    return build_variant(encoder_layers=depths[0], decoder_layers=depths[1])


def make_cache(kind: str, model: Model) -> EncoderDecoderCache:
    def make(length: int) -> Cache:
        if kind == "dynamic":
            return DynamicCache(config=model.config)
        return StaticCache(config=model.config, max_cache_len=length)

    # The source's seven positions, and more than the target's five.
    return EncoderDecoderCache(make(9), make(7))


def decode(
    model: Model,
    source: Batch,
    target: Tensor,
    cache: EncoderDecoderCache,
    mask: Tensor | None = None,
) -> Tensor:
    """Logits of a target that continues what the cache holds."""
    end = cache.get_seq_length() + target.shape[1]
    output = model(
        **source,
        decoder_input_ids=target,
        # Without padding none is given: positions then follow from the cache.
        decoder_attention_mask=None if mask is None else mask[:, :end],
        past_key_values=cache,
    )
    assert output.past_key_values is cache
    return output.logits


@both_attentions
@pytest.mark.parametrize(
    ("depths", "chunks"), [((1, 3), (1, 1, 1, 1, 1)), ((3, 1), (2, 3))], ids=str
)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("left_padding", [0, 2])
def test_decoding_in_chunks_equals_decoding_at_once(
    batch, attention, depths, kind, chunks, left_padding
):
    model = build_model(depths)
    model.set_attn_implementation(attention)
    mask = torch.ones_like(batch["decoder_input_ids"])
    mask[2, :left_padding] = 0
    target = batch["decoder_input_ids"].masked_fill(mask == 0, 7)
    source = source_of(batch)
    expected = model(**source, decoder_input_ids=target, decoder_attention_mask=mask).logits

    cache = make_cache(kind, model)
    pieces = [
        decode(model, source, piece, cache, mask if left_padding else None)
        for piece in target.split(chunks, dim=1)
    ]

    is_real = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, dim=1)[is_real], expected[is_real])


def test_step_with_labels_fills_no_cache(tiny_model, batch):
    with_labels = tiny_model(**batch)
    without = tiny_model(**without_labels(batch))

    assert with_labels.past_key_values is None
    assert without.past_key_values.get_seq_length() == batch["labels"].shape[1]


@depths
@both_widths
@pytest.mark.parametrize(
    "cache_implementation",
    [
        "static",
        # Transformers copies to and from a GPU on a stream of its own, `Cache.update`.
        pytest.param("offloaded", marks=needs_gpu),
        pytest.param("offloaded_static", marks=needs_gpu),
    ],
)
def test_generation_is_the_same_with_another_cache(batch, depths, num_beams, cache_implementation):
    model = build_model(depths)
    if cache_implementation != "static":
        model, batch = model.cuda(), {name: tensor.cuda() for name, tensor in batch.items()}
    search = {"num_beams": num_beams, "max_new_tokens": 9}
    expected = model.generate(**source_of(batch), **search)

    # Twice: Transformers may use a cache again.
    for _ in range(2):
        actual = model.generate(
            **source_of(batch),
            **search,
            cache_implementation=cache_implementation,
            disable_compile=True,
        )
        assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@both_widths
def test_generation_takes_a_cache_made_by_hand(tiny_model, batch, kind, num_beams):
    search = {"num_beams": num_beams, "max_new_tokens": 8}
    expected = tiny_model.generate(**source_of(batch), **search)
    cache = make_cache(kind, tiny_model)

    actual = tiny_model.generate(**source_of(batch), **search, past_key_values=cache)

    assert actual.tolist() == expected.tolist()
    assert cache.get_seq_length() == actual.shape[1] - 1


class CountingBackend:
    """A backend of `torch.compile` that runs graphs as they are and counts."""

    def __init__(self) -> None:
        self.graphs = 0
        self.runs = 0

    def __call__(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run

    def __deepcopy__(self, memo: dict[int, Any]) -> "CountingBackend":
        return self  # Transformers copies its configs


def compile_everywhere(**settings: Any) -> CompileConfig:
    """Compiling settings that Transformers heeds on a CPU too, where it skips compiling else."""
    torch.compiler.reset()
    config = CompileConfig(fullgraph=True, mode=None, **settings)
    config._compile_all_devices = True
    return config


# Asked for attention weights, the decoder runs eager attention.
@pytest.mark.parametrize("output_attentions", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_generation_compiles_each_step_as_one_graph_and_once(tiny_model, batch, output_attentions):
    source = source_of(batch)
    other = {**source, "input_ids": source["input_ids"].flip(0)}
    expected = [tiny_model.generate(**inputs, max_new_tokens=9) for inputs in (source, other)]
    backend = CountingBackend()
    settings = {
        "max_new_tokens": 9,
        "cache_implementation": "static",
        "compile_config": compile_everywhere(backend=backend),
        "output_attentions": output_attentions,
    }

    for inputs, ids in zip((source, other), expected, strict=True):
        runs = backend.runs
        actual = tiny_model.generate(**inputs, **settings)

        assert actual.tolist() == ids.tolist()
        # The first step, which fills the cache, is not compiled.
        assert backend.runs - runs == ids.shape[1] - 2
    assert backend.graphs == 1
