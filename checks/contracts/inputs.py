"""Positions without an end and padding without an effect."""

import copy
import pickle

import torch
from torch import Tensor
from transformers import PreTrainedModel

from neighbours import sinusoids

from .candidate import (
    NARROW,
    PREFIXES,
    SOURCES,
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
        past_key_values=first.past_key_values,
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
