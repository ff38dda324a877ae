"""Properties of the model that hold for any weights: padding, cache, attention maps, saving."""

import copy
import math
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSeq2SeqLM
from transformers.modeling_outputs import BaseModelOutput

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from vanilla_transformer.modeling_vanilla_transformer import Dropout, FusedLinear

from . import reference
from .conftest import redraw_parameters

Model = VanillaTransformerForConditionalGeneration
Batch = dict[str, Tensor]

both_attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


def real_rows(ids: Tensor, is_real: Tensor) -> list[Tensor]:
    return [row[real] for row, real in zip(ids, is_real.bool(), strict=True)]


def pad(rows: list[Tensor], side: str, extra: int, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask, `extra` positions wider than the longest row needs."""
    width = max(len(row) for row in rows) + extra
    ids = torch.full((len(rows), width), filler)
    mask = torch.zeros_like(ids)
    for row, (padded, is_real) in zip(rows, zip(ids, mask, strict=True), strict=True):
        where = slice(width - len(row), None) if side == "left" else slice(len(row))
        padded[where], is_real[where] = row, 1
    return ids, mask


def source_of(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def without_labels(batch: Batch) -> Batch:
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def gradients(model: Model, batch: Batch) -> dict[str, Tensor]:
    model.train()(**batch).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def record_calls(model: nn.Module, suffix: str) -> list[str]:
    """Names of the submodules ending in `suffix`, appended each time that one is called."""
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(suffix):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


@both_attentions
@pytest.mark.parametrize("cached", [False, True])
def test_logits_ignore_later_target_tokens(tiny_model, batch, attention, cached):
    tiny_model.set_attn_implementation(attention)
    target = batch["decoder_input_ids"]
    edited = target.clone()
    edited[:, -1] = (edited[:, -1] + 1) % tiny_model.config.vocab_size

    def logits(target: Tensor) -> Tensor:
        if not cached:
            return tiny_model(**source_of(batch), decoder_input_ids=target).logits[:, 2:]
        start = tiny_model(**source_of(batch), decoder_input_ids=target[:, :2], use_cache=True)
        return tiny_model(
            **source_of(batch),
            decoder_input_ids=target[:, 2:],
            past_key_values=start.past_key_values,
        ).logits

    before, after = logits(target), logits(edited)

    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])  # the edit did reach the model


@both_attentions
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("extra", [0, 6])
def test_logits_of_a_sentence_are_those_it_has_alone(tiny_model, batch, attention, side, extra):
    tiny_model.set_attn_implementation(attention)
    sources = real_rows(batch["input_ids"], batch["attention_mask"])
    targets = real_rows(batch["decoder_input_ids"], batch["labels"] != -100)
    input_ids, attention_mask = pad(sources, side, extra, filler=7)
    decoder_input_ids, decoder_attention_mask = pad(targets, side, extra, filler=7)

    together = tiny_model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        decoder_input_ids=decoder_input_ids,
        decoder_attention_mask=decoder_attention_mask,
    ).logits

    alone = [
        tiny_model(input_ids=source[None], decoder_input_ids=target[None]).logits[0]
        for source, target in zip(sources, targets, strict=True)
    ]
    # Contract 3 of the design; logits are of order 1.
    torch.testing.assert_close(
        together[decoder_attention_mask.bool()], torch.cat(alone), rtol=1e-5, atol=1e-5
    )


@both_attentions
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_row_of_padding_gives_finite_numbers(tiny_model, batch, attention, precision):
    tiny_model.set_attn_implementation(attention)
    if precision == "bfloat16":
        tiny_model.bfloat16()
    batch["attention_mask"][1] = 0
    target_mask = torch.ones_like(batch["decoder_input_ids"])
    target_mask[1] = 0

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        output = tiny_model.train()(**batch, decoder_attention_mask=target_mask, return_logits=True)
    output.loss.backward()

    assert output.logits.isfinite().all()
    for name, parameter in tiny_model.named_parameters():
        assert parameter.grad.isfinite().all(), name


@both_attentions
def test_row_of_padding_leaves_the_others_alone(tiny_model, batch, attention):
    tiny_model.set_attn_implementation(attention)
    inputs = without_labels(batch)
    expected = tiny_model(**{name: rows[[0, 2]] for name, rows in inputs.items()}).logits
    inputs["attention_mask"][1] = 0

    actual = tiny_model(**inputs).logits[[0, 2]]

    torch.testing.assert_close(actual, expected)


@both_attentions
@pytest.mark.parametrize("chunks", [(1, 1, 1, 1, 1), (2, 3), (1, 3, 1)])
@pytest.mark.parametrize("left_padding", [0, 2])
def test_decoding_in_chunks_equals_decoding_at_once(
    tiny_model, batch, attention, chunks, left_padding
):
    tiny_model.set_attn_implementation(attention)
    mask = torch.ones_like(batch["decoder_input_ids"])
    mask[2, :left_padding] = 0
    target = batch["decoder_input_ids"].masked_fill(mask == 0, 7)
    expected = tiny_model(
        **source_of(batch), decoder_input_ids=target, decoder_attention_mask=mask
    ).logits

    pieces, cache, start = [], None, 0
    for length in chunks:
        end = start + length
        output = tiny_model(
            **source_of(batch),
            decoder_input_ids=target[:, start:end],
            # Without padding none is given: positions then follow from the cache.
            decoder_attention_mask=mask[:, :end] if left_padding else None,
            past_key_values=cache,
            use_cache=True,
        )
        pieces.append(output.logits)
        cache, start = output.past_key_values, end

    is_real = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, dim=1)[is_real], expected[is_real])


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_is_the_same_without_cache(tiny_model, batch, num_beams):
    cached, uncached = (
        tiny_model.generate(
            **source_of(batch),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=9,
            use_cache=use_cache,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for use_cache in (True, False)
    )

    assert cached.sequences.tolist() == uncached.sequences.tolist()
    torch.testing.assert_close(cached.scores, uncached.scores)
    if num_beams > 1:
        torch.testing.assert_close(cached.sequences_scores, uncached.sequences_scores)


def test_generation_is_the_same_with_a_static_cache(tiny_model, batch):
    dynamic, static = (
        tiny_model.generate(**source_of(batch), max_new_tokens=9, cache_implementation=cache)
        for cache in (None, "static")
    )

    assert static.tolist() == dynamic.tolist()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_projects_the_source_once(tiny_model, batch, num_beams):
    calls = record_calls(tiny_model, ".kv_proj")

    tiny_model.generate(**source_of(batch), num_beams=num_beams, max_new_tokens=6)

    layers = range(tiny_model.config.decoder_layers)
    assert sorted(calls) == [f"model.decoder.layers.{i}.encoder_attn.kv_proj" for i in layers]


def assert_is_distribution(weights: Tensor, shape: tuple[int, ...]) -> None:
    assert weights.shape == shape
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(shape[:-1]))


@both_attentions
def test_attention_weights_are_distributions_over_real_tokens(tiny_model, batch, attention):
    tiny_model.set_attn_implementation(attention)

    output = tiny_model(**batch, output_attentions=True)

    assert len(output.encoder_attentions) == 2
    assert len(output.decoder_attentions) == len(output.cross_attentions) == 3
    is_padding = batch["attention_mask"] == 0
    for weights in output.encoder_attentions:
        assert_is_distribution(weights, (3, 2, 7, 7))
        assert not weights.permute(0, 3, 1, 2)[is_padding].any()
    for weights in output.decoder_attentions:
        assert_is_distribution(weights, (3, 4, 5, 5))
        assert not weights.triu(diagonal=1).any()
    for weights in output.cross_attentions:
        assert_is_distribution(weights, (3, 4, 5, 7))
        assert not weights.permute(0, 3, 1, 2)[is_padding].any()


def test_asking_for_attention_weights_changes_nothing_else(tiny_model, batch):
    expected = tiny_model(**batch).logits
    configs = [m.config for m in tiny_model.modules() if hasattr(m, "config")]
    before = [config.to_dict() for config in configs]

    asked = tiny_model(**batch, output_attentions=True).logits
    afterwards = tiny_model(**batch)

    torch.testing.assert_close(asked, expected)
    assert torch.equal(afterwards.logits, expected)
    assert afterwards.encoder_attentions is None
    assert [config.to_dict() for config in configs] == before
    assert {config._attn_implementation for config in configs} == {"sdpa"}


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_returns_attention_weights_under_sdpa(tiny_model, batch, num_beams, use_cache):
    source = source_of(batch)

    output = tiny_model.generate(
        **source,
        num_beams=num_beams,
        max_new_tokens=4,
        min_new_tokens=4,
        use_cache=use_cache,
        output_attentions=True,
        return_dict_in_generate=True,
    )

    assert [len(step) for step in output.cross_attentions] == [3] * 4
    assert [len(step) for step in output.decoder_attentions] == [3] * 4
    assert_is_distribution(output.encoder_attentions[0], (3, 2, 7, 7))
    for step in range(4):
        queries = 1 if use_cache else step + 1
        rows = 3 * num_beams
        assert_is_distribution(output.cross_attentions[step][0], (rows, 4, queries, 7))
        assert_is_distribution(output.decoder_attentions[step][0], (rows, 4, queries, step + 1))
    assert tiny_model.config._attn_implementation == "sdpa"


def test_attention_flag_of_the_config_is_refused_under_sdpa(tiny_model):
    with pytest.raises(ValueError, match=r"output_attentions.*sdpa"):
        tiny_model.config.output_attentions = True


def from_meta(model: Model, folder: Path, dtype: torch.dtype) -> Model:
    with torch.device("meta"):
        empty = VanillaTransformerForConditionalGeneration(model.config)
    loaded = empty.to_empty(device="cpu").to(dtype)
    loaded.load_state_dict(model.state_dict())
    return loaded


OBTAIN: dict[str, Callable[[Model, Path, torch.dtype], Model]] = {
    "from_pretrained": lambda model, folder, dtype: type(model).from_pretrained(
        folder, dtype=dtype
    ),
    "to": lambda model, folder, dtype: model.to(dtype),
    "deepcopy": lambda model, folder, dtype: copy.deepcopy(model.to(dtype)),
    "pickle": lambda model, folder, dtype: pickle.loads(pickle.dumps(model.to(dtype))),
    "meta": from_meta,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", OBTAIN)
@torch.no_grad()
def test_sinusoids_are_exact_far_out_however_the_model_came(tiny_model, tmp_path, dtype, way):
    tiny_model.save_pretrained(tmp_path)
    model = OBTAIN[way](tiny_model, tmp_path, dtype).eval()

    # With empty lookups the first layer's input is the positions alone.
    nothing = torch.zeros(1, 2048, model.config.d_model, dtype=dtype)
    positions = model.model.encoder(inputs_embeds=nothing, output_hidden_states=True)

    actual = positions.hidden_states[0][0]
    assert actual.dtype == dtype
    for position in (0, 3, 2047):
        # Half a step of bfloat16 below 1; the angles themselves are taken in float32.
        torch.testing.assert_close(
            actual[position].double(), reference.sinusoid(position, 24), rtol=0, atol=2e-3
        )


def test_model_reads_and_writes_past_max_position_embeddings(tiny_model, batch):
    inputs = without_labels(batch)
    expected = tiny_model(**inputs).logits
    tiny_model.config.max_position_embeddings = 4

    assert torch.equal(tiny_model(**inputs).logits, expected)
    generated = tiny_model.generate(**source_of(batch), min_new_tokens=9, max_new_tokens=9)
    assert generated.shape == (3, 10)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_model_loads_with_the_same_logits(tiny_config, batch, tmp_path, tied):
    tiny_config.tie_word_embeddings = tied
    model = VanillaTransformerForConditionalGeneration(tiny_config).eval()
    redraw_parameters(model)
    model.save_pretrained(tmp_path)

    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)

    assert type(loaded) is VanillaTransformerForConditionalGeneration
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    tables = [loaded.model.encoder.embed_tokens, loaded.model.decoder.embed_tokens]
    assert all(table.weight is loaded.model.shared.weight for table in tables)
    assert (loaded.lm_head.weight is loaded.model.shared.weight) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_saved_file_holds_tied_tensors_once(tiny_config, tmp_path, tied):
    tiny_config.tie_word_embeddings = tied
    model = VanillaTransformerForConditionalGeneration(tiny_config)
    model.save_pretrained(tmp_path)

    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = set(file.keys())

    outside_layers = {name for name in saved if ".layers." not in name and "norm" not in name}
    assert outside_layers == {"model.shared.weight"} | (set() if tied else {"lm_head.weight"})
    assert saved == {name for name, _ in model.named_parameters()}


def test_bare_model_loads_from_the_complete_one(tiny_model, batch, tmp_path):
    tiny_model.save_pretrained(tmp_path)
    inputs = without_labels(batch)

    loaded = AutoModel.from_pretrained(tmp_path)

    assert type(loaded) is VanillaTransformerModel
    hidden = loaded(**inputs).last_hidden_state
    torch.testing.assert_close(tiny_model.lm_head(hidden), tiny_model(**inputs).logits)


def test_replaced_table_serves_both_stacks(tiny_model):
    table = nn.Embedding(37, 24)

    tiny_model.set_input_embeddings(table)

    assert tiny_model.get_input_embeddings() is table
    assert tiny_model.model.encoder.embed_tokens is table
    assert tiny_model.model.decoder.embed_tokens is table


def test_resized_vocabulary_stays_tied(tiny_model, batch):
    expected = tiny_model(**batch).logits

    tiny_model.resize_token_embeddings(41, mean_resizing=False)

    logits = tiny_model(**batch).logits
    assert logits.shape == (3, 5, 41)
    torch.testing.assert_close(logits[..., :37], expected)
    assert tiny_model.lm_head.weight is tiny_model.model.decoder.embed_tokens.weight


@pytest.fixture
def fresh_model() -> Model:
    """Large enough for statistics, with sizes that give each kind of matrix its own bound."""
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            vocab_size=1000,
            d_model=64,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=160,
            tie_word_embeddings=False,
        )
    )


def test_logical_matrices_start_xavier_uniform(fresh_model):
    linears = {
        name: module
        for name, module in fresh_model.model.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert sum(isinstance(module, FusedLinear) for module in linears.values()) == 3

    for name, module in linears.items():
        # Every attention matrix is D x D; a bound over a fused one would be 0.7 times as wide.
        rows = module.out_features if name.endswith(("fc1", "fc2")) else 64
        bound = math.sqrt(6 / (rows + module.in_features))
        for matrix in module.weight.split(rows):
            assert 0.98 * bound < matrix.abs().max() <= bound, name
            # A uniform distribution; 4096 entries or more leave 3 % of play.
            torch.testing.assert_close(matrix.std().item(), bound / math.sqrt(3), rtol=0.03, atol=0)


def test_biases_start_at_zero_and_norms_at_one(fresh_model):
    for name, parameter in fresh_model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name


@pytest.mark.parametrize("name", ["model.shared", "lm_head"])
def test_tables_start_with_lookups_of_unit_variance_and_no_padding(fresh_model, name):
    weight = fresh_model.get_submodule(name).weight

    # 64,000 entries leave 1 % of play.
    torch.testing.assert_close(weight[1:].std().item(), 64**-0.5, rtol=0.02, atol=0)
    assert not weight[0].any()


def test_embedding_sum_is_the_scaled_lookup_plus_positions(fresh_model):
    input_ids = torch.arange(1, 1000)[None]

    hidden = fresh_model.eval().model.encoder(input_ids, output_hidden_states=True).hidden_states

    positions = torch.stack([reference.sinusoid(i, 64) for i in range(999)]).float()
    lookups = hidden[0][0] - positions
    torch.testing.assert_close(
        lookups, 8 * fresh_model.model.shared.weight[1:], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(lookups.var().item(), 1.0, rtol=0.05, atol=0)


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


def test_embeddings_stand_for_ids(tiny_model, batch):
    inputs = without_labels(batch)
    expected = tiny_model(**inputs).logits
    table = tiny_model.get_input_embeddings()

    actual = tiny_model(
        inputs_embeds=table(inputs["input_ids"]),
        attention_mask=inputs["attention_mask"],
        decoder_inputs_embeds=table(inputs["decoder_input_ids"]),
    ).logits

    torch.testing.assert_close(actual, expected)


def test_encoder_outputs_stand_for_sources(tiny_model, batch):
    inputs = without_labels(batch)
    expected = tiny_model(**inputs).logits
    encoded = tiny_model.get_encoder()(inputs.pop("input_ids"), inputs["attention_mask"])

    for encoder_outputs in (encoded, (encoded.last_hidden_state,)):
        actual = tiny_model(**inputs, encoder_outputs=encoder_outputs).logits
        torch.testing.assert_close(actual, expected)
    assert isinstance(encoded, BaseModelOutput)


@pytest.mark.parametrize("given", ["both", "neither"])
@pytest.mark.parametrize(("stack", "prefix"), [("Encoder", ""), ("Decoder", "decoder_")])
def test_ids_and_embeddings_exclude_each_other(tiny_model, batch, stack, prefix, given):
    inputs: dict[str, Any] = without_labels(batch)
    if given == "both":
        inputs[f"{prefix}inputs_embeds"] = torch.zeros(3, 5, 24)
    else:
        del inputs[f"{prefix}input_ids"]

    with pytest.raises(ValueError, match=rf"{stack} needs either .* got {given}"):
        tiny_model(**inputs)


@both_attentions
def test_gradients_under_autocast_are_close_to_float32(tiny_model, batch, attention):
    tiny_model.set_attn_implementation(attention)
    expected = gradients(tiny_model, batch)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = gradients(tiny_model, batch)

    # A rounding to bfloat16 is off by up to 2^-9; some hundred of them lie on the way through five
    # layers and back, and a few ReLUs switch. The layer farthest from the loss is off by 9 %.
    error = {name: (gradient - expected[name]).norm() for name, gradient in actual.items()}
    for name, gradient in actual.items():
        assert gradient.dtype == torch.float32
        assert error[name] < 0.2 * expected[name].norm(), name
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert torch.stack(list(error.values())).norm() < 0.05 * total


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("shape", [(101, 203), (5, 40_009)])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(p, shape):
    torch.manual_seed(0)

    dropped = Dropout(p)(torch.ones(shape))

    kept = dropped != 0
    # Five standard deviations.
    play = 5 * math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.float().mean() - (1 - p)) < play
    # Rates are multiples of 2^-16.
    torch.testing.assert_close(dropped[kept], torch.full_like(dropped[kept], 1 / (1 - p)))


def test_dropout_drops_entries_independently():
    torch.manual_seed(0)

    kept = (Dropout(0.5)(torch.ones(10_007)) != 0).double()

    # Correlation with the mask shifted by each distance, all at once. Several entries share a
    # random draw, so a slip would show at some distance; chance stays below six deviations.
    spectrum = torch.fft.rfft(kept - kept.mean()).abs().square()
    correlation = torch.fft.irfft(spectrum, n=len(kept)) / len(kept) / kept.var()
    assert correlation[1:].abs().max() < 6 / math.sqrt(len(kept))


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_dropout_is_the_identity_when_off(p, training):
    x = torch.randn(7, 5)

    assert Dropout(p).train(training)(x) is x


def test_dropout_is_drawn_from_torchs_seed():
    dropout, x = Dropout(0.5), torch.ones(9, 11)

    torch.manual_seed(3)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(3)

    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_passes_the_gradient_of_kept_entries_only(dtype):
    x = torch.ones(13, 17, dtype=dtype, requires_grad=True)

    dropped = Dropout(0.3)(x)
    dropped.backward(torch.ones_like(x))

    assert dropped.dtype == dtype
    assert torch.equal(x.grad, dropped.detach())
    assert 0 < dropped.count_nonzero() < x.numel()


# The name that replaces the deprecated one does not exist in Transformers 5.17.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_draws_the_same_masks_again(tiny_config, batch):
    tiny_config.dropout = tiny_config.attention_dropout = tiny_config.activation_dropout = 0.4
    model = VanillaTransformerForConditionalGeneration(tiny_config)
    torch.manual_seed(5)
    expected = gradients(model, batch)
    model.gradient_checkpointing_enable()

    torch.manual_seed(5)
    actual = gradients(model, batch)

    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], msg=lambda m, n=name: f"{n}: {m}")


@both_attentions
@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_rate_has_an_effect_in_training_only(tiny_config, batch, attention, rate):
    setattr(tiny_config, rate, 0.5)
    model = VanillaTransformerForConditionalGeneration(tiny_config)
    model.set_attn_implementation(attention)

    def losses(model: Model) -> list[Tensor]:
        return [model(**batch).loss for _ in range(2)]

    first, second = losses(model.eval())
    assert torch.equal(first, second)
    first, second = losses(model.train())
    assert not torch.isclose(first, second)


def test_dropout_follows_the_embedding_sum_and_each_sublayer(tiny_model, batch):
    calls = record_calls(tiny_model, "coder.dropout")
    layer_calls = record_calls(tiny_model, "s.0.dropout")

    tiny_model(**batch)

    assert Counter(calls) == {"model.encoder.dropout": 1, "model.decoder.dropout": 1}
    assert Counter(layer_calls) == {
        "model.encoder.layers.0.dropout": 2,
        "model.decoder.layers.0.dropout": 3,
    }


def test_residual_stream_passes_when_every_sublayer_is_dropped(tiny_model, batch):
    for stack in (tiny_model.model.encoder, tiny_model.model.decoder):
        for layer in stack.layers:
            layer.dropout.register_forward_hook(lambda *call: torch.zeros_like(call[-1]))

    output = tiny_model(**batch, output_hidden_states=True)

    for hidden_states in (output.encoder_hidden_states, output.decoder_hidden_states):
        for hidden in hidden_states[1:-1]:
            assert torch.equal(hidden, hidden_states[0])
    expected = tiny_model.model.encoder.layer_norm(output.encoder_hidden_states[0])
    assert torch.equal(output.encoder_last_hidden_state, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_keys_that_no_file_holds_are_named_for_trainer(tiny_config, tmp_path, tied):
    tiny_config.tie_word_embeddings = tied
    model = Model(tiny_config)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = set(file.keys())

    # Trainer warns of lost weights unless the two are equal.
    assert set(model._keys_to_ignore_on_save) == model.state_dict().keys() - saved


def test_step_with_labels_fills_no_cache(tiny_model, batch):
    with_labels = tiny_model(**batch)
    without = tiny_model(**without_labels(batch))

    assert with_labels.past_key_values is None
    assert without.past_key_values.get_seq_length() == batch["labels"].shape[1]
