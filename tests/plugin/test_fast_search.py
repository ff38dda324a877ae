"""This package's searches: what Transformers' own find, in less time."""

import functools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationMixin, MaxTimeCriteria, TemperatureLogitsWarper
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    backend_vanilla_transformer,
)
from vanilla_transformer.backend_vanilla_transformer import SourceLengthLimit
from vanilla_transformer.layers_vanilla_transformer import SelfAttention
from vanilla_transformer.search_vanilla_transformer import IncrementalDecoder
from vanilla_transformer.stacks_vanilla_transformer import Decoder

from ..models import Batch, Model, source_of
from ..support.observed import observe
from .test_variant_grid import PADDED_ON_THE_RIGHT, build_combination, each_choice

SEARCHES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.7},
    {"forced_bos_token_id": 9},
    {"bad_words_ids": [[0], [1], [8, 21], [30]]},
    {"suppress_tokens": [5, 30], "bad_words_ids": None},
    {"eos_token_id": [2, 9, 33]},
    {"bad_words_ids": [[0], [1], [2]]},
    {"do_sample": True},
    {"do_sample": True, "num_return_sequences": 3, "temperature": 1.3, "top_k": 9, "top_p": 0.8},
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 4, "length_penalty": 0.0},
    {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
    {"num_beams": 3, "length_penalty": 0.6, "early_stopping": "never"},
    {"num_beams": 3, "length_penalty": -1.0, "early_stopping": "never"},
    {"num_beams": 3, "min_new_tokens": 4, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    {"num_beams": 3, "forced_bos_token_id": 9},
    {"num_beams": 3, "max_length": 2},
    {"eos_token_id": None, "cache_implementation": "dynamic"},
    {"num_beams": 3, "eos_token_id": None},
    {"max_length": 6, "forced_eos_token_id": 2},
    {"num_beams": 3, "max_length": 6, "forced_eos_token_id": 2},
    # Marian's.
    {"num_beams": 3, "renormalize_logits": True, "bad_words_ids": [[0], [1], [30]]},
]
both_widths = pytest.mark.parametrize("num_beams", [1, 3])


@pytest.fixture
def sentences() -> Batch:
    """Fourteen sources of unequal length, padded: some end soon, and leave the batch."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 12, (14, 1), generator=generator)
    is_real = torch.arange(12) < lengths
    ids = torch.randint(3, 37, is_real.shape, generator=generator) * is_real
    return {"input_ids": ids, "attention_mask": is_real.long()}


def refuse(monkeypatch: pytest.MonkeyPatch, place: Any, *names: str) -> None:
    """Fails as soon as one of these searches runs."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{names} of {place.__name__} run")

    for name in names:
        # With its signature, which Transformers reads.
        monkeypatch.setattr(place, name, functools.wraps(getattr(place, name))(fail))


@pytest.fixture
def refuse_own_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, backend_vanilla_transformer, "greedy_search", "beam_search")


def generate(model: Model, source: Batch, **search: Any) -> Tensor:
    torch.manual_seed(0)
    return model.generate(**source, **{"max_length": 14, "do_sample": False, **search})


def generate_like_transformers(model: Model, source: Batch, **search: Any) -> Tensor:
    """By the inherited search, without a cache."""
    return generate(model, source, use_cache=False, use_transformers_search=True, **search)


def assert_own_search_finds_the_same(
    monkeypatch: pytest.MonkeyPatch, model: Model, source: Batch, **search: Any
) -> Tensor:
    """What this package's search finds is what Transformers' finds, which does not run again."""
    expected = generate_like_transformers(model, source, **search)
    with monkeypatch.context() as patch:
        refuse(patch, GenerationMixin, "_sample", "_beam_search")
        found = generate(model, source, **search)

    assert found.tolist() == expected.tolist()
    return found


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_search_finds_what_transformers_search_finds(monkeypatch, tiny_model, sentences, search):
    assert_own_search_finds_the_same(monkeypatch, tiny_model, sentences, **search)


@both_widths
def test_search_goes_on_from_a_prompt_as_transformers_does(
    monkeypatch, tiny_model, sentences, num_beams
):
    prompt = torch.randint(3, 37, (14, 4), generator=torch.Generator().manual_seed(1))
    search = {"num_beams": num_beams, "decoder_input_ids": prompt}

    found = assert_own_search_finds_the_same(monkeypatch, tiny_model, sentences, **search)

    assert found[:, 1:5].tolist() == prompt.tolist()


@both_widths
def test_each_sentence_ends_at_a_limit_of_its_own(monkeypatch, tiny_model, sentences, num_beams):
    limits = sentences["attention_mask"].sum(-1)
    search = {"num_beams": num_beams, "stopping_criteria": [SourceLengthLimit(limits)]}

    found = assert_own_search_finds_the_same(monkeypatch, tiny_model, sentences, **search)

    behind = torch.arange(1, found.shape[1]) > limits[:, None]
    assert set(found[:, 1:][behind].tolist()) <= {0, 2}


