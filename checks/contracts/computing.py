"""What a model computes: positions, padding, attention, caches and `generate`."""

import copy
import pickle
from collections import Counter
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from neighbours import sinusoids
from vanilla_transformer.generation_vanilla_transformer import CACHE

from .candidate import (
    NARROW,
    PAD,
    PREFIXES,
    SOURCES,
    START,
    Candidate,
    assert_close,
    contract,
    gradients_of,
    labels,
    logits_alone,
    pad,
    pairs,
    source,
    translate,
)


@torch.no_grad()
def assert_sinusoids(candidate: Candidate, model: PreTrainedModel, what: str) -> None:
    """The first layer reads exact positions, up to 2047, where lookups are empty."""
    width = model.config.d_model
    nothing = torch.zeros(1, 2048, width, dtype=model.dtype)
    states = model.get_encoder()(inputs_embeds=nothing, output_hidden_states=True).hidden_states
    # Half a step of bfloat16 below 1.
    assert_close(states[0][0], sinusoids(candidate.family, 2048, width), what, tolerance=2e-3)


@contract("Positions")
def positions_survive_loading(candidate: Candidate) -> None:
    """Sinusoids are exact after `from_pretrained` in float32, bfloat16 and float16."""
    model = candidate.build(max_position_embeddings=2048)
    for dtype in (torch.float32, *NARROW):
        assert_sinusoids(candidate, candidate.reload(model, dtype=dtype), f"{dtype} ")


@contract("Positions")
def positions_survive_casts_and_copies(candidate: Candidate) -> None:
    """They are exact after `.to(dtype)`, deepcopy and pickling."""
    for dtype in NARROW:
        model = candidate.build(max_position_embeddings=2048).to(dtype)
        pickled = pickle.dumps(model)
        assert_sinusoids(candidate, model, f"{dtype} ")
        assert_sinusoids(candidate, copy.deepcopy(model), f"{dtype}, deepcopy ")
        assert_sinusoids(candidate, pickle.loads(pickled), f"{dtype}, pickle ")


@contract("Positions")
def positions_survive_the_meta_device(candidate: Candidate) -> None:
    """They are exact after torch's `meta` device, `to_empty` and `load_state_dict`."""
    model = candidate.build(max_position_embeddings=2048)
    with torch.device("meta"):
        empty = type(model)(model.config)
    # Fresh memory is filled with NaN: by chance it may hold the table that another model left.
    torch.use_deterministic_algorithms(True)
    try:
        empty.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    empty.load_state_dict(model.state_dict())
    assert_sinusoids(candidate, empty.eval(), "")


@contract("Positions")
def reads_past_the_maximum(candidate: Candidate) -> None:
    """`forward` takes sequences longer than `max_position_embeddings`."""
    short, long = (candidate.build(max_position_embeddings=size) for size in (3, 64))
    assert_close(short(**pairs()).logits, long(**pairs()).logits)


@contract("Positions")
def writes_past_the_maximum(candidate: Candidate) -> None:
    """`generate` continues past `max_position_embeddings`, with the cache."""
    short, long = (candidate.build(max_position_embeddings=size) for size in (7, 64))
    assert translate(short).tolist() == translate(long).tolist(), "other translations"


@torch.no_grad()  # A traced program that fails would leave gradients switched off.
def assert_exports(candidate: Candidate, max_position_embeddings: int, *lengths: int) -> None:
    """A program exported at length 7 has the model's logits at other lengths."""

    def inputs(length: int) -> dict[str, Tensor]:
        ids = 4 + torch.arange(2 * length).view(2, length) % 33
        return {"input_ids": ids, "decoder_input_ids": ids[:, :-1]}

    model = candidate.build(max_position_embeddings=max_position_embeddings)
    model.config.use_cache = False
    dynamic = {name: {1: torch.export.Dim.DYNAMIC} for name in inputs(7)}
    program = torch.export.export(model, (), inputs(7), dynamic_shapes=dynamic, strict=False)
    for length in lengths:
        found = program.module()(**inputs(length)).logits
        assert_close(found, candidate.build()(**inputs(length)).logits, f"length {length}: ")


