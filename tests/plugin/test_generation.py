"""What `generate` adds to Transformers': its helpers with our caches and two vocabularies."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

from vanilla_transformer.generation_vanilla_transformer import CACHE

from ..models import (
    TWO_TABLES,
    Batch,
    Model,
    build_variant,
    record_calls,
    source_of,
    without_labels,
)
from .test_attention_backends import make_cache

EOS = 2

# Encoder and decoder layers; a cache sized by the wrong stack fails on one of them.
depths = pytest.mark.parametrize("depths", [(1, 3), (3, 1)], ids=str)
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU is absent"),
]
both_widths = pytest.mark.parametrize("num_beams", [1, 3])


def first_row(batch: Batch) -> Batch:
    return {name: tensor[:1] for name, tensor in source_of(batch).items()}


def log_probabilities(model: Model, batch: Batch, sequences: Tensor, source_rows: Tensor) -> Tensor:
    """What the model, teacher-forced, gives each generated token, `[B, T]`; 0 after `</s>`."""
    source = {name: tensor[source_rows] for name, tensor in source_of(batch).items()}
    with torch.no_grad():
        logits = model(**source, decoder_input_ids=sequences[:, :-1]).logits
    chosen = logits.log_softmax(dim=-1).gather(-1, sequences[:, 1:, None])[..., 0]
    is_eos = (sequences[:, 1:] == EOS).long()
    return chosen.masked_fill(is_eos.cumsum(dim=-1) - is_eos > 0, 0)


def test_start_token_that_is_an_end_may_be_generated():
    config = build_variant(bos_token_id=EOS, eos_token_id=[EOS, 7]).generation_config

    assert config.bad_words_ids == [[0]]


@pytest.mark.parametrize("search", [{}, {"do_sample": True}, {"bad_words_ids": [[5]]}], ids=str)
def test_generation_never_emits_padding_or_start_inside_a_sentence(tiny_model, batch, search):
    # Tokens are liked in this order.
    liking = torch.zeros(37)
    liking[[0, 1, 9, EOS]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    tiny_model.lm_head.register_forward_hook(lambda *call: liking.expand_as(call[-1]))
    torch.manual_seed(0)

    generated = tiny_model.generate(**source_of(batch), max_new_tokens=12, **search)

    for row in generated.tolist():
        sentence = row[1 : row.index(EOS) if EOS in row else None]
        assert not {0, 1} & set(sentence)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
def test_beam_search_scores_are_those_of_the_model(tiny_model, batch, length_penalty):
    output = tiny_model.generate(
        **source_of(batch),
        num_beams=3,
        num_return_sequences=3,
        length_penalty=length_penalty,
        max_new_tokens=7,
        return_dict_in_generate=True,
        output_scores=True,
    )

    source_rows = torch.arange(3).repeat_interleave(3)
    chosen = log_probabilities(tiny_model, batch, output.sequences, source_rows)
    lengths = (chosen != 0).sum(dim=-1)
    torch.testing.assert_close(
        output.sequences_scores, chosen.sum(dim=-1) / lengths**length_penalty
    )


@both_widths
@pytest.mark.parametrize("decoder_vocab_size", [None, 41, 34])
def test_transition_scores_are_log_probabilities(batch, decoder_vocab_size, num_beams):
    tables = TWO_TABLES if decoder_vocab_size else {}
    model = build_variant(**tables, decoder_vocab_size=decoder_vocab_size)

    found = model.generate(
        **source_of(batch),
        num_beams=num_beams,
        max_new_tokens=4,
        min_new_tokens=4,
        return_dict_in_generate=True,
        output_logits=True,
    )
    actual = model.compute_transition_scores(
        found.sequences,
        found.logits,
        found.beam_indices if num_beams > 1 else None,
        normalize_logits=True,
    )

    expected = log_probabilities(model, batch, found.sequences, torch.arange(3))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_beams", [2, 4])
@pytest.mark.parametrize(("source_size", "target_size"), [(37, 6), (6, 37)])
def test_beams_are_as_many_as_the_target_vocabulary_allows(source_size, target_size, num_beams):
    model = build_variant(**TWO_TABLES, vocab_size=source_size, decoder_vocab_size=target_size)
    source = torch.tensor([[5, 3, 4, 2], [4, 4, 5, 2]])
    search = {"num_beams": num_beams, "max_new_tokens": 5}

    cached = model.generate(source, **search)

    assert cached.tolist() == model.generate(source, **search, use_cache=False).tolist()


def test_step_with_labels_fills_no_cache(tiny_model, batch):
    with_labels = tiny_model(**batch)
    without = tiny_model(**without_labels(batch))

    assert getattr(with_labels, CACHE) is None
    assert getattr(without, CACHE).get_seq_length() == batch["labels"].shape[1]


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
    model = build_variant(encoder_layers=depths[0], decoder_layers=depths[1])
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
@pytest.mark.parametrize("masked", [False, True])
def test_generation_goes_on_from_a_filled_cache(tiny_model, batch, kind, masked):
    source = first_row(batch)
    cache = make_cache(kind, tiny_model)
    expected = tiny_model.generate(**source, min_new_tokens=8, max_new_tokens=8)

    start = tiny_model.generate(**source, cache=cache, min_new_tokens=3, max_new_tokens=3)
    assert cache.get_seq_length() == start.shape[1] - 1
    calls = record_calls(tiny_model, "lm_head")
    mask = {"decoder_attention_mask": torch.ones_like(start)} if masked else {}
    whole = tiny_model.generate(
        **source,
        **mask,
        past_key_values=cache,
        decoder_input_ids=start,
        min_new_tokens=5,
        max_new_tokens=5,
    )

    assert whole.tolist() == expected.tolist()
    assert len(calls) == 5


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
@pytest.mark.slow
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


@pytest.mark.parametrize("helper", ["small", "itself"])
def test_assisted_generation_is_greedy(tiny_model, batch, helper):
    depths = {"encoder_layers": 1, "decoder_layers": 1}
    assistant = build_variant(**depths) if helper == "small" else copy.deepcopy(tiny_model)
    # Five drafts a step, however unsure.
    assistant.generation_config.update(
        num_assistant_tokens=5,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    limits = {"min_new_tokens": 12, "max_new_tokens": 12}
    expected = tiny_model.generate(**first_row(batch), **limits)
    calls, drafts = record_calls(tiny_model, "lm_head"), record_calls(assistant, "lm_head")
    projections = record_calls(tiny_model, ".kv_proj")

    actual = tiny_model.generate(**first_row(batch), assistant_model=assistant, **limits)

    assert actual.tolist() == expected.tolist()
    assert drafts
    # One step checks all drafts, and where they are right it adds a token: 12 = 6 + 6.
    assert len(calls) == 2 if helper == "itself" else len(calls) <= 12
    assert len(projections) == tiny_model.config.decoder_layers


def build_two_vocabularies(decoder_vocab_size):
    return build_variant(**TWO_TABLES, decoder_vocab_size=decoder_vocab_size)


@pytest.mark.parametrize("target_size", [34, 41])
def test_prompt_lookup_of_two_vocabularies_finds_what_greedy_search_does(target_size):
    model = build_two_vocabularies(target_size)
    source = torch.tensor([[5, 6, 7, 2]])
    expected = model.generate(source, max_new_tokens=12)

    assert torch.equal(
        model.generate(source, max_new_tokens=12, prompt_lookup_num_tokens=3), expected
    )


@pytest.mark.parametrize("target_size", [34, 41])
def test_watermark_favours_tokens_of_the_whole_target_vocabulary(target_size):
    model = build_two_vocabularies(target_size)
    config = GenerationConfig(watermarking_config=WatermarkingConfig(bias=9.0))

    (processor,) = model._with_written_vocabulary()._get_logits_processor(config)

    greens = [set(processor._get_greenlist_ids(torch.tensor([one])).tolist()) for one in range(30)]
    assert set.union(*greens) == set(range(target_size))


@pytest.mark.parametrize(
    "settings", [{"encoder_repetition_penalty": 1.3}, {"encoder_no_repeat_ngram_size": 1}]
)
def test_ids_of_another_vocabulary_change_no_scores(settings):
    with pytest.raises(ValueError, match="`prefill_chunk_size` would cut off source masks"):
        build_variant().generate(torch.tensor([[5, 2]]), prefill_chunk_size=4)
    source = torch.tensor([[5, 6, 7, 2]])
    build_variant(**TWO_TABLES).generate(source, max_new_tokens=2, **settings)

    (name, value), *_ = settings.items()
    with pytest.raises(ValueError, match=rf"`{name}` takes .* got {value} .* two"):
        build_two_vocabularies(41).generate(source, max_new_tokens=2, **settings)