def test_samples_of_a_sentence_end_at_its_limit(tiny_model, sentences):
    limits = torch.arange(2, 2 + len(sentences["input_ids"]))
    # The likeliest token alone is drawn.
    draws = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}

    found = generate(tiny_model, sentences, **draws, stopping_criteria=[SourceLengthLimit(limits)])

    greedy = generate(tiny_model, sentences, stopping_criteria=[SourceLengthLimit(limits)])
    assert found.tolist() == greedy.repeat_interleave(2, dim=0).tolist()


def test_search_in_bfloat16_is_transformers(tiny_model, sentences):
    tiny_model.bfloat16()
    # One at a time: in bfloat16 the width of a batch changes the rounding of products.
    source = {name: tensor[3:4, :5] for name, tensor in sentences.items()}

    found = generate(tiny_model, source, num_beams=1)

    assert found.tolist() == generate_like_transformers(tiny_model, source, num_beams=1).tolist()


@both_widths
def test_sentences_leave_the_batch_when_they_have_ended(tiny_model, sentences, num_beams):
    rows = []
    observe(tiny_model.lm_head, lambda hidden, _: rows.append(len(hidden)))

    found = generate(tiny_model, sentences, num_beams=num_beams, max_length=30)

    assert rows[0] == 14
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] <= 12
    steps = found.shape[1] - 1
    # A beam may wait for hypotheses that turn out worse than those that have finished.
    most_steps = steps if num_beams == 1 else 29
    assert steps <= len(rows) <= most_steps


def test_memory_of_past_targets_grows_with_them(monkeypatch, tiny_model, sentences):
    # Encodings of 66 positions are computed at once.
    search = {"num_beams": 3, "max_length": 70, "suppress_tokens": [2]}
    few = {name: rows[:3] for name, rows in sentences.items()}

    found = assert_own_search_finds_the_same(monkeypatch, tiny_model, few, **search)

    assert found.shape == (3, 70)


class Silence(BaseStreamer):
    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


class OwnTemperature(TemperatureLogitsWarper):
    """A user's own, whatever it may do."""


UNKNOWN_SETTINGS: dict[str, dict[str, Any]] = {
    "streamer": {"streamer": Silence()},
    "dict": {"return_dict_in_generate": True},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "processor": {"logits_processor": LogitsProcessorList([OwnTemperature(2.0)])},
    "criterion": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(60)])},
    "mask": {"decoder_attention_mask": torch.ones(3, 1)},
    "drawn beams": {"num_beams": 3, "do_sample": True},
    "switch": {"num_beams": 3, "use_transformers_search": True},
}


@pytest.mark.parametrize("search", UNKNOWN_SETTINGS.values(), ids=UNKNOWN_SETTINGS)
@pytest.mark.usefixtures("refuse_own_searches")
def test_transformers_search_runs_with_other_settings(tiny_model, batch, caplog, search):
    caplog.set_level(logging.DEBUG, logger=backend_vanilla_transformer.__name__)

    generate(tiny_model, source_of(batch), **search)

    assert "`generate` runs Transformers' search, because " in caplog.text


@pytest.mark.parametrize("search", [{"num_beams": 4, "num_beam_groups": 2}, {"dola_layers": "low"}])
def test_search_that_transformers_has_moved_to_the_hub_is_not_replaced(tiny_model, batch, search):
    with pytest.raises(ValueError, match="trust_remote_code"):
        generate(tiny_model, source_of(batch), **search)


def test_own_search_runs_where_the_settings_leave_the_cache_open(monkeypatch, tiny_model, batch):
    refuse(monkeypatch, GenerationMixin, "_sample")
    tiny_model.generation_config.use_cache = None

    assert generate(tiny_model, source_of(batch)).shape[0] == 3


@pytest.mark.usefixtures("refuse_own_searches")
def test_argument_of_generate_overrides_the_switch_of_the_generation_config(tiny_model, batch):
    tiny_model.generation_config.use_transformers_search = True

    found = generate(tiny_model, source_of(batch))

    assert found.shape[0] == 3
    with pytest.raises(AssertionError, match="greedy_search"):
        generate(tiny_model, source_of(batch), use_transformers_search=False)


def add_one(_: Any, __: Any, output: Any) -> Any:
    output.logits = output.logits + torch.arange(37)
    return output


def patch_forward(model: Model) -> None:
    forward = model.forward
    model.forward = lambda *args, **kwargs: add_one(None, None, forward(*args, **kwargs))


class Subclass(VanillaTransformerForConditionalGeneration):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return add_one(None, None, super().forward(*args, **kwargs))


class ForeignLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnDecoder(Decoder):
    def lookup(self, *args: Any) -> Tensor:
        return 2 * super().lookup(*args)