@contract("Positions")
def exports(candidate: Candidate) -> None:
    """`torch.export` gives a program for any length up to the maximum."""
    assert_exports(candidate, 64, 5, 20)


@contract("Positions")
def exports_past_the_maximum(candidate: Candidate) -> None:
    """Such a program takes lengths past `max_position_embeddings`."""
    assert_exports(candidate, 16, 20)


@contract("Padding")
def right_padding_changes_nothing(candidate: Candidate) -> None:
    """A pair padded on the right has the logits that it has alone."""
    model = candidate.build()
    logits = model(**pairs()).logits[pad(PREFIXES)[1].bool()]
    assert_close(logits, logits_alone(model))


@contract("Padding")
def left_padding_of_sources_changes_nothing(candidate: Candidate) -> None:
    """A source padded on the left gives the logits that it gives alone."""
    model = candidate.build()
    logits = model(**pairs() | source("left")).logits[pad(PREFIXES)[1].bool()]
    assert_close(logits, logits_alone(model))


@contract("Padding")
def left_padding_of_targets_changes_nothing(candidate: Candidate) -> None:
    """A target padded on the left has the logits that it has alone."""
    model = candidate.build()
    ids, mask = pad(PREFIXES, "left")
    logits = model(**source(), decoder_input_ids=ids, decoder_attention_mask=mask).logits
    assert_close(logits[mask.bool()], logits_alone(model))


@contract("Padding")
def left_padded_prefixes_decode(candidate: Candidate) -> None:
    """Prefixes padded on the left continue, with the cache, as they do alone."""
    model = candidate.build()
    ids, mask = pad(PREFIXES, "left")
    first = model(
        **source(),
        decoder_input_ids=ids[:, :-1],
        decoder_attention_mask=mask[:, :-1],
        use_cache=True,
    )
    then = model(
        **source(),
        decoder_input_ids=ids[:, -1:],
        decoder_attention_mask=mask,
        **{CACHE: first[CACHE]},
    )
    ends = torch.tensor([len(prefix) for prefix in PREFIXES]).cumsum(0) - 1
    assert_close(then.logits[:, -1], logits_alone(model)[ends])


@contract("Padding")
def empty_rows_stay_finite(candidate: Candidate) -> None:
    """A row that is all padding gives finite logits and gradients in bfloat16 and float16."""
    (input_ids, source_mask), (prefixes, target_mask) = pad(SOURCES), pad(PREFIXES)
    for tensor in (input_ids, source_mask, prefixes, target_mask):
        tensor[1] = 0
    batch = {
        "input_ids": input_ids,
        "attention_mask": source_mask,
        "decoder_input_ids": prefixes,
        "decoder_attention_mask": target_mask,
    }
    for dtype in NARROW:
        for attention in ("eager", "sdpa"):
            model = candidate.build().to(dtype)
            model.set_attn_implementation(attention)
            where = f"under {attention} in {dtype}"
            assert model(**batch).logits.isfinite().all(), f"logits {where}"
            model.train()(**batch, labels=labels()).loss.backward()
            assert gradients_of(model).isfinite().all(), f"gradients {where}"


def assert_weights(weights: Any, layers: int, queries: int, keys: int) -> None:
    """One distribution over the keys for each layer, head and query."""
    assert weights, "none are returned"
    assert len(weights) == layers, f"{len(weights)} tensors for {layers} layers"
    for layer in weights:
        assert layer is not None, "a tuple of None"
        assert layer.shape[2:] == (queries, keys), f"shape {[*layer.shape]}"
        assert_close(layer.sum(-1), torch.ones(layer.shape[:3]), "sums ")


