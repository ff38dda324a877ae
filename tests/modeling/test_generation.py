"""Every kind of search that `generate` offers, and the settings saved for it."""

import copy
import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    dynamic_module_utils,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation import utils
from transformers.generation.streamers import BaseStreamer

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)

from ..conftest import Batch, Model, record_calls, redraw_parameters, source_of

FORBIDDEN = [0, 1]  # `<pad>` and `<s>`
EOS = 2


def first_row(batch: Batch) -> Batch:
    return {name: tensor[:1] for name, tensor in source_of(batch).items()}


def log_probabilities(model: Model, batch: Batch, sequences: Tensor, source_rows: Tensor) -> Tensor:
    """What the model, teacher-forced, gives each generated token, `[B, T]`; 0 behind `</s>`."""
    source = {name: tensor[source_rows] for name, tensor in source_of(batch).items()}
    with torch.no_grad():
        logits = model(**source, decoder_input_ids=sequences[:, :-1]).logits
    chosen = logits.log_softmax(dim=-1).gather(-1, sequences[:, 1:, None])[..., 0]
    is_eos = (sequences[:, 1:] == EOS).long()
    return chosen.masked_fill(is_eos.cumsum(dim=-1) - is_eos > 0, 0)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"max_new_tokens": 4}, 0),
        ({"generation_config": GenerationConfig(max_new_tokens=4)}, 0),
        ({"max_new_tokens": 4, "max_length": 9}, 1),
    ],
)
def test_only_a_call_with_two_limits_is_warned(tiny_model, batch, options, count, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(utils.logger, "warning", warnings.append)

    generated = tiny_model.generate(**source_of(batch), **options)

    assert generated.shape[1] <= 5
    assert len(warnings) == count


def test_fresh_model_generates_greedily_up_to_max_position_embeddings(tiny_config, batch):
    tiny_config.max_position_embeddings = 33
    model = VanillaTransformerForConditionalGeneration(tiny_config).eval()
    redraw_parameters(model)
    with torch.no_grad():
        model.model.shared.weight[2] = 0  # `</s>` is never the best token

    generated = model.generate(**source_of(batch))

    assert generated.shape == (3, 33)
    again = model.generate(**source_of(batch), num_beams=1, do_sample=False)
    assert generated.tolist() == again.tolist()


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_generation_never_emits_padding_or_start_inside_a_sentence(tiny_config, batch, search):
    tiny_config.tie_word_embeddings = False
    model = VanillaTransformerForConditionalGeneration(tiny_config).eval()
    redraw_parameters(model)
    with torch.no_grad():
        # The decoder's output is the norm's bias alone, and tokens are liked in this order.
        model.model.decoder.layer_norm.weight.zero_()
        model.lm_head.weight.zero_()
        for token, liking in ((0, 6.0), (1, 5.0), (9, 2.0), (2, 1.0)):
            bias = model.model.decoder.layer_norm.bias
            model.lm_head.weight[token] = liking * bias / bias.norm() ** 2
    torch.manual_seed(0)

    generated = model.generate(**source_of(batch), max_new_tokens=12, **search)

    for row in generated.tolist():
        sentence = row[1 : row.index(2) if 2 in row else None]
        assert not {0, 1} & set(sentence)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_sampling_is_drawn_from_torchs_seed(tiny_model, batch, num_beams):
    def sample(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        generated = tiny_model.generate(
            **source_of(batch), do_sample=True, num_beams=num_beams, max_new_tokens=9
        )
        return generated.tolist()

    assert sample(seed=1) == sample(seed=1)
    assert sample(seed=1) != sample(seed=2)


@pytest.mark.parametrize(
    "settings", [{"top_k": 1}, {"temperature": 1e-4}, {"top_p": 1e-4}], ids=str
)
def test_sampling_among_the_best_token_is_greedy(tiny_model, batch, settings):
    expected = tiny_model.generate(**source_of(batch), max_new_tokens=9)

    actual = tiny_model.generate(**source_of(batch), max_new_tokens=9, do_sample=True, **settings)

    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("search", [{"do_sample": True}, {"num_beams": 4}], ids=str)
def test_several_sequences_are_returned_for_each_source(tiny_model, batch, search):
    torch.manual_seed(0)

    generated = tiny_model.generate(
        **source_of(batch), num_return_sequences=3, max_new_tokens=9, **search
    )

    assert len(generated) == 9
    for rows in generated.split(3):
        assert len({tuple(row) for row in rows.tolist()}) == 3


def test_greedy_search_returns_the_models_own_logits_and_weights(tiny_model, batch):
    output = tiny_model.generate(
        **source_of(batch),
        min_new_tokens=6,
        max_new_tokens=6,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_attentions=True,
        output_hidden_states=True,
    )

    with torch.no_grad():
        forced = tiny_model(
            **source_of(batch),
            decoder_input_ids=output.sequences[:, :-1],
            output_attentions=True,
            output_hidden_states=True,
        )
    torch.testing.assert_close(torch.stack(output.logits, dim=1), forced.logits)
    scores = forced.logits.clone()
    scores[..., [*FORBIDDEN, EOS]] = -torch.inf
    torch.testing.assert_close(torch.stack(output.scores, dim=1), scores)
    assert output.sequences[:, 1:].tolist() == scores.argmax(dim=-1).tolist()
    transitions = tiny_model.compute_transition_scores(
        output.sequences, output.scores, normalize_logits=True
    )
    expected = scores.log_softmax(dim=-1).gather(-1, output.sequences[:, 1:, None])[..., 0]
    torch.testing.assert_close(transitions, expected)
    for name in ("cross_attentions", "decoder_hidden_states"):
        for layer, states in enumerate(getattr(forced, name)):
            steps = [step[layer] for step in getattr(output, name)]
            torch.testing.assert_close(torch.cat(steps, dim=-2), states)
    torch.testing.assert_close(output.encoder_attentions, forced.encoder_attentions)


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
    transitions = tiny_model.compute_transition_scores(
        output.sequences, output.scores, output.beam_indices
    )
    torch.testing.assert_close(transitions, chosen[:, : transitions.shape[1]])


def test_beam_search_as_wide_as_all_continuations_finds_the_best(tiny_model, batch):
    source = first_row(batch)
    width = tiny_model.config.vocab_size
    pairs = torch.cartesian_prod(torch.arange(width), torch.arange(width))
    allowed = pairs[~torch.isin(pairs, torch.tensor([*FORBIDDEN, EOS])).any(dim=-1)]
    sequences = torch.cat((torch.ones(len(allowed), 1, dtype=torch.long), allowed), dim=1)
    rows = torch.zeros(len(allowed), dtype=torch.long)
    scores = log_probabilities(tiny_model, batch, sequences, rows).sum(dim=-1)

    found = tiny_model.generate(**source, num_beams=width, min_new_tokens=2, max_new_tokens=2)

    assert found[0].tolist() == sequences[scores.argmax()].tolist()


@pytest.mark.parametrize(
    ("settings", "repository"),
    [
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "group-beam-search"),
        ({"num_beams": 2, "force_words_ids": [[5]]}, "constrained-beam-search"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive-search"),
    ],
)
def test_search_that_transformers_gave_away_is_refused_with_its_new_place(
    tiny_model, batch, settings, repository
):
    with pytest.raises(ValueError, match=f"transformers-community/{repository}"):
        tiny_model.generate(**source_of(batch), max_new_tokens=4, **settings)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_only_tokens_allowed_behind_a_prefix_are_generated(tiny_model, batch, num_beams):
    def allowed(row: int, prefix: Tensor) -> list[int]:
        # For each sentence another token first, then one of two, or the end.
        return [20 + row] if len(prefix) == 1 else [10 + row, 30 + row, EOS]

    generated = tiny_model.generate(
        **source_of(batch),
        num_beams=num_beams,
        max_new_tokens=6,
        prefix_allowed_tokens_fn=allowed,
    )

    for row, sentence in enumerate(generated.tolist()):
        assert sentence[1] == 20 + row
        assert set(sentence[2:]) <= {10 + row, 30 + row, EOS, 0}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_forced_first_token_comes_first(tiny_model, batch, num_beams):
    generated = tiny_model.generate(
        **source_of(batch), num_beams=num_beams, forced_bos_token_id=23, max_new_tokens=5
    )

    assert generated[:, :2].tolist() == [[1, 23]] * 3


def test_forced_first_token_may_be_a_setting_of_the_model(tiny_model, batch):
    tiny_model.generation_config.forced_bos_token_id = 23

    generated = tiny_model.generate(**source_of(batch), max_new_tokens=5)

    assert generated[:, 1].tolist() == [23] * 3


@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_generation_goes_on_from_a_prefix(tiny_model, batch, cache_implementation):
    # The third sentence ends at once.
    source = {name: tensor[:2] for name, tensor in source_of(batch).items()}
    expected = tiny_model.generate(**source, max_new_tokens=9)

    actual = tiny_model.generate(
        **source,
        decoder_input_ids=expected[:, :2],
        max_new_tokens=8,
        cache_implementation=cache_implementation,
    )

    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("masked", [False, True])
def test_generation_goes_on_from_a_filled_cache(tiny_model, batch, kind, masked):
    source = first_row(batch)
    sizes = [{}, {}] if kind is DynamicCache else [{"max_cache_len": 12}, {"max_cache_len": 7}]
    cache = EncoderDecoderCache(*(kind(config=tiny_model.config, **size) for size in sizes))
    expected = tiny_model.generate(**source, min_new_tokens=10, max_new_tokens=10)

    start = tiny_model.generate(**source, past_key_values=cache, min_new_tokens=4, max_new_tokens=4)
    calls = record_calls(tiny_model, "lm_head")
    mask = {"decoder_attention_mask": torch.ones_like(start)} if masked else {}
    whole = tiny_model.generate(
        **source,
        **mask,
        past_key_values=cache,
        decoder_input_ids=start,
        min_new_tokens=6,
        max_new_tokens=6,
    )

    assert whole.tolist() == expected.tolist()
    assert len(calls) == 6


@pytest.fixture
def assistant(tiny_config: VanillaTransformerConfig) -> Model:
    """A smaller model with the same vocabulary, and another opinion."""
    config = copy.deepcopy(tiny_config)
    config.encoder_layers = config.decoder_layers = 1
    model = VanillaTransformerForConditionalGeneration(config).eval()
    redraw_parameters(model)
    return model


@pytest.mark.parametrize("helper", ["small", "itself"])
def test_assisted_generation_is_greedy(tiny_model, batch, assistant, helper):
    if helper == "itself":
        assistant = copy.deepcopy(tiny_model)
    # Five drafts a step, however unsure.
    assistant.generation_config.update(
        num_assistant_tokens=5,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    source = first_row(batch)
    expected = tiny_model.generate(**source, min_new_tokens=12, max_new_tokens=12)
    calls, drafts = record_calls(tiny_model, "lm_head"), record_calls(assistant, "lm_head")
    projections = record_calls(tiny_model, ".kv_proj")

    actual = tiny_model.generate(
        **source, assistant_model=assistant, min_new_tokens=12, max_new_tokens=12
    )

    assert actual.tolist() == expected.tolist()
    assert drafts
    # One step checks all drafts, and where they are right it adds a token: 12 = 6 + 6.
    assert len(calls) == 2 if helper == "itself" else len(calls) <= 12
    assert len(projections) == tiny_model.config.decoder_layers


def test_generation_with_tokens_looked_up_in_the_source_is_greedy(tiny_model, batch):
    source = first_row(batch)
    expected = tiny_model.generate(**source, max_new_tokens=12)
    calls = record_calls(tiny_model, "lm_head")

    actual = tiny_model.generate(**source, prompt_lookup_num_tokens=3, max_new_tokens=12)

    assert actual.tolist() == expected.tolist()
    assert len(calls) < expected.shape[1] - 1


class Recorder(BaseStreamer):
    """Keeps the pieces that it is given."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("assisted", [False, True])
def test_streamer_gets_every_token_as_it_comes(tiny_model, batch, assistant, assisted):
    streamer = Recorder()
    helpers: dict[str, Any] = {"assistant_model": assistant} if assisted else {}

    generated = tiny_model.generate(
        **first_row(batch), streamer=streamer, max_new_tokens=7, **helpers
    )

    assert list(chain.from_iterable(streamer.pieces)) == generated[0].tolist()
    assert streamer.ended
    if not assisted:
        assert {len(piece) for piece in streamer.pieces} == {1}


class Favourite(LogitsProcessor):
    """Makes one token certain."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        favoured = torch.full_like(scores, -torch.inf)
        favoured[:, self.token] = 0
        return favoured


class StopAtLength(StoppingCriteria):
    """Ends each sentence at a length of its own."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self.lengths


def test_users_processor_and_criterion_take_part(tiny_model, batch):
    generated = tiny_model.generate(
        **source_of(batch),
        max_new_tokens=9,
        logits_processor=LogitsProcessorList([Favourite(9)]),
        stopping_criteria=StoppingCriteriaList([StopAtLength([3, 5, 4])]),
    )

    assert generated.tolist() == [[1, 9, 9, 0, 0], [1, 9, 9, 9, 9], [1, 9, 9, 9, 0]]


def contrary(
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: Any,
    steps: int,
    **model_kwargs: Any,
) -> Tensor:
    """A search of a user's: takes the worst token each time."""
    for name in ("logits_processor", "stopping_criteria"):
        model_kwargs.pop(name)
    for _ in range(steps):
        inputs = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1, **model_kwargs
        )
        output = model(**inputs, return_dict=True)
        model_kwargs = model._update_model_kwargs_for_generation(
            output, model_kwargs, is_encoder_decoder=True
        )
        input_ids = torch.cat((input_ids, output.logits[:, -1:].argmin(dim=-1)), dim=1)
    return input_ids


def worst_tokens(model: Model, batch: Batch, steps: int) -> Tensor:
    target = torch.ones(3, 1, dtype=torch.long)
    for _ in range(steps):
        logits = model(**source_of(batch), decoder_input_ids=target).logits
        target = torch.cat((target, logits[:, -1:].argmin(dim=-1)), dim=1)
    return target


def test_users_search_runs_when_given_as_a_function(tiny_model, batch):
    expected = worst_tokens(tiny_model, batch, steps=4)

    actual = tiny_model.generate(**source_of(batch), custom_generate=contrary, steps=4)

    assert actual.tolist() == expected.tolist()


def test_users_search_runs_when_it_lies_in_a_folder(tiny_model, batch, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = tmp_path / "search"
    (folder / "custom_generate").mkdir(parents=True)
    (folder / "custom_generate" / "generate.py").write_text(
        "def generate(model, input_ids, attention_mask, max_new_tokens, **kwargs):\n"
        "    inputs = {'input_ids': input_ids, 'attention_mask': attention_mask}\n"
        "    return model.generate(**inputs, max_new_tokens=max_new_tokens - 1)\n"
    )
    expected = tiny_model.generate(**source_of(batch), max_new_tokens=5)

    actual = tiny_model.generate(
        **source_of(batch), max_new_tokens=6, custom_generate=str(folder), trust_remote_code=True
    )

    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("limit", "width"), [({"max_new_tokens": 30}, 31), ({"max_length": 30}, 30)], ids=str
)
def test_limit_of_the_call_outranks_that_of_the_model(tiny_model, batch, limit, width):
    tiny_model.generation_config.suppress_tokens = [EOS]

    assert tiny_model.generate(**source_of(batch), **limit).shape == (3, width)


def saved_generation_config(folder: Path) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads((folder / "generation_config.json").read_text())
    return saved


def test_generation_config_is_saved_with_every_model(tiny_model, tmp_path):
    tiny_model.save_pretrained(tmp_path)

    saved = saved_generation_config(tmp_path)
    expected = {
        "max_length": tiny_model.config.max_position_embeddings,
        "bad_words_ids": [[token] for token in FORBIDDEN],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "decoder_start_token_id": 1,
    }
    assert {name: saved.get(name) for name in expected} == expected


def test_generation_config_of_the_users_survives_saving_and_loading(tiny_model, batch, tmp_path):
    tiny_model.generation_config.update(num_beams=3, length_penalty=0.6, max_length=11)
    expected = tiny_model.generate(**source_of(batch))
    tiny_model.save_pretrained(tmp_path / "first")
    first = type(tiny_model).from_pretrained(tmp_path / "first")
    first.save_pretrained(tmp_path / "second")

    again = type(tiny_model).from_pretrained(tmp_path / "second")

    assert saved_generation_config(tmp_path / "first") == saved_generation_config(
        tmp_path / "second"
    )
    assert again.generation_config.num_beams == 3
    assert again.generate(**source_of(batch)).tolist() == expected.tolist()