class LinearBiases(SelfAttention):
    """As ALiBi: later keys weigh more."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Any:
        bias = 3 * torch.arange(float(key.shape[2])).expand(1, 1, query.shape[2], -1)
        return super().attend(query, key, value, bias if mask is None else bias + mask, **kwargs)


def prepare_otherwise(model: Model) -> None:
    prepare = model.prepare_inputs_for_generation

    def shifted(input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(input_ids, *args, **kwargs)
        return inputs | {"decoder_input_ids": (inputs["decoder_input_ids"] + 5) % 37}

    # As PEFT does for prefix tuning.
    model.prepare_inputs_for_generation = shifted


def patch_linear(model: Model) -> None:
    forward = fc1(model).forward
    # As accelerate's hooks do.
    fc1(model).forward = lambda x: 2 * forward(x)


def fc1(model: Model) -> nn.Linear:
    return model.model.decoder.layers[1].fc1


CHANGES = {
    "hook": lambda model: model.register_forward_hook(add_one),
    "forward": patch_forward,
    "subclass": lambda model: setattr(model, "__class__", Subclass),
    "decoder": lambda model: setattr(model.model.decoder, "__class__", OwnDecoder),
    "layers": lambda model: model.model.decoder.layers.pop(0),
    "inputs": prepare_otherwise,
    "class of a map": lambda model: setattr(fc1(model), "__class__", ForeignLinear),
    "hook of a map": lambda model: fc1(model).register_forward_hook(lambda *call: 2 * call[-1]),
    "forward of a map": patch_linear,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_model_is_searched_with_its_changes(tiny_model, sentences, change):
    before = generate(tiny_model, sentences, num_beams=3)
    change(tiny_model)

    after = generate(tiny_model, sentences, num_beams=3)

    expected = generate_like_transformers(tiny_model, sentences, num_beams=3)
    assert after.tolist() == expected.tolist()
    assert after.tolist() != before.tolist()


@both_widths
def test_attention_of_another_class_is_searched_in_steps_of_transformers(
    tiny_model, sentences, num_beams
):
    before = generate(tiny_model, sentences, num_beams=num_beams)
    for layer in tiny_model.model.decoder.layers:
        layer.self_attn.__class__ = LinearBiases

    found = generate(tiny_model, sentences, num_beams=num_beams)

    expected = generate(tiny_model, sentences, num_beams=num_beams, use_transformers_search=True)
    assert found.tolist() == expected.tolist() != before.tolist()


def test_kernel_that_a_user_registers_is_used(tiny_model, batch, monkeypatch):
    def upside_down(*args: Any, **kwargs: Any) -> Any:
        heads, weights = sdpa_attention_forward(*args, **kwargs)
        return -heads, weights

    before = generate(tiny_model, source_of(batch))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", upside_down)

    found = generate(tiny_model, source_of(batch))

    expected = generate(tiny_model, source_of(batch), use_transformers_search=True)
    assert found.tolist() == expected.tolist() != before.tolist()


def test_search_under_autocast_is_transformers(monkeypatch, tiny_model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        assert_own_search_finds_the_same(monkeypatch, tiny_model, source_of(batch))


@both_widths
def test_model_in_training_mode_drops_out(tiny_config, batch, num_beams):
    tiny_config.dropout = 0.5
    model = VanillaTransformerForConditionalGeneration(tiny_config).eval()
    # The encoder's states, which are computed before, are the same.
    model.model.decoder.layers.train()

    found = generate(model, source_of(batch), num_beams=num_beams)

    in_evaluation = generate(model.eval(), source_of(batch), num_beams=num_beams)
    assert found.tolist() != in_evaluation.tolist()


def logits_at_once(model: Model, targets: Tensor) -> Tensor:
    return model(**PADDED_ON_THE_RIGHT, decoder_input_ids=targets, use_cache=False).logits[:, -1]


@each_choice
@torch.no_grad()
def test_steps_have_the_logits_of_the_model(combination):
    model = build_combination(combination)
    encoded = model.get_encoder()(**PADDED_ON_THE_RIGHT).last_hidden_state
    decoding = IncrementalDecoder(model, encoded, PADDED_ON_THE_RIGHT["attention_mask"])
    prompt, first, second = torch.tensor([[[1, 6], [1, 12]], [[7, 8], [3, 4]], [[9, 5], [6, 11]]])

    logits = decoding.first_logits(prompt)
    both = decoding.next_logits(first, torch.zeros_like(first))
    # Each hypothesis continues from the other one.
    swapped = decoding.next_logits(second, torch.tensor([[1, 0]] * 2))

    torch.testing.assert_close(logits, logits_at_once(model, prompt))
    for hypothesis in range(2):
        past = torch.cat((prompt, first[:, [hypothesis]]), dim=1)
        torch.testing.assert_close(both[:, hypothesis], logits_at_once(model, past))
        continued = torch.cat((past, second[:, [1 - hypothesis]]), dim=1)
        expected = logits_at_once(model, continued)
        torch.testing.assert_close(swapped[:, 1 - hypothesis], expected)