@contract("Attention")
def backends_agree(candidate: Candidate) -> None:
    """The kernels eager and sdpa give the same logits."""
    model = candidate.build()
    model.set_attn_implementation("eager")
    eager = model(**pairs()).logits
    model.set_attn_implementation("sdpa")
    assert_close(model(**pairs()).logits, eager)


@contract("Attention")
def returns_weights_when_asked(candidate: Candidate) -> None:
    """`output_attentions=True` in a call under sdpa returns every layer's weights."""
    model = candidate.build()
    model.set_attn_implementation("sdpa")
    found = model(**pairs(), output_attentions=True)
    assert_weights(found.encoder_attentions, 2, 7, 7)
    assert_weights(found.decoder_attentions, 3, 5, 5)
    assert_weights(found.cross_attentions, 3, 5, 7)


@contract("Attention")
def generation_returns_weights_when_asked(candidate: Candidate) -> None:
    """`generate(output_attentions=True)` under sdpa returns those of every step."""
    model = candidate.build()
    model.set_attn_implementation("sdpa")
    found = translate(model, output_attentions=True, return_dict_in_generate=True)
    assert_weights(found.encoder_attentions, 2, 7, 7)
    for step in range(9):
        assert_weights(found.decoder_attentions[step], 3, 1, step + 1)
        assert_weights(found.cross_attentions[step], 3, 1, 7)


@contract("Attention")
def returns_hidden_states_when_asked(candidate: Candidate) -> None:
    """`output_hidden_states=True` returns every layer's, in a call and in `generate`."""
    model = candidate.build()
    found = model(**pairs(), output_hidden_states=True)
    counts = len(found.encoder_hidden_states), len(found.decoder_hidden_states)
    assert counts == (3, 4), f"{counts} for 2 and 3 layers"
    steps = translate(model, output_hidden_states=True, return_dict_in_generate=True)
    assert [len(step) for step in steps.decoder_hidden_states] == [4] * 9


@contract("Attention")
def asking_changes_nothing(candidate: Candidate) -> None:
    """Asking for weights and states alters neither the model nor later calls."""
    model = candidate.build()
    model.set_attn_implementation("sdpa")
    before, config = model(**pairs()).logits, model.config.to_dict()
    model(**pairs(), output_attentions=True, output_hidden_states=True)
    translate(model, output_attentions=True, return_dict_in_generate=True)
    after = model(**pairs())
    assert model.config.to_dict() == config, "the config changed"
    assert model.config._attn_implementation == "sdpa", model.config._attn_implementation
    assert after.encoder_attentions is None, "later calls return weights"
    assert_close(after.logits, before, tolerance=0.0)


@contract("Attention")
def asking_leaves_a_model_that_pickles(candidate: Candidate) -> None:
    """A model pickles, also once it has returned weights or states."""
    model = candidate.build()
    pickle.loads(pickle.dumps(model))
    model(**pairs(), output_hidden_states=True)
    pickle.loads(pickle.dumps(model))


def assert_cache_changes_nothing(model: PreTrainedModel, num_beams: int) -> None:
    """Same tokens and logits with the cache as without."""
    cached, uncached = (
        translate(
            model,
            num_beams=num_beams,
            use_cache=use_cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for use_cache in (True, False)
    )
    assert cached.sequences.tolist() == uncached.sequences.tolist(), "other translations"
    assert_close(torch.cat(cached.logits), torch.cat(uncached.logits))


@contract("Cache")
def cache_changes_nothing(candidate: Candidate) -> None:
    """Greedy and beam search find the same with the cache as without."""
    for num_beams in (1, 3):
        assert_cache_changes_nothing(candidate.build(), num_beams)


@contract("Cache")
def depths_may_differ(candidate: Candidate) -> None:
    """They do with 1 + 3 and 3 + 1 layers."""
    for encoder_layers, decoder_layers in ((1, 3), (3, 1)):
        model = candidate.build(encoder_layers=encoder_layers, decoder_layers=decoder_layers)
        assert_cache_changes_nothing(model, num_beams=3)


@contract("Cache")
def decodes_in_chunks(candidate: Candidate) -> None:
    """A target fed in chunks of 1, 3 and 1 has the logits that it has at once."""
    model = candidate.build()
    expected, cache, pieces = model(**pairs()).logits, None, []
    for piece in pairs()["decoder_input_ids"].split((1, 3, 1), dim=1):
        step = model(**source(), decoder_input_ids=piece, **{CACHE: cache}, use_cache=True)
        cache = step[CACHE]
        pieces.append(step.logits)
    assert_close(torch.cat(pieces, dim=1), expected)


@contract("Cache")
def static_cache_changes_nothing(candidate: Candidate) -> None:
    """`generate(cache_implementation="static")` finds the same as a dynamic cache."""
    model = candidate.build()
    static = translate(model, cache_implementation="static")
    assert static.tolist() == translate(model).tolist(), "other translations"


@contract("Cache")
def projects_the_source_once(candidate: Candidate) -> None:
    """`generate` projects the source to keys and values once, not at each step."""
    model = candidate.build()
    calls: Counter[str] = Counter()
    for name, module in model.get_decoder().named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda _, inputs, __, name=name: calls.update([name] * (inputs[0].shape[1] == 7))
            )
    translate(model, num_beams=3)
    assert set(calls.values()) == {1}, f"calls {dict(calls)}"


@contract("Cache")
def beams_leave_the_source_alone(candidate: Candidate) -> None:
    """Beam search neither copies nor reorders the cached keys of the source."""
    model, keys = candidate.build(), []
    model.get_decoder().register_forward_hook(
        lambda _, __, output: keys.append(output[CACHE].cross_attention_cache.layers[0].keys)
    )
    translate(model, num_beams=3)
    copies = sum(old.data_ptr() != new.data_ptr() for old, new in pairwise(keys))
    assert not copies, f"copied {copies} times in {len(keys)} steps"


def prefer(model: PreTrainedModel, *tokens: int) -> None:
    """Makes the model like these tokens best, in this order, whatever it reads."""
    liking = torch.zeros(model.config.vocab_size)
    for rank, token in enumerate(tokens):
        liking[token] = 9.0 - rank
    model.get_output_embeddings().register_forward_hook(lambda _, __, out: liking.expand_as(out))


@contract("Generation")
def generation_has_room(candidate: Candidate) -> None:
    """A model saved afresh writes more than Transformers' default of 20 tokens."""
    model = candidate.reload(candidate.build())
    prefer(model, 9)
    length = model.generate(**source()).shape[1]
    assert length > 21, f"stops at {length} tokens"


@contract("Generation")
def never_writes_padding_or_start(candidate: Candidate) -> None:
    """`<pad>` and `<s>` are never written inside a sentence, however likely."""
    model = candidate.build()
    prefer(model, PAD, START, 9)
    for num_beams in (1, 3):
        found = translate(model, num_beams=num_beams, suppress_tokens=None)
        tokens = found[0, 1:].tolist()
        assert not {PAD, START} & {*tokens}, f"wrote {tokens}"


@contract("Generation")
def embeddings_stand_for_ids(candidate: Candidate) -> None:
    """`inputs_embeds` from the model's own table stand for ids, in `forward` and `generate`."""
    model, is_real = candidate.build(), pad(PREFIXES)[1].bool()
    expected = model(**pairs()).logits[is_real]
    for stack in ("", "decoder_"):
        batch = pairs()
        lookups = model.get_input_embeddings()(batch.pop(f"{stack}input_ids"))
        logits = model(**batch, **{f"{stack}inputs_embeds": lookups}).logits
        assert_close(logits[is_real], expected, f"{stack or 'encoder_'}inputs_embeds ")
    batch = source()
    lookups = model.get_input_embeddings()(batch.pop("input_ids"))
    found = model.generate(**batch, inputs_embeds=lookups, max_new_tokens=9)
    wanted = model.generate(**source(), max_new_tokens=9)
    assert found.tolist() == wanted.tolist(), "other translations"
